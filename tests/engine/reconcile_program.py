"""Plant errors into tiny models and reconcile them; run by vLLM's Python with a mode and a folder.

`reference` makes the models in the folder, which `kv` needs. Standard output ends with a line of JSON.
"""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from launcher.reconcile.program import engine, reference
from launcher.reconcile.program.compare import compare
from launcher.reconcile.program.problems import Problem
from launcher.reconcile.program.recorder import Recorder

LAYERS, VOCABULARY = 3, 384
SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 128,
}
ROWS = [[(7 * place + 3) % VOCABULARY for place in range(24)], [(11 * place + 5) % VOCABULARY for place in range(12)]]
Tensors = dict[str, torch.Tensor]


def models(folder: Path) -> None:
    """Write a dense model of random weights, one with a layer less, and the former with ternary weights."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from vllm_graft.quantization.ternary.convert import Options, convert

    for name, layers in (("dense", LAYERS), ("short", LAYERS - 1)):
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, tie_word_embeddings=False, **SIZES))
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
        model.save_pretrained(folder / name)
    convert(folder / "dense", folder / "ternary", Options(64, "float32"), lambda event: None)


def wrong_scale(tensors: Tensors) -> None:
    tensors["model.layers.1.self_attn.v_proj.weight_scale"][7, 1] *= 1.5


def swapped_gate_and_up(tensors: Tensors) -> None:
    for suffix in ("weight", "weight_scale"):
        gate, up = (f"model.layers.2.mlp.{name}_proj.{suffix}" for name in ("gate", "up"))
        tensors[gate], tensors[up] = tensors[up], tensors[gate]


def transposed_group(tensors: Tensors) -> None:
    name = "model.layers.0.self_attn.o_proj.weight"
    packed = tensors[name]
    codes = torch.stack([packed >> 2 * place & 3 for place in range(4)], 2).flatten(1)
    codes[:64, 64:] = codes[:64, 64:].T.clone()
    quarters = codes.view(len(codes), -1, 4)
    tensors[name] = sum(quarters[..., place] << 2 * place for place in range(4)).to(torch.uint8)


def wrong_zero_code(tensors: Tensors) -> None:
    row = tensors["model.layers.1.mlp.up_proj.weight"][11]
    for shift in (0, 2, 4, 6):
        row -= ((row >> shift & 3) == 1).to(torch.uint8) << shift


def wrong_embedding(tensors: Tensors) -> None:
    tensors["model.embed_tokens.weight"][ROWS[1][4]] *= 1.1


PLANTED: tuple[Callable[[Tensors], None], ...] = (
    wrong_scale,
    swapped_gate_and_up,
    transposed_group,
    wrong_zero_code,
    wrong_embedding,
)


def plant(source: Path, target: Path, change: Callable[[Tensors], None]) -> Path:
    """Copy a checkpoint with its tensors changed."""
    target.mkdir()
    for file in source.iterdir():
        if file.suffix == ".json" and "index" not in file.name:
            (target / file.name).write_bytes(file.read_bytes())
    tensors = {name: tensor for file in source.glob("*.safetensors") for name, tensor in load_file(file).items()}
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, target / "model.safetensors")
    return target


def facts(name: str, dtype: str, layers: int = LAYERS) -> dict[str, Any]:
    return {"side": name, "layers": layers, "dtype": dtype, "head_dim": SIZES["head_dim"]}


def recorded(folder: Path, out: Path, dtype: str = "float32", layers: int = LAYERS) -> Path:
    """Record a checkpoint by transformers."""
    recorder = Recorder(out)
    reference.capture(folder, {"dtype": dtype}, ROWS, recorder)
    recorder.finish(facts(out.name, dtype, layers), sum(map(len, ROWS)))
    return out


def by_reference(folder: Path) -> dict[str, Any]:
    """What is found of each planted error, both sides in transformers."""
    models(folder)
    good = recorded(folder / "ternary", folder / "good")
    rounded = recorded(folder / "ternary", folder / "rounded", "bfloat16")
    found = {"bfloat16": compare(good, rounded, ROWS, 1), "again": compare(good, good, ROWS, 1)}
    for change in PLANTED:
        name = change.__name__
        bad = plant(folder / "ternary", folder / f"{name}-model", change)
        found[name] = compare(good, recorded(bad, folder / name), ROWS, 1)
        if change is wrong_scale:
            found["wrong_scale_in_bfloat16"] = compare(good, recorded(bad, folder / "b16", "bfloat16"), ROWS, 1)
    short = recorded(folder / "short", folder / "two", layers=LAYERS - 1)
    try:
        compare(recorded(folder / "dense", folder / "three"), short, ROWS, 1)
    except Problem as problem:
        found["short"] = {"refused": str(problem)}
    return found | {"memory": memory(folder)}


def memory(folder: Path) -> dict[str, Any]:
    """How much memory is taken while activations are recorded and compared, and how large these are together."""
    layers, size = 60, 1024
    before = peak_bytes()
    recorder = Recorder(folder / "large")
    recorder.rows_now = size
    for name in (*(f"layers.{number}" for number in range(layers)), "logits"):
        recorder.write(name, torch.randn(size, size))
    recorder.finish(facts("large", "float32", layers), size)
    compare(recorder.folder, recorder.folder, [list(range(size))], 1)
    recorded = sum(file.stat().st_size for file in recorder.folder.glob("*.bin"))
    shutil.rmtree(recorder.folder)
    return {"taken_bytes": peak_bytes() - before, "recorded_bytes": recorded}


def peak_bytes() -> int:
    """The most memory that this process has had."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return 1024 * int(line.split()[1])


def in_vllm(folder: Path) -> dict[str, Any]:
    """What is found of a KV scale that is too small for its values; and whether the hooks are gone afterwards."""
    llm = engine.start(folder / "dense", {"dtype": "bfloat16", "kv_cache_dtype": "fp8"}, max(map(len, ROWS)))

    def record(name: str) -> Path:
        recorder = Recorder(folder / name)
        engine.run(llm, LAYERS, ROWS, 6, recorder)
        recorder.finish(facts(name, "bfloat16"), sum(map(len, ROWS)))
        return folder / name

    good, again = record("fp8"), record("fp8-again")
    (model,) = llm.apply_model(lambda model: model)
    attention = model.model.layers[1].self_attn.attn
    attention._v_scale.fill_(2.0**-12)
    attention._v_scale_float = 2.0**-12
    bad = record("fp8-bad")
    return {
        "again": compare(good, again, ROWS, 1),
        "wrong_kv_scale": compare(good, bad, ROWS, 1),
        "hooks": left(model),
        "hooks_after_error": after_error(llm, model, folder),
    }


def left(model: Any) -> int:
    """How many hooks a model still has."""
    hooks = sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())
    return hooks + ("compute_logits" in vars(model))


def after_error(llm: Any, model: Any, folder: Path) -> int:
    """How many hooks are left when the disk is full in the middle of a model."""

    class Full(Recorder):
        def write(self, name: str, tensor: torch.Tensor) -> None:
            if name == "layers.1":
                assert left(model) > LAYERS
                raise OSError(28, "No space left on device")

    try:
        engine.run(llm, LAYERS, ROWS, 6, Full(folder / "full"))
    except OSError:
        return left(model)
    raise AssertionError("no error came through")


if __name__ == "__main__":
    answer = {"reference": by_reference, "kv": in_vllm}[sys.argv[1]](Path(sys.argv[2]))
    print("\n" + json.dumps(answer))
