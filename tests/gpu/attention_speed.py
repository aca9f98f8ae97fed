#!/usr/bin/env python3
"""Time and check attention over TurboQuant's packed KV: vLLM's kernel, Graft's, and FlashAttention 2 on bfloat16 KV.

    python3 tests/gpu/attention_speed.py --results tests/gpu/results/attention_speed.json

vLLM 0.33.0 must be importable.  One attention call of Qwen3.6-27B (24 query heads, 4 KV heads of 256) is captured in a
CUDA graph and replayed after a write larger than the L2 cache; its time includes every kernel of the call, the rotation
of queries too.  vLLM's kernel verifies k rows as k decodes, the way of its own code.  Both read the same cache, and
their errors on the same inputs are against FP32 attention, over the original and over the decoded keys and values.
The exit status is 0 when no shape is slower than vLLM's kernel and no error larger, 3 when the budget ended the run.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "patches"))

import torch
import triton
import vllm
from clock import OTHER_BYTES, cold_microseconds, copy_bytes_per_s
from kept import Kept, OutOfTime
from vllm.model_executor.layers.quantization.turboquant.centroids import get_centroids
from vllm.v1.attention.ops.triton_turboquant_decode import triton_turboquant_decode_attention
from vllm.v1.attention.ops.triton_turboquant_store import triton_turboquant_store
from vllm_graft.attention.kernels import decode, store_reference
from vllm_graft.attention.kernels.codebook import Codebook, prepare_codebook
from vllm_graft.attention.kernels.launch import decode_launch
from vllm_graft.attention.kernels.layout import PRESETS, SlotLayout, slot_layout

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HEADS, KV_HEADS, HEAD_SIZE, PAGE = 24, 4, 256, 64
SCALE = HEAD_SIZE**-0.5
STOCK_SPLITS = 32  # vLLM's default of tq_max_kv_splits_for_cuda_graph
SHAPES = (
    *((1, length) for length in (262144, 131072, 32768)),
    *((8, 32768), (1, 128), (1, 1024), (1, 8192)),
    *((8, 8192), (8, 128), (32, 4096), (32, 128)),
)
"""Requests and their length, in the order in which they are timed: a run may be cut."""
QUERIES = (1, 4)
TARGETS_US = {"1x32768": 70.0, "1x131072": 160.0, "1x262144": 300.0, "8x32768": 280.0}
"""Of a k8v4 decode on one H200."""
VERIFY_TARGET = 1.4
"""Verifying 4 rows, in times of one decode."""
FOUR_BIT_TARGET = 1.3
"""A 4bit_nc decode, in times of a k8v4 decode."""
LARGER_ERROR = 1.005
"""Errors are those of random inputs: a ratio above this is larger."""


@dataclasses.dataclass(frozen=True)
class Inputs:
    """One batch: all requests have the same length and the same number of queries."""

    layout: SlotLayout
    query: torch.Tensor
    cache: torch.Tensor
    blocks: torch.Tensor
    lengths: torch.Tensor
    starts: torch.Tensor

    @property
    def queries(self) -> int:
        return int(self.query.shape[0] // self.lengths.shape[0])


@dataclasses.dataclass(frozen=True)
class Tables:
    """What a preset's keys need besides the cache; the codebook of FP8 keys is None."""

    centroids: torch.Tensor
    rotation: torch.Tensor
    codebook: Codebook | None


def tables(layout: SlotLayout) -> Tables:
    centroids = get_centroids(layout.head_size, 4 if layout.key_is_fp8 else layout.preset.key_bits).float()
    codebook = None if layout.key_is_fp8 else prepare_codebook(centroids)
    return Tables(centroids.to(DEVICE), store_reference.hadamard(layout.head_size).to(DEVICE), codebook)


