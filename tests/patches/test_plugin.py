"""What one process of vLLM does when it is asked to register: policy, settings, reports, and ending."""

import json
import multiprocessing
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from vllm_graft import plugin as plugin_module
from vllm_graft.facts import EngineFacts, Gpu, GpuFacts, ModelFacts, RunFacts, SettingsError
from vllm_graft.patch import Outcome, Patch, Process, When
from vllm_graft.plugin import Plugin, RequiredFixError
from vllm_graft.records import to_json
from vllm_graft.report import parse_lines, read_directory

SUMS = "def answer(value):\n    return value\n"
Make = Callable[..., Plugin]


@pytest.fixture(autouse=True)
def _process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin_module, "vllm_version", lambda: "1.0")
    monkeypatch.setattr(sys, "argv", ["chat.py"])


@pytest.fixture
def sums(stock: Callable[[Mapping[str, str]], Any]) -> Any:
    return stock({"sums": SUMS}).module("sums")


@pytest.fixture
def make(sums: Any, make_patch: Callable[..., Patch]) -> Make:
    """A plugin with one fix, `double-answer`."""

    def build(environ: dict[str, str] | None = None, **values: Any) -> Plugin:
        def double(original: Any) -> Any:
            return lambda value: 2 * original(value)

        return Plugin([make_patch(f"{sums.__name__}:answer", double, **values)], environ or {})

    return build


@pytest.fixture
def facts(tmp_path: Path) -> Callable[..., dict[str, str]]:
    """The environment with a facts file."""

    def write(kv_cache_dtype: str = "turboquant_k8v4") -> dict[str, str]:
        model = ModelFacts(("Qwen3_5ForCausalLM",), 16, 48, 0, 1, 256)
        path = tmp_path / "facts.json"
        path.write_text(to_json(RunFacts(1, "run-1", model, EngineFacts(kv_cache_dtype, "mtp", 3, 1, "docker"))))
        return {"GRAFT_FACTS": str(path)}

    return write


def only(plugin: Plugin) -> tuple[Outcome, str]:
    assert plugin.report is not None
    (fix,) = plugin.report.fixes
    return fix.outcome, fix.reason


def test_a_fix_is_applied_and_reported(make: Make, sums: Any, capfd: pytest.CaptureFixture[str]) -> None:
    plugin = make()
    plugin.register()
    assert sums.answer(2) == 4
    assert only(plugin)[0] is Outcome.APPLIED
    log = capfd.readouterr().err
    assert log.startswith(f"vllm_graft (MainProcess pid={os.getpid()}): patches applied: 1 (double-answer)\n")
    (report,) = parse_lines(log)
    assert report == plugin.report
    assert (report.pid, report.process, report.vllm, report.run_id) == (os.getpid(), "MainProcess", "1.0", None)


def test_registering_again_does_nothing(make: Make, sums: Any, capfd: pytest.CaptureFixture[str]) -> None:
    plugin = make()
    plugin.register()
    bound = sums.answer
    plugin.register()
    assert sums.answer is bound
    assert len(parse_lines(capfd.readouterr().err)) == 1


def test_a_pending_fix_is_tried_again(make: Make, sums: Any, capfd: pytest.CaptureFixture[str]) -> None:
    plugin = make()
    sums.__spec__._initializing = True
    plugin.register()
    assert only(plugin)[0] is Outcome.PENDING
    plugin.register()
    sums.__spec__._initializing = False
    plugin.register()
    assert only(plugin)[0] is Outcome.APPLIED
    outcomes = [report.fixes[0].outcome for report in parse_lines(capfd.readouterr().err)]
    assert outcomes == [Outcome.PENDING, Outcome.APPLIED]


