"""How ternary weights lie in memory for the kernels: 2 bits each, in the order of the tensor cores' fragments.

A weight is a sign bit above a non-zero bit, so that `word << 2 * slot & 0xC000` is the bit pattern of 2 * weight in
float16 and in bfloat16 alike: 0x4000 is 2.0 in both, and 0xC000 is -2.0.  A word of 16 bits has 8 slots; slot s holds
column s * 16 + kk of a tile of 16 rows and 128 columns, so that one tile is 256 words, 512 bytes.  The words of a tile
follow the first operand of `mma.m16n8k16` (PTX ISA, 9.7.14.5.8): a lane reads its 8 words, 16 bytes, in one load, and
each slot of them is one fragment.  Tiles lie row strip by row strip, along K within a strip.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

import torch

ROWS = 16
COLUMNS = 128
SLOTS = 8
WORDS = ROWS * COLUMNS // SLOTS
_ROWS_AT_ONCE = 1024


@dataclass(frozen=True)
class TernaryWeight:
    """A packed weight [n, k]: `words` int16 [strips, tiles, 256], `scales` [strips, groups, 16] as in the file.

    `group` is the number of columns that share a scale, a power of two from 16 to 128 or a multiple of 128.
    """

    words: torch.Tensor
    scales: torch.Tensor
    n: int
    k: int
    group: int


def padded(size: int, multiple: int) -> int:
    """The next multiple."""
    return -(-size // multiple) * multiple


def kernel_group(group: int, k: int) -> int:
    """The group size that the kernels use for one on disk: they take divisors and multiples of a tile's 128 columns.

    Raises:
        ValueError: groups of this size do not split into runs of 16 columns.

    """
    if group >= k:
        return padded(k, COLUMNS)
    common = group if group % COLUMNS == 0 else gcd(group, COLUMNS)
    if common < ROWS:
        raise ValueError(f"a group of {group} columns; the kernels take multiples of {ROWS}, or one group a row")
    return common


def pack(values: torch.Tensor, scales: torch.Tensor) -> TernaryWeight:
    """Lay out `values`, int8 [n, k] of -1, 0 and +1, with `scales` [n, groups].

    Raises:
        ValueError: as `kernel_group`, or the groups do not divide k.

    """
    n, k = values.shape
    groups = scales.shape[1]
    if k % groups:
        raise ValueError(f"{groups} scales a row do not divide {k} columns")
    return TernaryWeight(pack_words(values), pack_scales(scales, k), n, k, kernel_group(k // groups, k))


def pack_words(values: torch.Tensor) -> torch.Tensor:
    """The words int16 [strips, tiles, 256] of int8 [n, k] values, made a block of rows at a time."""
    n, k = values.shape
    strips, tiles = padded(n, ROWS) // ROWS, padded(k, COLUMNS) // COLUMNS
    words = torch.empty(strips, tiles, WORDS, dtype=torch.int16, device=values.device)
    for start in range(0, n, _ROWS_AT_ONCE):
        block = values[start : start + _ROWS_AT_ONCE]
        rows = padded(block.shape[0], ROWS)
        block = torch.nn.functional.pad(block, (0, tiles * COLUMNS - k, 0, rows - block.shape[0]))
        first = start // ROWS
        words[first : first + rows // ROWS] = _words(block)
    return words


def _words(values: torch.Tensor) -> torch.Tensor:
    strips, tiles = values.shape[0] // ROWS, values.shape[1] // COLUMNS
    bits = (values != 0).to(torch.int32) | (values < 0).to(torch.int32) << 1
    # [strip, n bit 3, n bits 0-2, tile, slot, kk bit 3, kk bits 1-2, kk bit 0]
    bits = bits.view(strips, 2, 8, tiles, SLOTS, 2, 4, 2)
    shifts = (14 - 2 * torch.arange(SLOTS, device=values.device, dtype=torch.int32)).view(1, 1, 1, 1, SLOTS, 1, 1, 1)
    words = (bits << shifts).sum(4, dtype=torch.int32)
    return words.permute(0, 3, 2, 5, 4, 1, 6).reshape(strips, tiles, WORDS).to(torch.int16)


def unpack_words(words: torch.Tensor, n: int, k: int) -> torch.Tensor:
    """The values, int8 [n, k], of words int16 [strips, tiles, 256]: the inverse of `pack_words`."""
    strips, tiles, _ = words.shape
    split = words.view(strips, tiles, 8, 4, 2, 2, 2).permute(0, 5, 2, 1, 4, 3, 6)  # [strip, n3, n, tile, kk3, kk, kk0]
    split = split.reshape(strips * ROWS, tiles, 1, 16).to(torch.int32)
    shifts = (14 - 2 * torch.arange(SLOTS, device=words.device, dtype=torch.int32)).view(1, 1, SLOTS, 1)
    bits = (split >> shifts) & 3
    values = (bits & 1) * (1 - (bits & 2))
    return values.to(torch.int8).reshape(strips * ROWS, tiles * COLUMNS)[:n, :k].contiguous()


def pack_scales(scales: torch.Tensor, k: int) -> torch.Tensor:
    """The scales [strips, groups, 16] of [n, groups], repeated where the kernels' groups are smaller; padding is 0."""
    n, groups = scales.shape
    size = k // groups
    repeats = 1 if groups == 1 else size // kernel_group(size, k)
    scales = scales.repeat_interleave(repeats, dim=1)
    scales = torch.nn.functional.pad(scales, (0, 0, 0, padded(n, ROWS) - n))
    return scales.view(-1, ROWS, scales.shape[1]).transpose(1, 2).contiguous()


def unpack_scales(scales: torch.Tensor, n: int) -> torch.Tensor:
    """The scales [n, groups] of [strips, groups, 16]."""
    return scales.transpose(1, 2).reshape(-1, scales.shape[1])[:n]
