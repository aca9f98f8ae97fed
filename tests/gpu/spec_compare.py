"""Greedy output with speculation against greedy output without, stream by stream, by the rule of near ties."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import paths  # noqa: F401

from launcher.measure.greedy import EPSILON, Difference, Generated, Verdict, common_prefix, compare

__all__ = ["EPSILON", "Difference", "Generated", "Verdict", "common_prefix", "compare", "compare_streams", "passes"]

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
