"""Kernels compiled for the cards that Graft is for: they fit, spill nothing, and serving needs few of them."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton.backends.nvidia")
sys.path.insert(0, str(Path(__file__).parents[1] / "gpu"))

import torch
from compile_targets import SHAPES, compile_for, compiling, faults, how_to_decode
from vllm_graft.attention.kernels import decode
from vllm_graft.attention.kernels.layout import slot_layout


@pytest.mark.parametrize("capability", [(8, 6), (8, 9), (12, 0)], ids=lambda at: f"sm_{at[0]}{at[1]}")
def test_kernels_of_a_card_fit_and_spill_nothing(capability: tuple[int, int]) -> None:
    entries = compile_for(capability, SHAPES[1:2])
    assert {"attend", "merge", "store", "dequantize", "rotate"} <= {entry["kernel"] for entry in entries}
    assert not faults(entries)


def test_batches_of_all_sizes_share_one_variant_for_each_number_of_query_tokens() -> None:
    layout = slot_layout("turboquant_k8v4", 64)
    cache = torch.zeros(2, 16, 1, layout.slot_bytes, dtype=torch.uint8)
    capability = (8, 6)
    with compiling(capability) as made:
        for requests in (1, 2, 3, 16, 17, 64, 200):
            for queries in (1, 4):
                shape = SHAPES[1].__class__(64, 2, queries, 16)
                tokens = torch.zeros(requests * queries + 1, 2, 64, dtype=torch.bfloat16)[1:]
                floats = decode.workspace_floats(
                    programs=5,
                    num_requests=requests,
                    num_heads=2,
                    num_kv_heads=1,
                    max_query_len=queries,
                    head_size=64,
                )
                decode.verify_attention(
                    tokens,
                    cache,
                    torch.zeros(requests + 1, 7, dtype=torch.int32)[1:],
                    torch.ones(requests + 1, dtype=torch.int32)[1:],
                    torch.arange(0, (requests + 2) * queries, queries, dtype=torch.int32)[1:],
                    max_query_len=queries,
                    layout=layout,
                    scale=0.125,
                    codebook=None,
                    workspace=decode.Workspace(torch.zeros(floats), 5),
                    out=torch.empty_like(tokens),
                    launch=how_to_decode(layout, shape, capability),
                )
    variants = {(name, compiled.hash) for name, compiled in made}
    assert sorted(name for name, _ in variants) == ["attend", "attend", "merge", "merge"]
