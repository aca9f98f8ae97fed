"""Unpacks a stretch of one sequence's cache into keys and values that flash attention can read.

MSE keys stay rotated: whoever reads them rotates the query instead (`rotation.rotate`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_graft.attention.kernels.float8 import from_e4m3
from vllm_graft.attention.kernels.layout import SlotLayout

TOKENS, WARPS = 16, 4  # a program has 16 x 256 elements, 32 a thread: no spills on any card


@triton.jit
def _codes(cache, at, inside, D: tl.constexpr, BLOCK_D: tl.constexpr, TOKENS: tl.constexpr, BITS: tl.constexpr):
    """Codes int32 [TOKENS, BLOCK_D] of 3 or 4 bits, packed from byte `at` [TOKENS] on."""
    if BITS == 4:
        column = tl.arange(0, BLOCK_D // 2)[None, :]
        byte = tl.load(cache + at[:, None] + column, mask=inside & (column < D // 2), other=0).to(tl.int32)
        codes = tl.reshape(tl.join(byte & 15, byte >> 4), [TOKENS, BLOCK_D])
    else:
        bit = tl.arange(0, BLOCK_D)[None, :] * 3
        mask = inside & (bit < D * 3)
        low = tl.load(cache + at[:, None] + bit // 8, mask=mask, other=0).to(tl.int32)
        # the last code ends with its byte: nothing is read behind the codes
        high = tl.load(cache + at[:, None] + bit // 8 + 1, mask=mask & (bit % 8 > 5), other=0).to(tl.int32)
        codes = ((low | (high << 8)) >> (bit % 8)) & 7
    return codes


@triton.jit
def _load_half(cache, at, inside):
    """FP32 numbers from FP16 at even byte offsets."""
    return tl.load((cache + at).to(tl.pointer_type(tl.float16)), mask=inside, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["block_table", "first", "num_tokens"])
def _dequantize(
    cache,
    block_table,
    centroids,
    keys,
    values,
    first,
    num_tokens,
    stride_block,
    stride_position,
    stride_head,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEY_BITS: tl.constexpr,
    NORM_AT: tl.constexpr,
    NORM_CORRECTION: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    VALUE_AT: tl.constexpr,
    SCALE_AT: tl.constexpr,
    TOKENS: tl.constexpr,
):
    row = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    head = tl.program_id(1).to(tl.int64)
    present = row < num_tokens
    position = first + row
    block = tl.load(block_table + position // BLOCK_SIZE, mask=present, other=0).to(tl.int64)
    at = block * stride_block + (position % BLOCK_SIZE).to(tl.int64) * stride_position + head * stride_head
    column = tl.arange(0, BLOCK_D)[None, :]
    inside = present[:, None] & (column < D)
    out = (row.to(tl.int64) * HEADS + head)[:, None] * D + column

    if KEY_BITS == 8:
        key = from_e4m3(tl.load(cache + at[:, None] + column, mask=inside, other=0))
    else:
        codes = _codes(cache, at, present[:, None], D, BLOCK_D, TOKENS, KEY_BITS)
        key = tl.load(centroids + codes, mask=inside, other=0.0)
        length = _load_half(cache, at + NORM_AT, present)
        if NORM_CORRECTION:
            length = length / tl.sqrt(tl.sum(key * key, axis=1) + 1e-16)
        key = key * length[:, None]
    tl.store(keys + out, key.to(keys.dtype.element_ty), mask=inside)

    codes = _codes(cache, at + VALUE_AT, present[:, None], D, BLOCK_D, TOKENS, VALUE_BITS)
    scale = _load_half(cache, at + SCALE_AT, present)
    zero = _load_half(cache, at + SCALE_AT + 2, present)
    value = codes.to(tl.float32) * scale[:, None] + zero[:, None]
    tl.store(values + out, value.to(values.dtype.element_ty), mask=inside)


def dequantize(
    cache: torch.Tensor,
    block_table: torch.Tensor,
    centroids: torch.Tensor,
    first: int,
    keys: torch.Tensor,
    values: torch.Tensor,
    layout: SlotLayout,
) -> None:
    """Write the tokens from `first` on into the contiguous `keys` and `values` [T, KV heads, D], as many as they hold.

    `cache` is uint8 [blocks, block size, KV heads, slot], `block_table` int32 [blocks of the sequence], `centroids`
    FP32 [2^bits], unused with FP8 keys.  Computed in FP32 and rounded once to the dtype of the outputs.
    """
    tokens, heads, head_size = keys.shape
    _dequantize[(triton.cdiv(tokens, TOKENS), heads)](
        cache,
        block_table,
        centroids,
        keys,
        values,
        first,
        tokens,
        cache.stride(0),
        cache.stride(1),
        cache.stride(2),
        HEADS=heads,
        D=head_size,
        BLOCK_D=triton.next_power_of_2(head_size),
        BLOCK_SIZE=cache.shape[1],
        KEY_BITS=layout.preset.key_bits,
        NORM_AT=layout.norm_offset,
        NORM_CORRECTION=layout.preset.norm_correction,
        VALUE_BITS=layout.preset.value_bits,
        VALUE_AT=layout.value_offset,
        SCALE_AT=layout.scale_offset,
        TOKENS=TOKENS,
        num_warps=WARPS,
    )
