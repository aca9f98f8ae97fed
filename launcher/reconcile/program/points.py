"""The points of a model where two engines are compared, under names that both have, and the hooks that record them.

embed, norm               the embedding's output, and what lm_head gets
layers.3                  the residual stream behind decoder layer 3
layers.3.mlp              what a block of the layer adds to the stream
layers.3.mlp.gate_proj    the output of a linear layer; vLLM's fused ones are split into the checkpoint's
layers.3.self_attn.o_proj.input    what comes out of attention, behind the KV cache
logits                    written by the engines' own code
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from launcher.reconcile.program.problems import Problem
from launcher.reconcile.program.recorder import Recorder

_STACKS = ("layers", "h", "blocks")
_OTHER_STACKS = ("visual", "vision", "audio", "mtp")
_EMBEDDINGS = ("embed_tokens", "wte")
_NORMS = ("norm", "final_layernorm", "ln_f")
_LAST_LINEARS = ("o_proj", "out_proj", "down_proj")
"""Linear layers whose input no other hook sees: attention's own result, and the gated product."""
Write = Callable[[str, torch.Tensor], None]


@contextmanager
def recording(model: nn.Module, layers: int, recorder: Recorder) -> Iterator[None]:
    """Record every point while the block runs; the hooks are gone afterwards, also after an error.

    Args:
        model: transformers' or vLLM's.
        layers: how many decoder layers config.json has.
        recorder: where the activations go.

    Raises:
        Problem: the model has no stack of so many layers.

    """
    handles: list[Any] = []
    try:
        _hook(model, layers, recorder.write, handles)
        yield
    finally:
        for handle in handles:
            handle.remove()


def _hook(model: nn.Module, layers: int, write: Write, handles: list[Any]) -> None:
    parent, stack = _stack(model, layers)
    packed: dict[str, list[str]] = getattr(model, "packed_modules_mapping", None) or {}
    for name, child in parent.named_children():
        point = "embed" if name in _EMBEDDINGS else "norm" if name in _NORMS else None
        if point is not None:
            handles.append(_after(child, partial(_write_first, write, point)))
    for number, layer in enumerate(stack):
        place = f"layers.{number}"
        for name, module in layer.named_modules():
            if "Linear" in type(module).__name__:
                handles += _linear(module, f"{place}.{name}", packed, write)
            elif name and "." not in name and any(True for _ in module.children()):
                handles.append(_after(module, partial(_write_first, write, f"{place}.{name}")))
        handles.append(_after(layer, partial(_write_stream, write, place)))


def _stack(model: nn.Module, layers: int) -> tuple[nn.Module, nn.ModuleList]:
    """The decoder's list of layers, and the module that it belongs to."""
    found = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
        and name.rpartition(".")[2] in _STACKS
        and not any(part in name for part in _OTHER_STACKS)
    }
    for name, module in found.items():
        if len(module) == layers:
            return model.get_submodule(name.rpartition(".")[0]), module
    have = ", ".join(f"{name} of {len(module)}" for name, module in found.items()) or "none"
    raise Problem(
        f"{type(model).__name__}: config.json has {layers} decoder layers; the model's lists of layers: {have}"
    )


def _linear(module: nn.Module, point: str, packed: dict[str, list[str]], write: Write) -> Iterator[Any]:
    prefix, _, leaf = point.rpartition(".")
    if leaf in _LAST_LINEARS:
        yield module.register_forward_pre_hook(
            lambda _, args, kwargs: write(f"{point}.input", args[0] if args else next(iter(kwargs.values()))),
            with_kwargs=True,
        )
    parts, sizes = packed.get(leaf, [leaf]), getattr(module, "output_sizes", None)
    if len(parts) == 1 or sizes is None or len(sizes) != len(parts):
        yield _after(module, partial(_write_first, write, point))
        return
    names = [f"{prefix}.{part}" for part in parts]

    def split(output: Any) -> None:
        for name, part in zip(names, _first(output).split(list(sizes), dim=-1), strict=True):
            write(name, part)

    yield _after(module, split)


def _after(module: nn.Module, take: Callable[[Any], None]) -> Any:
    """Call `take` with what the module returns, or with the tensor `output` that it fills."""

    def hook(_: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        take(kwargs.get("output") if output is None else output)

    return module.register_forward_hook(hook, with_kwargs=True)


def _write_first(write: Write, point: str, output: Any) -> None:
    write(point, _first(output))


def _write_stream(write: Write, point: str, output: Any) -> None:
    write(point, _stream(output))


def _first(output: Any) -> torch.Tensor:
    tensor: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return tensor


def _stream(output: Any) -> torch.Tensor:
    """The residual stream: vLLM's layers return what the last block adds and the stream before, for a fused norm."""
    if isinstance(output, tuple) and len(output) == 2 and isinstance(output[1], torch.Tensor):
        added, stream = output
        if added.shape == stream.shape:
            total: torch.Tensor = added + stream
            return total
    return _first(output)
