"""The products as custom operators: torch.compile sees one opaque call, whose kernel is chosen when it runs."""

from __future__ import annotations

import torch
from torch.library import Library
from vllm.utils.torch_utils import direct_register_custom_op

from vllm_graft.quantization.ternary import cpu
from vllm_graft.quantization.ternary.layout import TernaryWeight

_LIBRARY = Library("graft", "FRAGMENT")  # the operators live as long as it does


def _linear(
    x: torch.Tensor, words: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, n: int, k: int, group: int
) -> torch.Tensor:
    from vllm_graft.quantization.ternary import kernels

    return kernels.linear(x, TernaryWeight(words, scales, n, k, group), bias)


def _linear_shape(
    x: torch.Tensor, words: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, n: int, k: int, group: int
) -> torch.Tensor:
    return x.new_empty(x.shape[0], n)


def _linear_bytes_shape(
    x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, k: int
) -> torch.Tensor:
    return x.new_empty(x.shape[0], packed.shape[0])


direct_register_custom_op("ternary_linear", _linear, fake_impl=_linear_shape, target_lib=_LIBRARY)
direct_register_custom_op("ternary_linear_bytes", cpu.linear, fake_impl=_linear_bytes_shape, target_lib=_LIBRARY)

linear = torch.ops.graft.ternary_linear
linear_bytes = torch.ops.graft.ternary_linear_bytes
