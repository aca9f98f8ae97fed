"""How ternary weights and their scales lie on disk, told from the tensors themselves.

A weight [n, k] is stored in bytes: one code each, or four (2 bits each, the first in the lowest) along K in order, or
along N the way BitNet b1.58 does (the byte of row i holds rows i, i + n/4, i + n/2 and i + 3n/4; transformers
`integrations/bitnet.py`), any of them transposed.  A code is the weight plus one (`OFFSET`), or 0, +1, -1 in that order
(`ZERO_FIRST`), or, unpacked only, the weight itself (`SIGNED`).

Ternary weights are about as often +1 as -1, and that tells the mappings of packed codes apart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

import torch

PER_BYTE = 4
SCALE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_BYTES = (torch.int8, torch.uint8)
_EVEN = 0.02  # +1 and -1 may differ so much in number, as a share of all: in SmolLM2-135M they do to 0.007
_TIMES = 3.0  # and by the mapping that is wrong so many times more


class FormatError(ValueError):
    """A tensor cannot be ternary weights or scales; the message says what was found and what is accepted."""


class Undecided(Exception):
    """A tensor alone does not tell its format: another tensor of the checkpoint, or the config, has to."""


class Codes(StrEnum):
    """Which weight a code stands for."""

    OFFSET = "offset"
    ZERO_FIRST = "zero-first"
    SIGNED = "signed"


@dataclass(frozen=True)
class Packing:
    """Along which dimension four codes share a byte (None: one code a byte), and whether K comes first."""

    along: Literal["k", "n"] | None
    transposed: bool = False

    def shape(self, n: int, k: int) -> tuple[int, int]:
        """The shape of the tensor."""
        rows = -(-n // PER_BYTE) if self.along == "n" else n
        columns = -(-k // PER_BYTE) if self.along == "k" else k
        return (columns, rows) if self.transposed else (rows, columns)

    def __str__(self) -> str:
        packed = f"four a byte along {self.along.upper()}" if self.along else "one a byte"
        return f"{packed}{', transposed' if self.transposed else ''}"


PACKINGS = tuple(Packing(along, transposed) for transposed in (False, True) for along in ("k", "n", None))


@dataclass(frozen=True)
class Format:
    """Packing and codes; None is not known yet."""

    packing: Packing | None = None
    codes: Codes | None = None

    def __str__(self) -> str:
        return f"{self.packing or 'of any packing'}, codes {self.codes or 'of any kind'}"


BITNET = Format(Packing("n"), Codes.OFFSET)


def packing_of(shape: Sequence[int], dtype: torch.dtype, n: int, k: int, known: Packing | None) -> Packing:
    """The packing of a weight [n, k] whose tensor has this shape; `known` decides between several that fit.

    Raises:
        FormatError: the dtype or the shape is that of no packing.
        Undecided: several fit, and `known` is none of them.

    """
    if dtype not in _BYTES:
        raise FormatError(f"is {str(dtype).removeprefix('torch.')}; ternary weights are uint8 or int8")
    fitting = [packing for packing in PACKINGS if packing.shape(n, k) == tuple(shape)]
    if not fitting:
        accepted = "; ".join(f"{list(packing.shape(n, k))} {packing}" for packing in PACKINGS)
        raise FormatError(f"has the shape {list(shape)}; a weight of {n} outputs and {k} inputs is {accepted}")
    if len(fitting) == 1:
        return fitting[0]
    if known in fitting:
        assert known is not None
        return known
    raise Undecided


def raw_codes(tensor: torch.Tensor, packing: Packing, n: int, k: int) -> torch.Tensor:
    """The bytes [n, k] that hold one code each: 2 bits of packed tensors, whole bytes of others."""
    tensor = (tensor.T if packing.transposed else tensor).contiguous()
    if packing.along is None:
        return tensor
    tensor = tensor.view(torch.uint8)
    quarters = [(tensor >> 2 * i) & 3 for i in range(PER_BYTE)]
    if packing.along == "k":
        return torch.stack(quarters, dim=2).flatten(1)[:, :k]
    return torch.cat(quarters)[:n]


def values_of(codes: torch.Tensor, packed: bool, known: Codes | None) -> tuple[torch.Tensor, Codes]:
    """The weights, int8 [n, k] of -1, 0 and +1, and the mapping that was found; `known` counts where data say nothing.

    Raises:
        FormatError: a code is 3, or the bytes are neither codes nor weights.
        Undecided: the data do not tell the mapping, and `known` is None.

    """
    if not packed and codes.dtype == torch.int8 and bool(((codes >= -1) & (codes <= 1)).all()):
        if bool((codes < 0).any()):
            return codes, Codes.SIGNED
        # Without a -1 these may be codes; what the others of the checkpoint are decides.
        if known is Codes.SIGNED:
            return codes, Codes.SIGNED
    low = (codes.view(torch.uint8) & 3) if not packed else codes
    counts = [int((low == code).count_nonzero()) for code in range(4)]
    if counts[3]:
        raise FormatError(
            f"has {counts[3]} codes of value 3 among {low.numel()}; codes are 0, 1, 2 for the weights -1, 0, +1, or "
            "for 0, +1, -1; or bytes of -1, 0, +1"
        )
    mapping = codes_from_counts(counts[:3]) or known
    if mapping is None or mapping is Codes.SIGNED:
        raise Undecided
    signed = low.view(torch.int8)
    if mapping is Codes.OFFSET:
        return signed - 1, mapping
    return signed - 3 * (signed == 2), mapping


def codes_from_counts(counts: Sequence[int]) -> Codes | None:
    """The mapping under which +1 and -1 are about equally many, from how often each code occurs; None: not clear."""
    total = sum(counts)
    offset = abs(counts[0] - counts[2]) / total
    zero_first = abs(counts[1] - counts[2]) / total
    even = _EVEN + 4 / math.sqrt(total)
    best, other = sorted((offset, zero_first))
    if not best <= even < other or other < _TIMES * best:
        return None
    return Codes.OFFSET if offset < zero_first else Codes.ZERO_FIRST


def scales_of(tensor: torch.Tensor, n: int, k: int) -> torch.Tensor:
    """The scales [n, groups], in the dtype of the file, of a tensor that has one for all, a row, or a group of columns.

    Raises:
        FormatError: dtype, shape or a value is impossible.

    """
    if tensor.dtype not in SCALE_DTYPES:
        raise FormatError(f"is {str(tensor.dtype).removeprefix('torch.')}; scales are float16, bfloat16 or float32")
    if not bool(torch.isfinite(tensor).all()):
        bad = (~torch.isfinite(tensor)).flatten().nonzero()[0, 0].item()
        raise FormatError(f"is not finite: element {bad} of {tensor.numel()} is {tensor.flatten()[bad].item()}")
    shape = tuple(size for size in tensor.shape if size != 1) or (1,)
    if tensor.numel() == 1:
        return tensor.reshape(1, 1).expand(n, 1).contiguous()
    if tensor.numel() == n and len(shape) == 1:
        return tensor.reshape(n, 1)
    if len(shape) == 1 and n == 1 and k % shape[0] == 0:
        return tensor.reshape(1, -1)
    if len(shape) == 2 and shape[0] == n and k % shape[1] == 0:
        return tensor.reshape(shape)
    if len(shape) == 2 and shape[1] == n and k % shape[0] == 0:
        return tensor.reshape(shape).T.contiguous()
    raise FormatError(
        f"has the shape {list(tensor.shape)}; a weight of {n} outputs and {k} inputs has one scale, {n} scales, or "
        f"[{n}, groups] or [groups, {n}] of them, where groups divides {k}"
    )


def reciprocal(scales: torch.Tensor) -> torch.Tensor:
    """The scales that multiply where the file has those that divide, float32.

    Raises:
        FormatError: one is 0.

    """
    if not bool(scales.all()):
        raise FormatError("has a scale of 0, by which weights would be divided")
    return scales.float().reciprocal()


def pack_bytes(values: torch.Tensor) -> torch.Tensor:
    """Weights int8 [n, k] as OFFSET codes, uint8 [n, ceil(k / 4)], the first of four in the lowest bits; padding is 0.

    What `graft quantize ternary` writes.
    """
    n, k = values.shape
    codes = torch.nn.functional.pad(values, (0, -k % PER_BYTE)).add(1).view(torch.uint8)
    quarters = codes.view(n, -1, PER_BYTE)
    packed = quarters[:, :, 0] | quarters[:, :, 1] << 2 | quarters[:, :, 2] << 4 | quarters[:, :, 3] << 6
    return packed.contiguous()


def unpack_bytes(packed: torch.Tensor, k: int) -> torch.Tensor:
    """The inverse of `pack_bytes`."""
    return raw_codes(packed, Packing("k"), packed.shape[0], k).to(torch.int8) - 1
