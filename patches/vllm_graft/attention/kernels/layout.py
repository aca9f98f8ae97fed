"""The packed slot that TurboQuant keeps for one token and one KV head: what is where, as data.

vLLM 0.33.0 is the layout's truth: `TurboQuantConfig` for sizes, `triton_turboquant_store` for the order of the bits.

    [ key codes | key norm, fp16, MSE keys only | value codes | value scale, fp16 | value zero, fp16 | padding to even ]

Codes lie in the order of the dimensions, least significant bits first: code i of b bits has the bits [b*i, b*i + b) of
the little-endian bit string.  An FP8 key is its e4m3 bytes.  An MSE key is norm * (centroids[codes] @ rotation), with
the centroids' vector scaled to length 1 where the preset corrects norms.  A value is scale * codes + zero.
"""

from __future__ import annotations

from dataclasses import dataclass

E4M3_IN_FP16 = 2.0**-8
"""An e4m3 byte b read as fp16 bits (b & 0x80) << 8 | (b & 0x7f) << 7 is its value times this, subnormals included."""


@dataclass(frozen=True)
class Preset:
    """One of vLLM's `--kv-cache-dtype turboquant_*`; key_bits is 8 for FP8 keys."""

    name: str
    key_bits: int
    value_bits: int
    norm_correction: bool


PRESETS = {
    preset.name: preset
    for preset in (
        Preset("turboquant_k8v4", key_bits=8, value_bits=4, norm_correction=False),
        Preset("turboquant_4bit_nc", key_bits=4, value_bits=4, norm_correction=True),
        Preset("turboquant_k3v4_nc", key_bits=3, value_bits=4, norm_correction=True),
        Preset("turboquant_3bit_nc", key_bits=3, value_bits=3, norm_correction=True),
    )
}


@dataclass(frozen=True)
class SlotLayout:
    """Byte offsets within the slot of one token and KV head, for a preset and a head size."""

    preset: Preset
    head_size: int

    @property
    def key_is_fp8(self) -> bool:
        return self.preset.key_bits == 8

    @property
    def num_centroids(self) -> int:
        """Size of the MSE codebook; 0 with FP8 keys."""
        return 0 if self.key_is_fp8 else 1 << self.preset.key_bits

    @property
    def key_code_bytes(self) -> int:
        return packed_bytes(self.head_size, self.preset.key_bits)

    @property
    def norm_offset(self) -> int:
        """Where the fp16 norm of an MSE key lies; an FP8 key has none, and its value codes begin here."""
        return self.key_code_bytes

    @property
    def value_offset(self) -> int:
        return self.key_code_bytes + (0 if self.key_is_fp8 else 2)

    @property
    def value_code_bytes(self) -> int:
        return packed_bytes(self.head_size, self.preset.value_bits)

    @property
    def scale_offset(self) -> int:
        return self.value_offset + self.value_code_bytes

    @property
    def zero_offset(self) -> int:
        return self.scale_offset + 2

    @property
    def slot_bytes(self) -> int:
        """Bytes from one KV head's slot to the next: vLLM rounds up to an even number."""
        size = self.zero_offset + 2
        return size + size % 2


def packed_bytes(codes: int, bits: int) -> int:
    """Bytes that hold this many codes of so many bits."""
    return -(-codes * bits // 8)


def slot_layout(preset: str, head_size: int) -> SlotLayout:
    """Return the layout of a preset by vLLM's name for it."""
    try:
        return SlotLayout(PRESETS[preset], head_size)
    except KeyError:
        raise ValueError(f"unknown TurboQuant preset {preset!r}; one of {', '.join(PRESETS)}") from None
