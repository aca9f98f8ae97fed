"""Linear layers of ternary weights in vLLM: load any format that `formats` tells, lay it out once, multiply.

While a checkpoint is loaded a layer holds OFFSET codes, four a byte along K, each rank's part of K padded by itself: so
vLLM's own loaders cut and place them as they do any weight, whatever the layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.nn import Parameter
from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.layers.linear import (
    LinearMethodBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    register_weight_loader_v2_supported_method,
)
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.parameter import ModelWeightParameter
from vllm.platforms import current_platform

from vllm_graft.quantization.ternary import formats, layout, ops
from vllm_graft.quantization.ternary.config import TernaryConfig
from vllm_graft.quantization.ternary.formats import PER_BYTE, Format, FormatError

Shard = str | int | tuple[int, ...] | None
_ZEROS = 0b01010101  # a byte of four weights of 0
_DUMMY_SCALE = 0.02


@register_weight_loader_v2_supported_method
class TernaryLinearMethod(LinearMethodBase):  # type: ignore[misc]
    """One layer's ternary weight."""

    def __init__(self, config: TernaryConfig, prefix: str) -> None:
        self.config = config
        self.prefix = prefix
        vllm_config = get_current_vllm_config_or_none()
        self.is_dummy = vllm_config is not None and vllm_config.load_config.load_format == "dummy"

    def create_weights(
        self,
        layer: torch.nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Register `weight`, uint8 [n, ceil(k / 4)], and `weight_scale` [n, groups], which takes the file's groups."""
        n, k = sum(output_partition_sizes), input_size_per_partition
        layer.ternary_k = k
        layer.ternary_ranks = input_size // k
        layer.ternary_dtype = params_dtype
        layer.ternary_loaded = {"weight": set(), "weight_scale": set()}
        place = extra_weight_attrs["weight_loader"]
        groups = k // self.config.group_size if self.config.group_size and k % self.config.group_size == 0 else 1
        tensors = {
            "weight": torch.full((n, -(-k // PER_BYTE)), _ZEROS, dtype=torch.uint8),
            "weight_scale": torch.zeros(n, groups, dtype=torch.float16),
        }
        for name, load in (("weight", self._load_weight), ("weight_scale", self._load_scale)):
            loader = partial(load, layer, place)
            layer.register_parameter(
                name, ModelWeightParameter(data=tensors[name], input_dim=1, output_dim=0, weight_loader=loader)
            )

    def _load_weight(
        self, layer: Any, place: Callable[..., None], param: Parameter, tensor: torch.Tensor, shard: Shard = None
    ) -> None:
        name = f"{self._name(layer, shard)}.weight"
        self.config.formats.take(name, partial(self._place_weight, name, layer, place, param, tensor, shard))

    def _place_weight(
        self,
        name: str,
        layer: Any,
        place: Callable[..., None],
        param: Parameter,
        tensor: torch.Tensor,
        shard: Shard,
    ) -> Format:
        n, k = disk_rows(layer, shard), layer.ternary_k * layer.ternary_ranks
        known = self.config.formats.known
        with _naming(name):
            packing = formats.packing_of(tensor.shape, tensor.dtype, n, k, known.packing)
            codes = formats.raw_codes(tensor.to(param.device), packing, n, k)
            values, mapping = formats.values_of(codes, packing.along is not None, known.codes)
        parts = [formats.pack_bytes(part) for part in values.chunk(layer.ternary_ranks, dim=1)]
        self._place(layer, place, param, torch.cat(parts, dim=1), shard)
        return Format(packing, mapping)

    def _load_scale(
        self, layer: Any, place: Callable[..., None], param: Parameter, tensor: torch.Tensor, shard: Shard = None
    ) -> None:
        n, k, ranks = disk_rows(layer, shard), layer.ternary_k * layer.ternary_ranks, layer.ternary_ranks
        with _naming(f"{self._name(layer, shard)}.weight_scale"):
            scales = formats.scales_of(tensor.to(param.device), n, k)
            if self.config.scales_divide:
                scales = formats.reciprocal(scales)
            groups = scales.shape[1]
            self.config.note_group(None if groups == 1 else k // groups)
            if groups == 1:
                scales = scales.expand(n, ranks)
            else:
                _refuse_group(k // groups, k, ranks)
            self._make_room(layer, param, scales.shape[1] // ranks, scales.dtype)
        repeats = param.shape[1] * ranks // scales.shape[1]
        self._place(layer, place, param, scales.repeat_interleave(repeats, dim=1).to(param.dtype), shard)

    def _place(
        self, layer: Any, place: Callable[..., None], param: Parameter, tensor: torch.Tensor, shard: Shard
    ) -> None:
        """Give a tensor, laid out as the parameter is, to vLLM's loader of the layer."""
        place(param, tensor, *([] if shard is None else [shard]))
        parts = set(self._parts(layer)) if shard is None else set(shard) if isinstance(shard, tuple) else {shard}
        layer.ternary_loaded["weight" if param is layer.weight else "weight_scale"] |= parts

    def _make_room(self, layer: Any, param: Parameter, groups: int, dtype: torch.dtype) -> None:
        """Make the parameter hold `groups` scales a row of `dtype`, besides those of the parts that are there."""
        old = param.data
        if not layer.ternary_loaded["weight_scale"]:
            if old.shape[1] != groups or old.dtype != dtype:
                param.data = torch.zeros(old.shape[0], groups, dtype=dtype, device=old.device)
            return
        finer, coarser = max(groups, old.shape[1]), min(groups, old.shape[1])
        if finer % coarser:
            raise FormatError(
                f"has {groups} scales a row; the other parts of {self.prefix} have {old.shape[1]}: one has to be a "
                "multiple of the other"
            )
        param.data = old.repeat_interleave(finer // old.shape[1], dim=1).to(torch.promote_types(old.dtype, dtype))

    def _name(self, layer: Any, shard: Shard) -> str:
        """The module's name in the checkpoint, of one part, of several together, or of the whole layer."""
        return self._parts(layer).get(shard[0] if isinstance(shard, tuple) else shard, self.prefix)

    def _parts(self, layer: Any) -> dict[Shard, str]:
        """The parts of a layer that a checkpoint may hold by themselves, with their module names there."""
        parent, dot, own = self.prefix.rpartition(".")
        parts: tuple[Shard, ...] = (None,)
        if isinstance(layer, QKVParallelLinear):
            parts = ("q", "k", "v")
        elif isinstance(layer, MergedColumnParallelLinear):
            parts = tuple(range(len(layer.output_sizes)))
        names = list(self.config.packed_modules_mapping.get(own, ()))
        # Where there are fewer, the first is of several parts: in_proj_qkv of in_proj_qkvz (Qwen3.5).
        names = names[:1] * (len(parts) - len(names)) + names
        if len(names) != len(parts):
            names = [own if part is None else f"{own}[{part}]" for part in parts]
        return {part: f"{parent}{dot}{name}" for part, name in zip(parts, names, strict=True)}

    def _refuse_missing(self, layer: Any) -> None:
        missing = dict.fromkeys(
            f"{name}.{suffix}"
            for part, name in self._parts(layer).items()
            for suffix, loaded in layer.ternary_loaded.items()
            if part not in loaded
        )
        if missing:
            raise ValueError(
                f"{', '.join(missing)}: not in the checkpoint; each ternary layer has a weight and a weight_scale, and "
                "one that is not ternary has a weight in floating point"
            )

    def process_weights_after_loading(self, layer: Any) -> None:
        """Lay the weight out for the kernels, on the device of the layer.

        Raises:
            ValueError: tensors of the layer were not in the checkpoint.

        """
        if self.is_dummy:
            random = layer.weight.data
            random.bitwise_and_(~((random >> 1) & random & _ZEROS))  # no code is 3
            layer.weight_scale.data.fill_(_DUMMY_SCALE)
        else:
            self.config.formats.settle()
            self._refuse_missing(layer)
        scales = layer.weight_scale.data
        if current_platform.is_cpu():
            layer.weight = Parameter(layer.weight.data, requires_grad=False)
            layer.weight_scale = Parameter(scales, requires_grad=False)
            return
        values = formats.unpack_bytes(layer.weight.data, layer.ternary_k)
        packed = layout.pack(values, scales)
        layer.ternary_n, layer.ternary_group = packed.n, packed.group
        layer.weight = Parameter(packed.words, requires_grad=False)
        layer.weight_scale = Parameter(packed.scales, requires_grad=False)
        if packed.words.is_cuda:
            self._compile(layer)

    def _compile(self, layer: Any) -> None:
        """Multiply once by each kernel that the layer may need, so that none is compiled while requests wait."""
        from vllm_graft.quantization.ternary import kernels

        sizes = (layer.ternary_n, layer.ternary_k, layer.ternary_group)
        weight = layout.TernaryWeight(layer.weight, layer.weight_scale, *sizes)
        bias = getattr(layer, "bias", None)
        for count, config in kernels.to_compile(*sizes, kernels.card_of(layer.weight.device)):
            x = torch.zeros(count, layer.ternary_k, dtype=layer.ternary_dtype, device=layer.weight.device)
            for added in (None,) if bias is None else (bias, None):  # not all ranks add it, nor all kinds of layers
                kernels.linear(x, weight, added, config)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        if current_platform.is_cpu():
            y = ops.linear_bytes(rows, layer.weight, layer.weight_scale, bias, layer.ternary_k)
        else:
            sizes = (layer.ternary_n, layer.ternary_k, layer.ternary_group)
            y = ops.linear(rows, layer.weight, layer.weight_scale, bias, *sizes)
        return y.reshape(*x.shape[:-1], y.shape[-1])


def disk_rows(layer: Any, shard: Shard) -> int:
    """How many outputs a tensor of the checkpoint has: those of one part of a fused layer, or of all of them."""
    if isinstance(layer, VocabParallelEmbedding):
        return int(layer.org_vocab_size)
    if isinstance(layer, QKVParallelLinear):
        kv_heads = layer.total_num_kv_heads
        rows = {"q": layer.total_num_heads * layer.head_size, "k": kv_heads * layer.head_size}
        rows["v"] = kv_heads * layer.v_head_size
        return sum(rows.values()) if shard is None else int(rows[str(shard)])
    sizes: Sequence[int] | None = getattr(layer, "output_sizes", None)
    if sizes is None or shard is None:
        return int(layer.output_size)
    return sum(sizes[one] for one in shard) if isinstance(shard, tuple) else sizes[int(shard)]


@contextmanager
def _naming(tensor: str) -> Iterator[None]:
    """Put a tensor's name into what a refusal says."""
    try:
        yield
    except FormatError as error:
        raise FormatError(f"{tensor} {error}") from error


def _refuse_group(group: int, k: int, ranks: int) -> None:
    if (k // ranks) % group:
        raise FormatError(
            f"has a scale for each {group} columns; each of {ranks} tensor-parallel ranks holds {k // ranks} columns, "
            f"which splits a group: use a number of ranks that divides {k // group}, or one scale a row"
        )
    try:
        layout.kernel_group(group, k // ranks)
    except ValueError as error:
        raise FormatError(f"has {error}") from error
