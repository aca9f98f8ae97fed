"""Times on a GPU by replays of a CUDA graph whose inputs no cache holds, and the bandwidth of a copy."""

from __future__ import annotations

import math
from typing import Any

import torch

OTHER_BYTES = 3 * 2**26
"""Written before each replay: more than the L2 cache of any card here holds."""


def cold_microseconds(graph: Any, other: torch.Tensor, repeats: int) -> float:
    """The median time of a graph's replay, each behind a write to all of `other` (`OTHER_BYTES` of the device)."""
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for start, stop in events:
        other.zero_()
        start.record()
        graph.replay()
        stop.record()
    torch.cuda.synchronize()
    times = sorted(start.elapsed_time(stop) for start, stop in events)
    return float(round(times[len(times) // 2] * 1000, 1))


def copy_bytes_per_s() -> float:
    """Bytes read and written per second by a large copy on the device, the best of six."""
    source = torch.empty(2**31, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    best = math.inf
    for _ in range(6):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        target.copy_(source)
        stop.record()
        stop.synchronize()
        best = min(best, start.elapsed_time(stop) / 1000)
    return float(2 * source.numel() / best)
