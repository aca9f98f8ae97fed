#!/usr/bin/env python3
"""Compile the attention kernels for GPUs that need not be there, and write down what they take; no GPU is needed.

    python3 tests/gpu/compile_targets.py --results tests/gpu/results/compile_targets.json

Triton compiles for a named target with the ptxas that it brings.  The kernels' own launchers are called on small CPU
tensors, with a driver that names the target and launches nothing, so that what is compiled is what would be launched.
The exit status is 0 when no kernel spills and each fits the shared memory of every target.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "patches"))

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from vllm_graft.attention.kernels import decode, dequantize, merge, rotation, store
from vllm_graft.attention.kernels.codebook import prepare_codebook
from vllm_graft.attention.kernels.launch import Launch, decode_launch, resident_programs
from vllm_graft.attention.kernels.layout import PRESETS, SlotLayout, slot_layout

TARGETS = ((8, 6), (8, 9), (9, 0), (12, 0))
SHARED_MEMORY_BYTES = 99 * 1024
"""What one program can have on 8.6, 8.9 and 12.0."""
SHARED_BYTES_PER_SM = {(8, 6): 100 * 1024, (8, 9): 100 * 1024, (9, 0): 228 * 1024, (12, 0): 100 * 1024}
REGISTERS_PER_SM = 64 * 1024


@dataclasses.dataclass(frozen=True)
class Shape:
    """A shape of attention: one KV head's query heads, and the query tokens of a verify step."""

    head_size: int
    group: int
    queries: int
    page_tokens: int


SHAPES = (
    Shape(256, 6, 1, 64),
    Shape(256, 6, 4, 64),
    Shape(256, 16, 8, 16),
    Shape(128, 4, 8, 32),
    Shape(96, 3, 4, 64),
    Shape(64, 1, 1, 16),
)


