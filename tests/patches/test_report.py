"""Reports come through a real log, and what they say is judged process by process."""

import json
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm_graft.patch import Outcome, Patch, Process
from vllm_graft.records import RecordError
from vllm_graft.report import (
    FixReport,
    ProcessReport,
    expected_processes,
    parse_lines,
    problems,
    read_directory,
    summary,
    to_line,
    write_file,
    write_lines,
)

API, CORE, WORKER = Process.API_SERVER, Process.ENGINE_CORE, Process.WORKER
ONE_GPU = expected_processes(1, cpu=False)


def fix(outcome: Outcome = Outcome.APPLIED, **values: Any) -> FixReport:
    given: dict[str, Any] = {"id": "double-answer", "reason": "why", "required": True, "fingerprint": "0" * 16} | values
    return FixReport(outcome=outcome, **given)


def report(pid: int, *roles: Process, **values: Any) -> ProcessReport:
    given: dict[str, Any] = {
        "schema": 1,
        "run_id": "run-1",
        "process": "EngineCore",
        "graft": "0.1.0",
        "vllm": "1.0",
        "fixes": (fix(),),
        "error": None,
    } | values
    return ProcessReport(pid=pid, roles=roles, **given)


@pytest.fixture
def judge(make_patch: Callable[..., Patch]) -> Callable[..., list[str]]:
    patch = make_patch("json:dumps", lambda original: original, fingerprints={}, processes=(CORE, WORKER))

    def run(*reports: ProcessReport, required: bool = True, **values: Any) -> list[str]:
        given: dict[str, Any] = {"run_id": "run-1", "expected": ONE_GPU} | values
        return problems(reports, fixes=(patch,), required={patch.id} if required else set(), **given)

    return run


GOOD_API = report(1, API, fixes=(fix(Outcome.NOT_APPLICABLE, fingerprint=None),))
GOOD_CORE = report(2, CORE, WORKER)


def test_reports_are_found_in_a_log_behind_any_prefix() -> None:
    log = "\n".join(
        [
            "INFO 11-30 starting",
            to_line(GOOD_API),
            "\x1b[36m(EngineCore pid=2)\x1b[0m " + to_line(GOOD_CORE) + "\x1b[0m trailing",
            "vllm-1  | 2026-11-30T02:00:00Z " + to_line(report(3, WORKER)) + "\r",
        ]
    )
    assert parse_lines(log) == [GOOD_API, GOOD_CORE, report(3, WORKER)]


def test_a_line_that_was_cut_off_or_is_foreign_is_no_report() -> None:
    line = to_line(GOOD_CORE)
    log = "\n".join([line[:-20], "GRAFT-REPORT not json", 'GRAFT-REPORT {"schema": 9}', "GRAFT-REPORT", line])
    assert parse_lines(log) == [GOOD_CORE]