def test_an_optional_fix_that_drifted_is_left_out_and_said(
    make: Make, sums: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    plugin = make(fingerprints={"1.0": "0" * 16})
    plugin.register()
    assert only(plugin)[0] is Outcome.DRIFTED
    assert sums.answer(2) == 2
    assert "patches applied: 0; double-answer: drifted (" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("values", "environ", "outcome"),
    [
        ({"fingerprints": {"1.0": "0" * 16}}, {}, "drifted"),
        ({"reached": lambda: None}, {}, "failed"),
        ({"affects": "<0.9", "fingerprints": {}}, {}, "not-affected"),
        ({"when": When(speculation=True)}, {}, "not-applicable"),
        ({}, {"GRAFT_DISABLE": "double-answer"}, "disabled"),
    ],
)
def test_a_required_fix_that_is_not_applied_raises_after_reporting(
    make: Make,
    sums: Any,
    capfd: pytest.CaptureFixture[str],
    values: dict[str, Any],
    environ: dict[str, str],
    outcome: str,
) -> None:
    plugin = make({"GRAFT_REQUIRE": "double-answer", **environ}, **values)
    with pytest.raises(RequiredFixError, match=f"required fix double-answer is not applied: {outcome}: "):
        plugin.register()
    (report,) = parse_lines(capfd.readouterr().err)
    assert report.error is not None
    assert report.fixes[0].required
    assert sums.answer(2) == 2
    with pytest.raises(RequiredFixError):
        plugin.register()


def test_a_pending_required_fix_raises(make: Make, sums: Any) -> None:
    plugin = make({"GRAFT_REQUIRE": "double-answer"})
    sums.__spec__._initializing = True
    with pytest.raises(RequiredFixError, match="pending"):
        plugin.register()


def test_a_required_fix_need_not_be_in_a_process_that_it_does_not_name(make: Make, sums: Any) -> None:
    plugin = make({"GRAFT_REQUIRE": "double-answer"}, processes=(Process.MODEL_INSPECTION,))
    plugin.register()
    assert only(plugin) == (Outcome.NOT_APPLICABLE, "belongs to model-inspection")
    assert sums.answer(2) == 2


def test_a_disabled_fix_stays_out(make: Make, sums: Any) -> None:
    plugin = make({"GRAFT_DISABLE": "double-answer"})
    plugin.register()
    assert only(plugin) == (Outcome.DISABLED, "GRAFT_DISABLE names it")
    assert sums.answer(2) == 2


@pytest.mark.parametrize(
    ("kv_cache_dtype", "outcome"),
    [("turboquant_k8v4", Outcome.APPLIED), ("fp8", Outcome.NOT_APPLICABLE), (None, Outcome.NOT_APPLICABLE)],
)
def test_the_facts_file_decides(
    make: Make, facts: Callable[..., dict[str, str]], kv_cache_dtype: str | None, outcome: Outcome
) -> None:
    plugin = make(facts(kv_cache_dtype) if kv_cache_dtype else {}, when=When(kv_cache_dtypes=("turboquant_*",)))
    plugin.register()
    assert only(plugin)[0] is outcome
    assert plugin.report is not None
    assert plugin.report.run_id == ("run-1" if kv_cache_dtype else None)


