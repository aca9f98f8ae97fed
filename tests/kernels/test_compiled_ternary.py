"""The ternary kernels compiled for the cards that Graft is for: they fit, spill nothing, and copy asynchronously."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton.backends.nvidia")
sys.path.insert(0, str(Path(__file__).parents[1] / "gpu"))

import torch
from compile_targets import SHARED_BYTES_PER_SM, TARGETS, compiling, resources
from vllm_graft.quantization.ternary import kernels, layout

N, K = 256, 1024


def compiled(capability: tuple[int, int], m: int, n: int) -> Any:
    """The kernel that a product of m tokens is given where a weight [n, K] has one scale a row."""
    weight = layout.pack(torch.zeros(N, K, dtype=torch.int8), torch.ones(N, 1, dtype=torch.float16))
    config = kernels.choose(m, n, K, K, SHARED_BYTES_PER_SM[capability] - 1024)
    with compiling(capability) as made:
        kernels.linear(torch.zeros(m, K, dtype=torch.bfloat16), weight, None, config)
    ((_, kernel),) = made
    return kernel


@pytest.mark.parametrize("capability", TARGETS, ids=lambda at: f"sm_{at[0]}{at[1]}")
def test_kernels_of_a_card_fit_and_spill_nothing(capability: tuple[int, int]) -> None:
    for n in (N, kernels.MANY_STRIPS * layout.ROWS):
        for m in (1, 2, 16, 32, 64, 128, 1024):
            found = resources(compiled(capability, m, n), capability)
            assert found["spilled_bytes"] == 0, (m, n, found)
            assert found["shared_bytes"] < SHARED_BYTES_PER_SM[capability], (m, n, found)


def test_tokens_that_are_not_there_are_neither_read_nor_compiled_for() -> None:
    few = [compiled((9, 0), m, N) for m in (2, 3, 7, 8)]
    assert len({kernel.hash for kernel in few}) == 1
    copies = re.findall(r"cp\.async\.c[ag]\.shared\.global \[.*?\], \[.*?\], (0x\w+), %r\d+;", few[0].asm["ptx"])
    assert len(copies) > 8
    assert set(copies) == {"0x10"}
