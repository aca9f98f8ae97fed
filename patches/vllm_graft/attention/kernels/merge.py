"""Merges the attention over two sets of keys by their log-sum-exp, in FP32."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_TOKENS = 4  # 4 x 256 elements on four warps: 16-byte accesses of bfloat16


_LSE = ("left_lse", "right_lse", "out_lse")
"""Slices of a longer chunk's, which begin anywhere: nothing is compiled for how they are aligned."""


@triton.jit(do_not_specialize=["num_tokens", *_LSE, *(f"stride_{name}" for name in _LSE)])
def _merge(
    left,
    left_lse,
    right,
    right_lse,
    out,
    out_lse,
    num_tokens,
    stride_left,
    stride_right,
    stride_out,
    stride_left_lse,
    stride_right_lse,
    stride_out_lse,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TOKENS: tl.constexpr,
):
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    head = tl.program_id(1)
    present = token < num_tokens
    a = tl.load(left_lse + head * stride_left_lse + token, mask=present, other=0.0)
    b = tl.load(right_lse + head * stride_right_lse + token, mask=present, other=0.0)
    top = tl.maximum(a, b)
    top = tl.where(top == float("-inf"), 0.0, top)  # neither side has a key: both weights are 0, not NaN
    a, b = tl.exp(a - top), tl.exp(b - top)
    total = a + b
    lse = tl.where(total > 0.0, top + tl.log(tl.maximum(total, 1e-30)), float("-inf"))
    share = 1.0 / tl.maximum(total, 1e-30)
    column = tl.arange(0, BLOCK_D)[None, :]
    inside = present[:, None] & (column < D)
    row = token.to(tl.int64)[:, None]
    x = tl.load(left + row * stride_left + head * D + column, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(right + row * stride_right + head * D + column, mask=inside, other=0.0).to(tl.float32)
    merged = x * (a * share)[:, None] + y * (b * share)[:, None]
    tl.debug_barrier()  # outputs may be inputs, of which several warps hold a copy: all have read before one writes
    tl.store(out_lse + head * stride_out_lse + token, lse, mask=present)
    tl.store(out + row * stride_out + head * D + column, merged.to(out.dtype.element_ty), mask=inside)


def merge(
    left: torch.Tensor,
    left_lse: torch.Tensor,
    right: torch.Tensor,
    right_lse: torch.Tensor,
    out: torch.Tensor,
    out_lse: torch.Tensor,
) -> None:
    """Write the attention over both sets of keys to `out`; out may be left, and out_lse may be left_lse.

    Outputs are [T, heads, D] with contiguous heads, of any float dtype each; log-sum-exps FP32 [heads, T].
    """
    tokens, heads, head_size = left.shape
    _merge[(triton.cdiv(tokens, _TOKENS), heads)](
        left,
        left_lse,
        right,
        right_lse,
        out,
        out_lse,
        tokens,
        left.stride(0),
        right.stride(0),
        out.stride(0),
        left_lse.stride(0),
        right_lse.stride(0),
        out_lse.stride(0),
        D=head_size,
        BLOCK_D=triton.next_power_of_2(head_size),
        TOKENS=_TOKENS,
    )
