"""Whether new requests are let in: a state machine over what vLLM's /metrics say. Pure; the caller has the clock."""

import re
from dataclasses import dataclass, replace
from typing import Literal

Pressure = Literal["kv-cache", "queue"]

_GAUGE = re.compile(
    r"^(vllm:kv_cache_usage_perc|vllm:num_requests_waiting)(?:\{[^}]*\})?[ \t]+(\S+)(?:[ \t]+\d+)?$", re.M
)


@dataclass(frozen=True)
class Sample:
    """What one look at /metrics gave."""

    kv_usage: float
    """Share of the KV cache's blocks that is in use, 0 to 1; of several engines the fullest."""
    waiting: int
    """Requests that wait for a place in a batch, over all engines."""


@dataclass(frozen=True)
class Bounds:
    """When the door closes, and when it opens again: the gap keeps it from swinging."""

    max_waiting: int
    """More requests than this in vLLM's queue close it at once."""
    kv_close: float = 0.95
    kv_open: float = 0.85
    kv_for_s: float = 5.0
    """A KV cache above `kv_close` for so long closes it."""

    @property
    def waiting_open(self) -> int:
        """The longest queue with which it opens again."""
        return self.max_waiting // 2


@dataclass(frozen=True)
class Admission:
    """The door's state."""

    kv_high_since_s: float | None = None
    closed_by: frozenset[Pressure] = frozenset()

    @property
    def is_open(self) -> bool:
        return not self.closed_by

    def after(self, sample: Sample, now_s: float, bounds: Bounds) -> "Admission":
        """Return the state after a sample; `now_s` is of a clock that never goes back."""
        since_s = None
        if sample.kv_usage > bounds.kv_close:
            since_s = now_s if self.kv_high_since_s is None else self.kv_high_since_s
        closed: set[Pressure] = set()
        if "kv-cache" in self.closed_by:
            closed |= {"kv-cache"} if sample.kv_usage > bounds.kv_open else set()
        elif since_s is not None and now_s - since_s >= bounds.kv_for_s:
            closed.add("kv-cache")
        limit = bounds.waiting_open if "queue" in self.closed_by else bounds.max_waiting
        if sample.waiting > limit:
            closed.add("queue")
        return replace(self, kv_high_since_s=since_s, closed_by=frozenset(closed))


def read_metrics(text: str) -> Sample | None:
    """Read vLLM's metrics; None where they lack one of the two gauges or it is no number."""
    usage: list[float] = []
    waiting: list[float] = []
    for name, value in _GAUGE.findall(text):
        try:
            (usage if name == "vllm:kv_cache_usage_perc" else waiting).append(float(value))
        except ValueError:
            return None
    total = sum(waiting)
    # NaN compares with nothing.
    if not usage or not waiting or max(usage) != max(usage) or total != total or total == float("inf"):
        return None
    return Sample(kv_usage=max(usage), waiting=int(total))
