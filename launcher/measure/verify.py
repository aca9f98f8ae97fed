"""Verify a running service: its tool calls, its prefix cache, its context, and its speculation."""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Protocol

from launcher.ask import AskFailed, Unreachable
from launcher.measure import equality, ladder, prefix, tools, verdict
from launcher.measure.dialogues import KINDS, Kind, Task, tasks
from launcher.measure.equality import EqualityReport, Reference
from launcher.measure.ladder import Ladder
from launcher.measure.prefix import PrefixReport
from launcher.measure.replies import Failure
from launcher.measure.target import Target
from launcher.measure.tools import ToolReport
from launcher.measure.verdict import Check, Parts, Skipped, Thresholds

SCHEMA = 1
CALL_TOKENS = 3500
"""Longest request of the tool-call suite and its reply, in tokens of a byte-level tokenizer."""

SHORTEST_CONTEXT = 256
"""In which a needle can be asked for, in tokens."""


class Progress(Protocol):
    """Where the progress goes."""

    def phase(self, name: str) -> None:
        """Say that a part begins."""

    def progress(self, done: float, total: float, unit: str, detail: str = "") -> None:
        """Say how far the part is."""


@dataclass(frozen=True)
class Settings:
    """What is asked, and how much of it."""

    seed: int
    context_tokens: int
    """Context that the needles climb to."""
    recall_tokens: int | None = None
    """Longest prompt in which the model itself finds a needle reliably; None: any."""
    right_replies: float | None = None
    """Share of right replies that the tool-call suite must reach; None: that of real models."""
    tool_replies: int = 240
    kinds: tuple[Kind, ...] = KINDS
    repeats: int = prefix.REPEATS
    repeated_kinds: tuple[Kind, ...] = prefix.KINDS
    prefix_tokens: int = 5000
    """More than one block of a hybrid's cache (2112 tokens with turboquant_k8v4, 4128 with turboquant_3bit_nc)."""
    lengths: tuple[int, ...] | None = None
    """Steps of the ladder; None: doubling up to the context."""
    depths: tuple[float, ...] = ladder.DEPTHS
    compared: int = 16
    """Replies compared with a reference."""
    concurrency: int = 4
    quick: bool = False


def quick(seed: int, context_tokens: int) -> Settings:
    """Return the settings of a check that takes a card less than 20 seconds."""
    return Settings(
        seed=seed,
        context_tokens=context_tokens,
        tool_replies=9,
        kinds=("single", "parallel", "code", "no-call"),
        repeats=3,
        repeated_kinds=("single",),
        prefix_tokens=2400,
        lengths=(1500,),
        depths=(0.1, 0.6),
        compared=4,
        quick=True,
    )


@dataclass(frozen=True)
class VerifyReport:
    """The answer, and all that it rests on."""

    schema: int
    url: str
    model: str
    when: str
    """Start, UTC, ISO 8601."""
    elapsed_s: float
    settings: Settings
    passed: bool
    checks: tuple[Check, ...]
    tools: ToolReport | Skipped
    prefix: PrefixReport | Skipped
    needles: Ladder | Skipped
    equality: EqualityReport | Skipped

    @property
    def failures(self) -> tuple[Failure, ...]:
        """Every wrong reply."""
        parts = (self.tools, self.prefix, self.needles, self.equality)
        return tuple(failed for part in parts if not isinstance(part, Skipped) for failed in part.failures)


