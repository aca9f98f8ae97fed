"""Reconciliation on tiny models: planted errors are found at their layer, row and column; like pairs report nothing."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from launcher.engine_env import ENGINE, is_installed
from launcher.errors import UsageError
from launcher.reconcile.run import Settings, reconcile
from launcher.reconcile.sides import parse
from launcher.state import CHECKOUT

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]
PROGRAM = Path(__file__).with_name("reconcile_program.py")
ONE_THREAD = ("OMP_NUM_THREADS", "1")
"""The models are so small that threads would do little but wait for each other."""
Found = dict[str, Any]


def run(mode: str, folder: Path) -> Found:
    """The program's answer."""
    environ = {key: value for key, value in os.environ.items() if not key.startswith(("GRAFT_", "VLLM_", "PYTHON"))}
    command = (str(ENGINE.python), str(PROGRAM), mode, str(folder))
    environ |= dict((("PYTHONPATH", str(CHECKOUT)), ONE_THREAD))
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environ, cwd=folder)
    assert done.returncode == 0, done.stderr[-3000:]
    answer: Found = json.loads(done.stdout.splitlines()[-1])
    return answer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not is_installed(ENGINE):
        pytest.skip(f"{ENGINE.folder.name} is not installed; run `graft engine install`")
    return tmp_path_factory.mktemp("reconcile")


@pytest.fixture(scope="module")
def found(folder: Path) -> Found:
    """What is found of each planted error; the models lie in the folder then."""
    return run("reference", folder)


@pytest.mark.parametrize("pair", ["again", "bfloat16"])
def test_a_clean_pair_reports_nothing(found: Found, pair: str) -> None:
    assert found[pair]["first"] is None
    assert found[pair]["logits"]["kl_mean"] < 0.012
    assert len(found[pair]["points"]) == 39
    assert found[pair]["only_a"] == found[pair]["only_b"] == []


@pytest.mark.parametrize("plant", ["wrong_scale", "wrong_scale_in_bfloat16"])
def test_one_wrong_scale_is_found_at_its_layer_and_output_channel(found: Found, plant: str) -> None:
    first = found[plant]["first"]
    assert (first["name"], first["layer"], first["column"]) == ("layers.1.self_attn.v_proj", 1, 7)
    assert first["column_runs"] == "7"
    assert first["column_share"] > 0.9


def test_swapped_gate_and_up_are_wrong_in_all_columns_of_the_gate(found: Found) -> None:
    first = found["swapped_gate_and_up"]["first"]
    assert (first["name"], first["columns_beyond"], first["columns"]) == ("layers.2.mlp.gate_proj", 192, 192)
    assert first["rows_beyond"] == first["rows"] == 36


def test_a_transposed_group_is_found_in_the_output_channels_that_it_covers(found: Found) -> None:
    first = found["transposed_group"]["first"]
    assert (first["name"], first["column_runs"]) == ("layers.0.self_attn.o_proj", "0-63")


def test_a_wrong_zero_code_is_found_at_its_output_channel(found: Found) -> None:
    first = found["wrong_zero_code"]["first"]
    assert (first["name"], first["column_runs"]) == ("layers.1.mlp.up_proj", "11")


def test_a_wrong_row_of_the_embedding_is_found_at_the_tokens_position(found: Found) -> None:
    first = found["wrong_embedding"]["first"]
    assert (first["name"], first["row_runs"]) == ("embed", "28")
    assert (first["prompt"], first["position"], first["token"], first["row_share"]) == (1, 4, 49, 1)


def test_models_of_different_depth_are_refused(found: Found) -> None:
    assert "B, two: no layers.2; it has 2 layers" in found["short"]["refused"]


def test_activations_are_held_one_at_a_time(found: Found) -> None:
    assert found["memory"]["recorded_bytes"] == 61 * 4 << 20
    assert found["memory"]["taken_bytes"] < 32 * 4 << 20


@pytest.mark.usefixtures("found")
def test_a_wrong_kv_scale_in_vllm_is_found_behind_that_layers_attention(folder: Path) -> None:
    in_vllm = run("kv", folder)
    assert in_vllm["again"]["first"] is None
    first = in_vllm["wrong_kv_scale"]["first"]
    assert (first["name"], first["layer"]) == ("layers.1.self_attn.o_proj.input", 1)
    assert (in_vllm["hooks"], in_vllm["hooks_after_error"]) == (0, 0)


@pytest.mark.usefixtures("found")
def test_vllm_and_transformers_part_where_a_scale_is_wrong(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(*ONE_THREAD)
    prompts: list[str | list[int]] = [[(5 * place) % 384 for place in range(20)]]
    sides = [parse(f"transformers:{folder}/ternary"), parse(f"vllm:{folder}/wrong_scale-model?dtype=float32")]
    (pair,) = reconcile(
        sides[0], sides[1:], prompts, Settings(tokens=20, decoded=4), ENGINE.python, lambda phase: None, tmp_path
    )
    first = pair.found["first"]
    assert (first["name"], first["column"], first["columns_beyond"]) == ("layers.1.self_attn.v_proj", 7, 1)
    assert not pair.agree
    before = [point["name"] for point in pair.found["points"] if point["within"]]
    assert {"embed", "layers.0", "layers.0.mlp.up_proj", "layers.1.self_attn.k_proj"} <= set(before)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("found")
def test_what_an_engine_refuses_is_told(folder: Path) -> None:
    sides = [parse(f"transformers:{folder}/ternary"), parse(f"transformers:{folder}/dense?device=nowhere")]
    with pytest.raises(UsageError, match="token 384"):
        list(reconcile(sides[0], sides[1:], [[1, 2, 3, 384]], Settings(), ENGINE.python, lambda phase: None))