def batch(layout: SlotLayout, cache: torch.Tensor, requests: int, length: int, queries: int) -> Inputs:
    """Queries from N(0, 1) over a cache whose pages the requests share out at random."""
    width = -(-length // PAGE)
    blocks = torch.randperm(cache.shape[0], device=DEVICE)[: requests * width].reshape(requests, width).int()
    tokens = requests * queries
    return Inputs(
        layout,
        torch.randn(tokens, HEADS, layout.head_size, device=DEVICE, dtype=torch.bfloat16),
        cache,
        blocks,
        torch.full((requests,), length, dtype=torch.int32, device=DEVICE),
        torch.arange(0, tokens + 1, queries, dtype=torch.int32, device=DEVICE),
    )


def stock_call(inputs: Inputs, needs: Tables) -> tuple[Callable[[], None], torch.Tensor]:
    """A call of vLLM's kernel with buffers as its backend keeps them, and its output."""
    layout, queries = inputs.layout, inputs.queries
    rows = inputs.query.shape[0]
    lengths = inputs.lengths.repeat_interleave(queries)
    lengths = (lengths - queries + 1 + torch.arange(rows, device=DEVICE) % queries).int()
    blocks = inputs.blocks.repeat_interleave(queries, dim=0)
    middle = torch.empty(rows, HEADS, STOCK_SPLITS, layout.head_size + 1, device=DEVICE)
    out = torch.empty_like(inputs.query)
    sums = torch.empty(rows, HEADS, device=DEVICE)

    def call() -> None:
        triton_turboquant_decode_attention(
            inputs.query,
            inputs.cache,
            blocks,
            lengths,
            needs.rotation,
            needs.centroids,
            SCALE,
            mse_bits=layout.preset.key_bits if not layout.key_is_fp8 else 0,
            key_packed_size=layout.value_offset,
            value_quant_bits=layout.preset.value_bits,
            key_fp8=layout.key_is_fp8,
            norm_correction=layout.preset.norm_correction,
            PiT=needs.rotation,
            mid_o_buf=middle,
            output_buf=out,
            lse_buf=sums,
            max_num_kv_splits=STOCK_SPLITS,
        )

    return call, out


def our_call(inputs: Inputs, needs: Tables) -> tuple[Callable[[], None], torch.Tensor]:
    """A call of Graft's kernels with the launch of this device, and its output."""
    layout = inputs.layout
    requests = inputs.lengths.shape[0]
    capability = torch.cuda.get_device_capability() if DEVICE == "cuda" else (8, 6)
    how = decode_launch(
        capability,
        layout=layout,
        rows=HEADS // KV_HEADS * inputs.queries,
        page_tokens=inputs.cache.shape[1],
    )
    programs = how.programs(torch.cuda.get_device_properties(DEVICE).multi_processor_count) if DEVICE == "cuda" else 5
    floats = decode.workspace_floats(
        programs=programs,
        num_requests=requests,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        max_query_len=inputs.queries,
        head_size=layout.head_size,
    )
    workspace = decode.Workspace(torch.empty(floats, device=DEVICE), programs)
    out = torch.empty_like(inputs.query)

    def call() -> None:
        decode.verify_attention(
            inputs.query,
            inputs.cache,
            inputs.blocks,
            inputs.lengths,
            inputs.starts,
            max_query_len=inputs.queries,
            layout=layout,
            scale=SCALE,
            codebook=needs.codebook,
            workspace=workspace,
            out=out,
            launch=how,
        )

    return call, out


def flash_call(inputs: Inputs, keys_values: torch.Tensor) -> Callable[[], None]:
    """A call of FlashAttention 2 over bfloat16 pages [2, blocks, page, KV heads, D]."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    out = torch.empty_like(inputs.query)
    longest = int(inputs.lengths.max())

    def call() -> None:
        flash_attn_varlen_func(
            inputs.query,
            keys_values[0],
            keys_values[1],
            max_seqlen_q=inputs.queries,
            cu_seqlens_q=inputs.starts,
            max_seqlen_k=longest,
            seqused_k=inputs.lengths,
            softmax_scale=SCALE,
            causal=True,
            block_table=inputs.blocks,
            out=out,
            fa_version=2,
        )

    return call


# ---- time ----


class Clock:
    """Times a call by replays of its CUDA graph, each after a write that is larger than the L2 cache."""

    def __init__(self) -> None:
        self.other = torch.empty(OTHER_BYTES, dtype=torch.uint8, device=DEVICE)

    def microseconds(self, call: Callable[[], None], repeats: int = 21) -> float:
        if DEVICE != "cuda":
            call()
            return math.nan
        for _ in range(2):
            call()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        return cold_microseconds(graph, self.other, repeats)


def plausible_cache(layout: SlotLayout, pages: int) -> torch.Tensor:
    """Random slots whose numbers are finite and of the size that real ones have."""
    cache = torch.randint(0, 256, (pages, PAGE, KV_HEADS, layout.slot_bytes), dtype=torch.uint8, device=DEVICE)
    if layout.key_is_fp8:
        cache[..., : layout.head_size] &= 0xBF  # below 2
    for offset, low, high in (
        *(() if layout.key_is_fp8 else ((layout.norm_offset, 10.0, 20.0),)),
        (layout.scale_offset, 0.2, 0.4),
        (layout.zero_offset, -3.0, -2.0),
    ):
        numbers = torch.rand(pages, PAGE, KV_HEADS, 1, device=DEVICE) * (high - low) + low
        cache[..., offset : offset + 2] = numbers.half().view(torch.uint8)
    return cache


def time_preset(preset: str, shapes: tuple[tuple[int, int], ...], clock: Clock, kept: Kept) -> None:
    """Time vLLM's kernel and Graft's over one cache."""
    left = [key for key in keys_of(shapes) if not kept.has("times", preset=preset, shape=key.name, queries=key.queries)]
    if not left:
        return
    layout = slot_layout(preset, HEAD_SIZE)
    cache = plausible_cache(layout, pages_of(shapes))
    needs = tables(layout)
    for key in left:
        inputs = batch(layout, cache, key.requests, key.length, key.queries)
        entry = {
            "preset": preset,
            "shape": key.name,
            "queries": key.queries,
            "stock_us": clock.microseconds(stock_call(inputs, needs)[0]),
            "graft_us": clock.microseconds(our_call(inputs, needs)[0]),
            "packed_bytes": key.requests * key.length * KV_HEADS * layout.slot_bytes,
        }
        kept.add("times", entry)


def time_flash(shapes: tuple[tuple[int, int], ...], clock: Clock, kept: Kept) -> None:
    """Time FlashAttention 2 over bfloat16 keys and values of the same shapes."""
    left = [key for key in keys_of(shapes) if not kept.has("flash", shape=key.name, queries=key.queries)]
    if not left:
        return
    pages = pages_of(shapes)
    keys_values = torch.randn(2, pages, PAGE, KV_HEADS, HEAD_SIZE, device=DEVICE, dtype=torch.bfloat16)
    layout = slot_layout("turboquant_k8v4", HEAD_SIZE)
    for key in left:
        inputs = batch(layout, keys_values[0], key.requests, key.length, key.queries)
        entry = {
            "shape": key.name,
            "queries": key.queries,
            "flash_us": clock.microseconds(flash_call(inputs, keys_values)),
            "bytes": key.requests * key.length * KV_HEADS * HEAD_SIZE * 4,
        }
        kept.add("flash", entry)


@dataclasses.dataclass(frozen=True)
class Key:
    """One shape to be timed."""

    requests: int
    length: int
    queries: int

    @property
    def name(self) -> str:
        return f"{self.requests}x{self.length}"


def keys_of(shapes: tuple[tuple[int, int], ...]) -> list[Key]:
    return [Key(*shape, queries) for shape, queries in itertools.product(shapes, QUERIES)]


def pages_of(shapes: tuple[tuple[int, int], ...]) -> int:
    return max(requests * -(-length // PAGE) for requests, length in shapes)


# ---- errors ----


def exact(inputs: Inputs, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Causal FP32 attention of one request's last tokens to keys and values [length, Hk, D]."""
    queries, length = inputs.queries, keys.shape[0]
    group = HEADS // KV_HEADS
    keys, values = (x.float().repeat_interleave(group, dim=1) for x in (keys, values))
    scores = torch.einsum("qhd,nhd->hqn", inputs.query.float(), keys) * SCALE
    last = torch.arange(length - queries, length, device=DEVICE)
    seen = torch.arange(length, device=DEVICE)[None, None, :] <= last[None, :, None]
    return torch.einsum("hqn,nhd->qhd", scores.masked_fill(~seen, -math.inf).softmax(-1), values)


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.float() - wanted).norm() / wanted.norm())


