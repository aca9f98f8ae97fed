"""What a log of a failed start says about the fixes."""

from pathlib import Path

from vllm_graft.patch import Outcome, Process
from vllm_graft.report import FixReport, ProcessReport, to_line

from launcher.errors import FixNotApplied
from launcher.images.pins import load_pins
from launcher.plan import Plan
from launcher.planner import Inputs, make
from launcher.profile import load_model, load_profile
from launcher.reports import refusal


def plan() -> Plan:
    profile = load_profile("cpu")
    pin = load_pins(lock=Path("no-digests-recorded.json")).of(profile.vllm)
    return make(Inputs(profile, load_model(profile.model), pin)).plan


def line(run_id: str | None, error: str | None, pid: int = 7) -> str:
    outcome = Outcome.DRIFTED if error else Outcome.APPLIED
    fix = FixReport("none-not-null", outcome, "its source changed", required=True, fingerprint=None)
    roles = (Process.API_SERVER,)
    report = ProcessReport(
        schema=1,
        run_id=run_id,
        pid=pid,
        process="MainProcess",
        roles=roles,
        graft="0.1.0",
        vllm="0.32.0",
        fixes=(fix,),
        error=error,
    )
    return f"vllm-1  | {to_line(report)}"


def test_a_process_that_a_fix_ended_is_the_cause_of_the_failed_start() -> None:
    made = plan()
    log = "\n".join((line(made.run_id, "required fix x is not applied: drifted"), "RuntimeError: Engine core failed"))
    found = refusal(log, made)
    assert isinstance(found, FixNotApplied)
    assert str(found) == "MainProcess: required fix x is not applied: drifted"


def test_a_process_that_was_started_again_is_named_once() -> None:
    made = plan()
    log = "\n".join(line(made.run_id, "required fix x is not applied: drifted", pid) for pid in (7, 8))
    assert str(refusal(log, made)).count("required fix") == 1


def test_a_process_that_cannot_read_its_facts_counts_although_it_knows_no_run() -> None:
    assert refusal(line(None, "GRAFT_FACTS=facts.json: cannot be read"), plan()) is not None


def test_reports_of_other_runs_and_good_ones_are_no_cause() -> None:
    made = plan()
    log = "\n".join((line("another-run", "required fix x is not applied"), line(made.run_id, None)))
    assert refusal(log, made) is None
