#!/usr/bin/env python3
"""Time on a GPU a chunk's attention to its cached prefix: by the fix's kernels, and by vLLM's own TurboQuant backend.

    python3 tests/gpu/prefill_speed.py --results tests/gpu/results/prefill_speed.json

One layer with the heads of Qwen3.6-27B, run through vLLM's backend, builder and implementation (vLLM must be there).
Per shape: the median time of one call by GPU events with a cold L2, what the call takes of memory (its share of vLLM's
workspace, and what it allocates on top), and the error of the chunk's last queries against dense FP32 attention over
the cache's content.  The exit status is 0 when the fix is nowhere slower, needs less than 64 MiB, and errs no more, 3
when the budget ended the run.  Where FlashAttention 2 has no machine code, run flash_ready.py before.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "patches"))

import spec_decode
from kept import Kept, OutOfTime

DEVICE = "cuda"
HEADS, KV_HEADS, HEAD_SIZE, BLOCK_SIZE = 24, 4, 256, 16
PRESETS = ("turboquant_k8v4", "turboquant_4bit_nc")
SHAPES = (
    *((256 * 1024, 2048), (64 * 1024, 2048), (8 * 1024, 512), (256 * 1024, 8192)),
    *((256 * 1024, 512), (64 * 1024, 512), (64 * 1024, 8192), (8 * 1024, 2048), (8 * 1024, 8192)),
)
"""Cached and new tokens, the most telling first."""
MAX_NEW = max(new for _, new in SHAPES)
MAX_MODEL_LEN = max(cached for cached, _ in SHAPES) + MAX_NEW
CHECKED_QUERIES = 32
NOISE = 1.02
"""A call that takes up to so many times as long is not called slower: medians of equal runs differ by that."""
ERROR_NOISE = 1.05
MEMORY_BOUND_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Row:
    """One shape on one backend."""

    preset: str
    cached: int
    new: int
    backend: str
    ms: float
    workspace_bytes: int
    transient_bytes: int
    error: float


@dataclass
class Bench:
    """A layer of the backend that is under TURBOQUANT at this moment, and the content of its cache."""

    torch: Any
    builder: Any
    impl: Any
    layer: Any
    cache: Any

    def call(self, cached: int, query: Any, key: Any, value: Any) -> Callable[[], Any]:
        """What vLLM calls for a chunk of one request behind `cached` tokens; the function returns the output."""
        from vllm.v1.attention.backend import CommonAttentionMetadata

        torch, count = self.torch, len(query)
        starts = torch.tensor([0, count], dtype=torch.int32)
        length = torch.tensor([cached + count], dtype=torch.int32)
        blocks = torch.arange(1, self.cache.shape[0], dtype=torch.int32, device=DEVICE).unsqueeze(0)
        described = CommonAttentionMetadata(
            query_start_loc=starts.to(DEVICE),
            query_start_loc_cpu=starts,
            seq_lens=length.to(DEVICE),
            seq_lens_cpu_upper_bound=length,
            num_reqs=1,
            num_actual_tokens=count,
            max_query_len=count,
            max_seq_len=int(length),
            block_table_tensor=blocks,
            slot_mapping=torch.zeros(count, dtype=torch.int64, device=DEVICE),
        )
        metadata = self.builder.build(0, described)
        output = torch.empty_like(query)

        def attend() -> Any:
            self.impl.forward(self.layer, query, key, value, self.cache, metadata, output)
            return output

        return attend


def make(torch: Any, preset: str, cache: Any) -> Bench:
    """A layer of the backend in place, on `cache`."""
    import vllm.v1.attention.backends.turboquant_attn as stock
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.kv_cache_interface import FullAttentionSpec
    from vllm.v1.worker import workspace

    layer = torch.nn.Module()
    config = SimpleNamespace(
        speculative_config=None,
        use_v2_model_runner=True,
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
        attention_config=SimpleNamespace(tq_max_kv_splits_for_cuda_graph=32, flash_attn_version=None),
        scheduler_config=SimpleNamespace(max_num_seqs=8, enable_chunked_prefill=True, max_num_batched_tokens=MAX_NEW),
        model_config=SimpleNamespace(
            max_model_len=MAX_MODEL_LEN, dtype=torch.bfloat16, get_num_attention_heads=lambda _: HEADS
        ),
        compilation_config=SimpleNamespace(static_forward_context={"layer": layer}),
    )
    stock.get_current_vllm_config = lambda: config
    workspace._manager = workspace.WorkspaceManager(torch.device(DEVICE))
    backend = AttentionBackendEnum.TURBOQUANT.get_class()
    layer.impl = backend.get_impl_cls()(HEADS, HEAD_SIZE, HEAD_SIZE**-0.5, KV_HEADS, kv_cache_dtype=preset)
    layer.kv_cache = cache
    builder_class = backend.get_builder_cls()
    width = {"block_table_width": cache.shape[0]} if builder_class.requires_block_table_width else {}
    spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=KV_HEADS, head_size=HEAD_SIZE, dtype=torch.uint8)
    builder = builder_class(spec, ["layer"], config, torch.device(DEVICE), **width)
    return Bench(torch, builder, layer.impl, layer, cache)


@contextmanager
def fixed() -> Iterator[None]:
    """The fix in its place.

    Raises:
        RuntimeError: it cannot be applied.

    """
    from vllm_graft.engine import Engine
    from vllm_graft.facts import vllm_version
    from vllm_graft.fixes.tq_spec_decode import PATCH

    engine = Engine()
    attempt = engine.apply(PATCH, vllm_version() or "")
    if attempt.outcome != "applied":
        raise RuntimeError(f"the fix is {attempt.outcome}: {attempt.reason}")
    yield
    engine.undo_all()


def filled(torch: Any, preset: str) -> Any:
    """A cache of random keys and values, stored by vLLM's own kernel."""
    from vllm_graft.attention.kernels.layout import slot_layout

    blocks = -(-MAX_MODEL_LEN // BLOCK_SIZE) + 1
    slot = slot_layout(preset, HEAD_SIZE).slot_bytes
    cache = torch.zeros(blocks, KV_HEADS, BLOCK_SIZE, slot, dtype=torch.uint8, device=DEVICE)
    bench = make(torch, preset, cache)
    for first in range(0, MAX_MODEL_LEN, 2**15):
        count = min(2**15, MAX_MODEL_LEN - first)
        slots = torch.arange(first, first + count, device=DEVICE) + BLOCK_SIZE
        key, value = (torch.randn(count, KV_HEADS, HEAD_SIZE, device=DEVICE).bfloat16() for _ in "kv")
        bench.impl.do_kv_cache_update(bench.layer, key, value, cache, slots)
    return cache


def milliseconds(torch: Any, work: Callable[[], Any], repeats: int) -> float:
    """The median time of a call, with an L2 cache that holds other data."""
    other = torch.empty(2**27, dtype=torch.uint8, device=DEVICE)
    times = []
    for _ in range(repeats):
        other.zero_()
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    return float(sorted(times)[len(times) // 2])


def exact(torch: Any, bench: Bench, preset: str, cached: int, query: Any, key: Any, value: Any) -> Any:
    """Dense FP32 attention of the chunk's last queries to the cache's content and to the chunk."""
    from vllm_graft.attention.kernels.dequantize import dequantize
    from vllm_graft.attention.kernels.layout import slot_layout

    layout = slot_layout(preset, HEAD_SIZE)
    keys, values = (torch.empty(cached, KV_HEADS, HEAD_SIZE, device=DEVICE) for _ in "kv")
    blocks = torch.arange(1, bench.cache.shape[0], dtype=torch.int32, device=DEVICE)
    dequantize(bench.cache.transpose(1, 2), blocks, bench.layer._tq_centroids, 0, keys, values, layout)
    if not layout.key_is_fp8:
        keys = keys @ bench.layer._tq_Pi
    keys, values = torch.cat([keys, key.float()]), torch.cat([values, value.float()])
    last = torch.arange(len(keys) - CHECKED_QUERIES, len(keys), device=DEVICE).unsqueeze(1)
    future = torch.arange(len(keys), device=DEVICE) > last
    out = torch.empty(CHECKED_QUERIES, HEADS, HEAD_SIZE, device=DEVICE)
    for head in range(HEADS):
        own = head // (HEADS // KV_HEADS)
        scores = query[-CHECKED_QUERIES:, head].float() @ keys[:, own].T * HEAD_SIZE**-0.5
        out[:, head] = scores.masked_fill(future, float("-inf")).softmax(-1) @ values[:, own]
    return out


def measure(torch: Any, bench: Bench, backend: str, preset: str, cached: int, new: int, seed: int) -> Row:
    """One shape on the backend of `bench`."""
    from vllm.v1.worker import workspace

    generator = torch.Generator(DEVICE).manual_seed(seed)
    query, key, value = (
        torch.randn(new, heads, HEAD_SIZE, device=DEVICE, generator=generator).bfloat16()
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    attend = bench.call(cached, query, key, value)
    attend()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    output = attend()[-CHECKED_QUERIES:].float().clone()
    torch.cuda.synchronize()
    transient = torch.cuda.max_memory_allocated() - before
    ms = milliseconds(torch, attend, 9 if cached * new < 2**28 else 5)
    wanted = exact(torch, bench, preset, cached, query, key, value)
    error = ((output - wanted).norm() / wanted.norm()).item()
    reserved = sum(part.numel() for part in workspace._manager._current_workspaces if part is not None)
    return Row(preset, cached, new, backend, round(ms, 3), reserved, transient, error)


def holds(rows: list[Row]) -> dict[str, bool]:
    """What the fix promises: not slower than vLLM's own, little memory, no larger error."""
    stock = {(row.preset, row.cached, row.new): row for row in rows if row.backend == "stock"}
    pairs = [(row, stock[row.preset, row.cached, row.new]) for row in rows if row.backend == "fixed"]
    return {
        "not slower": bool(pairs) and all(ours.ms <= NOISE * theirs.ms for ours, theirs in pairs),
        "memory": bool(pairs)
        and all(ours.workspace_bytes + ours.transient_bytes < MEMORY_BOUND_BYTES for ours, _ in pairs),
        "error": bool(pairs) and all(ours.error <= ERROR_NOISE * theirs.error for ours, theirs in pairs),
    }


def measure_all(torch: Any, kept: Kept) -> None:
    """Measure what is not in the file, both backends of a shape one after the other."""
    caches: dict[str, Any] = {}
    for seed, (preset, (cached, new)) in enumerate(itertools.product(PRESETS, SHAPES)):
        for backend, place in (("stock", nullcontext), ("fixed", fixed)):
            if kept.has("rows", preset=preset, cached=cached, new=new, backend=backend):
                continue
            if preset not in caches:
                caches = {preset: filled(torch, preset)}
            with place():
                bench = make(torch, preset, caches[preset])
                row = measure(torch, bench, backend, preset, cached, new, seed)
            kept.add("rows", asdict(row))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, required=True, help="where the rows go, as JSON; it is gone on with")
    parser.add_argument("--budget-s", type=float, default=3600, help="stop behind the row that passes it")
    options = parser.parse_args()
    import torch

    torch.backends.cuda.matmul.allow_tf32 = False
    kept = Kept(
        options.results,
        {"host": spec_decode.host()},
        ("rows",),
        lambda report: {"holds": holds([Row(**row) for row in report["rows"]])},
        options.budget_s,
    )
    try:
        measure_all(torch, kept)
    except OutOfTime:
        print("cut by the budget: run again to go on")
        return 3
    held = kept.report["holds"]
    print(json.dumps(held))
    return 0 if all(held.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
