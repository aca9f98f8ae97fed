"""The measurement of KV cache dtypes with a stand-in for `reconcile`: what is compared, kept and gone on with."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[1] / "gpu"))
import reconcile_kv

from launcher.errors import CheckFailed
from launcher.reconcile.run import Pair
from launcher.reconcile.sides import Side
from tests.launcher.kv_dtypes_table import markdown

LOGITS = {
    "kl_mean": 0.001,
    "kl_max": 0.004,
    "kl": [0.0, 0.004],
    "top1_agreement": 0.5,
    "perplexity_a": 20.0,
    "perplexity_b": 21.0,
}


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[list[Side]]:
    """A stand-in that notes the sides of each call; the side of 3 bits breaks."""
    calls: list[list[Side]] = []

    def reconcile(a: Side, others: list[Side], *rest: Any) -> Iterator[Pair]:
        calls.append([a, *others])
        for side in others:
            if side.given()["kv_cache_dtype"] == "turboquant_3bit_nc":
                raise CheckFailed("no memory")
            yield Pair(a.name, side.name, {"first": {"name": "layers.0.mlp"}, "logits": LOGITS}, True)

    monkeypatch.setattr(reconcile_kv, "reconcile", reconcile)
    monkeypatch.setattr(reconcile_kv, "_host", lambda model, python: {"model": "a-model", "gpu": "a card"})
    return calls


def measure(monkeypatch: pytest.MonkeyPatch, folder: Path, *presets: str) -> None:
    (folder / "config.json").write_text("{}")
    options = {"model": folder, "results": folder / "kv.json", "work": folder / "work", "python": folder / "python"}
    arguments = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    monkeypatch.setattr(sys, "argv", ["reconcile_kv.py", *arguments, "--kv", *presets])
    assert reconcile_kv.main() == 0


def test_presets_are_held_against_bfloat16_in_engines_that_differ_by_nothing_else(
    compared: list[list[Side]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    measure(monkeypatch, tmp_path, "fp8", "turboquant_k8v4")
    base, *sides = (side.given() for side in compared[0])
    assert base == {
        "dtype": "bfloat16",
        "gdn_prefill_backend": "triton",
        "gpu_memory_utilization": 0.05,
        "kv_cache_memory_bytes": 2**30,
    }
    stock = {"kv_cache_dtype": "turboquant_k8v4", "fixes": False}
    assert sides == [base | {"kv_cache_dtype": "fp8"}, base | stock, base | {"kv_cache_dtype": "turboquant_k8v4"}]
    found = json.loads((tmp_path / "kv.json").read_text(encoding="utf-8"))
    assert list(found["presets"]) == ["fp8", "turboquant_k8v4&fixes=off", "turboquant_k8v4"]
    kept = {name: value for name, value in LOGITS.items() if name != "kl"} | {"first": "layers.0.mlp"}
    assert found["presets"]["fp8"] == kept
    assert "| `turboquant_k8v4` | with the fix | 21 (+5.0 %) |" in markdown(found)


def test_what_was_measured_before_one_breaks_is_kept_and_not_measured_again(
    compared: list[list[Side]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(CheckFailed):
        measure(monkeypatch, tmp_path, "fp8", "turboquant_3bit_nc")
    measure(monkeypatch, tmp_path, "fp8", "fp8_e5m2")
    assert [side.given()["kv_cache_dtype"] for side in compared[1][1:]] == ["fp8_e5m2"]
    found = json.loads((tmp_path / "kv.json").read_text(encoding="utf-8"))
    assert list(found["presets"]) == ["fp8", "fp8_e5m2"]
    measure(monkeypatch, tmp_path, "fp8", "fp8_e5m2")
    assert len(compared) == 2
