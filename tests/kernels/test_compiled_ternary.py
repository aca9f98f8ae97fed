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
MULTIPROCESSORS = {(8, 6): 82, (8, 9): 128, (9, 0): 132, (12, 0): 170}


def compiled(capability: tuple[int, int], m: int, config: Any = None) -> Any:
    """The kernel that multiplies m tokens by a weight [N, K] with one scale a row."""
    weight = layout.pack(torch.zeros(N, K, dtype=torch.int8), torch.ones(N, 1, dtype=torch.float16))
    with compiling(capability) as made:
        kernels.linear(torch.zeros(m, K, dtype=torch.bfloat16), weight, None, config)
    ((_, kernel),) = made
    return kernel


@pytest.mark.parametrize("capability", TARGETS, ids=lambda at: f"sm_{at[0]}{at[1]}")
def test_kernels_of_a_card_fit_and_spill_nothing(capability: tuple[int, int]) -> None:
    card = kernels.Card(SHARED_BYTES_PER_SM[capability] - 1024, MULTIPROCESSORS[capability])
    for m, config in {one for n in (4096, 28672) for one in kernels.to_compile(n, K, K, card)}:
        found = resources(compiled(capability, m, config), capability)
        assert found["spilled_bytes"] == 0, (m, config, found)
        assert found["shared_bytes"] <= card.shared_bytes, (m, config, found)


def test_tokens_that_are_not_there_are_neither_read_nor_compiled_for() -> None:
    few = [compiled((9, 0), m) for m in (2, 3, 7, 8)]
    assert len({kernel.hash for kernel in few}) == 1
    copies = re.findall(r"cp\.async\.c[ag]\.shared\.global \[.*?\], \[.*?\], (0x\w+), %r\d+;", few[0].asm["ptx"])
    assert len(copies) > 8
    assert set(copies) == {"0x10"}
