"""Triton kernels that multiply by ternary weights as they lie in memory (`layout`), 2 bits each.

Both put the weight on the side of the tensor cores' first operand, because its words are that operand's fragments: a
load of 16 bytes a lane, then a shift and a mask for two weights, and no trip through shared memory.  Values are 2 * t,
hence the halved scales.  Accumulation is in float32; activations stay float16 or bfloat16.

`gemv` gives each warp of a program its own tiles along K and adds their sums in shared memory at the end; `gemm` is a
pipelined product of blocks.  Neither writes anything but its output, so both can be captured in CUDA graphs.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl

from vllm_graft.quantization.ternary.layout import COLUMNS, ROWS, TernaryWeight

_INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")  # the interpreter has no inline assembly

_SLOTS_OF_TWO_WORDS = tl.constexpr(
    "{ .reg .b32 t; and.b32 $0, $8, 0xC000C000;"
    + "".join(f" shl.b32 t, $8, {2 * slot}; and.b32 ${slot}, t, 0xC000C000;" for slot in range(1, 8))
    + " }"
)
_PREFETCH = tl.constexpr("prefetch.global.L2 [$1]; mov.b32 $0, 0;")


@triton.jit
def _slots(words):
    """The 8 slots of each word as bit patterns of 2 * weight, in half precision of either kind."""
    if _INTERPRETED:
        high: tl.constexpr = -16384  # 0xC000
        return (
            words & high,
            (words << 2) & high,
            (words << 4) & high,
            (words << 6) & high,
            (words << 8) & high,
            (words << 10) & high,
            (words << 12) & high,
            (words << 14) & high,
        )
    return tl.inline_asm_elementwise(
        _SLOTS_OF_TWO_WORDS,
        "=r,=r,=r,=r,=r,=r,=r,=r,r",
        [words],
        dtype=(tl.int16, tl.int16, tl.int16, tl.int16, tl.int16, tl.int16, tl.int16, tl.int16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def _words_by_row(words, B: tl.constexpr, R: tl.constexpr):
    """[B, R tiles of 256 words] as [B, R * 16, 16]: a word's place in a tile is a row and a column of each slot."""
    words = words.reshape(B, R, 8, 4, 2, 2, 2)  # rows bits 0-2, columns bits 1-2, column bit 3, row bit 3, column bit 0
    return words.permute(0, 1, 5, 2, 4, 3, 6).reshape(B, R * 16, 16)


