"""Attention to a packed prefix, tile by tile and block by block, against dense attention, in Triton's interpreter."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from vllm_graft.attention.kernels import prefill, store, store_reference  # noqa: E402
from vllm_graft.attention.kernels.attention_reference import attend  # noqa: E402
from vllm_graft.attention.kernels.layout import PRESETS, slot_layout  # noqa: E402
from vllm_graft.attention.kernels.merge import merge  # noqa: E402
from vllm_graft.attention.kernels.prefill import Shape, Tiling, tiling  # noqa: E402
from vllm_graft.attention.kernels.workspace import WORKSPACE_BYTES  # noqa: E402

FP8, FOUR_BIT, THREE_FOUR, THREE_BIT = PRESETS
HEADS = 4


@pytest.mark.parametrize(
    ("preset", "tokens", "cached", "cut"),
    [
        (FP8, 1, 1, None),
        (FOUR_BIT, 5, 40, None),
        (FP8, 9, 33, Tiling(4, 16)),
        (THREE_BIT, 9, 33, Tiling(4, 16)),
        (THREE_FOUR, 6, 20, Tiling(6, 7)),
        (FP8, 13, 7, Tiling(4, 16)),
        (FOUR_BIT, 13, 7, Tiling(4, 16)),
    ],
    ids=[
        *("one token", "one tile", "three tiles, three blocks", "three tiles, three blocks, 3 bits", "odd tiles"),
        "one tile, a last block of one query",
        "one tile, a last block of one query, rotated",
    ],
)
def test_a_chunk_attends_to_its_prefix_and_to_itself(
    preset: str, tokens: int, cached: int, cut: Tiling | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if cut is not None:
        monkeypatch.setattr(prefill, "tiling", lambda *_: cut)
    layout, kv_heads, total = slot_layout(preset, 64), 2, tokens + cached
    generator = torch.Generator().manual_seed(cached)
    key, value, query = (
        torch.randn(total, heads, 64, generator=generator).half() for heads in (kv_heads, kv_heads, HEADS)
    )
    count = max(layout.num_centroids, 2)
    centroids = torch.special.ndtri((torch.arange(count) + 0.5) / count) / 8
    cache = torch.zeros(5, kv_heads, 16, layout.slot_bytes, dtype=torch.uint8).transpose(1, 2)
    table = torch.tensor([3, 0, 4, 1, 2], dtype=torch.int32)
    slots = table.repeat_interleave(16)[:total] * 16 + torch.arange(total) % 16
    bounds = (centroids[1:] + centroids[:-1]) / 2
    store.store(key, value, cache, slots, bounds, layout, hardware_fp8=False)
    out = torch.full((tokens, HEADS, 64), float("nan"), dtype=torch.float16)
    prefill.attend_to_prefix(
        query[cached:], key[cached:], value[cached:], cache, table, cached, centroids, layout,
        scale=0.125, attention=attend, workspace=torch.empty(WORKSPACE_BYTES, dtype=torch.uint8), slots=4, out=out,
    )  # fmt: skip
    keys, values = store_reference.contents(cache.flatten(0, 1)[slots[:cached].long()], centroids, layout)
    if not layout.key_is_fp8:
        keys = keys @ store_reference.hadamard(64)
    keys, values = torch.cat([keys, key[cached:].float()]), torch.cat([values, value[cached:].float()])
    wanted = torch.empty(tokens, HEADS, 64)
    attend(query[cached:], keys, values, causal=True, scale=0.125, out=wanted)
    torch.testing.assert_close(out.float(), wanted, rtol=2e-3, atol=2e-3)


def test_a_merge_is_the_attention_over_both_parts_also_in_place_and_with_empty_parts() -> None:
    generator = torch.Generator().manual_seed(9)
    a, b = (torch.randn(7, 3, 64, generator=generator) for _ in "ab")
    a_lse, b_lse = (torch.randn(3, 7, generator=generator) * 30 for _ in "ab")
    a_lse[0, 0] = b_lse[1, 1] = float("-inf")
    a_lse[2, 2] = b_lse[2, 2] = float("-inf")
    weights = torch.softmax(torch.stack([a_lse, b_lse]), 0).nan_to_num(0).transpose(1, 2).unsqueeze(-1)
    wanted, wanted_lse = weights[0] * a + weights[1] * b, torch.logaddexp(a_lse, b_lse)
    merge(a, a_lse, b.half(), b_lse, a, a_lse)
    torch.testing.assert_close(a, wanted, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(a_lse, wanted_lse)


@given(st.integers(2, 400), st.integers(64, 130))
def test_a_chunk_is_cut_into_blocks_of_at_least_two_queries(tokens: int, size: int) -> None:
    pieces = list(prefill._pieces(tokens, size, least=2))
    assert [start for start, _ in pieces] == [0, *(stop for _, stop in pieces[:-1])]
    assert pieces[-1][1] == tokens
    assert all(2 <= stop - start <= size for start, stop in pieces)


@given(
    st.sampled_from([8, 12, 16, 24, 40, 64]),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([64, 128, 256]),
    st.integers(1, 20_000),
    st.integers(1, 300_000),
    st.sampled_from([82, 128, 170, 264]),
)
def test_every_tiling_fits_the_workspace(
    heads: int, kv_heads: int, head_size: int, queries: int, cached: int, slots: int
) -> None:
    shape = Shape(heads, kv_heads, head_size, query_is_copied=True)
    assert prefill.supports(shape) is None
    cut = tiling(shape, queries, cached, slots)
    assert 1 <= cut.queries <= max(queries, 64)
    assert cut.tokens >= 1
    query_bytes = shape.query_bytes(one_tile=cut.tokens >= cached)
    padding = 5 * 256  # each tensor begins at a multiple of 256 bytes
    assert cut.queries * query_bytes + cut.tokens * shape.token_bytes + padding <= WORKSPACE_BYTES


@pytest.mark.parametrize(("cached", "is_one_tile"), [(8192, True), (11_000, True), (14_000, False), (65_536, False)])
def test_a_short_prefix_is_one_tile_beside_whole_waves_of_queries(cached: int, is_one_tile: bool) -> None:
    shape = Shape(24, 4, 256, query_is_copied=True)
    cut = tiling(shape, 8192, cached, 264)
    assert (cut.tokens >= cached) is is_one_tile
    assert shape.heads * cut.queries // 64 % 264 == 0


def test_long_chunks_are_cut_into_whole_waves() -> None:
    shape = Shape(24, 4, 256, query_is_copied=True)
    for slots in (82, 128, 170, 264):
        rows = tiling(shape, 8192, 262_144, slots).queries
        assert shape.heads * rows / 64 % slots >= 0.9 * slots or shape.heads * rows // 64 % slots == 0


def test_a_shape_that_the_workspace_cannot_hold_says_so() -> None:
    assert "64 tokens" in str(prefill.supports(Shape(1024, 512, 256, query_is_copied=True)))
