"""What the ternary kernels compute, in plain PyTorch: the truth that they are compared with."""

from __future__ import annotations

import torch

from vllm_graft.quantization.ternary.layout import TernaryWeight, unpack_scales, unpack_words


def dequantize(weight: TernaryWeight, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The weight [n, k] in full precision."""
    values = unpack_words(weight.words, weight.n, weight.k)
    scales = unpack_scales(weight.scales, weight.n).float()
    columns = scales.repeat_interleave(weight.group, dim=1)[:, : weight.k]
    return (values.float() * columns).to(dtype)


def linear(x: torch.Tensor, weight: TernaryWeight) -> torch.Tensor:
    """x [m, k] times the transposed weight [n, k], in float32."""
    return x.float() @ dequantize(weight).T
