"""Bytes of FP8 e4m3 (1 sign, 4 exponent, 3 mantissa bits, bias 7, no infinity) on cards with and without FP8 hardware.

The grid of e4m3 scaled by 2^-8 is that of an FP16 number cut after three mantissa bits, which is Triton's float8e4b15:
storing x as e4m3 and storing x * 2^-8 as e4b15 give the same byte.  So one byte serves every card; where the
conversion is no instruction (compute capability below 8.9) integer operations make it, bit for bit the same.
"""

from __future__ import annotations

import triton
import triton.language as tl

MAX = 448.0
"""The largest finite e4m3 number; larger magnitudes are stored as this one."""
MIN_HARDWARE_CAPABILITY = (8, 9)
"""From this compute capability on, the conversion from and to e4m3 is an instruction."""

_MAX = tl.constexpr(MAX)


@triton.jit
def to_e4m3(x, HARDWARE: tl.constexpr):
    """The e4m3 bytes of FP32 values: rounded to nearest even, saturated at 448; NaN becomes 0x7f."""
    if HARDWARE:
        bounded = tl.where(x == x, tl.clamp(x, -_MAX, _MAX), x)
        byte = bounded.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        byte = tl.where(x == x, byte, 0x7F)
    else:
        magnitude = tl.minimum(tl.abs(x), _MAX)
        bits = magnitude.to(tl.int32, bitcast=True)
        # half a step is added less one, and one more when the last kept bit is odd; the exponent's bias is 127 - 7
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
        # below 2^-6 the step is 2^-9, that of FP32 at 2^14: the addition rounds
        subnormal = (magnitude + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
        sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
        byte = sign | tl.where(magnitude < 0.015625, subnormal, normal)
        byte = tl.where(x == x, byte, 0x7F).to(tl.uint8)
    return byte


@triton.jit
def from_e4m3(byte):
    """The FP16 values of e4m3 bytes, exactly: as bits of FP16 they are the values times 2^-8."""
    wide = byte.to(tl.uint16)
    scaled = (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True)
    return tl.where((wide & 0x7F) == 0x7F, float("nan"), scaled * 256.0)