@triton.jit
def _beside(slots, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """COUNT of the slots [B, rows, 16] side by side: [B, rows, COUNT * 16]."""
    B: tl.constexpr = slots[0].shape[0]
    ROWS: tl.constexpr = slots[0].shape[1]
    if COUNT == 1:
        joined = slots[FIRST]
    elif COUNT == 2:
        joined = tl.join(slots[FIRST], slots[FIRST + 1]).permute(0, 1, 3, 2)
    elif COUNT == 4:
        even = tl.join(slots[FIRST], slots[FIRST + 2])
        odd = tl.join(slots[FIRST + 1], slots[FIRST + 3])
        joined = tl.join(even, odd).permute(0, 1, 3, 4, 2)
    else:
        even = tl.join(tl.join(slots[0], slots[4]), tl.join(slots[2], slots[6]))
        odd = tl.join(tl.join(slots[1], slots[5]), tl.join(slots[3], slots[7]))
        joined = tl.join(even, odd).permute(0, 1, 3, 4, 5, 2)
    return joined.reshape(B, ROWS, COUNT * 16)


@triton.jit
def _dot(weight, values, accumulator):
    if _INTERPRETED:  # whose products of bfloat16 are those of the bit patterns
        return tl.dot(weight.to(tl.float32), values.to(tl.float32), accumulator)
    return tl.dot(weight, values, accumulator)


@triton.jit
def _group_scales(places, group, groups, inside):
    """The scales [group, output] at `places` [1, output] plus the groups; they are asked for a step ahead."""
    wanted = inside[None, :] & (group < groups)[:, None]
    return tl.load(places + group[:, None] * 16, mask=wanted, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["m"])
def gemv_kernel(
    x,
    words,
    scales,
    bias,
    y,
    m,
    n,
    k,
    x_stride,
    tiles,
    groups,
    W: tl.constexpr,
    R: tl.constexpr,
    T: tl.constexpr,
    BM: tl.constexpr,
    ONE: tl.constexpr,
    GROUP: tl.constexpr,
    PER_ROW: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EVEN_TILES: tl.constexpr,
    EVEN_K: tl.constexpr,
    EARLY: tl.constexpr,
    STAGES: tl.constexpr,
):
    """y [m, n] of x [m, k]: a program makes R strips of 16 outputs, its W warps share the tiles along K, T at a time.

    BM is m, rounded up to a size of the tensor cores; with ONE, m is 1 and its row stands in all 8 columns.  With EARLY
    the program starts before the kernel that makes x has ended, and moves its weights to the L2 cache meanwhile.
    """
    if EARLY:
        last = tl.cdiv(n, 16) * tiles * 4 - 1  # in cache lines of 128 bytes, 64 words
        for line in tl.range(0, R * tiles * 4, W * 32):
            lines = tl.program_id(0) * R * tiles * 4 + line + tl.arange(0, W * 32)
            address = (words + tl.minimum(lines, last) * 64).to(tl.int64)
            tl.inline_asm_elementwise(_PREFETCH, "=r,l", [address], dtype=tl.int32, is_pure=False, pack=1)
    strip = tl.program_id(0) * R + tl.arange(0, R)
    strip = tl.where(strip < tl.cdiv(n, 16), strip, 0)
    outputs = tl.program_id(0) * R * 16 + tl.arange(0, R * 16)
    inside = outputs < n
    if PER_ROW:  # here, not where they are used: they travel while the weights do
        row_scale = tl.load(scales + outputs, mask=inside, other=0.0).to(tl.float32) * 0.5
    if HAS_BIAS:
        row_bias = tl.load(bias + outputs, mask=inside, other=0.0).to(tl.float32)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    warp = tl.arange(0, W)
    column = tl.arange(0, 128)
    token = tl.arange(0, BM)
    there = token < m  # copies of the others fill in zeros and read nothing; a row in their place would be read by all
    in_tile = tl.arange(0, 256)
    SPLIT: tl.constexpr = 1 if PER_ROW or GROUP >= 128 else 128 // GROUP
    accumulator = tl.zeros((SPLIT * W, R * 16, BM), tl.float32)
    strip_words = words + strip[None, :, None] * tiles * 256 + in_tile[None, None, :]
    if not PER_ROW:  # a warp's share of K is in SPLIT parts, one a group
        tl.static_assert(T == 1)
        part = tl.arange(0, SPLIT * W)
        group = part % W * 128 // GROUP + (part // W if SPLIT > 1 else 0)
        scale_places = scales + (outputs // 16 * groups * 16 + outputs % 16)[None, :]
        scale = _group_scales(scale_places, group, groups, inside)
    for step in tl.range(0, tl.cdiv(tiles, W * T), num_stages=STAGES):
        for i in tl.static_range(T):
            tile = (step * T + i) * W + warp
            address = strip_words + tile[:, None, None] * 256
            if EVEN_TILES:
                packed = tl.load(address, eviction_policy="evict_first")
            else:
                packed = tl.load(address, mask=tile[:, None, None] < tiles, other=0, eviction_policy="evict_first")
            ks = tile[:, None] * 128 + column[None, :]
            if ONE:
                values = tl.load(x + ks) if EVEN_TILES and EVEN_K else tl.load(x + ks, mask=ks < k, other=0.0)
                values = tl.broadcast_to(values[:, :, None], (W, 128, BM))
            else:
                places = x + token[None, :, None] * x_stride + ks[:, None, :]
                wanted = there[None, :, None]
                if not (EVEN_TILES and EVEN_K):
                    wanted &= ks[:, None, :] < k
                values = tl.load(places, mask=wanted, other=0.0).permute(0, 2, 1)
            weight = _beside(_slots(_words_by_row(packed, W, R)), 0, 8).to(x.dtype.element_ty, bitcast=True)
            if PER_ROW:
                accumulator = _dot(weight, values, accumulator)
            else:
                if SPLIT > 1:
                    weight = weight.reshape(W, R * 16, SPLIT, 128 // SPLIT).permute(2, 0, 1, 3)
                    weight = weight.reshape(SPLIT * W, R * 16, 128 // SPLIT)
                    values = values.reshape(W, SPLIT, 128 // SPLIT, BM).permute(1, 0, 2, 3)
                    values = values.reshape(SPLIT * W, 128 // SPLIT, BM)
                group = ((step + 1) * W + part % W) * 128 // GROUP + (part // W if SPLIT > 1 else 0)
                next_scale = _group_scales(scale_places, group, groups, inside)
                accumulator += _dot(weight, values, None) * scale[:, :, None]
                scale = next_scale
    out = tl.sum(accumulator, 0)
    out *= row_scale[:, None] if PER_ROW else 0.5
    if HAS_BIAS:
        out += row_bias[:, None]
    tl.store(y + token[None, :] * n + outputs[:, None], out.to(y.dtype.element_ty), mask=inside[:, None] & there)


@triton.jit(do_not_specialize=["m"])
def gemm_kernel(
    x,
    words,
    scales,
    bias,
    y,
    m,
    n,
    k,
    x_stride,
    tiles,
    groups,
    BN: tl.constexpr,
    BM: tl.constexpr,
    GROUP: tl.constexpr,
    PER_ROW: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EVEN_K: tl.constexpr,
    SUPER: tl.constexpr,
    STAGES: tl.constexpr,
):
    """y [m, n] of x [m, k] in blocks of BM tokens and BN outputs; SUPER blocks of outputs run beside each other.

    Programs of neighbouring numbers share tokens and outputs, so that both stay in the L2 cache.
    """
    blocks_n, blocks_m = tl.cdiv(n, BN), tl.cdiv(m, BM)
    wide = tl.program_id(0) // (SUPER * blocks_m)
    first = wide * SUPER
    height = tl.minimum(blocks_n - first, SUPER)
    within = tl.program_id(0) % (SUPER * blocks_m)
    block_n = first + within % height
    block_m = within // height

    strip = block_n * (BN // 16) + tl.arange(0, BN // 16)
    strip = tl.where(strip < tl.cdiv(n, 16), strip, 0)
    token = block_m * BM + tl.arange(0, BM)
    row = tl.where(token < m, token, token - m)  # not one row for all that are not there: many would wait for it
    row = tl.minimum(row, m - 1).to(tl.int64)
    SPLIT: tl.constexpr = 1 if PER_ROW or GROUP >= 128 else 128 // GROUP
    WIDTH: tl.constexpr = 128 // SPLIT
    column = tl.arange(0, WIDTH)
    places = x + row[:, None] * x_stride + column[None, :]
    strip_words = words + strip[:, None] * tiles * 256 + tl.arange(0, 256)[None, :]
    outputs = block_n * BN + tl.arange(0, BN)
    inside = outputs < n
    accumulator = tl.zeros((BN, BM), tl.float32)
    if not PER_ROW:
        scale_places = scales + outputs // 16 * groups * 16 + outputs % 16
        scale = tl.load(scale_places, mask=inside, other=0.0)
    for tile in tl.range(0, tiles, num_stages=STAGES):
        packed = tl.load(strip_words + tile * 256)
        slots = _slots(_words_by_row(packed.reshape(1, BN // 16, 256), 1, BN // 16))
        for i in tl.static_range(SPLIT):
            if EVEN_K:
                values = tl.load(places + tile * 128 + i * WIDTH)
            else:
                left = k - tile * 128 - i * WIDTH
                values = tl.load(places + tile * 128 + i * WIDTH, mask=column[None, :] < left, other=0.0)
            weight = _beside(slots, i * 8 // SPLIT, 8 // SPLIT).reshape(BN, WIDTH).to(x.dtype.element_ty, bitcast=True)
            if PER_ROW:
                accumulator = _dot(weight, values.T, accumulator)
            else:
                group = ((tile * SPLIT + i + 1) * WIDTH // GROUP) if SPLIT == 1 else tile * SPLIT + i + 1
                next_scale = tl.load(scale_places + tl.minimum(group, groups - 1) * 16, mask=inside, other=0.0)
                accumulator += _dot(weight, values.T, None) * scale.to(tl.float32)[:, None]
                scale = next_scale
    accumulator *= 0.5
    if PER_ROW:
        accumulator *= tl.load(scales + outputs, mask=inside, other=0.0).to(tl.float32)[:, None]
    if HAS_BIAS:
        accumulator += tl.load(bias + outputs, mask=inside, other=0.0).to(tl.float32)[:, None]
    target = y + token[:, None].to(tl.int64) * n + outputs[None, :]
    tl.store(target, accumulator.to(y.dtype.element_ty).T, mask=(token < m)[:, None] & inside[None, :])


@dataclass(frozen=True)
class GemvConfig:
    """Warps of a program, which share K; its strips of 16 outputs; tiles a warp and step; pipeline stages.

    `early` starts programs while the kernel before still runs (programmatic dependent launch, compute capability 9.0).
    """

    warps: int
    strips: int
    tiles: int
    stages: int
    early: bool = False


@dataclass(frozen=True)
class GemmConfig:
    """Outputs and tokens of a block, warps, pipeline stages, blocks of outputs that run beside each other."""

    outputs: int
    tokens: int
    warps: int
    stages: int
    beside: int = 8

    def programs(self, m: int, n: int) -> int:
        """How many a product of m tokens and n outputs has."""
        return -(-n // self.outputs) * -(-m // self.tokens)


@dataclass(frozen=True)
class Card:
    """Shared memory that one program may use, in bytes, and the number of multiprocessors."""

    shared_bytes: int
    multiprocessors: int


GEMV_TOKENS = 16
LARGE_SHARED_BYTES = 160 << 10
"""What a program of compute capability 9.0 or 10.0 may use and one of 8.6, 8.9 and 12.0 (99 KiB) may not."""
MANY_STRIPS = 1024
"""From so many strips of 16 outputs on, each multiprocessor has several programs: fewer warps each then wait less."""
MOST_TOKENS = 32768
"""Beyond, every weight has programs for all multiprocessors, and `choose` gives nothing else."""


def choose(m: int, n: int, k: int, group: int, card: Card) -> GemvConfig | GemmConfig:
    """The configuration for m tokens and a weight [n, k].

    The fastest ones of `tests/gpu/ternary_speed.py --tune` on an H200 (triton 3.6 and 3.8), by what tells them apart.
    There a wave of programs took as long whether or not it filled the card: so blocks are small while few are needed,
    which beyond 64 tokens follows from that alone and was not timed.
    """
    many_strips = n >= MANY_STRIPS * ROWS
    if m == 1:
        return GemvConfig(2, 1, 2, 4) if many_strips else GemvConfig(4, 1, 2, 3 if k <= 8192 else 4)
    if m <= GEMV_TOKENS:
        return GemvConfig(4, 2, 1, 3) if many_strips else GemvConfig(4, 1, 1, 4)
    if m <= 32:
        return GemmConfig(64, 32, 4, 3)
    small, middle = GemmConfig(64, 64, 4, 3), GemmConfig(128, 128, 8, 3)
    if m <= 64 or small.programs(m, n) <= 2 * card.multiprocessors:
        return small
    # Sums of small groups beside those of the block do not fit the registers of a larger one.
    if card.shared_bytes < LARGE_SHARED_BYTES:
        return small if group < COLUMNS else GemmConfig(128, 128, 8, 2)
    if group < COLUMNS:
        return GemmConfig(128, 64, 8, 3)
    if m >= 1024 and group >= k and middle.programs(m, n) > card.multiprocessors:
        return GemmConfig(128, 256, 8, 3)
    return middle


@cache
def to_compile(n: int, k: int, group: int, card: Card) -> tuple[tuple[int, GemvConfig | GemmConfig], ...]:
    """Tokens and configurations that between them need every kernel that `choose` may give a weight [n, k]."""
    counts = (1, 2, GEMV_TOKENS, *range(32, MOST_TOKENS + 1, 32))
    chosen = [(m, choose(m, n, k, group, card)) for m in counts]
    return tuple(dict.fromkeys((m if isinstance(config, GemvConfig) else 1, config) for m, config in chosen))


@cache
def card_of(device: torch.device) -> Card:
    """What runs the programs there; the interpreter has no bound, and runs one after the other."""
    if device.type != "cuda":
        return Card(LARGE_SHARED_BYTES, 1)
    found = torch.cuda.get_device_properties(device)
    return Card(int(found.shared_memory_per_block_optin), int(found.multi_processor_count))


def linear(
    x: torch.Tensor,
    weight: TernaryWeight,
    bias: torch.Tensor | None = None,
    config: GemvConfig | GemmConfig | None = None,
) -> torch.Tensor:
    """x [m, k] of float16 or bfloat16 times the transposed weight [n, k], plus bias [n], in the dtype of x."""
    m, k, n = x.shape[0], weight.k, weight.n
    y = torch.empty(m, n, dtype=x.dtype, device=x.device)
    if m == 0:
        return y
    if x.stride(1) != 1:
        x = x.contiguous()
    config = config or choose(m, n, k, weight.group, card_of(x.device))
    tiles, groups = weight.words.shape[1], weight.scales.shape[1]
    arguments = (x, weight.words, weight.scales, x if bias is None else bias, y, m, n, k, x.stride(0), tiles, groups)
    common = {
        "GROUP": weight.group,
        "PER_ROW": groups == 1,
        "HAS_BIAS": bias is not None,
        "EVEN_K": k % COLUMNS == 0,
        "STAGES": config.stages,
        "num_warps": config.warps,
    }
    if isinstance(config, GemvConfig):
        tiles_a_step = config.tiles if groups == 1 else 1
        gemv_kernel[(triton.cdiv(triton.cdiv(n, ROWS), config.strips),)](
            *arguments,
            W=config.warps,
            R=config.strips,
            T=tiles_a_step,
            BM=max(8, triton.next_power_of_2(m)),
            ONE=m == 1,
            EVEN_TILES=tiles % (config.warps * tiles_a_step) == 0,
            EARLY=config.early,
            launch_pdl=config.early,
            **common,
        )
    else:
        gemm_kernel[(config.programs(m, n),)](
            *arguments, BN=config.outputs, BM=config.tokens, SUPER=config.beside, **common
        )
    return y
