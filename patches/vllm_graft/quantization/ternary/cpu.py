"""The product on the CPU, where vLLM has no Triton: a block of rows is unpacked to the activations' dtype at a time.

It is right and not fast: unpacking costs more than the product at few tokens.
"""

from __future__ import annotations

import torch

from vllm_graft.quantization.ternary.formats import PER_BYTE

_WEIGHTS_AT_ONCE = 1 << 22


def linear(
    x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, k: int
) -> torch.Tensor:
    """x [m, k] times the transposed weight, plus bias [n], in the dtype of x.

    Args:
        x: activations of any floating dtype.
        packed: uint8 [n, ceil(k / 4)], as `formats.pack_bytes` makes it.
        scales: [n, groups].
        bias: [n].
        k: columns of the weight.

    """
    table = _weights_of_bytes(x.dtype, x.device)
    n, groups = scales.shape
    y = x.new_empty(x.shape[0], n)
    rows = max(1, _WEIGHTS_AT_ONCE // k)
    for start in range(0, n, rows):
        block = table[packed[start : start + rows].long()].flatten(1)[:, :k]
        scale = scales[start : start + rows].to(x.dtype)
        if groups == 1:
            y[:, start : start + rows] = x @ block.T * scale.T
        else:
            block = (block.reshape(block.shape[0], groups, -1) * scale[:, :, None]).flatten(1)
            y[:, start : start + rows] = x @ block.T
    return y if bias is None else y + bias


def _weights_of_bytes(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The four weights of each byte, [256, 4]."""
    every = torch.arange(256, device=device)
    codes = torch.stack([(every >> 2 * i) & 3 for i in range(PER_BYTE)], dim=1)
    return (codes - 1).to(dtype)
