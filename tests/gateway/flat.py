"""Whether a process's memory stays flat, by samples of its resident size. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

WARM_UP_SHARE = 0.25
"""Of the time of the run: caches and pools fill."""
MOST_GROWTH_BYTES = 8 << 20
MOST_GROWTH_SHARE = 0.10


@dataclass(frozen=True)
class Flatness:
    """Memory after the warm-up: at its beginning and at its end, each the median of a quarter of the samples."""

    first_bytes: int
    last_bytes: int
    most_bytes: int

    @property
    def growth_bytes(self) -> int:
        return self.last_bytes - self.first_bytes

    @property
    def is_flat(self) -> bool:
        return self.growth_bytes <= max(MOST_GROWTH_BYTES, MOST_GROWTH_SHARE * self.first_bytes)


def flatness(samples: Sequence[int]) -> Flatness:
    """Judge samples taken at equal intervals, at least eight."""
    if len(samples) < 8:
        raise ValueError(f"{len(samples)} samples: at least 8 are needed")
    kept = samples[int(len(samples) * WARM_UP_SHARE) :]
    part = max(1, len(kept) // 4)
    return Flatness(int(median(kept[:part])), int(median(kept[-part:])), max(samples))
