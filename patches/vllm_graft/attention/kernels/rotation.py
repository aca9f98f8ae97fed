"""The rotation of TurboQuant's keys: the Hadamard matrix in Sylvester's order, without its factor 1 / sqrt(D).

H[i, j] = (-1)^popcount(i & j) factors by the bits of the index, H_D = H_(D/16) (x) H_16: a vector, read as a matrix
with D/16 rows, is multiplied by a small matrix from each side.  That takes 32 multiplications an element instead of D.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

HEAD_SIZES = (64, 128, 256)
_ROWS = 4  # what a program rotates at least: 16 / (D / 16) rows at D = 64


@triton.jit
def _signs(bits):
    """(-1)^popcount of integers of four bits, FP32."""
    odd = (bits ^ (bits >> 1) ^ (bits >> 2) ^ (bits >> 3)) & 1
    return 1.0 - 2.0 * odd.to(tl.float32)


@triton.jit
def hadamard(x, ROWS: tl.constexpr, D: tl.constexpr):
    """x @ H for FP32 rows x [ROWS, D], D in 64, 128, 256; ROWS a power of two and at least 256 / D."""
    GROUPS: tl.constexpr = D // 16
    row = tl.arange(0, 16)[:, None]
    column = tl.arange(0, 16)[None, :]
    within = _signs(row & column)
    # the outer factor H_(D/16), repeated along the diagonal so that the product has the least size of a dot
    across = tl.where(row // GROUPS == column // GROUPS, _signs(row & column & (GROUPS - 1)), 0.0)
    x = tl.dot(tl.reshape(x, [ROWS * GROUPS, 16]), within, input_precision="ieee")
    x = tl.permute(tl.reshape(x, [ROWS * GROUPS // 16, 16, 16]), [0, 2, 1])
    x = tl.dot(tl.reshape(x, [ROWS * GROUPS, 16]), across, input_precision="ieee")
    x = tl.permute(tl.reshape(x, [ROWS * GROUPS // 16, 16, 16]), [0, 2, 1])
    return tl.reshape(x, [ROWS, D])


@triton.jit(do_not_specialize=["num_tokens"])
def _rotate(
    query, out, num_tokens, stride_qt, stride_qh, factor, HEADS: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token, head = (row // HEADS).to(tl.int64), row % HEADS
    inside = (token < num_tokens)[:, None]
    column = tl.arange(0, D)[None, :]
    x = tl.load(query + (token * stride_qt + head * stride_qh)[:, None] + column, mask=inside, other=0.0)
    y = hadamard(x.to(tl.float32), ROWS, D) * factor
    tl.store(out + row.to(tl.int64)[:, None] * D + column, y.to(out.dtype.element_ty), mask=inside)


def step(head_size: int) -> float:
    """The power of two next to 1 / sqrt(D), with which a rotated vector keeps the magnitude of its elements."""
    return 2.0 ** -math.ceil(math.log2(head_size) / 2)


def rotate(query: torch.Tensor, out: torch.Tensor) -> None:
    """Write query [T, heads, D] @ H * step(D) to the contiguous `out`, computed in FP32 and rounded once."""
    tokens, heads, head_size = query.shape
    grid = (triton.cdiv(tokens * heads, _ROWS),)
    _rotate[grid](
        query, out, tokens, query.stride(0), query.stride(1), step(head_size), HEADS=heads, D=head_size, ROWS=_ROWS
    )
