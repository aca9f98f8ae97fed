"""The centroids of MSE keys as the decode kernel takes them: FP16 numbers, and the instructions that look them up.

A byte permutation (`prmt`) chooses each byte of its result among eight by a 4-bit selector, so it looks four codes up
in a table of eight bytes: an FP16 centroid takes two, for its high and its low byte.  The tables are constants of the
instructions, since Triton computes in the layout of a product's operand only what depends on loads and constants.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_FACTORS = 2**13 + 1
"""Factors that are tried; of 2^13 the best rounds centroids to a fourth of what a power of two does, or less."""


@dataclass(frozen=True)
class Codebook:
    """Centroids times a factor, which the correction of norms cancels, and their look-up in PTX."""

    values: tuple[float, ...]
    lookup: str


def prepare_codebook(centroids: torch.Tensor) -> Codebook:
    """Return the codebook of 8 or 16 ascending centroids, symmetric about zero; at set-up, since it reads them."""
    values = centroids.detach().to("cpu", torch.float64)
    if values.numel() not in (8, 16):
        raise ValueError(f"centroids: got {values.numel()} of them; MSE keys have 8 or 16")
    if not torch.allclose(values, -values.flip(0), rtol=0, atol=1e-4 * values.abs().max().item()):
        raise ValueError("centroids: not symmetric about zero, as the look-up takes those of TurboQuant's keys to be")
    values = (values - values.flip(0)) / 2
    rounded = _in_fp16(values / values.abs().max())
    bits = [number & 0xFFFF for number in rounded.view(torch.int16).tolist()]
    tables = _tables(bits[-8:])
    return Codebook(tuple(rounded.tolist()), (_LOOKUP_4 if len(bits) == 16 else _LOOKUP_3).replace("TABLES", tables))


def _in_fp16(values: torch.Tensor) -> torch.Tensor:
    """The values [n], up to 1, in FP16 times the factor in [1, 2) that leaves the least of the rounding.

    An error that is common to all values counts as none: it is part of the factor.
    """
    scaled = values[None, :] * torch.linspace(1.0, 2.0, _FACTORS, dtype=values.dtype)[:-1, None]
    rounded = scaled.to(torch.float16)
    numbers = rounded.to(values.dtype)
    common = (numbers * values).sum(1) / values.square().sum()
    errors = (numbers / common[:, None] - values).square().sum(1)
    return rounded[int(errors.argmin())]


def _tables(bits: list[int]) -> str:
    """Registers h0, h1, l0, l1 of the high and the low bytes of eight FP16 numbers."""
    lines = []
    for name, shift in (("h", 8), ("l", 0)):
        for half in (0, 1):
            bytes_ = [number >> shift & 0xFF for number in bits[4 * half : 4 * half + 4]]
            word = sum(byte << (8 * place) for place, byte in enumerate(bytes_))
            lines.append(f"mov.b32 {name}{half}, 0x{word:08X};")
    return " ".join(lines)


# Two words of four 4-bit codes each; $0 and $1 are the four centroids of each word, in one result for the sake of the
# layout.  The tables hold the positive half: the code's low three bits choose from it, complemented (n - n / 8 is 7
# where the sign bit n is 8) below zero, and t holds the sign bits of four codes in four bytes.
_LOOKUP_4 = """{
.reg .b32 n, s, i, a, b, t, x, y, h0, h1, l0, l1;
TABLES
not.b32 n, $2; and.b32 n, n, 0x88888888;
shr.u32 i, n, 3; sub.u32 i, n, i; xor.b32 i, i, $2; and.b32 i, i, 0x77777777;
shl.b32 s, n, 4;
prmt.b32 a, h0, h1, i; prmt.b32 b, l0, l1, i;
prmt.b32 t, n, s, 0x1504; and.b32 t, t, 0x80808080; xor.b32 a, a, t;
prmt.b32 x, b, a, 0x5140; prmt.b32 y, b, a, 0x7362; mov.b64 $0, {x, y};
shr.u32 i, i, 16;
prmt.b32 a, h0, h1, i; prmt.b32 b, l0, l1, i;
prmt.b32 t, n, s, 0x3726; and.b32 t, t, 0x80808080; xor.b32 a, a, t;
prmt.b32 x, b, a, 0x5140; prmt.b32 y, b, a, 0x7362; mov.b64 $1, {x, y};
}"""

# Two words of eight 3-bit codes each, whose table is all of them; four codes at a time are spread to one in four bits.
_SPREAD = """shl.b32 u, c, 2; and.b32 t, c, 0x03F; and.b32 u, u, 0x3F00; or.b32 t, t, u;
shl.b32 u, t, 1; and.b32 t, t, 0x0707; and.b32 u, u, 0x7070; or.b32 i, t, u;
prmt.b32 a, h0, h1, i; prmt.b32 b, l0, l1, i;"""
_LOOKUP_3 = f"""{{
.reg .b32 c, i, t, u, a, b, x, y, z, w, h0, h1, l0, l1;
TABLES
and.b32 c, $8, 0xFFF;
{_SPREAD}
prmt.b32 x, b, a, 0x5140; prmt.b32 y, b, a, 0x7362;
and.b32 c, $9, 0xFFF;
{_SPREAD}
prmt.b32 z, b, a, 0x5140; prmt.b32 w, b, a, 0x7362;
prmt.b32 $0, x, z, 0x5410; prmt.b32 $1, x, z, 0x7632;
prmt.b32 $2, y, w, 0x5410; prmt.b32 $3, y, w, 0x7632;
shr.u32 c, $8, 12; and.b32 c, c, 0xFFF;
{_SPREAD}
prmt.b32 x, b, a, 0x5140; prmt.b32 y, b, a, 0x7362;
shr.u32 c, $9, 12; and.b32 c, c, 0xFFF;
{_SPREAD}
prmt.b32 z, b, a, 0x5140; prmt.b32 w, b, a, 0x7362;
prmt.b32 $4, x, z, 0x5410; prmt.b32 $5, x, z, 0x7632;
prmt.b32 $6, y, w, 0x5410; prmt.b32 $7, y, w, 0x7632;
}}"""
