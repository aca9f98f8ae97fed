#!/usr/bin/env python3
"""Proof on a GPU, without an engine, that verified tokens get the attention of single-token decodes.

    python3 tests/gpu/spec_attention.py --results tests/gpu/results/spec_attention.json

Runs vLLM's own TurboQuant classes and kernels with the heads of Qwen3.6-27B, as they are and with the fix.  The truth
is vLLM's decode of one token per request, which none of the faults touches; verification must equal it eagerly, with
host lengths that are too high, beside a fresh prompt, and in a CUDA graph that was captured on a dummy batch.  The exit
status is 0 when the fix passes everywhere and vLLM's own backend fails where it is known to.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "patches"))

DRAFTS = 3
TOLERANCE = 2**-7  # one step of bfloat16, relative to the output or to 1


@dataclass(frozen=True)
class Shape:
    """The sizes of an attention layer and of the sequences that are verified."""

    heads: int = 24
    kv_heads: int = 4
    head_size: int = 256
    block_size: int = 64
    lengths: tuple[int, ...] = (5000, 37, 700, 65)
    prompt: int = 6000
    splits: int = 32


@dataclass(frozen=True)
class Outcome:
    """The largest difference from the truth, relative to it or to 1, and whether it is none to the bit."""

    largest: float
    exact: bool


@dataclass
class Bench:
    """A layer of one backend on one device, with a filled cache."""

    torch: Any
    shape: Shape
    device: Any
    builder: Any
    impl: Any
    layer: Any
    cache: Any
    blocks: Any
    keys: list[Any]
    values: list[Any]
    queries: list[Any]

    def batch(self, query_lens: Sequence[int], lengths: Sequence[int], bounds: Sequence[int] | None = None) -> Any:
        """The batch as the model runner describes it; `bounds` are the host's lengths."""
        from vllm.v1.attention.backend import CommonAttentionMetadata

        torch = self.torch
        starts = torch.tensor([0, *torch.tensor(query_lens).cumsum(0).tolist()], dtype=torch.int32)
        host = torch.tensor(list(bounds or lengths), dtype=torch.int32)
        return CommonAttentionMetadata(
            query_start_loc=starts.to(self.device),
            query_start_loc_cpu=starts,
            seq_lens=torch.tensor(list(lengths), dtype=torch.int32, device=self.device),
            seq_lens_cpu_upper_bound=host,
            num_reqs=len(query_lens),
            num_actual_tokens=int(starts[-1]),
            max_query_len=max(query_lens),
            max_seq_len=int(host.max()),
            block_table_tensor=self.blocks[: len(query_lens)].clone(),
            slot_mapping=torch.zeros(int(starts[-1]), dtype=torch.int64, device=self.device),
        )

    def attend(self, metadata: Any, query: Any, key: Any, value: Any) -> Any:
        """The layer's output [tokens, heads, head size]."""
        output = query.new_zeros(query.shape[0], self.shape.heads * self.shape.head_size)
        self.impl.forward(self.layer, query, key, value, self.cache, metadata, output)
        return output.view(query.shape)

    def inputs(self, query_lens: Sequence[int], lengths: Sequence[int]) -> tuple[Any, Any, Any]:
        """Query, key and value of the last tokens of each sequence."""
        spans = [(i, slice(n - q, n)) for i, (q, n) in enumerate(zip(query_lens, lengths, strict=True))]
        return tuple(
            self.torch.cat([parts[i][span] for i, span in spans]) for parts in (self.queries, self.keys, self.values)
        )

    def truth(self, request: int, query_len: int, length: int) -> Any:
        """Single-token decodes of the last `query_len` tokens of a request."""
        rows = []
        for end in range(length - query_len + 1, length + 1):
            described = self.batch([1] * (request + 1), [1] * request + [end])
            query, key, value = self.inputs([1] * (request + 1), [1] * request + [end])
            rows.append(self.attend(self.builder.build(0, described), query, key, value)[request])
        return self.torch.stack(rows)


