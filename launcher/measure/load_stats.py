"""Percentiles and a timeline of any length in bounded memory."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from fastdigest import TDigest

CENTROIDS = 400
"""Of a t-digest: percentiles are within a few thousandths of a rank, at the tails far closer."""
BUCKET_CENTROIDS = 40
MOST_BUCKETS = 360
FIRST_WIDTH_S = 5.0
"""Wide enough for two looks at the server in each bucket."""


class Spread:
    """How values spread: a t-digest, which forgets the values and keeps their percentiles."""

    def __init__(self, centroids: int = CENTROIDS) -> None:
        self._digest = TDigest(max_centroids=centroids)
        self.largest: float | None = None

    def add(self, values: Iterable[float]) -> None:
        """Take in values."""
        new = list(values)
        if new:
            self._digest.batch_update(new)
            self.largest = max(new) if self.largest is None else max(self.largest, *new)

    def take(self, other: "Spread") -> None:
        """Take in what another one has seen."""
        if other.count:
            self._digest += other._digest
            assert other.largest is not None
            self.largest = max(self.largest or other.largest, other.largest)

    @property
    def count(self) -> int:
        return int(self._digest.n_values)

    def quantile(self, share: float) -> float | None:
        """Return the value that this share of all values does not exceed; None where there are none."""
        return float(self._digest.quantile(share)) if self.count else None

    def summary(self) -> dict[str, float | int | None]:
        """Return count, percentiles and the largest value."""
        named = {f"p{percent:g}": self.quantile(percent / 100) for percent in (50, 95, 99)}
        return {"count": self.count, **named, "max": self.largest}

    def to_json(self) -> dict[str, Any]:
        return {"digest": self._digest.to_dict() if self.count else None, "largest": self.largest}

    @classmethod
    def from_json(cls, document: dict[str, Any], centroids: int = CENTROIDS) -> "Spread":
        made = cls(centroids)
        if document["digest"] is not None:
            made._digest = TDigest.from_dict(document["digest"])
            made.largest = document["largest"]
        return made


def _short_spread() -> Spread:
    return Spread(BUCKET_CENTROIDS)


@dataclass
class Bucket:
    """What happened in one stretch of time: sums, means and largest values of gauges, and spreads."""

    start_s: float
    sums: dict[str, float] = field(default_factory=dict)
    gauges: dict[str, tuple[float, int, float]] = field(default_factory=dict)
    """Sum, count and largest value by name."""
    spreads: dict[str, Spread] = field(default_factory=dict)

    def count(self, name: str, value: float = 1.0) -> None:
        self.sums[name] = self.sums.get(name, 0.0) + value

    def gauge(self, name: str, value: float) -> None:
        total, count, largest = self.gauges.get(name, (0.0, 0, value))
        self.gauges[name] = (total + value, count + 1, max(largest, value))

    def spread(self, name: str, values: Iterable[float]) -> None:
        self.spreads.setdefault(name, _short_spread()).add(values)

    def take(self, other: "Bucket") -> None:
        """Take in a later bucket."""
        for name, value in other.sums.items():
            self.count(name, value)
        for name, (total, count, largest) in other.gauges.items():
            own_total, own_count, own_largest = self.gauges.get(name, (0.0, 0, largest))
            self.gauges[name] = (own_total + total, own_count + count, max(own_largest, largest))
        for name, spread in other.spreads.items():
            self.spreads.setdefault(name, _short_spread()).take(spread)

    def mean(self, name: str) -> float | None:
        total, count, _ = self.gauges.get(name, (0.0, 0, 0.0))
        return total / count if count else None

    def largest(self, name: str) -> float | None:
        return self.gauges[name][2] if name in self.gauges else None

    def to_json(self) -> dict[str, Any]:
        spreads = {name: spread.to_json() for name, spread in self.spreads.items()}
        return {"start_s": self.start_s, "sums": self.sums, "gauges": self.gauges, "spreads": spreads}

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> "Bucket":
        spreads = {name: Spread.from_json(one, BUCKET_CENTROIDS) for name, one in document["spreads"].items()}
        gauges = {name: (float(a), int(n), float(b)) for name, (a, n, b) in document["gauges"].items()}
        return cls(document["start_s"], dict(document["sums"]), gauges, spreads)


@dataclass
class Timeline:
    """Buckets of one width, which doubles when there are too many of them."""

    width_s: float = FIRST_WIDTH_S
    buckets: list[Bucket] = field(default_factory=list)

    def at(self, elapsed_s: float) -> Bucket:
        """Return the bucket of a time."""
        while elapsed_s >= self.width_s * MOST_BUCKETS:
            self._halve()
        number = int(elapsed_s / self.width_s)
        while len(self.buckets) <= number:
            self.buckets.append(Bucket(len(self.buckets) * self.width_s))
        return self.buckets[number]

    def series(self, value: Callable[[Bucket], float | None]) -> list[tuple[float, float | None]]:
        """Return a value of each bucket by the middle of its time; the last bucket may be cut short and is left out."""
        whole = self.buckets[:-1] or self.buckets
        return [(bucket.start_s + self.width_s / 2, value(bucket)) for bucket in whole]

    def _halve(self) -> None:
        self.width_s *= 2
        merged = self.buckets[::2]
        for into, later in zip(merged, self.buckets[1::2], strict=False):
            into.take(later)
        for number, bucket in enumerate(merged):
            bucket.start_s = number * self.width_s
        self.buckets = merged

    def to_json(self) -> dict[str, Any]:
        return {"width_s": self.width_s, "buckets": [bucket.to_json() for bucket in self.buckets]}

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> "Timeline":
        return cls(document["width_s"], [Bucket.from_json(one) for one in document["buckets"]])
