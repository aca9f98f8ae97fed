"""The rule of greedy equality: two continuations are equal, but for near ties of the reference's two best tokens.

A near tie is a position where the reference's best token leads the second by little in log-probability (`near_tie`):
there the rounding of bfloat16, which differs with the shape of a batch, decides. Behind it the two texts have nothing
in common any more, so only the first difference of a sequence counts. Standard library only.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

# In nats. Logits of a small model lie between 2 and 4, where bfloat16 has steps of 1/64: three steps and a little.
EPSILON = 0.05

# Logits of a large model lie between 16 and 32, where bfloat16 has steps of 1/8: each of two may move by one.
_STEPS = (0.5, 0.25, 0.125, 0.0625, 0.03125)
_STEPS_APART = 2.1
_ALIKE_NATS = 1.0
_FEWEST = 8

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


def near_tie(margins: Iterable[float]) -> float:
    """Return below which margin, in nats, rounding decides: EPSILON, or two steps of the logits where that is more.

    The log-probabilities of two tokens differ as their logits do, whose rounding shows in the `margins` of all replies:
    they are multiples of its step, where the two are of one magnitude.
    """
    near = [margin for margin in margins if 1e-3 < margin < _ALIKE_NATS]
    if len(near) < _FEWEST:
        return EPSILON
    step = next((step for step in _STEPS if all(abs(one - step * round(one / step)) < 1e-3 for one in near)), 0.0)
    return max(EPSILON, _STEPS_APART * step)


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many tokens two sequences have in common from the start."""
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
