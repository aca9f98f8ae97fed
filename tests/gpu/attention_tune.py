#!/usr/bin/env python3
"""Check the decode kernel on a GPU and time its launch parameters; torch and Triton suffice.

    python3 tests/gpu/attention_tune.py --results /tmp/attention_tune.json --budget-s 150
    ncu --clock-control none -k regex:_attend -c 1 --set full python3 tests/gpu/attention_tune.py --profile k8v4:1

Every shape and variant is compiled by worker processes and compared with FP32 attention over the decoded slots; then
the variants are timed one after the other in CUDA graphs with a cold L2 cache.  The results are written as they come.
The exit status is 0 when every comparison holds.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import json
import math
import multiprocessing
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "patches"))

import torch
from clock import OTHER_BYTES, cold_microseconds, copy_bytes_per_s
from vllm_graft.attention.kernels import decode, store_reference
from vllm_graft.attention.kernels.attention_reference import attend
from vllm_graft.attention.kernels.codebook import prepare_codebook
from vllm_graft.attention.kernels.launch import Launch
from vllm_graft.attention.kernels.layout import SlotLayout, slot_layout

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float16: 1.5e-3, torch.bfloat16: 4e-3}  # of the output's rounding and of FP16 operands
SHAPES = ((1, 128), (1, 1024), (1, 8192), (1, 32768), (1, 131072), (1, 262144), (8, 32768))
SCREENED = ((1, 32768), (1, 262144))
WARPS_PER_SM = (8, 12)
"""Warps that the programs of a grid have on each multiprocessor: as many programs as make up so many."""
PAGE = 64


@dataclasses.dataclass(frozen=True)
class Case:
    """A shape class of the kernel with the launch that serves it."""

    preset: str
    head_size: int
    group: int
    kv_heads: int
    queries: int
    page: int
    dtype: str
    launch: Launch

    @property
    def name(self) -> str:
        at = self.launch
        kind = (
            f"{self.preset.removeprefix('turboquant_')} D{self.head_size} {self.group}x{self.kv_heads} q{self.queries}"
        )
        how = f"n{at.block_tokens} w{at.num_warps} s{at.num_stages}"
        how += f" {'hw' if at.hardware_fp8 else 'sw'}{f' {at.fetch}' if at.fetch else ''}"
        reload = " reload" if at.reload_queries else ""
        return f"{kind} {how}{reload} p{self.page}"


def launch(
    tokens: int,
    warps: int,
    stages: int,
    *,
    fp8: bool = False,
    fetch: str | None = None,
    reload: bool = False,
) -> Launch:
    return Launch(tokens, warps, stages, 2, 1, fp8, fetch, reload, "measured")


VARIANTS = {
    ("turboquant_k8v4", 1): [
        *(launch(*at, fp8=True) for at in ((64, 4, 2), (64, 2, 2), (32, 2, 2), (128, 4, 2), (32, 1, 2), (16, 1, 3))),
        *(launch(64, warps, 2, fp8=True, fetch="L2") for warps in (2, 4)),
        launch(32, 1, 2, fp8=True, fetch="L2"),
        launch(64, 2, 2),
        launch(64, 4, 2),
    ],
    ("turboquant_k8v4", 4): [
        *(launch(*at, fp8=True) for at in ((64, 4, 2), (64, 4, 1), (128, 4, 2), (128, 4, 1), (128, 8, 2), (32, 2, 2))),
        *(launch(tokens, 4, 2, fp8=True, fetch="L2") for tokens in (64, 128)),
        launch(64, 4, 2),
    ],
    ("turboquant_4bit_nc", 1): [
        *(launch(*at, 1, fetch="L2") for at in ((64, 4), (128, 4), (128, 8), (64, 2), (32, 2), (16, 1))),
        launch(64, 4, 1, fetch="L1"),
        launch(64, 4, 1),
    ],
    ("turboquant_4bit_nc", 4): [
        *(launch(*at, 1, fetch="L2") for at in ((64, 4), (32, 4), (64, 8), (128, 8))),
        launch(64, 4, 1, fetch="L2", reload=True),
    ],
    ("turboquant_k3v4_nc", 1): [launch(*at, 1, fetch="L2") for at in ((64, 4), (32, 2), (16, 2), (64, 8))],
    ("turboquant_k3v4_nc", 4): [
        *(launch(*at, 1, fetch="L2") for at in ((64, 4), (64, 8), (32, 4))),
        launch(64, 4, 1, fetch="L2", reload=True),
    ],
    ("turboquant_3bit_nc", 1): [launch(*at, 1, fetch="L2") for at in ((64, 4), (32, 2), (16, 2), (64, 8))],
    ("turboquant_3bit_nc", 4): [
        *(launch(*at, 1, fetch="L2") for at in ((64, 4), (64, 8), (32, 4))),
        launch(64, 4, 1, fetch="L2", reload=True),
    ],
}


def timed_cases() -> list[Case]:
    """The geometry of Qwen3.6-27B with each variant."""
    return [
        Case(preset, 256, 6, 4, queries, PAGE, "bfloat16", at)
        for (preset, queries), launches in VARIANTS.items()
        for at in launches
    ]


def checked_cases() -> list[Case]:
    """Head sizes, groups, rows, page sizes and types beside the timed geometry."""
    cases = []
    for preset in ("turboquant_k8v4", "turboquant_4bit_nc", "turboquant_k3v4_nc", "turboquant_3bit_nc"):
        fp8 = preset == "turboquant_k8v4"
        shapes = [(256, 16, 1, 8, 16), (128, 8, 2, 1, 128), (128, 4, 2, 8, 32), (64, 1, 3, 1, 16), (64, 7, 2, 2, 64)]
        for head_size, group, kv_heads, queries, page in [*shapes, *([(96, 3, 2, 4, 32)] if fp8 else [])]:
            warps = 8 if group * queries > 32 else 4
            at = launch(32, warps, 2, fp8=fp8, fetch=None if fp8 else "L2", reload=not fp8)
            cases.append(Case(preset, head_size, group, kv_heads, queries, page, "float16", at))
    return cases


# ---- correctness ----


def centroids(layout: SlotLayout) -> torch.Tensor:
    """Lloyd-Max centroids of N(0, 1), divided by sqrt(D): Max (1960), tables 1 and 2."""
    half = {
        16: (0.1284, 0.3881, 0.6568, 0.9424, 1.2562, 1.6181, 2.0690, 2.7326),
        8: (0.2451, 0.7560, 1.3439, 2.1520),
        0: (1.0,),
    }[layout.num_centroids]
    positive = torch.tensor(half) / math.sqrt(layout.head_size)
    return torch.cat([-positive.flip(0), positive])


def scratch(case: Case, programs: int, requests: int) -> decode.Workspace:
    floats = decode.workspace_floats(
        programs=programs,
        num_requests=requests,
        num_heads=case.group * case.kv_heads,
        num_kv_heads=case.kv_heads,
        max_query_len=case.queries,
        head_size=case.head_size,
    )
    return decode.Workspace(torch.full((floats,), math.nan, device=DEVICE), programs)


def check(case: Case) -> dict[str, Any]:
    """The relative error of a ragged batch with padding, compiled and run in this process."""
    torch.set_num_threads(1)
    layout = slot_layout(case.preset, case.head_size)
    table = centroids(layout)
    generator = torch.Generator().manual_seed(1)
    lengths = [300, 1, 65, 0, 33] if case.queries == 1 else [300, 129, 65, case.queries, 0]
    queries = [1, 1, 1, 0, 1] if case.queries == 1 else [case.queries, case.queries - 1, 1, case.queries, 0]
    heads = case.group * case.kv_heads
    dtype = getattr(torch, case.dtype)
    width = -(-max(lengths) // case.page)
    blocks = torch.randperm(len(lengths) * width, generator=generator).reshape(-1, width).int() + 1
    shape = (len(lengths) * width + 1, case.page, case.kv_heads, layout.slot_bytes)
    cache = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    tokens = len(lengths) * case.queries
    query = torch.randn(tokens, heads, case.head_size, generator=generator).to(dtype)
    wanted = torch.zeros(tokens, heads, case.head_size)
    start = 0
    for row, (length, count) in enumerate(zip(lengths, queries, strict=True)):
        keys, values = torch.randn(2, length, case.kv_heads, case.head_size, generator=generator)
        slots = store_reference.slots(keys, values, (table[1:] + table[:-1]) / 2, layout)
        places = torch.arange(length)
        cache[blocks[row, places // case.page].long(), places % case.page] = slots
        keys, values = store_reference.contents(slots, table, layout)
        if not layout.key_is_fp8:
            keys = keys @ store_reference.hadamard(case.head_size)
        if count:
            rows = slice(start, start + count)
            attend(query[rows], keys, values, causal=True, scale=query.shape[2] ** -0.5, out=wanted[rows])
        start += count
    out = torch.full((tokens, heads, case.head_size), math.nan, dtype=dtype, device=DEVICE)
    begun = time.perf_counter()
    decode.verify_attention(
        query.to(DEVICE),
        cache.to(DEVICE),
        blocks.to(DEVICE),
        torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
        torch.tensor([0, *queries], device=DEVICE).cumsum(0).int(),
        max_query_len=case.queries,
        layout=layout,
        scale=case.head_size**-0.5,
        codebook=None if layout.key_is_fp8 else prepare_codebook(table),
        workspace=scratch(case, 7, len(lengths)),
        out=out,
        launch=case.launch,
    )
    found = out.cpu().float()
    error = ((found - wanted).norm() / wanted.norm()).item()
    return {
        "relative_error": error,
        "largest_error": (found - wanted).abs().max().item(),
        "holds": bool(error < TOLERANCE[dtype]),
        "first_call_s": round(time.perf_counter() - begun, 2),
    }


# ---- time ----


def plausible_cache(layout: SlotLayout, pages: int) -> torch.Tensor:
    """Random slots whose numbers are finite and of the size that real ones have."""
    cache = torch.randint(0, 256, (pages, PAGE, 4, layout.slot_bytes), dtype=torch.uint8, device=DEVICE)
    if layout.key_is_fp8:
        cache[..., : layout.head_size] &= 0xBF  # below 2
    for offset, low, high in (
        *(() if layout.key_is_fp8 else ((layout.norm_offset, 10.0, 20.0),)),
        (layout.scale_offset, 0.2, 0.4),
        (layout.zero_offset, -3.0, -2.0),
    ):
        numbers = torch.rand(pages, PAGE, 4, 1, device=DEVICE) * (high - low) + low
        cache[..., offset : offset + 2] = numbers.half().view(torch.uint8)
    return cache


class Bench:
    """Times one attention call at a time: a captured graph, after a write that is larger than the L2 cache."""

    def __init__(self, preset: str) -> None:
        self.layout = slot_layout(preset, 256)
        self.pages = max(requests * length for requests, length in SHAPES) // PAGE
        self.cache = plausible_cache(self.layout, self.pages)
        self.table = None if self.layout.key_is_fp8 else prepare_codebook(centroids(self.layout))
        self.other = torch.empty(OTHER_BYTES, dtype=torch.uint8, device=DEVICE)
        self.multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count

    def graph(self, case: Case, requests: int, length: int, per_sm: int, min_tiles: int) -> torch.cuda.CUDAGraph:
        width = -(-length // PAGE)
        blocks = torch.randperm(self.pages, device=DEVICE)[: requests * width].reshape(requests, width).int()
        tokens = requests * case.queries
        query = torch.randn(tokens, 24, 256, device=DEVICE, dtype=torch.bfloat16)
        lengths = torch.full((requests,), length, dtype=torch.int32, device=DEVICE)
        starts = torch.arange(0, tokens + 1, case.queries, dtype=torch.int32, device=DEVICE)
        out = torch.empty_like(query)
        workspace = scratch(case, self.multiprocessors * per_sm, requests)
        how = dataclasses.replace(case.launch, programs_per_sm=per_sm, min_tiles=min_tiles)
        inputs = (query, self.cache, blocks, lengths, starts)

        def call() -> None:
            decode.verify_attention(
                *inputs,
                max_query_len=case.queries,
                layout=self.layout,
                scale=1 / 16,
                codebook=self.table,
                workspace=workspace,
                out=out,
                launch=how,
            )

        call()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        graph.kept = (*inputs, out, workspace)
        return graph

    def microseconds(self, case: Case, shape: tuple[int, int], per_sm: int, min_tiles: int, repeats: int = 11) -> float:
        graph = self.graph(case, *shape, per_sm, min_tiles)
        return cold_microseconds(graph, self.other, repeats)


def shape_name(shape: tuple[int, int]) -> str:
    return f"{shape[0]}x{shape[1]}"


def measure(report: dict[str, Any], write: Any, left: Any) -> None:
    """Screen all variants at two lengths, then time the best of each preset and query length at all shapes."""
    rate = report["copy_bytes_per_s"] = copy_bytes_per_s()
    for preset in dict.fromkeys(preset for preset, _ in VARIANTS):
        bench = Bench(preset)
        slot = bench.layout.slot_bytes
        report["floor_us"][preset] = {shape_name(at): at[0] * at[1] * 4 * slot / rate * 1e6 for at in SHAPES}
        for queries in (1, 4):
            cases = [c for c in timed_cases() if (c.preset, c.queries) == (preset, queries)]
            ranked = []
            for case in cases:
                if not report["checks"].get(case.name, {}).get("holds"):
                    continue
                for per_sm in sorted({max(1, warps // case.launch.num_warps) for warps in WARPS_PER_SM}):
                    if left() < 5:
                        return
                    times = {shape_name(at): bench.microseconds(case, at, per_sm, 1) for at in SCREENED}
                    report["screened"].append({"case": case.name, "programs_per_sm": per_sm, "us": times})
                    ranked.append((math.prod(times.values()), case, per_sm))
            write()
            ranked.sort(key=lambda entry: entry[0])
            for _, case, per_sm in ranked[:3]:
                for min_tiles in (1, 2):
                    if left() < 5:
                        return
                    shapes = SHAPES if min_tiles == 1 else SHAPES[:3]
                    times = {shape_name(at): bench.microseconds(case, at, per_sm, min_tiles, 21) for at in shapes}
                    how = {"programs_per_sm": per_sm, "min_tiles": min_tiles}
                    report["timed"].append({"case": case.name, **how, "us": times})
            write()


def table(report: dict[str, Any]) -> str:
    """What the results say, in lines that fit a terminal."""
    lines = [f"{report['device']}; copy {report.get('copy_bytes_per_s', 0) / 1e12:.2f} TB/s; torch {torch.__version__}"]
    lines += [f"FAILED {name}: {entry}" for name, entry in report["checks"].items() if not entry.get("holds")]
    good = [entry["relative_error"] for entry in report["checks"].values() if entry.get("holds")]
    lines.append(f"{len(good)} checks hold, largest relative error {max(good, default=0):.2e}")
    by_case: dict[str, list[str]] = {}
    for entry in report["screened"]:
        by_case.setdefault(entry["case"], []).append("/".join(f"{us:.0f}" for us in entry["us"].values()))
    lines.append(f"us at {' / '.join(map(shape_name, SCREENED))} for {WARPS_PER_SM} warps per multiprocessor")
    lines += [f"  {case:44} {'  '.join(times)}" for case, times in by_case.items()]
    for entry in report["timed"]:
        times = "  ".join(f"{shape}:{us:.1f}" for shape, us in entry["us"].items())
        lines.append(f"  {entry['case']} pps{entry['programs_per_sm']} min{entry['min_tiles']}  {times}")
    for preset, floors in report["floor_us"].items():
        lines.append(f"  floor {preset}  " + "  ".join(f"{shape}:{us:.1f}" for shape, us in floors.items()))
    return "\n".join(lines)


def run(results: Path, budget_s: float, workers: int) -> int:
    begun = time.perf_counter()
    report: dict[str, Any] = {"checks": {}, "screened": [], "timed": [], "floor_us": {}}
    report["device"] = torch.cuda.get_device_name() if DEVICE == "cuda" else "dry run"

    def write() -> None:
        results.write_text(json.dumps(report, indent=1) + "\n")

    cases = [*timed_cases(), *checked_cases()] if DEVICE == "cuda" else [timed_cases()[0], *checked_cases()[::4]]
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=context) as pool:
        waiting = {pool.submit(check, case): case for case in cases}
        for done in concurrent.futures.as_completed(waiting):
            failure = done.exception()
            report["checks"][waiting[done].name] = (
                {"holds": False, "failure": f"{type(failure).__name__}: {str(failure)[-400:]}"}
                if failure
                else done.result()
            )
    report["compiled_and_checked_s"] = round(time.perf_counter() - begun, 1)
    write()
    if DEVICE == "cuda":
        measure(report, write, lambda: budget_s - (time.perf_counter() - begun))
    report["seconds"] = round(time.perf_counter() - begun, 1)
    write()
    print(table(report))
    print(f"checked in {report['compiled_and_checked_s']} s, all in {report['seconds']} s")
    return 0 if all(entry["holds"] for entry in report["checks"].values()) else 1


def profile(what: str) -> int:
    """Launch the first variant of a preset and query length a few times at 1 x 131072, for a profiler to look at."""
    preset, queries, *rest = what.split(":")
    cases = [c for c in timed_cases() if (c.preset, c.queries) == (f"turboquant_{preset}", int(queries))]
    case = cases[int(rest[0]) if rest else 0]
    bench = Bench(case.preset)
    bench.graph(case, 1, 131072, int(rest[1]) if len(rest) > 1 else 2, 2)
    torch.cuda.synchronize()
    print(case.name)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path("attention_tune.json"))
    parser.add_argument("--budget-s", type=float, default=150.0)
    parser.add_argument("--workers", type=int, default=min(15, os.cpu_count() or 1))
    parser.add_argument("--profile", metavar="PRESET:QUERIES[:VARIANT[:PROGRAMS_PER_SM]]")
    arguments = parser.parse_args()
    if arguments.profile:
        return profile(arguments.profile)
    return run(arguments.results, arguments.budget_s, arguments.workers)


if __name__ == "__main__":
    sys.exit(main())