def test_lines_are_written_past_pythons_streams(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    write_lines([to_line(GOOD_API), to_line(GOOD_CORE)])
    assert parse_lines(capfd.readouterr().err) == [GOOD_API, GOOD_CORE]


def test_a_server_without_standard_error_is_no_error() -> None:
    program = "import os; os.close(2); from vllm_graft.report import write_lines; write_lines(['line'])"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_a_dozen_fixes_fit_into_one_atomic_write_to_a_pipe() -> None:
    fixes = tuple(fix(id=f"a-fix-with-a-long-name-{number}", reason="x" * 80) for number in range(12))
    assert len(to_line(report(1, CORE, WORKER, fixes=fixes))) < 4096


def test_files_are_copies_that_other_users_can_read(tmp_path: Path) -> None:
    directory = tmp_path / "new" / "reports"
    for each in (GOOD_API, GOOD_CORE, GOOD_CORE):
        path = write_file(each, directory)
        assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert read_directory(directory) == [GOOD_API, GOOD_CORE]
    assert sorted(path.name for path in directory.iterdir()) == ["graft-1.json", "graft-2.json"]


def test_a_file_that_is_no_report_is_named(tmp_path: Path) -> None:
    (tmp_path / "graft-1.json").write_text(json.dumps({"schema": 1}))
    with pytest.raises(RecordError, match=r"graft-1\.json: run_id: missing"):
        read_directory(tmp_path)


def test_a_failed_write_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "graft-1.json").mkdir()
    with pytest.raises(OSError, match="directory"):
        write_file(GOOD_API, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["graft-1.json"]


def test_the_line_for_people_counts_and_names_trouble() -> None:
    who = "vllm_graft (EngineCore pid=2): "
    assert summary(report(2, CORE, fixes=())) == who + "patches applied: 0"
    fixes = (fix(), fix(Outcome.DRIFTED, id="other", reason="it changed"), fix(Outcome.NOT_APPLICABLE, id="third"))
    expected = "patches applied: 1 (double-answer); other: drifted (it changed)"
    assert summary(report(2, CORE, fixes=fixes)) == who + expected
    assert summary(report(2, CORE, error="required fix x is not applied")) == who + "required fix x is not applied"


def test_one_gpu_has_core_and_worker_in_one_process() -> None:
    assert expected_processes(1, cpu=False) == (frozenset({API}), frozenset({CORE, WORKER}))
    assert expected_processes(2, cpu=False) == (
        frozenset({API}),
        frozenset({CORE}),
        frozenset({WORKER}),
        frozenset({WORKER}),
    )


def test_on_a_cpu_the_worker_is_a_process_beside_the_core() -> None:
    assert expected_processes(1, cpu=True) == (*ONE_GPU, frozenset({WORKER}))


def test_a_good_start_has_no_problem(judge: Callable[..., list[str]]) -> None:
    assert judge(GOOD_API, GOOD_CORE) == []
    worker = report(3, WORKER)
    assert judge(GOOD_API, report(2, CORE), worker, report(4, WORKER), expected=expected_processes(2, cpu=False)) == []


def test_a_process_that_did_not_report_is_missing(judge: Callable[..., list[str]]) -> None:
    (problem,) = judge(GOOD_API)
    assert problem.startswith("engine-core and worker: 0 of 1 processes reported")
    (problem,) = judge(GOOD_API, report(2, CORE), report(3, WORKER), expected=expected_processes(2, cpu=False))
    assert problem.startswith("worker: 1 of 2 processes reported")


@pytest.mark.parametrize("outcome", [outcome for outcome in Outcome if outcome is not Outcome.APPLIED])
def test_a_required_fix_is_applied_where_it_belongs(judge: Callable[..., list[str]], outcome: Outcome) -> None:
    core = report(2, CORE, WORKER, fixes=(fix(outcome),))
    assert judge(GOOD_API, core) == [f"double-answer: {outcome} in EngineCore (pid 2): why"]
    assert judge(GOOD_API, core, required=False) == []


def test_a_required_fix_that_a_process_does_not_know_is_a_problem(judge: Callable[..., list[str]]) -> None:
    (problem,) = judge(GOOD_API, report(2, CORE, WORKER, fixes=()))
    assert problem == "double-answer: not known to EngineCore (pid 2), which runs vllm_graft 0.1.0"


def test_processes_that_disagree_are_a_problem_even_for_an_optional_fix(judge: Callable[..., list[str]]) -> None:
    workers = [report(3, WORKER), report(4, WORKER, fixes=(fix(Outcome.DRIFTED, fingerprint="1" * 16),))]
    found = judge(GOOD_API, report(2, CORE), *workers, required=False, expected=expected_processes(2, cpu=False))
    assert found == ["double-answer: processes disagree: applied in pid 2, 3; drifted in pid 4"]
    (problem,) = judge(GOOD_API, report(2, CORE, WORKER, vllm="1.1"))
    assert problem.startswith("processes disagree on versions: vLLM 1.0")


def test_an_error_is_a_problem_also_without_a_run_id(judge: Callable[..., list[str]]) -> None:
    broken = report(2, CORE, WORKER, run_id=None, fixes=(), error="GRAFT_FACTS=/facts.json: not JSON")
    assert "EngineCore (pid 2): GRAFT_FACTS=/facts.json: not JSON" in judge(GOOD_API, broken)


def test_other_runs_earlier_reports_and_the_model_inspection_do_not_count(judge: Callable[..., list[str]]) -> None:
    drifted = (fix(Outcome.DRIFTED),)
    stale = report(2, CORE, WORKER, fixes=drifted)
    other = report(7, CORE, WORKER, run_id="run-0", fixes=drifted)
    inspection = report(8, Process.MODEL_INSPECTION, fixes=drifted)
    assert judge(stale, other, inspection, GOOD_API, GOOD_CORE) == []
