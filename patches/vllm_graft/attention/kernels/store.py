"""Quantizes new keys and values and stores them in packed slots: one launch for every preset, rotation included.

Slot bytes are those of vLLM's TurboQuant (`triton_turboquant_store.py`), except that e4m3 keys are e4m3 on every card.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_graft.attention.kernels.float8 import to_e4m3
from vllm_graft.attention.kernels.layout import SlotLayout
from vllm_graft.attention.kernels.rotation import HEAD_SIZES, hadamard

_ROWS = 4  # one decoded token of four KV heads is one program; more rows a program gain nothing for prompts


@triton.jit
def _pack(codes, cache, at, inside, D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, BITS: tl.constexpr):
    """Store codes int32 [ROWS, BLOCK_D] of 3 or 4 bits: two a byte, or eight in three bytes, lowest bits first."""
    if BITS == 4:
        low, high = tl.split(tl.reshape(codes, [ROWS, BLOCK_D // 2, 2]))
        column = tl.arange(0, BLOCK_D // 2)[None, :]
        tl.store(cache + at[:, None] + column, (low | (high << 4)).to(tl.uint8), mask=inside & (column < D // 2))
    else:
        shifts = (tl.arange(0, 8) * 3)[None, None, :]
        groups = tl.sum(tl.reshape(codes, [ROWS, BLOCK_D // 8, 8]) << shifts, axis=2)
        column = tl.arange(0, BLOCK_D // 8)[None, :]
        mask = inside & (column < D // 8)
        for byte in tl.static_range(3):
            tl.store(cache + at[:, None] + column * 3 + byte, ((groups >> (8 * byte)) & 0xFF).to(tl.uint8), mask=mask)


@triton.jit
def _store_half(number, cache, at, inside):
    """Store FP32 numbers [ROWS] as FP16 at even byte offsets."""
    tl.store((cache + at).to(tl.pointer_type(tl.float16)), number.to(tl.float16), mask=inside)


@triton.jit(do_not_specialize=["slot_mapping", "num_tokens"])
def _store(
    key,
    value,
    cache,
    slot_mapping,
    midpoints,
    num_tokens,
    stride_kt,
    stride_kh,
    stride_vt,
    stride_vh,
    stride_block,
    stride_position,
    stride_head,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEY_BITS: tl.constexpr,
    NORM_AT: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    VALUE_AT: tl.constexpr,
    SCALE_AT: tl.constexpr,
    HARDWARE_FP8: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token, head = (row // HEADS).to(tl.int64), row % HEADS
    slot = tl.load(slot_mapping + token, mask=token < num_tokens, other=-1).to(tl.int64)
    stored = slot >= 0
    at = slot // BLOCK_SIZE * stride_block + slot % BLOCK_SIZE * stride_position + head.to(tl.int64) * stride_head
    column = tl.arange(0, BLOCK_D)[None, :]
    inside = stored[:, None] & (column < D)

    x = tl.load(key + (token * stride_kt + head * stride_kh)[:, None] + column, mask=inside, other=0.0).to(tl.float32)
    if KEY_BITS == 8:
        tl.store(cache + at[:, None] + column, to_e4m3(x, HARDWARE_FP8), mask=inside)
    else:
        norm = tl.sqrt_rn(tl.sum(x * x, axis=1))
        y = hadamard(x, ROWS, D) * ((D**-0.5) / (norm + 1e-8))[:, None]
        codes = tl.zeros([ROWS, BLOCK_D], dtype=tl.int32)
        for i in tl.static_range(2**KEY_BITS - 1):
            codes += (y >= tl.load(midpoints + i)).to(tl.int32)
        _pack(codes, cache, at, stored[:, None], D, BLOCK_D, ROWS, KEY_BITS)
        _store_half(norm, cache, at + NORM_AT, stored)

    v = tl.load(value + (token * stride_vt + head * stride_vh)[:, None] + column, mask=inside, other=0.0)
    v = v.to(tl.float32)
    LEVELS: tl.constexpr = 2**VALUE_BITS - 1
    zero = tl.min(tl.where(column < D, v, float("inf")), axis=1)
    span = tl.max(tl.where(column < D, v, float("-inf")), axis=1) - zero
    scale = tl.div_rn(span, LEVELS * 1.0)
    scale = tl.where(scale > 1e-8, scale, 1e-8)
    # exact quotients: values of few bits often lie halfway between two codes, where an approximation picks the other
    codes = (tl.div_rn(v - zero[:, None], tl.broadcast_to(scale[:, None], [ROWS, BLOCK_D])) + 0.5).to(tl.int32)
    codes = tl.minimum(tl.maximum(codes, 0), LEVELS)
    _pack(codes, cache, at + VALUE_AT, stored[:, None], D, BLOCK_D, ROWS, VALUE_BITS)
    _store_half(scale, cache, at + SCALE_AT, stored)
    _store_half(zero, cache, at + SCALE_AT + 2, stored)


def supports(layout: SlotLayout) -> str | None:
    """Why this layout cannot be stored, or None."""
    if layout.key_is_fp8:
        return None if layout.head_size % 8 == 0 else f"head size {layout.head_size} is not a multiple of 8"
    if layout.head_size not in HEAD_SIZES:
        return f"head size {layout.head_size} has no rotation; one of {', '.join(map(str, HEAD_SIZES))}"
    return None


def store(
    key: torch.Tensor,
    value: torch.Tensor,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    midpoints: torch.Tensor,
    layout: SlotLayout,
    *,
    hardware_fp8: bool,
) -> None:
    """Store key and value [T, KV heads, D] in `cache` uint8 [blocks, block size, KV heads, slot] where slots say.

    `slot_mapping` is an integer [T], negative for tokens to skip.  `midpoints` FP32 [centroids - 1] are the bounds
    between an MSE key's centroids, unused with FP8 keys.  `hardware_fp8` says that the card converts to e4m3 itself;
    False gives the same bytes by integer operations, on any card.  Rows of key and value may lie apart, elements not.
    """
    tokens, heads, head_size = key.shape
    _store[(triton.cdiv(tokens * heads, _ROWS),)](
        key,
        value,
        cache,
        slot_mapping,
        midpoints,
        tokens,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        cache.stride(0),
        cache.stride(1),
        cache.stride(2),
        HEADS=heads,
        D=head_size,
        BLOCK_D=triton.next_power_of_2(head_size),
        BLOCK_SIZE=cache.shape[1],
        KEY_BITS=layout.preset.key_bits,
        NORM_AT=layout.norm_offset,
        VALUE_BITS=layout.preset.value_bits,
        VALUE_AT=layout.value_offset,
        SCALE_AT=layout.scale_offset,
        HARDWARE_FP8=hardware_fp8,
        ROWS=_ROWS,
    )