@pytest.mark.parametrize("content", [None, "{", json.dumps({"schema": 2})])
def test_a_wrong_facts_file_ends_the_process_after_reporting(
    make: Make, sums: Any, tmp_path: Path, content: str | None, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "facts.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(SettingsError, match=r"facts\.json"):
        make({"GRAFT_FACTS": str(path)}).register()
    (report,) = parse_lines(capfd.readouterr().err)
    assert report.error is not None
    assert str(path) in report.error
    assert sums.answer(2) == 2


def test_a_wrong_id_ends_the_process(make: Make, sums: Any) -> None:
    with pytest.raises(SettingsError, match="no fix is called 'dubble'; known are double-answer"):
        make({"GRAFT_REQUIRE": "dubble"}).register()
    assert sums.answer(2) == 2


@pytest.mark.parametrize(
    ("found", "outcome"),
    [
        (GpuFacts((Gpu(0, "GPU-a", "RTX 3090", (8, 6), 1),)), Outcome.APPLIED),
        (GpuFacts((Gpu(0, "GPU-a", "RTX 4090", (8, 9), 1),)), Outcome.NOT_APPLICABLE),
        (GpuFacts(unknown="no driver"), Outcome.NOT_APPLICABLE),
    ],
)
def test_the_gpu_decides_where_a_fix_asks_for_it(
    make: Make, monkeypatch: pytest.MonkeyPatch, found: GpuFacts, outcome: Outcome
) -> None:
    monkeypatch.setattr(plugin_module, "gpu_facts", lambda environ: found)
    plugin = make(when=When(capability_below=(8, 9)))
    plugin.register()
    assert only(plugin)[0] is outcome


def test_the_gpu_is_not_asked_when_no_fix_needs_it(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin_module, "gpu_facts", lambda environ: pytest.fail("NVML was started for nothing"))
    make().register()


@pytest.mark.parametrize("version", [None, "dev"])
def test_without_a_version_nothing_is_applied(
    make: Make, sums: Any, monkeypatch: pytest.MonkeyPatch, version: str | None
) -> None:
    plugin = make()
    monkeypatch.setattr(plugin_module, "vllm_version", lambda: version)
    plugin.register()
    assert only(plugin)[0] is Outcome.FAILED
    assert sums.answer(2) == 2


def test_reports_are_copied_into_the_directory(make: Make, tmp_path: Path) -> None:
    plugin = make({"GRAFT_REPORTS": str(tmp_path / "reports")})
    plugin.register()
    assert read_directory(tmp_path / "reports") == [plugin.report]


def test_a_directory_that_cannot_be_written_does_not_stop_the_server(
    make: Make, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "reports").write_text("a file")
    make({"GRAFT_REPORTS": str(tmp_path / "reports")}).register()
    log = capfd.readouterr().err
    assert "the log has the report" in log
    assert len(parse_lines(log)) == 1


def _in_child(name: str, plugin: Plugin, folder: Path) -> int:
    """Fork a process of this name, as vLLM does, with the plugin's callback; its report goes to the folder."""
    multiprocessing.util.register_after_fork(plugin, Plugin.after_fork)
    plugin._environ = {**plugin._environ, "GRAFT_REPORTS": str(folder)}
    child = multiprocessing.get_context("fork").Process(target=lambda: None, name=name)
    child.start()
    child.join()
    assert child.exitcode is not None
    return child.exitcode


def test_a_forked_engine_core_decides_for_itself(make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """vLLM does not call plugins in a forked child, which inherits the note that it has called them."""
    monkeypatch.setattr(sys, "argv", ["/bin/vllm", "serve"])
    plugin = make(processes=(Process.ENGINE_CORE,))
    plugin.register()
    assert only(plugin)[0] is Outcome.NOT_APPLICABLE
    assert _in_child("EngineCore", plugin, tmp_path) == 0
    (report,) = read_directory(tmp_path)
    assert (report.process, report.fixes[0].outcome) == ("EngineCore", Outcome.APPLIED)
    assert report.pid != os.getpid()


def test_a_fix_that_a_forked_child_inherits_is_reported_as_it_is(make: Make, tmp_path: Path) -> None:
    plugin = make(processes=(Process.API_SERVER,))
    plugin.register()
    assert _in_child("EngineCore", plugin, tmp_path) == 0
    (report,) = read_directory(tmp_path)
    assert report.fixes[0].outcome is Outcome.APPLIED


def test_a_forked_child_without_its_required_fix_ends(
    make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "argv", ["/bin/vllm", "serve"])
    environ = {"GRAFT_REQUIRE": "double-answer"}
    plugin = make(environ, processes=(Process.ENGINE_CORE,), fingerprints={"1.0": "0" * 16})
    plugin.register()
    assert _in_child("EngineCore", plugin, tmp_path) == 1


def test_a_forked_child_that_is_none_of_vllms_is_left_alone(make: Make, tmp_path: Path) -> None:
    plugin = make()
    plugin.register()
    assert _in_child("Process-1", plugin, tmp_path) == 0
    assert read_directory(tmp_path) == []
