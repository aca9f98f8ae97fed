"""The fixes among vLLM's metrics: every live process of this run, and only those."""

import os
import sys
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from vllm_graft import metrics as metrics_module
from vllm_graft import plugin as plugin_module
from vllm_graft.metrics import FixMetrics
from vllm_graft.patch import Outcome, Process
from vllm_graft.plugin import Plugin
from vllm_graft.report import FixReport, ProcessReport, write_file

NO_PROCESS = 2**22 + 1
"""Above the largest process id that Linux gives."""


def report(
    process: str, role: Process, outcome: Outcome = Outcome.APPLIED, pid: int = 1, run: str = "r"
) -> ProcessReport:
    fixes = (FixReport("a-fix", outcome, "", True, None),)
    return ProcessReport(1, run, pid, process, (role,), "0.1.0", "0.33.0", fixes, None)


def shown(own: ProcessReport, folder: Path | None) -> list[str]:
    """Return the samples of /metrics."""
    metrics, registry = FixMetrics(), CollectorRegistry(auto_describe=True)
    metrics.own, metrics.directory = own, folder
    registry.register(metrics)
    return [line for line in generate_latest(registry).decode().splitlines() if not line.startswith("#")]


OWN = report("MainProcess", Process.API_SERVER, Outcome.NOT_APPLICABLE, pid=os.getpid())


def test_each_process_says_what_became_of_each_fix(tmp_path: Path) -> None:
    write_file(report("EngineCore", Process.ENGINE_CORE), tmp_path)
    found = shown(OWN, tmp_path)
    assert 'graft_fix_outcome{fix="a-fix",outcome="applied",process="EngineCore",required="true"} 1.0' in found
    assert 'graft_fix_outcome{fix="a-fix",outcome="not-applicable",process="MainProcess",required="true"} 1.0' in found
    assert 'graft_info{graft="0.1.0",process="EngineCore",vllm="0.33.0"} 1.0' in found
    assert len(found) == 4


def test_an_engine_that_ended_and_another_run_do_not_count(tmp_path: Path) -> None:
    write_file(report("EngineCore", Process.ENGINE_CORE, pid=NO_PROCESS), tmp_path)
    write_file(report("EngineCore", Process.ENGINE_CORE, pid=os.getppid(), run="before"), tmp_path)
    write_file(report("MainProcess", Process.MODEL_INSPECTION, pid=1), tmp_path)
    assert all('process="MainProcess"' in line for line in shown(OWN, tmp_path))


def test_what_cannot_be_read_leaves_this_process_and_all_other_metrics(tmp_path: Path) -> None:
    (tmp_path / "graft-7.json").write_text("{", encoding="utf-8")
    assert len(shown(OWN, tmp_path)) == 2
    assert len(shown(OWN, tmp_path / "absent")) == 2
    assert len(shown(OWN, None)) == 2


@pytest.mark.parametrize(
    ("argv", "exported"), [(["vllm", "serve"], True), (["vllm", "bench"], False), (["a.py"], False)]
)
def test_the_api_server_exports_them_and_no_other_process_does(
    argv: list[str], exported: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = CollectorRegistry(auto_describe=True)
    monkeypatch.setattr(metrics_module, "METRICS", FixMetrics())
    monkeypatch.setattr(metrics_module, "REGISTRY", registry)
    monkeypatch.setattr(plugin_module, "vllm_version", lambda: "1.0")
    monkeypatch.setattr(sys, "argv", argv)
    # A later registration in the same process, such as one that settles a pending fix, takes the place of the first.
    for _ in range(2):
        Plugin([], {}).register()
    assert (b"graft_info{" in generate_latest(registry)) == exported