def errors(preset: str, key_size: float, length: int, queries: int, seed: int) -> dict[str, Any]:
    """Errors of both kernels over one cache, written by vLLM's store from keys N(0, key_size) and values N(0, 1)."""
    torch.manual_seed(seed)
    torch.backends.cuda.matmul.allow_tf32 = False
    layout = slot_layout(preset, HEAD_SIZE)
    needs = tables(layout)
    pages = -(-length // PAGE)
    cache = torch.zeros(pages, PAGE, KV_HEADS, layout.slot_bytes, dtype=torch.uint8, device=DEVICE)
    inputs = batch(layout, cache, 1, length, queries)
    keys, values = torch.randn(2, length, KV_HEADS, HEAD_SIZE, device=DEVICE, dtype=torch.bfloat16)
    keys = keys * key_size
    place = torch.arange(length, device=DEVICE)
    slots = inputs.blocks[0, place // PAGE].long() * PAGE + place % PAGE
    triton_turboquant_store(
        keys,
        values,
        cache,
        slots.int(),
        needs.rotation,
        (needs.centroids[1:] + needs.centroids[:-1]) / 2,
        mse_bits=layout.preset.key_bits if not layout.key_is_fp8 else 0,
        key_packed_size=layout.value_offset,
        value_quant_bits=layout.preset.value_bits,
        key_fp8=layout.key_is_fp8,
    )
    with torch.device(DEVICE):
        kept_keys, kept_values = store_reference.contents(cache.flatten(0, 1)[slots], needs.centroids, layout)
    if not layout.key_is_fp8:
        kept_keys = kept_keys @ needs.rotation
    original, decoded = exact(inputs, keys, values), exact(inputs, kept_keys, kept_values)
    entry: dict[str, Any] = {"preset": preset, "key_size": key_size, "length": length, "queries": queries, "seed": seed}
    for name, (call, out) in (("stock", stock_call(inputs, needs)), ("graft", our_call(inputs, needs))):
        out.fill_(math.nan)
        call()
        entry[name] = {"to_original": relative(out, original), "to_decoded": relative(out, decoded)}
    return entry


def mean_errors(entries: list[dict[str, Any]], preset: str, against: str) -> dict[str, float]:
    """The mean over all inputs of a preset, of both kernels."""
    mine = [entry for entry in entries if entry["preset"] == preset]
    return {name: sum(entry[name][against] for entry in mine) / len(mine) for name in ("stock", "graft")}


# ---- what the results say ----


def verdicts(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Each target with what was found, for what was timed."""
    times = {(e["preset"].removeprefix("turboquant_"), e["shape"], e["queries"]): e for e in report["times"]}
    found: list[tuple[str, float, float]] = []
    for (preset, shape, queries), entry in times.items():
        decode_us = times[preset, shape, 1]["graft_us"]
        allowed = TARGETS_US.get(shape)
        if allowed and (preset, queries) == ("k8v4", 1):
            found.append((f"k8v4 decode {shape}, us", decode_us, allowed))
        if allowed and (preset, queries) == ("4bit_nc", 1):
            ratio = decode_us / times["k8v4", shape, 1]["graft_us"]
            found.append((f"4bit_nc decode {shape}, times of k8v4", ratio, FOUR_BIT_TARGET))
        if allowed and queries > 1:
            ratio = entry["graft_us"] / decode_us
            found.append((f"{preset} verify({queries}) {shape}, times of its decode", ratio, VERIFY_TARGET))
    if times:
        (preset, shape, queries), slowest = max(
            times.items(), key=lambda item: item[1]["graft_us"] / item[1]["stock_us"]
        )
        title = f"slowest against stock, {preset} {shape} with {queries} queries, times of stock"
        found.append((title, slowest["graft_us"] / slowest["stock_us"], 1.0))
    for preset, against in itertools.product(PRESETS, ("to_original", "to_decoded")):
        if any(entry["preset"] == preset for entry in report["errors"]):
            both = mean_errors(report["errors"], preset, against)
            title = f"{preset.removeprefix('turboquant_')} error {against.replace('_', ' ')}, times of stock"
            found.append((title, both["graft"] / both["stock"], LARGER_ERROR))
    return [
        {"target": title, "found": round(value, 4), "allowed": allowed, "met": value <= allowed}
        for title, value, allowed in found
    ]


def measure(kept: Kept, shapes: tuple[tuple[int, int], ...]) -> None:
    """Time and check what is not in the file, the most telling first."""
    clock = Clock()
    first, second, *others = PRESETS
    for preset in (first, second):
        time_preset(preset, shapes, clock, kept)
    sizes, seeds = ((1.0, 2.0), (0, 1)) if DEVICE == "cuda" else ((1.0,), (0,))
    lengths = ((8192, 1), (2048, 4)) if DEVICE == "cuda" else ((20, 2),)
    for preset, size, (length, queries), seed in itertools.product(PRESETS, sizes, lengths, seeds):
        if not kept.has("errors", preset=preset, key_size=size, length=length, queries=queries, seed=seed):
            kept.add("errors", errors(preset, size, length, queries, seed))
    for preset in others:
        time_preset(preset, shapes, clock, kept)
    if DEVICE == "cuda":  # last: a build without machine code for the card compiles for minutes (flash_ready.py)
        time_flash(shapes, clock, kept)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path("attention_speed.json"), help="gone on with")
    parser.add_argument("--budget-s", type=float, default=3600, help="stop behind the entry that passes it")
    arguments = parser.parse_args()
    shapes = SHAPES if DEVICE == "cuda" else ((1, 70),)
    derive = (lambda report: {"verdicts": verdicts(report)}) if DEVICE == "cuda" else lambda report: {"verdicts": []}
    about = {
        "device": torch.cuda.get_device_name() if DEVICE == "cuda" else "dry run",
        "versions": {module.__name__: module.__version__ for module in (vllm, torch, triton)},
    }
    kept = Kept(arguments.results, about, ("times", "flash", "errors"), derive, arguments.budget_s)
    if DEVICE == "cuda":
        kept.report.setdefault("copy_bytes_per_s", copy_bytes_per_s())
    left = ""
    try:
        measure(kept, shapes)
    except OutOfTime:
        left = "cut by the budget: run again to go on"
    for entry in kept.report.get("verdicts", []):
        print("met   " if entry["met"] else "MISSED", entry["target"], entry["found"], "allowed", entry["allowed"])
    if left:
        print(left)
        return 3
    return 0 if all(entry["met"] for entry in kept.report["verdicts"] if "stock" in entry["target"]) else 1


if __name__ == "__main__":
    sys.exit(main())
