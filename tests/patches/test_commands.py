"""The commands of `python -m vllm_graft`, as a person and as a program use them."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm_graft import __main__ as commands
from vllm_graft import detect as detect_module
from vllm_graft.detect import Fp8Probe, ModelError, describe_model, probe_fp8, read_model
from vllm_graft.facts import Gpu, GpuFacts, ModelFacts
from vllm_graft.fixes import FIXES
from vllm_graft.patch import Outcome, Patch, Process
from vllm_graft.prove import prove
from vllm_graft.report import FixReport, ProcessReport, to_line, write_file

ROOT = Path(__file__).parents[2]
QWEN36_27B = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "text_config": {
        "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 16,
        "num_hidden_layers": 64,
        "head_dim": 256,
        "mtp_num_hidden_layers": 1,
    },
}


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GRAFT_DISABLE", "GRAFT_REQUIRE", "GRAFT_FACTS", "GRAFT_REPORTS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("VLLM_LOGGING_STREAM", "ext://sys.stderr")


def report(outcome: Outcome, error: str | None = None) -> ProcessReport:
    fix = FixReport("double-answer", outcome, "why", required=error is not None, fingerprint=None)
    roles = (Process.ENGINE_CORE, Process.WORKER)
    return ProcessReport(1, "run-1", 7, "EngineCore", roles, "0.1.0", "1.0", (fix,), error)


@pytest.mark.parametrize(
    ("each", "code"),
    [
        (report(Outcome.APPLIED), commands.OK),
        (report(Outcome.NOT_APPLICABLE), commands.OK),
        (report(Outcome.DRIFTED), commands.CHECK_FAILED),
        (report(Outcome.DRIFTED, error="required fix double-answer is not applied"), commands.NOT_APPLIED),
    ],
)
def test_status_reads_a_log_or_a_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], each: ProcessReport, code: int
) -> None:
    log = tmp_path / "server.log"
    log.write_text(f"INFO starting\n{to_line(each)}\n")
    write_file(each, tmp_path / "reports")
    assert commands.main(["status", "--log", str(log)]) == code
    text = capsys.readouterr().out
    assert "EngineCore (pid 7; engine-core, worker; vLLM 1.0; run run-1)" in text
    assert f"double-answer: {each.fixes[0].outcome}" in text
    assert commands.main(["status", "--reports", str(tmp_path / "reports"), "--json"]) == code
    (document,) = json.loads(capsys.readouterr().out)
    assert document["fixes"][0]["outcome"] == each.fixes[0].outcome


def test_status_without_reports_is_a_failed_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main(["status", "--reports", str(tmp_path)]) == commands.CHECK_FAILED
    assert "vllm_graft did not run in any process" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["status"], "give --reports DIR or --log FILE"),
        (["status", "--log", "/nonexistent/log"], "/nonexistent/log"),
        (["detect", "--config", "/nonexistent"], "/nonexistent"),
        (["fingerprint", "json:dumps()"], "json:dumps()"),
    ],
)
def test_bad_input_is_named(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert commands.main(arguments) != commands.OK
    assert message in capsys.readouterr().err


def test_a_fingerprint_is_that_of_all_paths_together(capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main(["fingerprint", "json:dumps", "json.decoder"]) == commands.OK
    both = capsys.readouterr().out.split()[0]
    assert commands.main(["fingerprint", "json:dumps", "--json"]) == commands.OK
    one = json.loads(capsys.readouterr().out)["fingerprint"]
    assert len(one) == len(both) == 16
    assert one != both
    assert commands.main(["fingerprint", "json:gone"]) == commands.CHECK_FAILED


def test_prove_without_vllm_is_a_failed_check(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "vllm_version", lambda: None)
    assert commands.main(["prove"]) == commands.CHECK_FAILED
    assert "vLLM is not installed" in capsys.readouterr().err


@pytest.fixture
def fix(stock: Callable[..., Any], make_patch: Callable[..., Patch]) -> Callable[..., Patch]:
    package = stock({"sums": "def answer(value):\n    return value\n", "caller": "from STOCK.sums import answer\n"})
    package.module("sums")

    def make(**values: Any) -> Patch:
        return make_patch(package.path("sums:answer"), lambda original: lambda value: 2 * original(value), **values)

    return make


def test_prove_puts_in_and_takes_out(fix: Callable[..., Patch]) -> None:
    module = fix().target.path.partition(".")[0]
    from_caller = __import__(f"{module}.sums", fromlist=["answer"])
    original = from_caller.answer
    copied = fix(target=type(fix().target)(fix().target.path, also=(f"{module}.caller:answer",)))
    proofs = prove([copied, fix(id="newer-fix", affects=">=2,<3", fingerprints={})], "1.0")
    assert [(proof.outcome, proof.holds) for proof in proofs] == [
        (Outcome.APPLIED, True),
        (Outcome.NOT_AFFECTED, True),
    ]
    assert from_caller.answer is original


def test_prove_finds_a_copy_that_nobody_listed(fix: Callable[..., Patch]) -> None:
    patch = fix()
    __import__(patch.target.path.partition(":")[0].replace("sums", "caller"))
    (proof,) = prove([patch], "1.0")
    assert (proof.outcome, proof.holds) == (Outcome.FAILED, False)


def test_prove_fails_on_drift_with_exit_code_5(
    fix: Callable[..., Patch], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(commands, "vllm_version", lambda: "1.0")
    monkeypatch.setattr(commands, "FIXES", (fix(fingerprints={"1.0": "0" * 16}),))
    assert commands.main(["prove", "--json"]) == commands.NOT_APPLIED
    (proof,) = json.loads(capsys.readouterr().out)["fixes"]
    assert (proof["outcome"], proof["holds"]) == ("drifted", False)


def test_vllms_log_stays_out_of_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_LOGGING_STREAM")
    commands.main(["fingerprint", "json:dumps"])
    assert os.environ["VLLM_LOGGING_STREAM"] == "ext://sys.stderr"


def test_the_layers_of_a_hybrid_are_counted_by_kind(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN36_27B))
    expected = ModelFacts(("Qwen3_5ForConditionalGeneration",), 16, 48, 0, 1, 256)
    assert read_model(tmp_path) == read_model(tmp_path / "config.json") == expected


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (
            {"num_hidden_layers": 30, "hidden_size": 576, "num_attention_heads": 9},
            ModelFacts(("A",), 30, 0, 0, None, 64),
        ),
        (
            {"num_hidden_layers": 48, "full_attention_interval": 4, "linear_num_value_heads": 32, "num_experts": 512},
            ModelFacts(("A",), 12, 36, 512, None, None),
        ),
        ({"num_hidden_layers": 48, "linear_num_value_heads": 32}, ModelFacts(("A",), None, None, 0, None, None)),
        ({"num_hidden_layers": 61, "n_routed_experts": 256, "num_nextn_predict_layers": 1, "head_dim": 128},
         ModelFacts(("A",), 61, 0, 256, 1, 128)),
        ({}, ModelFacts(("A",), None, None, 0, None, None)),
    ],
)  # fmt: skip
def test_what_a_configuration_does_not_say_is_unknown(config: dict[str, Any], expected: ModelFacts) -> None:
    assert describe_model({"architectures": ["A"], **config}) == expected


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"architectures": []}'])
def test_a_file_that_describes_no_model_is_named(tmp_path: Path, content: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(content)
    with pytest.raises(ModelError, match=r"config\.json: "):
        read_model(path)


def test_detect_shows_hardware_model_versions_and_fixes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = Gpu(0, "GPU-a", "NVIDIA GeForce RTX 3090", (8, 6), 24 * 2**30)
    probe = Fp8Probe((detect_module.Fp8Cast("float8e4nv", works=False, reason="not supported"),), "")
    monkeypatch.setattr(detect_module, "gpu_facts", lambda environ: GpuFacts((gpu,)))
    monkeypatch.setattr(detect_module, "probe_fp8", lambda: probe)
    (tmp_path / "config.json").write_text(json.dumps(QWEN36_27B))
    assert commands.main(["detect", "--config", str(tmp_path)]) == commands.OK
    text = capsys.readouterr().out
    assert "GPU 0: NVIDIA GeForce RTX 3090, compute capability 8.6, 24.00 GiB" in text
    assert "FP8 float8e4nv: not supported" in text
    assert "attention_layers 16, gdn_layers 48" in text
    assert commands.main(["detect", "--json"]) == commands.OK
    document = json.loads(capsys.readouterr().out)
    assert document["hardware"]["gpus"][0]["capability"] == [8, 6]
    assert [fix["id"] for fix in document["fixes"]] == [patch.id for patch in FIXES]


def test_without_a_gpu_fp8_is_not_probed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detect_module, "gpu_facts", lambda environ: GpuFacts(unknown="NVML does not start"))
    monkeypatch.setattr(detect_module, "probe_fp8", lambda: pytest.fail("CUDA was started without a GPU"))
    assert commands.main(["detect"]) == commands.OK
    assert "FP8: not probed: NVML does not start" in capsys.readouterr().out


def test_a_probe_that_fails_says_why() -> None:
    probe = probe_fp8()
    assert probe.casts == ()
    assert probe.reason.startswith("the probe failed: ")
