"""Decode and verify attention over TurboQuant's packed KV: one kernel reads each packed byte once, a second one merges.

A unit of work is one request and one KV head: all query heads of the head and all rows of a verify step are the rows
of one tensor-core tile, 32 at most.  The tiles of tokens of all units form one list, which a fixed number of programs
share evenly: the grid depends on the device alone, the lengths are read on the device, so a CUDA graph captured at
one set of lengths serves any other, and an empty request costs nothing.

Dequantization is folded into the two products:
- an e4m3 byte becomes fp16 by a shift (`layout.E4M3_IN_FP16`), which every architecture can do;
- an MSE key's codes become fp16 centroids by byte permutations, and its norm and their length scale the score later;
- a value's codes enter the product as integers about zero, with scale folded into the weights and zero into a sum.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from vllm_graft.attention.kernels.codebook import Codebook
from vllm_graft.attention.kernels.launch import Launch, resident_programs
from vllm_graft.attention.kernels.layout import E4M3_IN_FP16, SlotLayout
from vllm_graft.attention.kernels.operands import (
    anew,
    centroids3,
    centroids4,
    codes3,
    codes4,
    load_half,
    load_keys,
    load_page,
    load_words,
    pair_columns,
    pair_rows,
    power_of_two,
    prefetch,
    rotate_rows,
    tile_slots,
    to_fp16_rows,
)

_WEIGHT_RANGE = tl.constexpr(2.0**14)
"""Weights times value scales stay below this in fp16, relative to the largest scale: small ones stay normal numbers."""


# ---- how the work is shared ----


@triton.jit
def _tiles_before(seq_lens, query_start, num_requests, BLOCK_R: tl.constexpr, N: tl.constexpr):
    """Tiles of tokens of the requests up to and with each, [BLOCK_R]: none for a request without a query token."""
    r = tl.arange(0, BLOCK_R)
    there = r < num_requests
    length = tl.load(seq_lens + r, mask=there, other=0)
    queries = tl.load(query_start + r + 1, mask=there, other=0) - tl.load(query_start + r, mask=there, other=0)
    return tl.cumsum(tl.where(queries > 0, (length + N - 1) // N, 0), 0)


@triton.jit
def _tiles_per_program(total, programs, min_tiles):
    return tl.maximum((total + programs - 1) // programs, min_tiles)


# ---- the kernels ----

_PER_BATCH = ("block_table", "seq_lens", "query_start", "num_requests", "programs", "min_tiles", "stride_table")
"""Arguments whose values must not make another variant: nothing is compiled while serving."""


@triton.jit(do_not_specialize=[*_PER_BATCH, "scale_log2"])
def _attend(
    query,  # [T, Hq, D] fp16 or bf16
    cache,  # packed slots in units of 16 bits
    block_table,  # [R, W] int32
    seq_lens,  # [R] int32
    query_start,  # [R + 1] int32
    partial,  # [programs + R * HK * BLOCKS, BLOCK_ROWS, D] fp32, dimensions by plane
    stats,  # [programs + R * HK * BLOCKS, 2, BLOCK_ROWS] fp32: maximum in base 2, sum
    num_requests,
    programs,
    min_tiles,
    scale_log2,
    stride_query_token,
    stride_query_head,
    stride_table,
    STRIDE_PAGE: tl.constexpr,
    STRIDE_TOKEN: tl.constexpr,
    STRIDE_HEAD: tl.constexpr,
    HK: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    M: tl.constexpr,
    D: tl.constexpr,
    N: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    KEY_BITS: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    NORM: tl.constexpr,
    VALUE: tl.constexpr,
    SCALE: tl.constexpr,
    CODEBOOK: tl.constexpr,
    LOOKUP: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    RELOAD: tl.constexpr,
    HARDWARE_FP8: tl.constexpr,
    FETCH: tl.constexpr,
    FP8_UNIT: tl.constexpr,
):
    """Attend to this program's share of all tiles, and leave one partial result for each unit that it touches."""
    pid = tl.program_id(0)
    BLOCK_D: tl.constexpr = triton.next_power_of_2(D)
    QUARTER: tl.constexpr = BLOCK_D // 4
    m = tl.arange(0, M)
    n = tl.arange(0, N)
    ends = _tiles_before(seq_lens, query_start, num_requests, BLOCK_R, N) * (HK * BLOCKS)
    total = tl.max(ends, 0)
    share = _tiles_per_program(total, programs, min_tiles)
    place = pid * share
    stop = tl.minimum(place + share, total)
    while place < stop:
        request = tl.sum((ends <= place).to(tl.int32), 0)
        begin = tl.max(tl.where(ends <= place, ends, 0), 0)
        length = tl.load(seq_lens + request)
        first_query = tl.load(query_start + request)
        queries = tl.load(query_start + request + 1) - first_query
        tiles = (length + N - 1) // N
        unit = (place - begin) // tiles
        first_tile = place - begin - unit * tiles
        last_tile = tl.minimum(first_tile + stop - place, tiles)

        # ---- the rows: query heads of each verified token; row limits are causal ----
        head = unit // BLOCKS
        row = unit % BLOCKS * BLOCK_ROWS + m
        row_there = (m < BLOCK_ROWS) & (row < queries * GROUP)
        limit = length - queries + 1 + row // GROUP
        row_query = (
            query + (first_query + row // GROUP) * stride_query_token + (head * GROUP + row % GROUP) * stride_query_head
        )
        if KEY_BITS == 8:
            if HARDWARE_FP8:
                d = tl.arange(0, BLOCK_D)
                q = tl.load(row_query[:, None] + d[None, :], mask=row_there[:, None] & (d < D)[None, :], other=0.0)
                q, size = to_fp16_rows(q.to(tl.float32))
            else:
                d = tl.arange(0, BLOCK_D // 2)
                there = row_there[:, None] & (d < D // 2)[None, :]
                q0 = tl.load(row_query[:, None] + 2 * d[None, :], mask=there, other=0.0).to(tl.float32)
                q1 = tl.load(row_query[:, None] + 2 * d[None, :] + 1, mask=there, other=0.0).to(tl.float32)
                size = power_of_two(tl.maximum(tl.max(tl.abs(q0), 1), tl.max(tl.abs(q1), 1)))
                q0 = (q0 * (1.0 / size)[:, None]).to(tl.float16)
                q1 = (q1 * (1.0 / size)[:, None]).to(tl.float16)
        else:
            d = tl.arange(0, D)
            q = tl.load(row_query[:, None] + d[None, :], mask=row_there[:, None], other=0.0)
            q, size = to_fp16_rows(q.to(tl.float32))
            rotated, again = to_fp16_rows(rotate_rows(q, M, D))
            size = size * again
            even, odd = tl.split(tl.reshape(rotated, [M, D // 4, 2, 2]))
            q0, q2 = tl.split(even)
            q1, q3 = tl.split(odd)
            ones = tl.full([M, QUARTER], 1.0, tl.float16)
        row_scale = size * scale_log2

        # ---- the tiles ----
        a0 = tl.zeros([M, QUARTER], tl.float32)
        a1 = tl.zeros([M, QUARTER], tl.float32)
        a2 = tl.zeros([M, QUARTER], tl.float32)
        a3 = tl.zeros([M, QUARTER], tl.float32)
        zeros = tl.zeros([M], tl.float32)
        weight_sum = tl.zeros([M], tl.float32)
        peak = tl.full([M], -float("inf"), tl.float32)
        scale_peak = 2.0**-24
        pages = block_table + request.to(tl.int64) * stride_table
        head_cache = cache + head * STRIDE_HEAD
        # A tile's page, scales, zeros and norms are loaded while the tile before it is computed.
        page = load_page(pages, first_tile, length - 1, N, PAGE)
        slots = tile_slots(head_cache, page, first_tile, STRIDE_PAGE, STRIDE_TOKEN, N, PAGE)
        scale_ahead = load_half(slots + SCALE)
        zero_ahead = load_half(slots + SCALE + 1)
        norm_ahead = load_half(slots + NORM)
        for tile in range(first_tile, last_tile):
            slots = tile_slots(head_cache, page, tile, STRIDE_PAGE, STRIDE_TOKEN, N, PAGE)
            keys = load_keys(slots, D, KEY_BITS, HARDWARE_FP8)
            values = load_words(slots + VALUE, D, VALUE_BITS, False)
            value_scale = scale_ahead
            value_zero = zero_ahead
            norm = norm_ahead
            page = load_page(pages, tile + 1, length - 1, N, PAGE)
            slots_ahead = tile_slots(head_cache, page, tile + 1, STRIDE_PAGE, STRIDE_TOKEN, N, PAGE)
            scale_ahead = load_half(slots_ahead + SCALE)
            zero_ahead = load_half(slots_ahead + SCALE + 1)
            norm_ahead = load_half(slots_ahead + NORM)
            if FETCH is not None:
                prefetch(slots_ahead, 2 * STRIDE_HEAD, FETCH)
            if KEY_BITS == 8:
                if HARDWARE_FP8:
                    k = keys.to(tl.float8e4nv, bitcast=True).to(tl.float16)
                    scores = tl.dot(q, k) * row_scale[:, None]
                else:
                    k0 = ((keys << 8) & 0x8000) | ((keys << 7) & 0x3F80)
                    k1 = (keys & 0x8000) | ((keys >> 1) & 0x3F80)
                    scores = tl.dot(q0, k0.to(tl.float16, bitcast=True))
                    scores = tl.dot(q1, k1.to(tl.float16, bitcast=True), scores)
                    scores = scores * (row_scale * FP8_UNIT)[:, None]
            else:
                if KEY_BITS == 4:
                    k0, k1, k2, k3 = centroids4(keys, CODEBOOK, LOOKUP, ASSEMBLY)
                else:
                    k0, k1, k2, k3, k4, k5, k6, k7 = centroids3(keys, CODEBOOK, LOOKUP, ASSEMBLY)
                    k0 = pair_rows(k0, k4)
                    k1 = pair_rows(k1, k5)
                    k2 = pair_rows(k2, k6)
                    k3 = pair_rows(k3, k7)
                scores = tl.dot(anew(q0, tile, RELOAD), k0)
                scores = tl.dot(anew(q1, tile, RELOAD), k1, scores)
                scores = tl.dot(anew(q2, tile, RELOAD), k2, scores)
                scores = tl.dot(anew(q3, tile, RELOAD), k3, scores)
                square = tl.dot(ones, k0 * k0)  # the tensor cores sum what needs no rows
                square = tl.dot(ones, k1 * k1, square)
                square = tl.dot(ones, k2 * k2, square)
                square = tl.dot(ones, k3 * k3, square)
                scores = scores * tl.rsqrt(square) * norm[None, :] * row_scale[:, None]

            scores = tl.where((tile * N + n)[None, :] < limit[:, None], scores, -float("inf"))
            alive = tile * N + n < length
            value_scale = tl.where(alive, value_scale, 0.0)
            # Codes enter centred: the rounding of weights is then that of values about zero, not about their least.
            value_zero = tl.where(alive, value_zero + value_scale * (1 << VALUE_BITS - 1), 0.0)
            new_peak = tl.maximum(peak, tl.max(scores, 1))
            anchor = tl.where(new_peak == -float("inf"), 0.0, new_peak)
            fade = tl.exp2(peak - anchor)
            weights = tl.exp2(scores - anchor[:, None])
            weight_sum = weight_sum * fade + tl.sum(weights, 1)
            zeros = zeros * fade + tl.sum(weights * value_zero[None, :], 1)
            peak = new_peak
            new_scale_peak = tl.maximum(scale_peak, tl.max(value_scale, 0))
            fade = fade * (scale_peak / new_scale_peak)
            scale_peak = new_scale_peak
            weights = (weights * (value_scale * (_WEIGHT_RANGE / scale_peak))[None, :]).to(tl.float16)
            if VALUE_BITS == 4:
                v0, v1, v2, v3 = codes4(values, ASSEMBLY)
            else:
                v0, v1, v2, v3, v4, v5, v6, v7 = codes3(values, ASSEMBLY)
                v0 = pair_columns(v0, v4)
                v1 = pair_columns(v1, v5)
                v2 = pair_columns(v2, v6)
                v3 = pair_columns(v3, v7)
            a0 = tl.dot(weights, v0, a0 * fade[:, None])
            a1 = tl.dot(weights, v1, a1 * fade[:, None])
            a2 = tl.dot(weights, v2, a2 * fade[:, None])
            a3 = tl.dot(weights, v3, a3 * fade[:, None])

        # ---- the partial result ----
        slot = (pid + request * (HK * BLOCKS) + unit).to(tl.int64)
        quarter = tl.arange(0, QUARTER)
        where = partial + (slot * BLOCK_ROWS + m[:, None]) * D + quarter[None, :]
        there = (m < BLOCK_ROWS)[:, None] & (quarter < D // 4)[None, :]
        size = scale_peak / _WEIGHT_RANGE
        tl.store(where, a0 * size + zeros[:, None], mask=there)
        tl.store(where + D // 4, a1 * size + zeros[:, None], mask=there)
        tl.store(where + D // 4 * 2, a2 * size + zeros[:, None], mask=there)
        tl.store(where + D // 4 * 3, a3 * size + zeros[:, None], mask=there)
        tl.store(stats + slot * (2 * BLOCK_ROWS) + m, peak, mask=m < BLOCK_ROWS)
        tl.store(stats + slot * (2 * BLOCK_ROWS) + BLOCK_ROWS + m, weight_sum, mask=m < BLOCK_ROWS)
        place += last_tile - first_tile


@triton.jit(do_not_specialize=[*_PER_BATCH, "num_tokens"])
def _merge(
    partial,
    stats,
    seq_lens,
    query_start,
    output,  # [T, Hq, D]
    num_requests,
    programs,
    min_tiles,
    num_tokens,
    stride_output_token,
    stride_output_head,
    HK: tl.constexpr,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    D: tl.constexpr,
    N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Merge the partial results of one query token and query head; a token that no request has becomes zero."""
    at = tl.program_id(0)
    query_head = tl.program_id(1)
    request = at // QUERIES
    row_token = at % QUERIES
    d = tl.arange(0, triton.next_power_of_2(D))
    there = request < num_requests
    first_query = tl.load(query_start + request, mask=there, other=0)
    queries = tl.load(query_start + request + 1, mask=there, other=0) - first_query
    where = output + query_head * stride_output_head + 4 * (d % (D // 4)) + d // (D // 4)
    if (at < num_tokens) & (at >= tl.load(query_start + num_requests)):
        tl.store(where + at * stride_output_token, tl.zeros_like(d).to(output.dtype.element_ty), mask=d < D)
    if row_token < queries:
        ends = _tiles_before(seq_lens, query_start, num_requests, BLOCK_R, N)
        r = tl.arange(0, BLOCK_R)
        share = _tiles_per_program(tl.max(ends, 0) * (HK * BLOCKS), programs, min_tiles)
        tiles = (tl.load(seq_lens + request) + N - 1) // N
        row = row_token * GROUP + query_head % GROUP
        unit = query_head // GROUP * BLOCKS + row // BLOCK_ROWS
        row = row % BLOCK_ROWS
        begin = tl.max(tl.where(r < request, ends, 0), 0) * (HK * BLOCKS) + unit * tiles
        first = begin // share
        last = (begin + tiles - 1) // share
        slots = request * (HK * BLOCKS) + unit
        peak = -float("inf")
        weight_sum = 0.0
        total = tl.zeros([triton.next_power_of_2(D)], tl.float32)
        if tiles > 0:
            for start in range(first, last + 1, BLOCK_S):
                program = start + tl.arange(0, BLOCK_S)
                part = program <= last
                slot = (slots + program).to(tl.int64)
                peaks = tl.load(stats + slot * (2 * BLOCK_ROWS) + row, mask=part, other=-float("inf"))
                sums = tl.load(stats + slot * (2 * BLOCK_ROWS) + BLOCK_ROWS + row, mask=part, other=0.0)
                parts = tl.load(
                    partial + (slot * BLOCK_ROWS + row)[:, None] * D + d[None, :],
                    mask=part[:, None] & (d < D)[None, :],
                    other=0.0,
                )
                new_peak = tl.maximum(peak, tl.max(peaks, 0))
                anchor = tl.where(new_peak == -float("inf"), 0.0, new_peak)
                fade = tl.exp2(peak - anchor)
                factors = tl.exp2(peaks - anchor)
                weight_sum = weight_sum * fade + tl.sum(sums * factors, 0)
                total = total * fade + tl.sum(parts * factors[:, None], 0)
                peak = new_peak
        total = total / tl.where(weight_sum > 0.0, weight_sum, 1.0)
        tl.store(where + (first_query + row_token) * stride_output_token, total.to(output.dtype.element_ty), mask=d < D)


# ---- launching ----

_COMPILED = isinstance(_attend, triton.JITFunction)
"""Triton's interpreter knows no instructions: it computes the same numbers by other ways."""
HEAD_SIZES = (64, 96, 128, 256)
MAX_ROWS = 128
"""Query heads of a KV head times tokens of a verify step that are tested; a longer chunk is a prefill's."""
REQUEST_CLASSES = (256, 1024, 4096)
"""The kernels are compiled for a batch of up to so many requests, whose lengths each program reads at once.

A larger batch than the last has kernels of its own.
"""
_BLOCK_ROWS = 32
"""Rows of one unit: operands and accumulators of more spill, so more rows are more units that read the same tokens."""
_MERGE_BLOCK = 16


@dataclass(frozen=True)
class Workspace:
    """Scratch of one call, kept by the caller: its address and size are part of a CUDA graph."""

    partial: torch.Tensor
    """fp32, at least `workspace_floats` of it."""
    programs: int
    """Size of the grid; `Launch.programs` says a good one."""


def supports(
    layout: SlotLayout,
    *,
    num_heads: int,
    num_kv_heads: int,
    max_query_len: int,
    page_tokens: int,
    dtype: torch.dtype,
    sliding_window: int | None = None,
    logits_soft_cap: float | None = None,
    has_sinks: bool = False,
    has_alibi: bool = False,
) -> str | None:
    """Return why these kernels do not serve a shape, or None when they do."""
    preset = layout.preset
    if layout.head_size not in HEAD_SIZES:
        return f"head size {layout.head_size} is not one of {', '.join(map(str, HEAD_SIZES))}"
    if not layout.key_is_fp8 and layout.head_size & (layout.head_size - 1):
        return f"the rotation of {preset.name} needs a head size that is a power of two, not {layout.head_size}"
    if not layout.key_is_fp8 and not preset.norm_correction:
        return f"{preset.name} keeps MSE keys without norm correction"
    if num_heads % num_kv_heads:
        return f"{num_heads} query heads do not divide among {num_kv_heads} KV heads"
    rows = num_heads // num_kv_heads * max_query_len
    if rows > MAX_ROWS:
        return f"{rows} rows (query heads of a KV head times query tokens) are more than {MAX_ROWS}"
    if page_tokens < 16 or page_tokens & (page_tokens - 1):
        return f"a block of {page_tokens} tokens is not a power of two from 16 on"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"queries are {dtype}, not float16 or bfloat16"
    for there, name in (
        (sliding_window is not None and sliding_window > 0, "a sliding window"),
        (bool(logits_soft_cap), "a cap on logits"),
        (has_sinks, "attention sinks"),
        (has_alibi, "ALiBi slopes"),
    ):
        if there:
            return f"{name} is not applied by these kernels"
    return None


def workspace_floats(
    *, programs: int, num_requests: int, num_heads: int, num_kv_heads: int, max_query_len: int, head_size: int
) -> int:
    """fp32 numbers that a call needs: a partial result for each program and for each unit of each request."""
    blocks, block_rows = _row_blocks(num_heads // num_kv_heads * max_query_len)
    return (programs + num_requests * num_kv_heads * blocks) * block_rows * (head_size + 2)


def _row_blocks(rows: int) -> tuple[int, int]:
    """How many blocks the rows of a KV head make, and the rows of one."""
    blocks = -(-rows // _BLOCK_ROWS)
    return blocks, rows if blocks == 1 else _BLOCK_ROWS


_RESIDENT: dict[tuple[object, ...], int] = {}
"""Programs that fit one multiprocessor, by variant: compilers differ, and a grid of more runs in two waves."""


def _resident(compiled: Any, device: torch.device) -> int:
    """How many programs of a kernel that has been launched fit one multiprocessor of a device."""
    properties = torch.cuda.get_device_properties(device)
    return resident_programs(
        compiled.n_regs,
        compiled.metadata.shared,
        compiled.metadata.num_warps,
        registers_per_sm=properties.regs_per_multiprocessor,
        shared_bytes_per_sm=properties.shared_memory_per_multiprocessor,
    )


def verify_attention(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    *,
    max_query_len: int,
    layout: SlotLayout,
    scale: float,
    codebook: Codebook | None,
    workspace: Workspace,
    out: torch.Tensor,
    launch: Launch,
) -> None:
    """Attend causally from the last query tokens of each request to its packed KV, into out.

    query, out: [T, Hq, D], fp16 or bf16, the last dimension dense.  kv_cache: uint8 [blocks, block tokens, Hk, slot].
    block_table: int32 [R, W].  seq_lens: int32 [R], tokens of each request with its queries.  query_start_loc: int32
    [R + 1].  Token j of a request's q queries sees its first seq_len - q + 1 + j tokens.  Requests without query tokens
    cost nothing, and tokens after the last request become zero; a length of 0 gives zeros.  Lengths are read on the
    device alone.  codebook: of `prepare_codebook`, for MSE keys, taken to be rotated by the Sylvester-Hadamard matrix.
    """
    num_tokens, num_heads, head_size = query.shape
    num_requests = seq_lens.shape[0]
    _, page_tokens, num_kv_heads, _ = kv_cache.shape
    group = num_heads // num_kv_heads
    blocks, block_rows = _row_blocks(group * max_query_len)
    partial = workspace.partial
    stats = partial[(workspace.programs + num_requests * num_kv_heads * blocks) * block_rows * head_size :]
    cache = kv_cache.view(torch.uint16)
    larger = triton.next_power_of_2(num_requests)
    block_requests = next((count for count in REQUEST_CLASSES if num_requests <= count), larger)
    if not layout.key_is_fp8:
        if codebook is None:
            raise ValueError(f"codebook: {layout.preset.name} needs the one of prepare_codebook")
        scale = scale / math.sqrt(head_size)
    common = {
        "HK": num_kv_heads,
        "GROUP": group,
        "BLOCKS": blocks,
        "BLOCK_ROWS": block_rows,
        "D": head_size,
        "N": launch.block_tokens,
        "BLOCK_R": block_requests,
    }
    variant = (layout, launch, block_rows, page_tokens, query.dtype, block_requests)
    resident = min(_RESIDENT.get(variant, launch.programs_per_sm), launch.programs_per_sm)
    programs = workspace.programs // launch.programs_per_sm * resident or workspace.programs
    compiled = _attend[(programs,)](
        query,
        cache,
        block_table,
        seq_lens,
        query_start_loc,
        partial,
        stats,
        num_requests,
        programs,
        launch.min_tiles,
        scale * math.log2(math.e),
        query.stride(0),
        query.stride(1),
        block_table.stride(0),
        STRIDE_PAGE=cache.stride(0),
        STRIDE_TOKEN=cache.stride(1),
        STRIDE_HEAD=cache.stride(2),
        M=max(16, triton.next_power_of_2(block_rows)),
        PAGE=page_tokens,
        KEY_BITS=layout.preset.key_bits,
        VALUE_BITS=layout.preset.value_bits,
        NORM=0 if layout.key_is_fp8 else layout.norm_offset // 2,
        VALUE=layout.value_offset // 2,
        SCALE=layout.scale_offset // 2,
        CODEBOOK=codebook.values if codebook else None,
        LOOKUP=codebook.lookup if codebook else None,
        ASSEMBLY=_COMPILED,
        RELOAD=launch.reload_queries and _COMPILED,
        HARDWARE_FP8=launch.hardware_fp8,
        FETCH=launch.fetch if _COMPILED else None,
        FP8_UNIT=1.0 / E4M3_IN_FP16,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        **common,
    )
    if _COMPILED and variant not in _RESIDENT and query.is_cuda:
        _RESIDENT[variant] = _resident(compiled, query.device)
    _merge[(max(num_requests * max_query_len, num_tokens), num_heads)](
        partial,
        stats,
        seq_lens,
        query_start_loc,
        out,
        num_requests,
        programs,
        launch.min_tiles,
        num_tokens,
        out.stride(0),
        out.stride(1),
        QUERIES=max_query_len,
        BLOCK_S=_MERGE_BLOCK,
        num_warps=4,
        num_stages=2,
        **common,
    )
