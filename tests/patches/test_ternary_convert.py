"""The conversion of a dense checkpoint to ternary weights: what it writes, that it goes on, and what it refuses."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs an environment with vLLM; the launcher's has none")
pytest.importorskip("safetensors", reason="needs an environment with vLLM; the launcher's has none")
from safetensors.torch import load_file, save_file  # noqa: E402
from vllm_graft.quantization.ternary import convert, formats  # noqa: E402
from vllm_graft.quantization.ternary.convert import ConversionError, Options  # noqa: E402

N, K = 48, 64


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A checkpoint of two files, of a tiny Llama by its names."""
    folder = tmp_path / "dense"
    folder.mkdir()
    random = torch.Generator().manual_seed(0)
    first = {
        "model.embed_tokens.weight": torch.randn(100, K, generator=random),
        "model.layers.0.self_attn.q_proj.weight": torch.randn(N, K, generator=random).bfloat16(),
        "model.layers.0.self_attn.q_proj.bias": torch.randn(N, generator=random).bfloat16(),
        "model.layers.0.input_layernorm.weight": torch.ones(K),
    }
    second = {
        "model.layers.1.mlp.gate_proj.weight": torch.randn(N, K, generator=random).half(),
        "model.layers.1.mlp.down_proj.weight": torch.randn(K, N, generator=random).half(),
        "lm_head.weight": torch.randn(100, K, generator=random).half(),
    }
    save_file(first, folder / "model-00001-of-00002.safetensors")
    save_file(second, folder / "model-00002-of-00002.safetensors")
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "hidden_size": K}))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors.index.json").write_text("{}")
    (folder / "notes.bin").write_text("not copied")
    return folder


def run(source: Path, target: Path, options: Options = Options()) -> tuple[convert.Summary, list[Any]]:  # noqa: B008
    told: list[Any] = []
    return convert.convert(source, target, options, told.append), told


def read(folder: Path) -> dict[str, Any]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("group_size", [0, 16])
def test_a_row_or_group_becomes_its_mean_magnitude_times_a_sign(source: Path, tmp_path: Path, group_size: int) -> None:
    summary, told = run(source, tmp_path / "out", Options(group_size=group_size, scale_dtype="float32"))
    dense, written = read(source), read(tmp_path / "out")
    assert summary.ternary_modules == 3
    assert summary.kept_modules == ("lm_head", "model.embed_tokens")
    assert told[-1]["total_bytes"] == summary.source_bytes
    for name in ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.gate_proj", "model.layers.1.mlp.down_proj"):
        weight = dense[f"{name}.weight"].float()
        grouped = weight.view(weight.shape[0], -1, group_size or weight.shape[1])
        mean = grouped.abs().mean(dim=2)
        assert torch.allclose(written[f"{name}.weight_scale"], mean)
        expected = (grouped / mean[:, :, None]).round().clamp(-1, 1).view(weight.shape)
        assert torch.equal(formats.unpack_bytes(written[f"{name}.weight"], weight.shape[1]).float(), expected)
    for name in ("lm_head.weight", "model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.bias"):
        assert torch.equal(written[name], dense[name])


def test_config_and_index_say_what_was_written(source: Path, tmp_path: Path) -> None:
    run(source, tmp_path / "out", Options(group_size=16))
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["hidden_size"] == K
    assert config["quantization_config"] == {
        "quant_method": "ternary",
        "bits": 2,
        "sym": True,
        "codes": "offset",
        "packing": "k",
        "group_size": 16,
        "modules_to_not_convert": ["lm_head", "model.embed_tokens"],
        "lm_head": False,
    }
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(read(tmp_path / "out"))
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        *("config.json", "tokenizer.json", "model.safetensors.index.json", "model-00001-of-00001.safetensors")
    }


def test_the_error_is_that_of_the_rounded_weights(source: Path, tmp_path: Path) -> None:
    summary, _ = run(source, tmp_path / "out")
    dense, written = read(source), read(tmp_path / "out")
    lost = total = 0.0
    for name in [name for name in dense if f"{name}_scale" in written]:
        rounded = formats.unpack_bytes(written[name], dense[name].shape[1]).float() * written[f"{name}_scale"].float()
        lost += float((rounded - dense[name].float()).square().sum())
        total += float(dense[name].float().square().sum())
    assert summary.relative_error == pytest.approx((lost / total) ** 0.5, rel=1e-4)


def test_lm_head_is_ternary_when_it_is_asked_for_and_patterns_keep_modules(source: Path, tmp_path: Path) -> None:
    summary, _ = run(source, tmp_path / "out", Options(lm_head=True, keep=("*down_proj",)))
    assert summary.kept_modules == ("model.embed_tokens", "model.layers.1.mlp.down_proj")
    assert json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]["lm_head"]


