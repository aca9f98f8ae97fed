"""Settings, the facts file, what a process is, and which GPUs it sees."""

from pathlib import Path

import pytest
from vllm_graft.facts import (
    EngineFacts,
    Gpu,
    ModelFacts,
    RunFacts,
    Settings,
    SettingsError,
    process_roles,
    read_run_facts,
    select_gpus,
)
from vllm_graft.patch import Process
from vllm_graft.records import to_json

API, CORE, WORKER = Process.API_SERVER, Process.ENGINE_CORE, Process.WORKER
SERVE = ["/opt/venv/bin/vllm", "serve", "model"]
SITE = "/usr/local/lib/python3.12/dist-packages/vllm"


def run_facts(tensor_parallel_size: int = 1) -> RunFacts:
    model = ModelFacts(("Qwen3_5ForCausalLM",), 16, 48, 0, 1, 256)
    return RunFacts(1, "run-1", model, EngineFacts("fp8", None, 0, tensor_parallel_size, "docker"))


def test_settings_are_four_and_empty_ones_are_unset() -> None:
    environ = {"GRAFT_DISABLE": " a, b ,", "GRAFT_REQUIRE": "", "GRAFT_FACTS": "", "GRAFT_REPORTS": "/reports"}
    assert Settings.read(environ, ["a", "b"]) == Settings(frozenset({"a", "b"}), frozenset(), None, Path("/reports"))
    assert Settings.read({}, []) == Settings()


@pytest.mark.parametrize("name", ["GRAFT_DISABLE", "GRAFT_REQUIRE"])
def test_an_unknown_fix_is_refused_with_those_known(name: str) -> None:
    with pytest.raises(SettingsError, match=f"{name}: no fix is called 'tq'; known are tq-spec-decode"):
        Settings.read({name: "tq"}, ["tq-spec-decode"])


def test_a_facts_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "facts.json"
    path.write_text(to_json(run_facts()))
    assert read_run_facts(path) == run_facts()


@pytest.mark.parametrize("content", [None, b"{", b"\xff\xfe", b'{"schema": 1}'])
def test_a_facts_file_that_is_none_is_refused_by_name(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "facts.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(SettingsError, match=r"GRAFT_FACTS=.*facts\.json: .*render it with the launcher"):
        read_run_facts(path)


@pytest.mark.parametrize(
    ("name", "argv", "roles"),
    [
        ("MainProcess", SERVE, {API}),
        ("MainProcess", [f"{SITE}/entrypoints/openai/api_server.py", "--model", "m"], {API}),
        ("MainProcess", [f"{SITE}/entrypoints/cli/main.py", "serve", "m"], {API}),
        ("ApiServer_1", SERVE, {API}),
        ("EngineCore", SERVE, {CORE, WORKER}),
        ("EngineCore_DP0", SERVE, {CORE, WORKER}),
        ("VllmWorker-1", SERVE, {WORKER}),
        ("MainProcess", [f"{SITE}/model_executor/models/registry.py"], {Process.MODEL_INSPECTION}),
        ("MainProcess", ["chat.py"], {API, CORE, WORKER}),
        ("MainProcess", ["/opt/venv/bin/vllm", "bench", "latency"], {API, CORE, WORKER}),
        ("MainProcess", ["-c"], {API, CORE, WORKER}),
        ("MainProcess", [], {API, CORE, WORKER}),
        ("dp_rank_0", ["default_worker.py"], {API, CORE, WORKER}),
    ],
)
def test_a_process_is_known_by_its_name_and_command_line(name: str, argv: list[str], roles: set[Process]) -> None:
    assert process_roles(name, argv, None) == roles


def test_with_tensor_parallelism_the_engine_core_holds_no_worker() -> None:
    assert process_roles("EngineCore", SERVE, run_facts(tensor_parallel_size=1)) == {CORE, WORKER}
    assert process_roles("EngineCore", SERVE, run_facts(tensor_parallel_size=2)) == {CORE}


@pytest.mark.parametrize(
    ("visible", "indices"),
    [
        ("0,1", [0, 1]),
        ("1", [1]),
        ("GPU-bb", [1]),
        ("GPU-bb2f, 0", [1, 0]),
        ("", []),
        ("-1", []),
        ("0,7,1", [0]),
        ("GPU-", []),
    ],
)
def test_only_visible_gpus_count(visible: str, indices: list[int]) -> None:
    gpus = [
        Gpu(index=number, uuid=uuid, name="RTX 3090", capability=(8, 6), total_bytes=24 * 2**30)
        for number, uuid in enumerate(("GPU-aa1e", "GPU-bb2f"))
    ]
    assert [gpu.index for gpu in select_gpus(gpus, visible)] == indices
