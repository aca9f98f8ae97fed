"""Times on a GPU: CUDA graphs over weights that no cache holds, so that launches cost what they cost in an engine."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from vllm_graft.quantization.ternary import kernels, layout
from vllm_graft.quantization.ternary.kernels import GemmConfig, GemvConfig

Config = GemvConfig | GemmConfig
COLD_BYTES = 192 << 20  # three times the L2 cache of an H200


@dataclass(frozen=True)
class Shape:
    """A weight of n outputs and k inputs."""

    n: int
    k: int

    def __str__(self) -> str:
        return f"{self.n}x{self.k}"

    @property
    def packed_bytes(self) -> int:
        """What the kernels read of it, without the scales."""
        return self.n * self.k // 4


def name(config: Config) -> str:
    """A configuration in a few letters."""
    if isinstance(config, GemvConfig):
        early = "e" if config.early else ""
        return f"gemv w{config.warps} r{config.strips} t{config.tiles} s{config.stages}{early}"
    return f"gemm {config.outputs}x{config.tokens} w{config.warps} s{config.stages}"


def weights(shape: Shape, group: int | None, at_least: int = 1) -> list[layout.TernaryWeight]:
    """Random packed weights, enough of them that the first has left the cache when the last was read."""
    copies = max(at_least, -(-COLD_BYTES // shape.packed_bytes))
    return [weight(shape, group, seed) for seed in range(copies)]


def weight(shape: Shape, group: int | None, seed: int, dtype: torch.dtype = torch.float16) -> Any:
    """One random packed weight with positive scales."""
    random = torch.Generator("cuda").manual_seed(seed)
    values = torch.randint(-1, 2, (shape.n, shape.k), generator=random, device="cuda", dtype=torch.int8)
    groups = shape.k // group if group else 1
    scales = torch.rand(shape.n, groups, generator=random, device="cuda") * 0.02 + 0.01
    return layout.pack(values, scales.to(dtype))


def microseconds(calls: Sequence[Callable[[], Any]], least_us: float = 3000) -> float:
    """The median time of one call, all of them captured in one CUDA graph that is replayed."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    once = _elapsed_us(graph, 1)
    replays = max(1, int(least_us / once))
    return statistics.median([_elapsed_us(graph, replays) for _ in range(5)]) / len(calls)


def _elapsed_us(graph: Any, replays: int) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1000 / replays


def copy_us(shape: Shape) -> float:
    """Time of a copy that moves as many bytes as a product reads of its weight, half read and half written."""
    half = shape.packed_bytes // 2
    copies = max(2, -(-COLD_BYTES // half))
    sources = [torch.randint(0, 255, (half,), device="cuda", dtype=torch.uint8) for _ in range(copies)]
    targets = [torch.empty_like(source) for source in sources]
    return microseconds([partial(target.copy_, source) for source, target in zip(sources, targets, strict=True)])


def launch_us() -> float:
    """Time of a kernel that does next to nothing, in a graph of such kernels: no product takes less."""
    small = torch.zeros(32, device="cuda")
    return microseconds([lambda: small.add_(1)] * 64)


def ternary_us(packed: Sequence[Any], m: int, config: Config) -> float:
    """Time of one product of m tokens."""
    x = torch.randn(m, packed[0].k, device="cuda", dtype=torch.bfloat16)
    return microseconds([partial(kernels.linear, x, one, None, config) for one in packed])


def dense_us(shape: Shape, m: int) -> float:
    """Time of the same product by PyTorch (cuBLAS) with bfloat16 weights."""
    copies = max(2, -(-COLD_BYTES // (shape.n * shape.k * 2)))
    dense = [torch.randn(shape.n, shape.k, device="cuda", dtype=torch.bfloat16) for _ in range(copies)]
    x = torch.randn(m, shape.k, device="cuda", dtype=torch.bfloat16)
    return microseconds([partial(torch.nn.functional.linear, x, one) for one in dense])


def marlin_us(shape: Shape, m: int) -> float:
    """Time of the same product by vLLM's Marlin kernel with int4 weights in groups of 128.

    Raises:
        ImportError: there is no vLLM here.

    """
    from vllm import _custom_ops as ops
    from vllm.model_executor.layers.quantization.utils import marlin_utils
    from vllm.scalar_type import scalar_types

    copies = max(2, -(-COLD_BYTES // (shape.n * shape.k // 2)))
    device = torch.device("cuda", torch.cuda.current_device())
    workspace = marlin_utils.marlin_make_workspace_new(device)
    nothing = torch.empty(0, dtype=torch.int32, device=device)
    x = torch.randn(m, shape.k, device=device, dtype=torch.bfloat16)
    calls = []
    for _ in range(copies):
        codes = torch.randint(-(2**31), 2**31 - 1, (shape.k // 8, shape.n), device=device, dtype=torch.int32)
        scales = torch.rand(shape.k // 128, shape.n, device=device, dtype=torch.bfloat16) * 0.01
        calls.append(
            partial(
                marlin_utils.apply_gptq_marlin_linear,
                input=x,
                weight=ops.gptq_marlin_repack(codes, shape.k, shape.n, 4),
                weight_scale=marlin_utils.marlin_permute_scales(scales, shape.k, shape.n, 128),
                weight_zp=nothing,
                workspace=workspace,
                wtype=scalar_types.uint4b8,
                output_size_per_partition=shape.n,
                input_size_per_partition=shape.k,
            )
        )
    return microseconds(calls)


def error(m: int, shape: Shape, group: int | None, dtype: torch.dtype, config: Config | None, bias: bool) -> float:
    """Relative error of one product against float64; NaN when a repetition differs or an output is left out."""
    scale_dtype = torch.float32 if group is None else dtype
    one = weight(shape, group, seed=m + shape.n + shape.k, dtype=scale_dtype)
    x = torch.randn(m, shape.k, device="cuda", dtype=dtype)
    added = torch.randn(shape.n, device="cuda", dtype=dtype) if bias else None
    poison = torch.full((m, shape.n), torch.nan, device="cuda", dtype=dtype)  # the allocator hands it to the product
    del poison
    y = kernels.linear(x, one, added, config)
    if not torch.equal(y, kernels.linear(x, one, added, config)):
        return float("nan")
    values = layout.unpack_words(one.words, one.n, one.k).double()
    columns = layout.unpack_scales(one.scales, one.n).double().repeat_interleave(one.group, dim=1)
    truth = x.double() @ (values * columns[:, : one.k]).T
    if added is not None:
        truth += added.double()
    return float((y.double() - truth).norm() / truth.norm())