def verify(
    target: Target,
    settings: Settings,
    progress: Progress,
    *,
    no_tools: str | None = None,
    reference: Reference | None = None,
) -> VerifyReport:
    """Measure and judge a service.

    Args:
        target: the service.
        settings: how much is asked.
        progress: told how far it is.
        no_tools: why the model cannot call tools; None where it can.
        reference: brings the same model without speculation, for greedy equality.

    Raises:
        Unreachable: the server is gone.
        AskFailed: it does not say how long a prompt is, or a comparison breaks.
        GraftError: the reference cannot be had.
    """
    started, when = time.monotonic(), datetime.now(UTC).isoformat(timespec="seconds")
    refusal = no_tools or tools_refusal(target) or _context_refusal(settings, CALL_TOKENS)
    parts = Parts(
        tools=Skipped(refusal) if refusal else _tools(target, settings, progress),
        prefix=_prefix(target, settings, progress, refusal),
        needles=_needles(target, settings, progress),
        equality=_equality(target, reference, settings, progress, with_tools=not refusal),
    )
    found = verdict.checks(parts, _thresholds(settings))
    return VerifyReport(
        schema=SCHEMA,
        url=target.connection.base_url,
        model=target.served.name,
        when=when,
        elapsed_s=round(time.monotonic() - started, 1),
        settings=settings,
        passed=verdict.passed(found),
        checks=found,
        tools=parts.tools,
        prefix=parts.prefix,
        needles=parts.needles,
        equality=parts.equality,
    )


def tools_refusal(target: Target) -> str | None:
    """Return why the server refuses requests with tools; None where it takes them."""
    task: Task = tasks("single", random.Random(0))[0]
    try:
        target.connection.answer({**target.request(task), "max_tokens": 1})
    except Unreachable:
        raise
    except AskFailed as error:
        if error.status == 400:
            return f"the server refuses tools: {error}"
    return None


def _thresholds(settings: Settings) -> Thresholds:
    return Thresholds() if settings.right_replies is None else Thresholds(right_replies=settings.right_replies)


def _rng(settings: Settings, part: str) -> random.Random:
    """A part's own, so that one part's size does not change another's questions."""
    return random.Random(f"{settings.seed} {part}")


def _count(progress: Progress, unit: str) -> Callable[[int, int], None]:
    return lambda done, total: progress.progress(done, total, unit)


def _tools(target: Target, settings: Settings, progress: Progress) -> ToolReport:
    progress.phase("tool-calls")
    return tools.suite(
        target,
        _rng(settings, "tools"),
        count=settings.tool_replies,
        concurrency=settings.concurrency,
        on_done=_count(progress, "replies"),
        kinds=settings.kinds,
    )


def _prefix(target: Target, settings: Settings, progress: Progress, refusal: str | None) -> PrefixReport | Skipped:
    # A prefix that leaves no room for the request is cut, and too short a one is cached nowhere.
    longest = settings.context_tokens - CALL_TOKENS
    if refusal or longest < settings.prefix_tokens / 2:
        return Skipped(refusal or f"a context of {settings.context_tokens:,} tokens has no room for a long prefix")
    progress.phase("shared-prefix")
    return prefix.probe(
        target,
        _rng(settings, "prefix"),
        prefix_tokens=min(settings.prefix_tokens, longest),
        repeats=settings.repeats,
        kinds=settings.repeated_kinds,
        concurrency=settings.concurrency,
        on_done=_count(progress, "replies"),
    )


def _needles(target: Target, settings: Settings, progress: Progress) -> Ladder | Skipped:
    if refusal := _context_refusal(settings, SHORTEST_CONTEXT):
        return Skipped(refusal)
    progress.phase("needles")
    return ladder.climb(
        target,
        _rng(settings, "needles"),
        settings.context_tokens,
        recall_tokens=settings.recall_tokens,
        lengths=settings.lengths,
        depths=settings.depths,
        on_done=lambda done, total, what: progress.progress(done, total, "needles", what),
    )


def _equality(
    target: Target, reference: Reference | None, settings: Settings, progress: Progress, *, with_tools: bool
) -> EqualityReport | Skipped:
    if reference is None:
        return Skipped("nothing without speculation to compare with: --against URL, or --restart-without-speculation")
    if not target.is_vllm:
        return Skipped("only vLLM tells the token ids that are compared")
    progress.phase("equality")
    return equality.probe(
        target,
        reference,
        _rng(settings, "equality"),
        count=settings.compared,
        with_tools=with_tools,
        concurrency=settings.concurrency,
        on_done=_count(progress, "replies"),
    )


def _context_refusal(settings: Settings, needed_tokens: int) -> str | None:
    if settings.context_tokens >= needed_tokens:
        return None
    return f"a context of {settings.context_tokens:,} tokens is too short: {needed_tokens:,} are needed"