def make(torch: Any, device: Any, shape: Shape, dtype: str, data: str) -> Bench:
    """A layer by the backend that is under TURBOQUANT at this moment, its cache filled with random keys and values."""
    import vllm.v1.attention.backends.turboquant_attn as stock
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.kv_cache_interface import FullAttentionSpec
    from vllm.v1.worker import workspace

    requests, longest = len(shape.lengths) + 1, max(*shape.lengths, shape.prompt)
    width = -(-longest // shape.block_size)
    data_type = getattr(torch, data)
    layer = torch.nn.Module()
    config = SimpleNamespace(
        speculative_config=SimpleNamespace(num_speculative_tokens=DRAFTS, parallel_drafting=False),
        use_v2_model_runner=True,
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
        attention_config=SimpleNamespace(tq_max_kv_splits_for_cuda_graph=shape.splits, flash_attn_version=2),
        scheduler_config=SimpleNamespace(
            max_num_seqs=requests, enable_chunked_prefill=True, max_num_batched_tokens=8192
        ),
        model_config=SimpleNamespace(
            max_model_len=width * shape.block_size, dtype=data_type, get_num_attention_heads=lambda _: shape.heads
        ),
        compilation_config=SimpleNamespace(static_forward_context={"layer": layer}),
    )
    stock.get_current_vllm_config = lambda: config
    workspace._manager = workspace.WorkspaceManager(device)
    backend = AttentionBackendEnum.TURBOQUANT.get_class()
    layer.impl = impl = backend.get_impl_cls()(
        shape.heads, shape.head_size, shape.head_size**-0.5, shape.kv_heads, kv_cache_dtype=dtype
    )
    impl.fa_version = 2
    spec = FullAttentionSpec(
        block_size=shape.block_size, num_kv_heads=shape.kv_heads, head_size=shape.head_size, dtype=torch.uint8
    )
    builder_class = backend.get_builder_cls()
    extra = {"block_table_width": width} if builder_class.requires_block_table_width else {}
    builder = builder_class(spec, ["layer"], config, device, **extra)
    workspace.current_workspace_manager().lock()
    slot = impl.tq_config.slot_size_aligned
    cache = torch.zeros(requests * width + 1, shape.kv_heads, shape.block_size, slot, dtype=torch.uint8).to(device)
    blocks = torch.randperm(requests * width, generator=torch.Generator().manual_seed(1)).int().add(1)
    blocks = blocks.view(requests, width).to(device)
    bench = Bench(torch, shape, device, builder, impl, layer, cache, blocks, [], [], [])
    generator = torch.Generator().manual_seed(2)
    for request, length in enumerate((*shape.lengths, shape.prompt)):
        keys, values, queries = (
            torch.randn(length, heads, shape.head_size, generator=generator).to(device, data_type)
            for heads in (shape.kv_heads, shape.kv_heads, shape.heads)
        )
        token = torch.arange(length, device=device)
        slots = blocks[request][token // shape.block_size].long() * shape.block_size + token % shape.block_size
        impl.do_kv_cache_update(bench.layer, keys, values, cache, slots)
        bench.keys.append(keys)
        bench.values.append(values)
        bench.queries.append(queries)
    return bench


def checks(bench: Bench, truths: Sequence[Any], *, graphs: bool) -> dict[str, Outcome]:
    """Verification of all sequences in each of the ways in which it can go wrong, against their truths."""
    lengths, width = bench.shape.lengths, 1 + DRAFTS
    query_lens = [width, width, 2, width]
    wanted = bench.torch.cat([truth[-count:] for truth, count in zip(truths, query_lens, strict=True)])

    def outcome(found: Any, expected: Any) -> Outcome:
        difference = (found.float() - expected.float()).abs() / expected.float().abs().clamp(min=1)
        largest = difference.max().item()
        return Outcome(largest if largest == largest else float("inf"), bool((found == expected).all()))

    inputs = bench.inputs(query_lens, lengths)
    eager = bench.attend(bench.builder.build(0, bench.batch(query_lens, lengths)), *inputs)
    rejected = bench.batch(query_lens, lengths, [length + 2 for length in lengths])
    late = bench.attend(bench.builder.build(0, rejected), *inputs)
    # the prompt is the last request: the longest query and the longest sequence of the batch
    beside = [*query_lens, bench.shape.prompt], [*lengths, bench.shape.prompt]
    mixed = bench.attend(bench.builder.build(0, bench.batch(*beside)), *bench.inputs(*beside))
    found = {
        "eager": outcome(eager, wanted),
        "rejected-drafts": outcome(late, wanted),
        "beside-a-prompt": outcome(mixed[: len(wanted)], wanted),
    }
    if graphs:
        found["graph"] = outcome(replayed(bench), bench.torch.cat(list(truths)))
    return found


def replayed(bench: Bench) -> Any:
    """The output of a CUDA graph of full verifications, captured on a dummy batch and replayed for the real one."""
    torch, width, requests = bench.torch, 1 + DRAFTS, len(bench.shape.lengths)
    full = [width] * requests
    buffers = bench.batch(full, full)
    metadata = bench.builder.build_for_cudagraph_capture(buffers)
    inputs = [part.clone() for part in bench.inputs(full, bench.shape.lengths)]
    bench.attend(metadata, *inputs)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = bench.attend(metadata, *inputs)
    real = bench.batch(full, bench.shape.lengths)
    for name in ("seq_lens", "query_start_loc", "block_table_tensor"):
        getattr(buffers, name).copy_(getattr(real, name))
    bench.builder.build(
        0, buffers.replace(seq_lens_cpu_upper_bound=real.seq_lens_cpu_upper_bound, max_seq_len=real.max_seq_len)
    )
    graph.replay()
    torch.cuda.synchronize()
    return output


def milliseconds(bench: Bench) -> float:
    """Median time of one eager verification of all sequences by one layer, metadata included."""
    torch, full = bench.torch, [1 + DRAFTS] * len(bench.shape.lengths)
    described, inputs, times = bench.batch(full, bench.shape.lengths), bench.inputs(full, bench.shape.lengths), []
    for _ in range(30):
        torch.cuda.synchronize()
        start = time.perf_counter()
        bench.attend(bench.builder.build(0, described), *inputs)
        torch.cuda.synchronize()
        times.append(1000 * (time.perf_counter() - start))
    return round(sorted(times)[len(times) // 2], 3)


def prove(device_name: str = "cuda", shape: Shape | None = None, data: str = "bfloat16") -> dict[str, Any]:
    """All checks, per KV cache format, on vLLM's backend and on the fix's."""
    import torch
    from vllm_graft.engine import Engine
    from vllm_graft.facts import vllm_version
    from vllm_graft.fixes.tq_spec_decode import PATCH

    shape, device = shape or Shape(), torch.device(device_name)
    graphs = device.type == "cuda"
    results: dict[str, Any] = {}
    for dtype in ("turboquant_k8v4", "turboquant_4bit_nc"):
        plain = make(torch, device, shape, dtype, data)
        truths = [plain.truth(request, 1 + DRAFTS, length) for request, length in enumerate(shape.lengths)]
        entry: dict[str, Any] = {"stock": checks(plain, truths, graphs=graphs)}
        if graphs:
            entry["stock_ms"] = milliseconds(plain)
        engine = Engine()
        attempt = engine.apply(PATCH, vllm_version() or "")
        if attempt.outcome != "applied":
            raise RuntimeError(f"the fix is {attempt.outcome}: {attempt.reason}")
        fixed = make(torch, device, shape, dtype, data)
        # The same slots: on a GPU vLLM's store divides approximately, which moves values halfway between two codes.
        fixed.cache.copy_(plain.cache)
        entry["fixed"] = checks(fixed, truths, graphs=graphs)
        if graphs:
            entry["fixed_ms"] = milliseconds(fixed)
        engine.undo_all()
        results[dtype] = entry
    return results


def holds(results: dict[str, Any], known: Callable[[str], bool]) -> bool:
    """Whether the fix is right in every check and vLLM's own backend wrong in those for which `known` says so."""
    return all(
        all(outcome.largest <= TOLERANCE for outcome in entry["fixed"].values())
        and all(outcome.largest > TOLERANCE for name, outcome in entry["stock"].items() if known(name))
        for entry in results.values()
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, required=True, help="where the outcomes go, as JSON")
    options = parser.parse_args()
    import spec_decode

    results = prove()
    record = {
        "host": spec_decode.host(),
        "tolerance": TOLERANCE,
        "shape": asdict(Shape()),
        "results": {
            dtype: {
                name: {check: asdict(outcome) for check, outcome in part.items()} if isinstance(part, dict) else part
                for name, part in entry.items()
            }
            for dtype, entry in results.items()
        },
        "holds": holds(results, lambda name: name != "eager"),
    }
    spec_decode.write(options.results, record)
    print(json.dumps(record["results"], indent=1))
    return 0 if record["holds"] else 1


if __name__ == "__main__":
    sys.exit(main())
