"""The rule: greedy output with speculation equals greedy output without, but for near ties of the reference's two best.

A near tie is a position where the reference's best token leads the second by less than EPSILON in log-probability:
there the rounding of bfloat16, which differs with the shape of a batch, decides.  Behind it the two texts have nothing
in common any more, so only the first difference of a sequence counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

# In nats.  Logits of the tiny model lie between 2 and 4, where bfloat16 has steps of 1/64: three steps and a little.
EPSILON = 0.05

Verdict = Literal["equal", "near-tie", "wrong"]


@dataclass(frozen=True)
class Generated:
    """One greedy continuation; `margins` are best minus second-best log-probability, recorded in reference runs."""

    tokens: tuple[int, ...]
    margins: tuple[float, ...] = ()


@dataclass(frozen=True)
class Difference:
    """A continuation against its reference; `margin` is the reference's at the first difference."""

    verdict: Verdict
    common: int
    length: int
    margin: float | None


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two sequences have in common from the start."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def compare(reference: Generated, candidate: Generated, epsilon: float = EPSILON) -> Difference:
    """Judge one continuation.

    Raises:
        ValueError: the reference has no margins.

    """
    if len(reference.margins) != len(reference.tokens):
        raise ValueError(f"{len(reference.margins)} margins for {len(reference.tokens)} tokens of the reference")
    length = len(reference.tokens)
    common = common_prefix(reference.tokens, candidate.tokens)
    if common == length == len(candidate.tokens):
        return Difference("equal", common, length, None)
    if common >= min(length, len(candidate.tokens)):
        return Difference("wrong", common, length, None)  # one of them stopped early
    margin = reference.margins[common]
    return Difference("near-tie" if margin < epsilon else "wrong", common, length, margin)


Streams = Mapping[str, Sequence[Generated]]


def compare_streams(reference: Streams, candidate: Streams) -> dict[str, tuple[Difference, ...]]:
    """Judge all continuations of a run, stream by stream.

    Raises:
        ValueError: the runs do not have the same streams.

    """
    if {name: len(items) for name, items in reference.items()} != {n: len(items) for n, items in candidate.items()}:
        raise ValueError(f"streams {sorted(candidate)} against {sorted(reference)} of the reference")
    return {
        name: tuple(compare(one, other) for one, other in zip(reference[name], items, strict=True))
        for name, items in candidate.items()
    }


def passes(differences: Mapping[str, Sequence[Difference]]) -> bool:
    """Whether no continuation is wrong."""
    return all(difference.verdict != "wrong" for items in differences.values() for difference in items)
