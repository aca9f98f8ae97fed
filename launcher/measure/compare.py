"""Two reports of load tests beside each other: ratios of what both measured. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from launcher.errors import UsageError

Better = Literal["higher", "lower"]
DIRECTIONS: Mapping[str, Better] = {
    "tokens_a_second": "higher",
    "replies_a_second": "higher",
    "requests_a_second": "higher",
    "acceptance": "higher",
    "prefix_hits": "higher",
    "right_calls": "higher",
    "right_answers": "higher",
    "kv_usage_peak": "lower",
    "gpu_peak_bytes": "lower",
    "error_rate": "lower",
    "preemptions": "lower",
    "restarts": "lower",
    "turned_away": "lower",
    "failed": "lower",
}
"""Which way each figure is better; latencies, which end in `_s`, are better when lower; the others say nothing."""
NEUTRAL = ("elapsed_s", "duration_s")
OF_THE_RUN = ("url", "profile", "duration_s", "vllm", "gpu_uuids", "gpu_bound_bytes", "no_tools_reason")
"""Settings that may differ: they are what is compared, or where it ran."""


@dataclass(frozen=True)
class Ratio:
    """One figure of both reports; `ratio` is the second by the first, None where it cannot be formed."""

    name: str
    first: float | None
    second: float | None
    ratio: float | None
    better: Better | None

    @property
    def is_better(self) -> bool | None:
        """Whether the second is better; None where neither is, or nobody can say."""
        if self.ratio is None or self.better is None or self.ratio == 1:
            return None
        return (self.ratio > 1) == (self.better == "higher")


def differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    """Return what makes two reports unlike: another kind, or another load."""
    if first["kind"] != second["kind"]:
        return [f"the first is of a {first['kind']}, the second of a {second['kind']}"]
    one, other = first["settings"], second["settings"]
    names = [name for name in dict.fromkeys((*one, *other)) if name not in OF_THE_RUN]
    return [f"{name}: {one.get(name)} and {other.get(name)}" for name in names if one.get(name) != other.get(name)]


def ratios(first: Mapping[str, Any], second: Mapping[str, Any]) -> tuple[Ratio, ...]:
    """Return every figure that at least one of the reports has."""
    one, other = first["figures"], second["figures"]
    return tuple(_ratio(name, one.get(name), other.get(name)) for name in dict.fromkeys((*one, *other)))


def check(document: Any, source: str) -> dict[str, Any]:
    """Return a report that can be compared.

    Raises:
        UsageError: it is none.
    """
    is_report = isinstance(document, dict) and document.get("kind") in ("bench", "soak")
    if not is_report or not isinstance(document.get("figures"), dict) or not isinstance(document.get("settings"), dict):
        raise UsageError(f"{source}: not a report of `graft bench` or `graft soak`; name a bench.json or a soak.json")
    return dict(document)


def _ratio(name: str, first: float | None, second: float | None) -> Ratio:
    ratio = second / first if first and second is not None else None
    return Ratio(name, first, second, ratio, _direction(name.rpartition(": ")[2]))


def _direction(name: str) -> Better | None:
    if name in NEUTRAL:
        return None
    return DIRECTIONS.get(name, "lower" if name.endswith("_s") else None)
