"""Ternary weights as full ones, read as config.json says; on purpose not by the code that vLLM loads them with."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from launcher.reconcile.program.problems import Problem

_CODES = {"offset": (-1, 0, 1), "zero-first": (0, 1, -1)}
"""The weights of the codes 0, 1 and 2."""


def multiplied_out(
    folder: Path, quantization: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Return the checkpoint's tensors with scaled weights in place of codes and scales.

    `shapes` are the model's; codes of what it has not, such as the layer that drafts, are left out.

    Raises:
        Problem: a tensor is not what config.json says.

    """
    from safetensors.torch import load_file

    stored = {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}
    bitnet = quantization.get("quant_method") == "bitnet"
    divides = quantization.get("scales", "divide" if bitnet else "multiply") == "divide"
    found = {}
    for name, tensor in stored.items():
        if name.endswith(".weight_scale"):
            continue
        if tensor.is_floating_point():
            found[name] = tensor.to(dtype)
            continue
        scale = stored.get(f"{name}_scale")
        if scale is None:
            raise Problem(f"{folder}: {name}: {tensor.dtype} without {name}_scale")
        if name not in shapes:
            continue
        values = _values(name, tensor, {**quantization, **({"packing": "n"} if bitnet else {})}, *shapes[name])
        found[name] = (values * _scales(name, scale.float(), divides, *shapes[name])).to(dtype)
    return found


def _values(name: str, tensor: torch.Tensor, quantization: Mapping[str, Any], n: int, k: int) -> torch.Tensor:
    """The weights -1, 0 and +1 as float32 [n, k]."""
    packing = quantization.get("packing", "k")
    raw = tensor.T if quantization.get("transposed") else tensor
    codes = quantization.get("codes", "offset")
    if packing == "none" and codes == "signed":
        found = raw.to(torch.float32)
    else:
        quarters = [raw.view(torch.uint8) >> 2 * place & 3 for place in range(1 if packing == "none" else 4)]
        placed = torch.stack(quarters, 2).flatten(1) if packing == "k" else torch.cat(quarters)
        table = torch.tensor([*_CODES.get(codes, _CODES["offset"]), float("nan")])
        found = table[placed[:n, :k].long()]
    if found.shape != (n, k) or not bool(torch.isfinite(found).all()):
        raise Problem(
            f"{name}: {list(tensor.shape)} does not hold the codes of [{n}, {k}] as packing {packing}, codes {codes}; "
            "set quantization_config.packing and .codes in config.json to what the tensors are"
        )
    return found


def _scales(name: str, scales: torch.Tensor, divides: bool, n: int, k: int) -> torch.Tensor:
    """The factors as float32, [n, k] or [1, 1]."""
    if divides:
        scales = 1 / scales
    if scales.numel() == 1:
        return scales.reshape(1, 1)
    by_row = scales.reshape(n, -1) if scales.shape[0] == n else scales.T if scales.shape[-1] == n else None
    if by_row is None or k % by_row.shape[1]:
        raise Problem(f"{name}_scale: {list(scales.shape)} fits no weight of [{n}, {k}]")
    return by_row.repeat_interleave(k // by_row.shape[1], dim=1)
