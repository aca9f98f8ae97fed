"""What a diagnosis is made from: files, a plan with the facts of a machine, and logs that no rule knows."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from launcher.diagnose import diagnose, last_words, rules, shows_failure
from launcher.errors import UsageError
from launcher.evidence import ContainerState, Context, Evidence, context_of, evidence_from_file
from launcher.host.facts import Docker, Gpu, GpuProcess, HostFacts, Listener, Nvml, Proc
from launcher.plan import EnvironmentVariable, Flag, Image, Plan, SelectedGpu

UUID = "GPU-00000000-0000-4000-8000-000000000001"
BUSY = (
    "ValueError: Free memory on device cuda:0 (3.02/15.47 GiB) on startup is less than desired GPU memory utilization "
    "(0.8, 12.38 GiB)."
)


def plan(gpus: tuple[SelectedGpu, ...]) -> Plan:
    flags = {"--max-model-len": "32768", "--gpu-memory-utilization": "0.85", "--enable-prefix-caching": None}
    return Plan(
        profile="rtx4090",
        model="m",
        model_repo="example-org/m",
        model_revision=None,
        served_name="m",
        runtime="docker",
        gpu_mode="nvidia",
        gpus=gpus,
        vllm="0.33.0",
        image=Image(base="vllm/vllm-openai:v0.33.0", vllm="0.33.0", cuda="13.0", min_driver="580", python="3.12"),
        host="127.0.0.1",
        port=8000,
        max_model_len=32768,
        tensor_parallel_size=1,
        flags=tuple(Flag(name=name, value=value, reason="", source="") for name, value in flags.items()),
        environment=(EnvironmentVariable(name="VLLM_ENABLE_CUDA_COMPATIBILITY", value="0", reason=""),),
        required_fixes=(),
        disabled_fixes=(),
        processes=(),
        facts={"run_id": "r"},
        fit=None,
        problems=(),
    )


FACTS = HostFacts(
    nvml=Nvml(
        driver="580.126.09",
        gpus=(
            Gpu(
                index=0,
                uuid=UUID,
                compute_capability=(8, 9),
                processes=(GpuProcess(pid=7, name="game", used_mib=9000),),
            ),
            Gpu(index=1, uuid="GPU-other", error="GPU is lost"),
        ),
    ),
    docker=Docker(root_dir="/var/lib/docker", root_free_gib=9.0),
    proc=Proc(kernel="6.6.87.2-microsoft-standard-WSL2", mem_total_gib=62.0),
    ports={"8000": Listener(process="python3", pid=5)},
)
SERVED = (SelectedGpu(uuid=UUID, name=None, compute_capability=(8, 9), total_mib=None),)


def test_plan_and_facts_give_the_numbers_of_a_remedy() -> None:
    context = context_of(plan(SERVED), FACTS, ContainerState(status="exited", exit_code=1))
    diagnosis = diagnose(Evidence(BUSY, context))
    assert diagnosis is not None
    assert diagnosis.cause == "gpu-memory-busy"
    assert "game (PID 7)" in diagnosis.remedy
    assert context.vllm_args.gpu_memory_utilization == 0.85
    assert context.vllm_args.max_model_len == 32768
    assert context.wsl is True
    assert context.listener_on(8000) is not None
    assert context.image_min_driver == "580"


def test_a_lost_gpu_that_the_service_does_not_use_is_not_its_failure() -> None:
    assert diagnose(Evidence("", context_of(plan(SERVED), FACTS))) is None
    every = diagnose(Evidence("", context_of(None, FACTS)))
    assert every is not None
    assert every.cause == "gpu-lost"


def test_a_server_on_the_cpu_has_no_failure_of_a_gpu() -> None:
    facts = HostFacts(nvml=Nvml(error="GPU is lost"))
    assert diagnose(Evidence("", context_of(plan(()), facts))) is None


def test_nothing_known_is_no_failure() -> None:
    assert diagnose(Evidence("", context_of(None, None))) is None
    assert not shows_failure(Evidence(""))


def test_a_plain_log_is_evidence(tmp_path: Path) -> None:
    log = tmp_path / "vllm.log"
    log.write_bytes(b"\xff\xfe not text\r\n" + BUSY.encode())
    diagnosis = diagnose(evidence_from_file(log))
    assert diagnosis is not None
    assert diagnosis.cause == "gpu-memory-busy"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("log: [", "case.yaml: not YAML"),
        ("just text", "case.yaml: log: missing"),
        ("log: x\nkernel_log: [1]", "case.yaml: kernel_log: got list"),
        ("log: x\ncontext: {container: {exit_code: many}}", "case.yaml: context.container.exit_code: got 'many'"),
    ],
)
def test_a_wrong_case_file_is_named_with_its_key(tmp_path: Path, content: str, message: str) -> None:
    case = tmp_path / "case.yaml"
    case.write_text(content, encoding="utf-8")
    with pytest.raises(UsageError, match=r"case\.yaml") as raised:
        evidence_from_file(case)
    assert message in str(raised.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none\.log: No such file"):
        evidence_from_file(tmp_path / "none.log")


def test_facts_that_no_rule_asks_for_are_left_out(tmp_path: Path) -> None:
    case = tmp_path / "case.yaml"
    case.write_text("log: ''\ncontext: {new_fact: 1, port: 8000}\n", encoding="utf-8")
    assert evidence_from_file(case).context == Context(port=8000)


def test_an_unknown_failure_is_told_with_the_last_words() -> None:
    log = (
        "(APIServer pid=1) INFO 01-01 00:00:00 [a.py:1] hello\nTraceback (most recent call last):\n  File x\n"
        "KeyError: 'new'\n(APIServer pid=1) WARNING 01-01 00:00:00 [a.py:1] bye\n"
    )
    evidence = Evidence(log)
    assert diagnose(evidence) is None
    assert shows_failure(evidence)
    assert last_words(evidence, 2) == ("  File x", "KeyError: 'new'")


@pytest.mark.parametrize(
    ("state", "failed"),
    [
        (ContainerState(status="exited", exit_code=1), True),
        (ContainerState(status="exited", exit_code=0), False),
        (ContainerState(status="restarting", exit_code=0, restart_count=2), True),
        (ContainerState(status="running", health="healthy", restart_count=0), False),
    ],
)
def test_the_container_state_tells_of_an_unknown_failure(state: ContainerState, failed: bool) -> None:
    assert shows_failure(Evidence("", Context(container=state))) is failed


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("error: x\n    surprise: 1", "surprise"),
        ("when: 'true'", "matches everything"),
        ("error: x\n    rank: state", "rank state"),
        ("error: '('", "unterminated subpattern|missing"),
    ],
)
def test_a_wrong_rule_is_refused(tmp_path: Path, rule: str, message: str) -> None:
    text = (
        "rules:\n  - id: mine\n    cause: disk-full\n    source: here\n    message: m\n    remedy: r\n"
        f"    restart_helps: false\n    {rule}\n"
    )
    (tmp_path / "mine.yaml").write_text(text, encoding="utf-8")
    with pytest.raises((ValidationError, ValueError), match=message):
        rules(tmp_path)


def test_two_rules_with_one_id_are_refused(tmp_path: Path) -> None:
    rule = "  - {id: mine, cause: disk-full, source: here, error: x, message: m, remedy: r, restart_helps: false}\n"
    (tmp_path / "mine.yaml").write_text("rules:\n" + rule + rule, encoding="utf-8")
    with pytest.raises(ValueError, match="mine"):
        rules(tmp_path)
