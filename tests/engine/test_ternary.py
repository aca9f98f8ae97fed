"""A real model, converted by the launcher, in a real vLLM on the CPU: its tokens are those of its weights."""

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from reference_config import WEIGHTS

from launcher.engine_env import ENGINE, ensure
from launcher.reconcile.run import Settings, reconcile
from launcher.reconcile.sides import parse
from launcher.weights.ternary import Request, Summary, convert

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]
PROGRAM = Path(__file__).with_name("ternary_program.py")
GROUP_SIZES = {"rows": None, "groups": 64}
LINEAR_LAYERS = 4 * 7
"""Of four decoder layers, which are what is converted of the model."""
EMBEDDING_BYTES = 49152 * 576 * 2


def run(*arguments: str | Path) -> tuple[str, str]:
    """The program's output and its log."""
    environ = {key: value for key, value in os.environ.items() if not key.startswith(("GRAFT_", "VLLM_", "PYTHON"))}
    environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1"}
    command = (str(ENGINE.python), str(PROGRAM), *map(str, arguments))
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environ)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout, done.stdout + done.stderr


@dataclass(frozen=True)
class Served:
    """Both checkpoints: what their conversions say, what they answer, and what vLLM logs meanwhile."""

    summaries: dict[str, Summary]
    answers: dict[str, Any]
    log: str


@pytest.fixture(scope="module")
def served(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Served:
    """A scale a row as config.json says; and a scale for 64 columns, of which config.json is silent."""
    ensure(ENGINE, lambda event: None)
    folder = tmp_path_factory.mktemp("ternary")
    run("cut", model_dir, folder / "dense")
    summaries = {
        name: convert(Request(folder / "dense", folder / name, group_size), ENGINE.python, lambda *event: None)
        for name, group_size in GROUP_SIZES.items()
    }
    config = folder / "groups" / "config.json"
    said = json.loads(config.read_text(encoding="utf-8"))
    del said["quantization_config"]
    config.write_text(json.dumps(said), encoding="utf-8")
    output, log = run("answer", *(folder / name for name in GROUP_SIZES))
    (line,) = (line for line in output.splitlines() if line.startswith('{"rows"'))  # vLLM logs its end after it
    return Served(summaries, json.loads(line), log)


@pytest.mark.parametrize("name", GROUP_SIZES)
def test_a_converted_model_answers_with_the_tokens_of_its_weights(served: Served, name: str) -> None:
    answer = served.answers[name]
    assert answer["quantization"] == "ternary"
    assert answer["served"] == answer["expected"]
    assert len({token for tokens in answer["served"] for token in tokens}) > 10  # it does not say one thing to all


@pytest.mark.parametrize("name", GROUP_SIZES)
def test_a_conversion_keeps_the_embedding_and_packs_the_rest(served: Served, name: str) -> None:
    summary = served.summaries[name]
    assert summary.ternary_modules == LINEAR_LAYERS
    assert summary.kept_modules == ("model.embed_tokens",)
    assert summary.target_bytes - EMBEDDING_BYTES < 0.15 * (summary.source_bytes - EMBEDDING_BYTES)


def test_config_json_is_right_and_the_tensors_tell_what_it_leaves_out(served: Served) -> None:
    assert "the tensors are" not in served.log
    assert "is assumed" not in served.log


def test_a_hybrid_model_with_experts_computes_what_transformers_does(tmp_path: Path) -> None:
    ensure(ENGINE, lambda event: None)
    folder = tmp_path / "hybrid"
    summary = convert(Request(WEIGHTS, folder), ENGINE.python, lambda *event: None)
    assert isinstance(summary, Summary)
    # Delta nets, attention, dense layers, shared experts and the layer that drafts; routed experts stay.
    assert summary.ternary_modules == 48
    sides = [parse(f"{engine}:{folder}?dtype=bfloat16") for engine in ("transformers", "vllm")]
    prompts: list[str | list[int]] = [list(b"A packed weight is -1, 0 or +1.")]
    (pair,) = reconcile(
        sides[0], sides[1:], prompts, Settings(tokens=31, decoded=4), ENGINE.python, lambda phase: None, tmp_path
    )
    assert pair.agree, pair.found["first"]
    names = {point["name"] for point in pair.found["points"]}
    assert {"layers.0.linear_attn.in_proj_qkvz", "layers.0.mlp", "layers.1.self_attn.o_proj", "logits"} <= names
