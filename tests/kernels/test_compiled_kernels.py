"""Kernels compiled for the cards that Graft is for: they fit, and spill nothing."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton.backends.nvidia")
sys.path.insert(0, str(Path(__file__).parents[1] / "gpu"))

from compile_targets import SHAPES, compile_for, faults

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("capability", [(8, 6), (8, 9), (12, 0)], ids=lambda at: f"sm_{at[0]}{at[1]}")
def test_kernels_of_a_card_fit_and_spill_nothing(capability: tuple[int, int]) -> None:
    entries = compile_for(capability, SHAPES[1:2])
    assert {"attend", "merge", "store", "dequantize", "rotate"} <= {entry["kernel"] for entry in entries}
    assert not faults(entries)
