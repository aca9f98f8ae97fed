#!/usr/bin/env python3
"""Check on a GPU the kernels that store, dequantize and merge TurboQuant's KV, and time them; torch and Triton suffice.

    python3 tests/gpu/store_prefill_check.py --results tests/gpu/results/store_prefill_check.json

Slots must equal those of `store_reference.py` but for codes of keys at a bound between two centroids; e4m3 bytes made
by the card and by integer operations, the way of cards below compute capability 8.9, must be equal for every bfloat16
and every float16 number.  The attention of a chunk to its prefix is compared with dense FP32 attention; plain torch
stands in for flash attention.  The exit status is 0 when all holds, 3 when the budget ended the run.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "patches"))

import spec_decode
import torch
from clock import copy_bytes_per_s
from kept import Kept, OutOfTime
from vllm_graft.attention.kernels import dequantize as dequantizing
from vllm_graft.attention.kernels import merge as merging
from vllm_graft.attention.kernels import prefill, rotation, store_reference
from vllm_graft.attention.kernels import store as storing
from vllm_graft.attention.kernels.layout import PRESETS, SlotLayout, slot_layout
from vllm_graft.attention.kernels.workspace import WORKSPACE_BYTES

DEVICE = torch.device("cuda")
HEADS, KV_HEADS, HEAD_SIZE, BLOCK_SIZE = 24, 4, 256, 64
HEAD_SIZES = (256, 128, 96, 64)
AT_A_BOUND = 1e-3  # the share of bytes that may differ where rounding decides between two centroids
PREFIX_ERROR = 2**-7
SCALES = (0.5, 1.0, 2.0, 4.0)


def tables(layout: SlotLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """Centroids and the bounds between them, near those of Lloyd and Max for N(0, 1/D)."""
    count = max(layout.num_centroids, 2)
    quantiles = torch.special.ndtri((torch.arange(count) + 0.5) / count) * layout.head_size**-0.5
    return quantiles.to(DEVICE), ((quantiles[1:] + quantiles[:-1]) / 2).to(DEVICE)


def filled(layout: SlotLayout, tokens: int, heads: int, block_size: int) -> torch.Tensor:
    """A cache for so many tokens, in vLLM's order: heads before positions within a block."""
    blocks = -(-tokens // block_size) + 1
    return torch.zeros(blocks, heads, block_size, layout.slot_bytes, dtype=torch.uint8, device=DEVICE).transpose(1, 2)


def milliseconds(work: Callable[[], Any], repeats: int = 20) -> float:
    """The median time of one call, replayed from a CUDA graph, with an L2 cache that holds other data."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    other = torch.empty(2**27, dtype=torch.uint8, device=DEVICE)
    times = []
    for _ in range(repeats):
        other.zero_()
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    return float(round(sorted(times)[len(times) // 2], 4))


def check_float8() -> dict[str, int]:
    """How many of all 16-bit numbers get other bytes from the card, and from integers, than from torch."""
    layout = slot_layout("turboquant_k8v4", HEAD_SIZE)
    found = {}
    for dtype in (torch.bfloat16, torch.float16):
        numbers = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype).view(-1, 1, HEAD_SIZE)
        wanted = store_reference.e4m3_bytes(numbers)
        for hardware in (True, False):
            if hardware and torch.cuda.get_device_capability() < (8, 9):
                continue
            cache = filled(layout, len(numbers), 1, BLOCK_SIZE)
            slots = torch.arange(len(numbers), device=DEVICE)
            keys = numbers.to(DEVICE)
            storing.store(keys, torch.zeros_like(keys), cache, slots, slots, layout, hardware_fp8=hardware)
            bytes_ = cache.flatten(0, 1)[: len(numbers), :, :HEAD_SIZE].cpu()
            found[f"{dtype} {'card' if hardware else 'integers'}"] = int((bytes_ != wanted).sum())
    return found


def check_slots(layout: SlotLayout) -> dict[str, float]:
    """The share of slot bytes that differ from the reference's, and the largest relative difference of what is read."""
    found = {}
    for tokens, block_size, dtype in ((1, 16, torch.bfloat16), (300, 128, torch.float16)):
        generator = torch.Generator(DEVICE).manual_seed(tokens)
        key, value = (
            torch.randn(tokens, KV_HEADS, layout.head_size, device=DEVICE, generator=generator).to(dtype) for _ in "kv"
        )
        centroids, bounds = tables(layout)
        cache = filled(layout, tokens, KV_HEADS, block_size)
        slots = torch.randperm(tokens, device=DEVICE, generator=generator)
        hardware = torch.cuda.get_device_capability() >= (8, 9)
        storing.store(key, value, cache, slots, bounds, layout, hardware_fp8=hardware)
        wanted = store_reference.slots(key.cpu(), value.cpu(), bounds.cpu(), layout)
        got = cache.flatten(0, 1)[slots].cpu()
        used = layout.zero_offset + 2
        name = f"{tokens} in {dtype}"
        found[name] = (got[..., :used] != wanted[..., :used]).float().mean().item()
        keys, values = (torch.empty_like(key, dtype=torch.float16) for _ in "kv")
        in_order = torch.arange(cache.shape[0], dtype=torch.int32, device=DEVICE)
        dequantizing.dequantize(cache, in_order, centroids, 0, keys, values, layout)
        wanted_parts = store_reference.contents(cache.flatten(0, 1)[:tokens].cpu(), centroids.cpu(), layout)
        for part, wanted_part in zip((keys, values), wanted_parts, strict=True):
            difference = ((part.cpu() - wanted_part).abs() / wanted_part.abs().clamp(min=1)).max().item()
            found[name + ", dequantized"] = max(found.get(name + ", dequantized", 0.0), difference)
    return found


def attention(query: Any, key: Any, value: Any, *, causal: bool, scale: float, out: Any) -> tuple[Any, Any]:
    """Dense attention in FP32 in the place of flash attention."""
    group = query.shape[1] // key.shape[1]
    lse = torch.empty(query.shape[1], query.shape[0], device=query.device)
    for head in range(query.shape[1]):
        scores = query[:, head].float() @ key[:, head // group].float().T * scale
        if causal:
            rows = torch.arange(len(key) - len(query), len(key), device=query.device)
            scores.masked_fill_(torch.arange(len(key), device=query.device) > rows[:, None], float("-inf"))
        lse[head] = scores.logsumexp(-1)
        out[:, head] = (scores.softmax(-1) @ value[:, head // group].float()).to(out.dtype)
    return out, lse


def check_prefix(name: str) -> dict[str, float]:
    """The largest error of the attention of a chunk, relative to the largest output, in tiles and in blocks."""
    found = {}
    for tokens, cached in ((5, 1), (70, 300), (2500, 9000)):
        layout = slot_layout(name, HEAD_SIZE)
        centroids, bounds = tables(layout)
        total = tokens + cached
        key, value = (torch.randn(total, KV_HEADS, HEAD_SIZE, device=DEVICE).bfloat16() for _ in "kv")
        query = torch.randn(tokens, HEADS, HEAD_SIZE, device=DEVICE).bfloat16()
        cache = filled(layout, total, KV_HEADS, BLOCK_SIZE)
        storing.store(key, value, cache, torch.arange(total, device=DEVICE), bounds, layout, hardware_fp8=False)
        out = torch.empty_like(query)
        workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=DEVICE)
        in_order = torch.arange(cache.shape[0], dtype=torch.int32, device=DEVICE)
        prefill.attend_to_prefix(
            query, key[cached:], value[cached:], cache, in_order, cached, centroids, layout,
            scale=HEAD_SIZE**-0.5, attention=attention, workspace=workspace, slots=264, out=out,
        )  # fmt: skip
        keys, values = store_reference.contents(cache.flatten(0, 1)[:cached].cpu(), centroids.cpu(), layout)
        if not layout.key_is_fp8:
            keys = keys @ store_reference.hadamard(HEAD_SIZE)
        keys, values = (
            torch.cat([part.to(DEVICE), own[cached:].float()])
            for part, own in zip((keys, values), (key, value), strict=True)
        )
        exact = torch.empty(query.shape, device=DEVICE)
        attention(query, keys, values, causal=True, scale=HEAD_SIZE**-0.5, out=exact)
        found[f"{tokens} behind {cached}"] = ((out.float() - exact).norm() / exact.norm()).item()
    return found


def key_errors() -> list[dict[str, float]]:
    """The relative error of the attention output over 4096 keys from N(0, s), by how keys are kept."""
    rows = []
    layout = slot_layout("turboquant_k8v4", HEAD_SIZE)
    for scale in SCALES:
        generator = torch.Generator(DEVICE).manual_seed(4)
        draw = [torch.randn(4096, 1, HEAD_SIZE, device=DEVICE, generator=generator) for _ in range(3)]
        key, value, query = (draw[0] * scale).bfloat16(), draw[1].bfloat16(), draw[2][:256].bfloat16()
        exact = torch.empty(query.shape, device=DEVICE)
        attention(query, key, value, causal=False, scale=HEAD_SIZE**-0.5, out=exact)
        row = {"scale": scale}
        for label, hardware, keys in (
            ("card", True, key),
            ("integers", False, key),
            # the byte of x 2^8 as e4m3 is that of x as e4b15: vLLM's own store below 8.9, which clips at 1.75
            ("vLLM's own below 8.9", False, key.float().clamp(-1.75, 1.75) * 256),
        ):
            cache = filled(layout, len(key), 1, BLOCK_SIZE)
            slots = torch.arange(len(key), device=DEVICE)
            storing.store(keys, value, cache, slots, slots, layout, hardware_fp8=hardware)
            kept, values = (torch.empty(len(key), 1, HEAD_SIZE, device=DEVICE) for _ in "kv")
            dequantizing.dequantize(cache, slots.int(), slots, 0, kept, values, layout)
            kept = kept / 256 if label.startswith("vLLM") else kept
            found = torch.empty(query.shape, device=DEVICE)
            attention(query, kept, values, causal=False, scale=HEAD_SIZE**-0.5, out=found)
            row[label] = round(((found - exact).norm() / exact.norm()).item(), 4)
        rows.append(row)
    return rows


def time_store(layout: SlotLayout) -> dict[str, float]:
    """Milliseconds of storing so many tokens of Qwen3.6-27B."""
    found = {}
    _, bounds = tables(layout)
    for tokens in (1, 4, 32, 2048, 8192):
        key, value = (torch.randn(tokens, KV_HEADS, HEAD_SIZE, device=DEVICE).bfloat16() for _ in "kv")
        cache, slots = filled(layout, tokens, KV_HEADS, BLOCK_SIZE), torch.arange(tokens, device=DEVICE)
        for hardware in (True, False) if layout.key_is_fp8 else (False,):
            label = f"store {tokens}" + (" integers" if layout.key_is_fp8 and not hardware else "")
            work = functools.partial(storing.store, key, value, cache, slots, bounds, layout, hardware_fp8=hardware)
            found[label] = milliseconds(work)
    return found


def time_dequantize(layout: SlotLayout) -> dict[str, list[float]]:
    """Milliseconds of dequantizing so many tokens of Qwen3.6-27B, and GB/s read and written."""
    found = {}
    centroids, _ = tables(layout)
    cache = filled(layout, 8192, KV_HEADS, BLOCK_SIZE)
    in_order = torch.randperm(cache.shape[0] - 1, device=DEVICE).int()
    for tokens in (2048, 8192):
        keys, values = (torch.empty(tokens, KV_HEADS, HEAD_SIZE, device=DEVICE).half() for _ in "kv")
        work = functools.partial(dequantizing.dequantize, cache, in_order, centroids, 0, keys, values, layout)
        took = milliseconds(work, 10)
        found[f"dequantize {tokens}"] = [
            took,
            round(tokens * KV_HEADS * (layout.slot_bytes + 4 * HEAD_SIZE) / took / 1e6),
        ]
    return found


def time_rest() -> dict[str, float]:
    """GB/s of a copy, and milliseconds of merging and rotating so many tokens of Qwen3.6-27B."""
    found = {"copy_gb_s": float(round(copy_bytes_per_s() / 1e9))}
    for tokens in (512, 1408):
        out, part = (torch.randn(tokens, HEADS, HEAD_SIZE, device=DEVICE).bfloat16() for _ in "ab")
        total, lse = torch.empty_like(out, dtype=torch.float32), torch.zeros(HEADS, tokens, device=DEVICE)
        merge = functools.partial(merging.merge, out, lse, part, lse, total, lse)
        found[f"merge {tokens}"] = milliseconds(merge)
        found[f"rotate {tokens}"] = milliseconds(functools.partial(rotation.rotate, out, part.half()))
    return found


def checks() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Everything that is done, by the name of its entry, the checks first."""
    yield "float8", check_float8
    for name in PRESETS:
        yield f"prefix {name}", functools.partial(check_prefix, name)
    yield "keys", key_errors
    for name, head_size in itertools.product(PRESETS, HEAD_SIZES):
        layout = slot_layout(name, head_size)
        if storing.supports(layout) is None:
            yield f"slots {name} {head_size}", functools.partial(check_slots, layout)
    yield "time rest", time_rest
    for name in PRESETS:
        layout = slot_layout(name, HEAD_SIZE)
        yield f"time store {name}", functools.partial(time_store, layout)
        yield f"time dequantize {name}", functools.partial(time_dequantize, layout)


def holds(report: Mapping[str, Any]) -> dict[str, bool]:
    """Which promises hold of what has been checked; one that nothing was checked of does not."""
    found = {entry["check"]: entry["found"] for entry in report["checks"]}

    def within(kind: str, bound: float) -> bool:
        sizes = [size for name, parts in found.items() if name.startswith(kind) for size in parts.values()]
        return bool(sizes) and all(size <= bound for size in sizes)

    return {
        "float8": within("float8", 0),
        "slots": within("slots", AT_A_BOUND),
        "prefix": within("prefix", PREFIX_ERROR),
        "keys": bool(found.get("keys")) and all(row["card"] == row["integers"] < 0.2 for row in found["keys"]),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--results", type=Path, required=True, help="where the outcomes go, as JSON; it is gone on with"
    )
    parser.add_argument("--budget-s", type=float, default=3600, help="stop behind the check that passes it")
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    kept = Kept(
        options.results,
        {"host": spec_decode.host()},
        ("checks",),
        lambda report: {"holds": holds(report)},
        options.budget_s,
    )
    try:
        for name, check in checks():
            if not kept.has("checks", check=name):
                kept.add("checks", {"check": name, "found": check()})
    except OutOfTime:
        print(json.dumps(kept.report["holds"]), "cut by the budget: run again to go on", sep="\n")
        return 3
    print(json.dumps(kept.report["holds"]))
    return 0 if all(kept.report["holds"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
