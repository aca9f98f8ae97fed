"""Reports of a start: nothing is READY before the required fixes are in, everywhere, and the processes agree."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
from vllm_graft.patch import Outcome, Process
from vllm_graft.report import FixReport, ProcessReport, to_line

from launcher import reports
from launcher.errors import FixNotApplied
from launcher.images.pins import load_pins
from launcher.plan import Plan
from launcher.planner import Inputs, make
from launcher.profile import load_model, load_profile
from launcher.runtime import RunState, Work

PROFILE = load_profile("rtx4090")
PLAN = make(Inputs(PROFILE, load_model(PROFILE.model), load_pins().of(PROFILE.vllm))).plan
FIX = "tq-spec-decode"


@dataclass
class FakeService:
    """A server whose log is given."""

    lines: tuple[str, ...]
    base_url: str = "http://127.0.0.1:1"

    def state(self) -> RunState:
        return RunState("running")

    def new_log_lines(self) -> tuple[str, ...]:
        return self.lines

    def log(self) -> Iterator[str]:
        yield from self.lines

    def work(self) -> Work | None:
        return None

    def stop(self) -> None:
        return None


def report(
    pid: int, roles: tuple[Process, ...], outcome: Outcome = Outcome.APPLIED, plan: Plan = PLAN
) -> ProcessReport:
    entries = []
    for name in plan.required_fixes:
        belongs = (Process.API_SERVER in roles) != (name == FIX)
        reason = "" if belongs else "belongs elsewhere"
        wanted = outcome if name == FIX else Outcome.APPLIED
        entries.append(FixReport(name, wanted if belongs else Outcome.NOT_APPLICABLE, reason, belongs, None))
    return ProcessReport(1, plan.run_id, pid, "Main", roles, "0.1.0", "0.33.0", tuple(entries), None)


API = report(1, (Process.API_SERVER,))
CORE = report(2, (Process.ENGINE_CORE, Process.WORKER))


def service(*found: ProcessReport) -> FakeService:
    return FakeService(tuple(f"(EngineCore pid=2) {to_line(one)}" for one in found))


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reports, "SETTLE_S", 0.0)


def test_a_good_start_says_which_fixes_are_in() -> None:
    collected = reports.collect(service(API, CORE), PLAN)
    assert set(collected.applied) == set(PLAN.required_fixes)
    assert collected.trouble == ()


@pytest.mark.parametrize("outcome", [Outcome.DRIFTED, Outcome.FAILED, Outcome.PENDING, Outcome.NOT_APPLICABLE])
def test_a_required_fix_that_is_not_applied_is_refused_by_name(outcome: Outcome) -> None:
    core = report(2, (Process.ENGINE_CORE, Process.WORKER), outcome)
    with pytest.raises(FixNotApplied, match=f"{FIX}: {outcome}"):
        reports.collect(service(API, core), PLAN)


def test_a_process_that_did_not_report_is_refused() -> None:
    with pytest.raises(FixNotApplied, match="engine-core and worker: 0 of 1"):
        reports.collect(service(API), PLAN)


def test_reports_of_another_start_do_not_count() -> None:
    with pytest.raises(FixNotApplied, match="0 of 1"):
        reports.collect(service(API, replace(CORE, run_id="another")), PLAN)


def test_an_optional_fix_that_is_not_in_is_told_and_refuses_nothing() -> None:
    profile = PROFILE.model_copy(update={"optional_fixes": (FIX,)})
    plan = make(Inputs(profile, load_model(profile.model), load_pins().of(profile.vllm))).plan
    api = report(1, (Process.API_SERVER,), plan=plan)
    drifted = FixReport(FIX, Outcome.DRIFTED, "the source is another", False, "0" * 16)
    core = report(2, (Process.ENGINE_CORE, Process.WORKER), plan=plan)
    collected = reports.collect(service(api, replace(core, fixes=(*core.fixes, drifted))), plan)
    assert [one.id for one in collected.trouble] == [FIX]
