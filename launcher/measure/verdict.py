"""From measurements to an answer: each check against its threshold. Pure."""

import math
from dataclasses import dataclass

from launcher.measure.equality import EqualityReport
from launcher.measure.heatmap import summary
from launcher.measure.ladder import Ladder
from launcher.measure.prefix import PrefixReport
from launcher.measure.replies import Share, needed_without_failure
from launcher.measure.tools import ToolReport


@dataclass(frozen=True)
class Thresholds:
    """What a service must reach."""

    right_replies: float = 0.9995
    """Share of right replies of the tool-call suite: the acceptance number of real models."""
    equal_streams: float = 1.0
    """Share of streamed replies that equal the whole ones."""
    steady_repeats: float = 1.0
    """Share of repetitions with a shared prefix that are right and equal to the first."""
    wrong_tokens: int = 0
    """Replies whose first difference from the reference is no near tie."""


@dataclass(frozen=True)
class Skipped:
    """A part that was not run."""

    reason: str


@dataclass(frozen=True)
class Check:
    """One question of the verdict; `passed` is None where it was not asked."""

    name: str
    passed: bool | None
    value: float | None
    threshold: float | None
    said: str


@dataclass(frozen=True)
class Parts:
    """What was measured, or why not."""

    tools: ToolReport | Skipped
    prefix: PrefixReport | Skipped
    needles: Ladder | Skipped
    equality: EqualityReport | Skipped


def checks(parts: Parts, thresholds: Thresholds = Thresholds()) -> tuple[Check, ...]:
    """Return every check with its answer."""
    return (
        *_tool_checks(parts.tools, thresholds),
        _prefix_check(parts.prefix, thresholds),
        _needle_check(parts.needles),
        _equality_check(parts.equality, thresholds),
    )


def passed(found: tuple[Check, ...]) -> bool:
    """Whether nothing failed, and something was asked."""
    return all(check.passed is not False for check in found) and any(check.passed for check in found)


def percent(rate: float) -> str:
    """Return a rate as a percentage, rounded down: 100 % is every one."""
    return f"{math.floor(rate * 10_000) / 100:.2f} %"


def _tool_checks(found: ToolReport | Skipped, thresholds: Thresholds) -> tuple[Check, ...]:
    names = ("tool calls", "streaming = whole")
    if isinstance(found, Skipped):
        return tuple(_skipped(name, found) for name in names)
    calls, twins = found.replies, found.twins
    wanted = thresholds.right_replies
    return (
        Check(
            names[0],
            calls.rate >= wanted,
            calls.rate,
            wanted,
            f"{_of(calls)} replies are right; {_bound(calls, wanted)}",
        ),
        Check(
            names[1],
            twins.rate >= thresholds.equal_streams,
            twins.rate,
            thresholds.equal_streams,
            f"{_of(twins)} streamed replies equal the whole ones byte for byte",
        ),
    )


def _bound(calls: Share, wanted: float) -> str:
    """What so few replies can show."""
    shown = f"with 95 % confidence at least {percent(calls.at_least)} of all are"
    if calls.at_least >= wanted:
        return shown
    return f"{shown} (to show {percent(wanted)}, {needed_without_failure(wanted):,} in a row must be right)"


def _prefix_check(found: PrefixReport | Skipped, thresholds: Thresholds) -> Check:
    name = "shared prefix"
    if isinstance(found, Skipped):
        return _skipped(name, found)
    value = min(found.right.rate, found.same.rate)
    said = (
        f"{_of(found.right)} replies behind a prefix of {found.prefix_tokens:,} tokens are right, "
        f"{_of(found.same)} repetitions equal the first"
    )
    return Check(name, value >= thresholds.steady_repeats, value, thresholds.steady_repeats, said)


def _needle_check(found: Ladder | Skipped) -> Check:
    name = "needles"
    if isinstance(found, Skipped):
        return _skipped(name, found)
    return Check(name, found.climbed, found.holds_tokens, found.climbs_to_tokens, summary(found))


def _equality_check(found: EqualityReport | Skipped, thresholds: Thresholds) -> Check:
    name = "greedy equality"
    if isinstance(found, Skipped):
        return _skipped(name, found)
    said = (
        f"of {found.compared} replies {found.equal} equal the reference's, {found.near_ties} differ at a near tie "
        f"(less than {found.near_tie_nats:.2g} nats), {found.wrong} are wrong"
    )
    return Check(name, found.wrong <= thresholds.wrong_tokens, found.wrong, thresholds.wrong_tokens, said)


def _skipped(name: str, found: Skipped) -> Check:
    return Check(name, None, None, None, f"skipped: {found.reason}")


def _of(share: Share) -> str:
    return f"{share.right} of {share.total}"
