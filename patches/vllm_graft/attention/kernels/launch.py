"""How the decode kernel is launched, by compute capability: data, with the reason of each choice."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Launch:
    """Tile and pipeline of the decode kernel; `programs_per_sm` fixes the grid, whatever the lengths are."""

    block_tokens: int
    num_warps: int
    num_stages: int
    programs_per_sm: int
    min_tiles: int
    hardware_fp8: bool
    fetch: str | None
    max_registers: int | None
    reload_queries: bool
    reason: str


def decode_launch(capability: tuple[int, int], *, key_is_fp8: bool, rows: int, page_tokens: int) -> Launch:
    """Return the launch of a compute capability for so many rows (query heads of a KV head times verified tokens)."""
    hardware_fp8 = capability >= (8, 9)
    tokens = min(64, page_tokens)
    warps = 8 if rows > 64 else 4
    stages = 3 if key_is_fp8 else 1
    return Launch(
        tokens,
        warps,
        stages,
        2,
        2,
        hardware_fp8,
        None if key_is_fp8 else "L2",
        None,
        not key_is_fp8 and rows > 16,
        "before tuning",
    )
