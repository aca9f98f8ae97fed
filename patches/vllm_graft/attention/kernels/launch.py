"""How the decode kernel is launched, by compute capability: data, with the reason of each choice.

Chosen by `tests/gpu/attention_tune.py` on an H200 where its results decide, and by what other cards have where they
differ: a multiprocessor of an H200 has 228 KiB of shared memory, one of 8.6, 8.9 and 12.0 has 100; all have 64 Ki
registers.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from vllm_graft.attention.kernels.float8 import MIN_HARDWARE_CAPABILITY
from vllm_graft.attention.kernels.layout import SlotLayout

_MANY_ROWS = 16
"""More rows than one tile of the tensor cores has."""
_LARGE_SHARED_MEMORY, _SMALL_AGAIN = (9, 0), (12, 0)
"""The compute capabilities between which a multiprocessor has 228 KiB of shared memory."""


@dataclass(frozen=True)
class Launch:
    """Tile, pipeline and occupancy of the decode kernel."""

    block_tokens: int
    num_warps: int
    num_stages: int
    """Tiles in flight and one; only copies of 4 bytes or more are asynchronous, so MSE keys have none."""
    programs_per_sm: int
    """Size of the grid, whatever the lengths are: the programs that fit one multiprocessor at a time."""
    min_tiles: int
    """Least work of a program; less would leave more to merge."""
    hardware_fp8: bool
    fetch: str | None
    """Cache level that the next tile's lines are brought to ahead of its loads."""
    reload_queries: bool
    """Read the queries' operand from shared memory for each tile, not hold it in registers."""
    reason: str

    def programs(self, multiprocessors: int) -> int:
        """Programs that fill a device, whatever the batch is."""
        return multiprocessors * self.programs_per_sm


_FP8_DECODE = Launch(
    block_tokens=64,
    num_warps=2,
    num_stages=2,
    programs_per_sm=4,
    min_tiles=1,
    hardware_fp8=True,
    fetch="L2",
    reload_queries=False,
    reason="two warps wait less for each other than four, and 32 tokens of a warp share the cost of a tile; the next "
    "tile's copy is in flight while a tile is computed, and four programs hide the rest of the latency",
)
_FP8_DECODE_SMALL = replace(
    _FP8_DECODE,
    num_warps=4,
    programs_per_sm=2,
    reason="100 KiB of shared memory hold the tiles of two programs, more bytes in flight than GDDR memory needs; with "
    "four warps each there are as many warps as where four programs fit",
)
_FP8_VERIFY = replace(
    _FP8_DECODE,
    num_warps=4,
    programs_per_sm=2,
    reason="32 rows of queries take the registers of a third program; two warps would spill, and eight would each hold "
    "all queries again",
)
_MSE_DECODE = Launch(
    block_tokens=64,
    num_warps=4,
    num_stages=1,
    programs_per_sm=2,
    min_tiles=1,
    hardware_fp8=False,
    fetch="L2",
    reload_queries=False,
    reason="slots lie at even addresses, too narrow for asynchronous copies: lines come to the L2 cache a tile ahead",
)
_MSE3_DECODE = replace(
    _MSE_DECODE,
    block_tokens=32,
    num_warps=2,
    programs_per_sm=4,
    reason="a word of 3-bit codes gives eight keys: smaller tiles of two warps spill few of them or none",
)
_MSE_VERIFY = replace(
    _MSE_DECODE,
    reason="a few registers spill, which costs less on 9.0 than reading the queries again or eight warps",
)
_MSE3_VERIFY = replace(
    _MSE_VERIFY,
    block_tokens=32,
    reason="as with 4-bit keys, in smaller tiles: a word of 3-bit codes gives eight keys",
)
_MSE_VERIFY_WIDE = replace(
    _MSE_DECODE,
    num_warps=8,
    programs_per_sm=1,
    reload_queries=True,
    reason="32 rows of queries of 256 in registers would spill on top of the looked-up keys, also with eight warps",
)


def resident_programs(
    registers: int, shared_bytes: int, warps: int, *, registers_per_sm: int, shared_bytes_per_sm: int
) -> int:
    """Return how many programs fit a multiprocessor; the driver takes 1 KiB for each, and registers in units of 256."""
    registers_of_warp = -(-registers * 32 // 256) * 256
    return min(registers_per_sm // (registers_of_warp * warps), shared_bytes_per_sm // (shared_bytes + 1024))


@functools.cache
def decode_launch(capability: tuple[int, int], *, layout: SlotLayout, rows: int, page_tokens: int) -> Launch:
    """Return the launch of a compute capability for so many rows (query heads of a KV head times verified tokens)."""
    many = rows > _MANY_ROWS
    large_shared_memory = _LARGE_SHARED_MEMORY <= capability < _SMALL_AGAIN
    if layout.key_is_fp8:
        launch = _FP8_VERIFY if many else _FP8_DECODE if large_shared_memory else _FP8_DECODE_SMALL
        launch = replace(launch, hardware_fp8=capability >= MIN_HARDWARE_CAPABILITY)
    elif not many:
        launch = _MSE3_DECODE if layout.preset.key_bits == 3 else _MSE_DECODE
    elif layout.head_size <= 128:
        launch = _MSE_DECODE
    elif large_shared_memory:
        launch = _MSE3_VERIFY if layout.preset.key_bits == 3 else _MSE_VERIFY
    else:
        launch = _MSE_VERIFY_WIDE
    if page_tokens < launch.block_tokens and launch.num_warps <= 4:
        # with smaller tiles fewer pages are looked up for each; eight warps need tokens for all of them
        launch = replace(launch, block_tokens=32)
    return launch
