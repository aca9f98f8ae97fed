"""What the store and the dequantization must do, in plain torch: slots from keys and values, and back."""

from __future__ import annotations

import torch

from vllm_graft.attention.kernels.layout import SlotLayout


def hadamard(size: int) -> torch.Tensor:
    """The orthonormal Hadamard matrix in Sylvester's order, FP32 [size, size]; size is a power of two."""
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / size**0.5


def e4m3_bytes(x: torch.Tensor) -> torch.Tensor:
    """The e4m3 bytes of x, saturated at 448; NaN is 0x7f."""
    x = x.float()
    return torch.where(x.isnan(), 0x7F, x.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8))


def packed(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Bytes [..., D * bits / 8] of codes [..., D], least significant bits first."""
    string = (codes.unsqueeze(-1) >> torch.arange(bits)) & 1
    string = string.flatten(-2).unflatten(-1, (-1, 8))
    return (string << torch.arange(8)).sum(-1).to(torch.uint8)


def unpacked(data: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes [..., D] of bytes [..., D * bits / 8]."""
    string = (data.long().unsqueeze(-1) >> torch.arange(8)) & 1
    string = string.flatten(-2).unflatten(-1, (-1, bits))
    return (string << torch.arange(bits)).sum(-1)


def slots(key: torch.Tensor, value: torch.Tensor, midpoints: torch.Tensor, layout: SlotLayout) -> torch.Tensor:
    """The packed slots uint8 [..., slot] of key and value [..., D]."""
    key, value = key.float(), value.float()
    if layout.key_is_fp8:
        parts = [e4m3_bytes(key)]
    else:
        norm = key.norm(dim=-1, keepdim=True)
        y = key / (norm + 1e-8) @ hadamard(layout.head_size)
        parts = [packed((y.unsqueeze(-1) >= midpoints).sum(-1), layout.preset.key_bits), _half_bytes(norm)]
    levels = 2**layout.preset.value_bits - 1
    zero = value.amin(-1, keepdim=True)
    scale = ((value.amax(-1, keepdim=True) - zero) / levels).clamp(min=1e-8)
    codes = ((value - zero) / scale + 0.5).long().clamp(0, levels)
    parts += [packed(codes, layout.preset.value_bits), _half_bytes(scale), _half_bytes(zero)]
    used = torch.cat(parts, dim=-1)
    return torch.nn.functional.pad(used, (0, layout.slot_bytes - used.shape[-1]))


def contents(data: torch.Tensor, centroids: torch.Tensor, layout: SlotLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values FP32 [..., D] of slots uint8 [..., slot]; MSE keys are still rotated."""
    if layout.key_is_fp8:
        keys = data[..., : layout.head_size].contiguous().view(torch.float8_e4m3fn).float()
    else:
        keys = centroids.float()[unpacked(data[..., : layout.key_code_bytes], layout.preset.key_bits)]
        if layout.preset.norm_correction:
            keys = keys / keys.norm(dim=-1, keepdim=True)
        keys = keys * _half(data, layout.norm_offset)
    codes = unpacked(data[..., layout.value_offset : layout.scale_offset], layout.preset.value_bits)
    return keys, codes * _half(data, layout.scale_offset) + _half(data, layout.zero_offset)


def _half_bytes(number: torch.Tensor) -> torch.Tensor:
    return number.half().contiguous().view(torch.uint8)


def _half(data: torch.Tensor, at: int) -> torch.Tensor:
    return data[..., at : at + 2].contiguous().view(torch.float16).float()
