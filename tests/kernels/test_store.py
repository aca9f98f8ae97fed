"""The kernels that store, dequantize and rotate, against their references, in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from vllm_graft.attention.kernels import rotation, store, store_reference  # noqa: E402
from vllm_graft.attention.kernels.dequantize import dequantize  # noqa: E402
from vllm_graft.attention.kernels.layout import PRESETS, SlotLayout, slot_layout  # noqa: E402

FP8, FOUR_BIT, THREE_FOUR, THREE_BIT = PRESETS
SHAPES = [(FP8, 96), (FP8, 256), (FOUR_BIT, 64), (FOUR_BIT, 256), (THREE_FOUR, 128), (THREE_BIT, 64), (THREE_BIT, 256)]


def tables(layout: SlotLayout) -> tuple[Any, Any]:
    """Centroids of N(0, 1/D) and the bounds between them."""
    count = max(layout.num_centroids, 2)
    centroids = torch.special.ndtri((torch.arange(count) + 0.5) / count) * layout.head_size**-0.5
    return centroids, (centroids[1:] + centroids[:-1]) / 2


def empty_cache(layout: SlotLayout, blocks: int, heads: int, page: int) -> Any:
    """A cache of bytes 0xEE, in vLLM's order: heads before the tokens of a block."""
    cache = torch.full((blocks, heads, page, layout.slot_bytes), 0xEE, dtype=torch.uint8)
    return cache.transpose(1, 2)


def random(shape: tuple[int, ...], dtype: Any = torch.bfloat16, seed: int = 5) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_integers_make_the_e4m3_byte_of_every_16_bit_number(dtype: Any) -> None:
    layout = slot_layout(FP8, 256)
    numbers = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype).view(256, 1, 256)
    cache, slots = empty_cache(layout, 16, 1, 16), torch.arange(256)
    store.store(numbers, torch.zeros_like(numbers), cache, slots, slots, layout, hardware_fp8=False)
    assert torch.equal(cache.flatten(0, 1)[..., :256], store_reference.e4m3_bytes(numbers))


@pytest.mark.parametrize(("preset", "head_size"), SHAPES)
def test_slots_are_the_references_byte_by_byte_and_come_back(preset: str, head_size: int) -> None:
    layout, heads, tokens, page = slot_layout(preset, head_size), 3, 5, 16
    centroids, bounds = tables(layout)
    key, value = random((tokens, heads, head_size), seed=1), random((tokens, heads, head_size), torch.float16, seed=2)
    cache = empty_cache(layout, 3, heads, page)
    slots = torch.randperm(2 * page, generator=torch.Generator().manual_seed(3))[:tokens] + page
    store.store(key, value, cache, slots, bounds, layout, hardware_fp8=False)
    used = layout.zero_offset + 2
    wanted = store_reference.slots(key, value, bounds, layout)[..., :used]
    assert torch.equal(cache.flatten(0, 1)[slots][..., :used], wanted)
    untouched = cache.flatten(0, 1).clone()
    untouched[slots] = 0xEE
    assert (untouched == 0xEE).all()

    first, table = 3, torch.tensor([2, 1], dtype=torch.int32)
    keys, values = torch.empty(2, 5 + page, heads, head_size)
    dequantize(cache, table, centroids, first, keys, values, layout)
    kept = torch.cat([cache[2], cache[1]])[first : first + 5 + page]
    for found, exact in zip((keys, values), store_reference.contents(kept, centroids, layout), strict=True):
        torch.testing.assert_close(found, exact, equal_nan=True, rtol=1e-6, atol=1e-6)


def test_a_token_without_a_slot_is_not_stored_and_rows_may_lie_apart() -> None:
    layout = slot_layout(FOUR_BIT, 64)
    _, bounds = tables(layout)
    wide = random((4, 2, 3 * 64))  # as the query, key and value of one projection
    key, value = wide[..., :64], wide[..., 128:]
    cache, slots = empty_cache(layout, 1, 2, 16), torch.tensor([4, -1, 0, 9])
    store.store(key, value, cache, slots, bounds, layout, hardware_fp8=False)
    stored = [4, 0, 9]
    assert torch.equal(cache[0, stored], store_reference.slots(key, value, bounds, layout)[[0, 2, 3]])
    assert (cache[0, [place for place in range(16) if place not in stored]] == 0xEE).all()


def test_keys_of_any_size_that_attention_has_are_kept_on_every_card() -> None:
    layout = slot_layout(FP8, 64)
    key = random((16, 1, 64), torch.float32) * 2
    cache, slots = empty_cache(layout, 1, 1, 16), torch.arange(16)
    store.store(key, key, cache, slots, slots, layout, hardware_fp8=False)
    kept, _ = store_reference.contents(cache[0], slots, layout)
    assert ((kept - key).norm() / key.norm()).item() < 0.04
    clipped = key.clamp(-1.75, 1.75)  # what vLLM itself keeps below compute capability 8.9
    assert ((clipped - key).norm() / key.norm()).item() > 0.3


@pytest.mark.parametrize("preset", PRESETS)
def test_slots_are_those_of_vllms_own_store(preset: str) -> None:
    vllm_store = pytest.importorskip(
        "vllm.v1.attention.ops.triton_turboquant_store", reason="needs an environment with vLLM"
    )
    layout, heads, tokens = slot_layout(preset, 64), 2, 5
    _, bounds = tables(layout)
    key, value = random((tokens, heads, 64), seed=1), random((tokens, heads, 64), seed=2)
    ours, theirs = empty_cache(layout, 2, heads, 16), empty_cache(layout, 2, heads, 16)
    slots = torch.tensor([3, 17, 30, 0, 8])
    store.store(key, value, ours, slots, bounds, layout, hardware_fp8=False)
    vllm_store.triton_turboquant_store(
        key,
        value,
        theirs,
        slots,
        store_reference.hadamard(64),
        bounds,
        mse_bits=0 if layout.key_is_fp8 else layout.preset.key_bits,
        key_packed_size=layout.value_offset,
        value_quant_bits=layout.preset.value_bits,
        key_fp8=layout.key_is_fp8,
    )
    # the interpreter rounds FP8 keys in its own way; on a card they are compared by tests/gpu/store_prefill_check.py
    compared = slice(layout.value_offset if layout.key_is_fp8 else 0, None)
    assert torch.equal(ours[..., compared], theirs[..., compared])


@pytest.mark.parametrize("head_size", rotation.HEAD_SIZES)
def test_rotation_is_the_hadamard_matrix(head_size: int) -> None:
    query, out = random((3, 5, head_size)), torch.empty(3, 5, head_size)
    rotation.rotate(query, out)
    wanted = query.float() @ store_reference.hadamard(head_size) * head_size**0.5 * rotation.step(head_size)
    torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-5)


def test_what_cannot_be_stored_says_why() -> None:
    assert store.supports(slot_layout(FP8, 96)) is None
    assert "multiple of 8" in str(store.supports(slot_layout(FP8, 100)))
    assert "no rotation" in str(store.supports(slot_layout(FOUR_BIT, 96)))