class NamedTarget:
    """What Triton asks of a driver before it compiles."""

    def __init__(self, capability: tuple[int, int]) -> None:
        self.target = GPUTarget("cuda", capability[0] * 10 + capability[1], 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return int(self.target.arch)  # kernels remember the target of a device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


@contextlib.contextmanager
def compiling(capability: tuple[int, int]) -> Iterator[list[tuple[str, Any]]]:
    """Compile for a target what is launched within, and launch nothing; the kernels are collected by name."""
    made: list[tuple[str, Any]] = []
    run = triton.JITFunction.run

    def compile_only(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **named: Any) -> Any:
        compiled = run(kernel, *arguments, grid=grid, warmup=True, **named)
        made.append((kernel.__name__.lstrip("_"), compiled))
        return compiled

    triton.runtime.driver.set_active(NamedTarget(capability))
    triton.JITFunction.run = compile_only
    try:
        yield made
    finally:
        triton.JITFunction.run = run


def resources(compiled: Any, capability: tuple[int, int]) -> dict[str, int]:
    """Registers, spilled bytes and stack of a kernel as ptxas reports them, and its shared memory."""
    ptxas = get_ptxas(10 * capability[0] + capability[1]).path
    name = f"sm_{capability[0]}{capability[1]}" + ("a" if capability >= (9, 0) else "")
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as source:
        source.write(compiled.asm["ptx"])
        source.flush()
        command = [ptxas, "-v", f"--gpu-name={name}", source.name, "-o", "/dev/null"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    frame = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", said)
    registers = re.search(r"Used (\d+) registers", said)
    if frame is None or registers is None:
        raise ValueError(f"ptxas -v: no resources in what it printed: {said[-300:]}")
    resident = resident_programs(
        int(registers[1]),
        int(compiled.metadata.shared),
        int(compiled.metadata.num_warps),
        registers_per_sm=REGISTERS_PER_SM,
        shared_bytes_per_sm=SHARED_BYTES_PER_SM[capability],
    )
    return {
        "resident_programs": resident,
        "registers": int(registers[1]),
        "spilled_bytes": int(frame[2]) + int(frame[3]),
        "stack_bytes": int(frame[1]),
        "shared_bytes": int(compiled.metadata.shared),
        "warps": int(compiled.metadata.num_warps),
    }


def centroids(layout: SlotLayout) -> torch.Tensor:
    """Some symmetric centroids: what they are changes constants alone."""
    count = max(layout.num_centroids, 2)
    return torch.special.ndtri((torch.arange(count, dtype=torch.float64) + 0.5) / count).float()


def how_to_decode(layout: SlotLayout, shape: Shape, capability: tuple[int, int]) -> Launch:
    rows = shape.group * shape.queries
    return decode_launch(capability, layout=layout, rows=rows, page_tokens=shape.page_tokens)


def launch_decode(layout: SlotLayout, shape: Shape, how: Launch) -> None:
    query = torch.zeros(shape.queries, 2 * shape.group, shape.head_size, dtype=torch.bfloat16)
    floats = decode.workspace_floats(
        programs=4,
        num_requests=1,
        num_heads=2 * shape.group,
        num_kv_heads=2,
        max_query_len=shape.queries,
        head_size=shape.head_size,
    )
    decode.verify_attention(
        query,
        torch.zeros(1, shape.page_tokens, 2, layout.slot_bytes, dtype=torch.uint8),
        torch.zeros(1, 1, dtype=torch.int32),
        torch.ones(1, dtype=torch.int32),
        torch.tensor([0, shape.queries], dtype=torch.int32),
        max_query_len=shape.queries,
        layout=layout,
        scale=1.0,
        codebook=None if layout.key_is_fp8 else prepare_codebook(centroids(layout)),
        workspace=decode.Workspace(torch.zeros(floats), 4),
        out=torch.empty_like(query),
        launch=how,
    )


def launch_store(layout: SlotLayout, capability: tuple[int, int]) -> None:
    key = torch.zeros(2, 2, layout.head_size, dtype=torch.bfloat16)
    cache = torch.zeros(1, 64, 2, layout.slot_bytes, dtype=torch.uint8)
    table = centroids(layout)
    midpoints = (table[1:] + table[:-1]) / 2
    store.store(key, key, cache, torch.arange(2), midpoints, layout, hardware_fp8=capability >= (8, 9))


def launch_dequantize(layout: SlotLayout) -> None:
    keys = torch.zeros(2, 2, layout.head_size, dtype=torch.float16)
    cache = torch.zeros(1, 64, 2, layout.slot_bytes, dtype=torch.uint8)
    dequantize.dequantize(cache, torch.zeros(1, dtype=torch.int32), centroids(layout), 0, keys, keys, layout)


def launch_merge(head_size: int) -> None:
    part, sums = torch.zeros(2, 2, head_size, dtype=torch.float16), torch.zeros(2, 2)
    merge.merge(part, sums, part, sums, torch.zeros(2, 2, head_size, dtype=torch.bfloat16), sums)


def launch_rotation(head_size: int) -> None:
    query = torch.zeros(2, 2, head_size, dtype=torch.bfloat16)
    rotation.rotate(query, torch.zeros(2, 2, head_size, dtype=torch.float16))


def work(shapes: tuple[Shape, ...], capability: tuple[int, int]) -> Iterator[tuple[str, Callable[[], None]]]:
    """Everything that is launched, by name."""
    for preset, shape in itertools.product(PRESETS, shapes):
        layout = slot_layout(preset, shape.head_size)
        refusal = decode.supports(
            layout,
            num_heads=shape.group,
            num_kv_heads=1,
            max_query_len=shape.queries,
            page_tokens=shape.page_tokens,
            dtype=torch.bfloat16,
        )
        if refusal is None:
            name = f"{preset} D{shape.head_size} {shape.group}x{shape.queries} rows, pages of {shape.page_tokens}"
            how = how_to_decode(layout, shape, capability)
            name += f", {how.programs_per_sm} programs"
            yield name, lambda layout=layout, shape=shape, how=how: launch_decode(layout, shape, how)  # type: ignore[misc]
    for preset, head_size in itertools.product(PRESETS, sorted({shape.head_size for shape in shapes})):
        layout = slot_layout(preset, head_size)
        if store.supports(layout) is None:
            yield f"{preset} D{head_size}", lambda layout=layout: launch_store(layout, capability)  # type: ignore[misc]
            yield f"{preset} D{head_size}", lambda layout=layout: launch_dequantize(layout)  # type: ignore[misc]
    for head_size in sorted({shape.head_size for shape in shapes}):
        yield f"prefix D{head_size}", lambda head_size=head_size: launch_merge(head_size)  # type: ignore[misc]
        if head_size in rotation.HEAD_SIZES:
            yield f"prefix D{head_size}", lambda head_size=head_size: launch_rotation(head_size)  # type: ignore[misc]


def compile_for(capability: tuple[int, int], shapes: tuple[Shape, ...] = SHAPES) -> list[dict[str, Any]]:
    """What each kernel takes on a target."""
    entries = []
    for name, launch in work(shapes, capability):
        with compiling(capability) as made:
            launch()
        for kernel, compiled in made:
            target = f"sm_{capability[0]}{capability[1]}"
            entries.append({"target": target, "kernel": kernel, "for": name, **resources(compiled, capability)})
            print(*entries[-1].values(), file=sys.stderr, flush=True)
    return entries


def faults(entries: list[dict[str, Any]]) -> list[str]:
    """Kernels that do not fit, whose grid would run in two waves, or that spill; Hopper may, where that was faster."""
    found = []
    for entry in entries:
        what = f"{entry['target']} {entry['kernel']} {entry['for']}"
        if entry["shared_bytes"] > SHARED_MEMORY_BYTES:
            found.append(f"{what}: {entry['shared_bytes']} bytes of shared memory")
        if entry["spilled_bytes"] and entry["target"] != "sm_90":
            found.append(f"{what}: {entry['spilled_bytes']} bytes spilled")
        wanted = re.search(r", (\d+) programs$", entry["for"])
        if entry["kernel"] == "attend" and wanted and entry["resident_programs"] < int(wanted[1]):
            found.append(f"{what}: {entry['resident_programs']} programs fit a multiprocessor")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path("compile_targets.json"))
    arguments = parser.parse_args()
    entries = [entry for capability in TARGETS for entry in compile_for(capability)]
    found = faults(entries)
    report = {"triton": triton.__version__, "faults": found, "kernels": entries}
    arguments.results.write_text(json.dumps(report, indent=1) + "\n")
    print("\n".join([*found, f"{len(entries)} kernels for {len(TARGETS)} targets, {len(found)} at fault"]))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