@pytest.mark.parametrize(
    "module", ["layers.0.mlp.experts.3.up_proj", "layers.0.mlp.shared_expert_gate", "mtp.fc", "a.visual.blocks.0.qkv"]
)
def test_experts_gates_drafters_and_encoders_stay_dense(source: Path, tmp_path: Path, module: str) -> None:
    name = f"model.{module}" if module.startswith("layers") else module
    save_file({f"{name}.weight": torch.ones(16, K)}, source / "model-00003-of-00002.safetensors")
    summary, _ = run(source, tmp_path / "out")
    assert name in summary.kept_modules
    assert summary.ternary_modules == 3


def test_a_broken_conversion_goes_on_with_the_file_it_was_at(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convert, "SHARD_BYTES", 30_000)
    whole, _ = run(source, tmp_path / "whole")
    assert len(list((tmp_path / "whole").glob("*.safetensors"))) > 1
    written: list[str] = []
    publish = convert._publish

    def breaks(partial: Path, final: Path) -> None:
        written.append(final.name)
        if final.name.startswith("model-00002"):
            raise KeyboardInterrupt
        publish(partial, final)

    monkeypatch.setattr(convert, "_publish", breaks)
    with pytest.raises(KeyboardInterrupt):
        run(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(convert, "_publish", publish)
    again, told = run(source, tmp_path / "out")
    assert "model.embed_tokens.weight" not in [event["detail"] for event in told]
    assert again == whole
    for path in (tmp_path / "whole").iterdir():
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()


MEMORY = """
import re, sys
from pathlib import Path
from vllm_graft.quantization.ternary import convert

def peak_kib():
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

convert.SHARD_BYTES = 1 << 24
before = peak_kib()
convert.convert(Path(sys.argv[1]), Path(sys.argv[2]), convert.Options(), lambda event: None)
print(1024 * (peak_kib() - before))
"""


def test_memory_is_that_of_a_file_however_large_the_model_is(tmp_path: Path) -> None:
    source = tmp_path / "large"
    source.mkdir()
    kinds = ("layers.{}.up_proj.weight", *("layers.{}.embed_tokens.weight",) * 5)
    tensors = {kinds[number % 6].format(number): torch.ones(2048, 2048) for number in range(18)}
    save_file(tensors, source / "model.safetensors")
    (source / "config.json").write_text("{}")
    command = (sys.executable, "-c", MEMORY, str(source), str(tmp_path / "out"))
    environ = os.environ | {"PYTHONPATH": str(Path(convert.__file__).parents[3])}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environ)
    model_bytes = (source / "model.safetensors").stat().st_size
    assert int(done.stdout) < model_bytes / 2, f"{model_bytes} bytes of weights"


def test_other_options_do_not_go_on_with_what_was_begun(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convert, "_finish", lambda *parts: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        run(source, tmp_path / "out")
    with pytest.raises(ConversionError, match="was begun from another source or with other options"):
        run(source, tmp_path / "out", Options(group_size=16))


def test_what_cannot_be_converted_is_refused_with_the_reason(source: Path, tmp_path: Path) -> None:
    def refuses(message: str, options: Options = Options()) -> None:  # noqa: B008
        with pytest.raises(ConversionError, match=message):
            run(source, tmp_path / "out", options)
        assert not (tmp_path / "out").exists()

    refuses("a group of 8 columns; the kernels take multiples of 16", Options(group_size=8))
    refuses(re.escape("down_proj.weight: 48 columns are not a multiple of the group size 32"), Options(group_size=32))
    refuses("no linear weight in floating point", Options(keep=("*",)))
    (source / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "awq"}}))
    refuses("quantized by awq already")
    (source / "config.json").unlink()
    refuses("no config.json; name the folder of a checkpoint")


def test_a_target_that_is_there_and_weights_that_are_not_finite_are_refused(source: Path, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    with pytest.raises(ConversionError, match="exists; name another folder"):
        run(source, tmp_path / "there")
    save_file({"a.weight": torch.full((16, 16), torch.inf)}, source / "model-00001-of-00002.safetensors")
    with pytest.raises(ConversionError, match=r"a\.weight holds a value that is not finite"):
        run(source, tmp_path / "out")


def test_the_command_ends_with_its_summary_or_its_error(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert convert.main([str(source), str(tmp_path / "out"), "--group-size", "16", "--keep", "*q_proj"]) == 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["summary"]["ternary_modules"] == 2
    shutil.rmtree(source)
    assert convert.main([str(source), str(tmp_path / "other")]) == 1
    assert "no config.json" in json.loads(capsys.readouterr().out.splitlines()[-1])["error"]
