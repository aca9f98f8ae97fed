"""When an engine counts as stuck: samples with their times in, actions out. Pure.

`/health` says 200 while the engine is stuck; what shows that it works is the counter of its steps
(`vllm:iteration_tokens_total`, a histogram: `_count` and `_sum`), and, where nobody asks anything, an answer.
"""

from dataclasses import dataclass, replace
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from launcher.operate.service_state import Phase


class WatchSettings(BaseModel):
    """How a watchdog looks, and when it acts."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    every_s: float = Field(default=20.0, gt=0)
    """Between two looks."""
    strikes: int = Field(default=3, ge=1)
    """Bad looks in a row until it acts."""
    idle_probe_s: float = Field(default=60.0, gt=0)
    """An engine that nobody asks is asked for one token so often."""
    probe_timeout_s: float = Field(default=30.0, gt=0)
    first_step_s: float = Field(default=300.0, gt=0)
    """What the first request may take: it compiles kernels."""
    loading_limit_s: float = Field(default=1800.0, gt=0)
    """A start that takes longer is ended."""


@dataclass(frozen=True)
class Counters:
    """The engine's own, of all its processes together."""

    steps: float
    """`vllm:iteration_tokens_total_count`"""
    tokens: float
    """`vllm:iteration_tokens_total_sum`"""
    running: float
    """`vllm:num_requests_running`"""
    waiting: float
    """`vllm:num_requests_waiting`"""

    @property
    def is_busy(self) -> bool:
        return self.running + self.waiting > 0


Probe = Literal["answered", "failed", "refused"]
"""What became of a tiny request; refused: the server says that the request is wrong, which shows that it works."""


@dataclass(frozen=True)
class Sample:
    """One look."""

    at_s: float
    phase: Phase
    """As the keeper says."""
    engine_pid: int | None
    counters: Counters | None
    """None: the server did not give them in time."""
    probe: Probe | None = None
    """None: it was not asked."""


@dataclass(frozen=True)
class Watch:
    """What is remembered between two looks."""

    engine_pid: int | None = None
    seen_since_s: float = 0.0
    """When this engine was first looked at."""
    serving_since_s: float | None = None
    """When it was first seen serving."""
    last: Counters | None = None
    strikes: int = 0
    asked_s: float | None = None
    """When the engine was last asked, or known to have answered others."""
    progress_s: float | None = None
    acted_on: int | None = None
    """The engine that was ended: one end is enough."""


@dataclass(frozen=True)
class Ask:
    """Ask the engine for one token, and look again with what becomes of it."""


@dataclass(frozen=True)
class Kill:
    """End the engine."""

    engine_pid: int
    reason: str


@dataclass(frozen=True)
class Wait:
    """Nothing is to be done; `struck` says what was wrong with this look, if anything."""

    struck: str = ""


Action = Ask | Kill | Wait


def look(watch: Watch, sample: Sample, settings: WatchSettings) -> tuple[Watch, Action]:
    """Return what is remembered after a look, and what is to be done."""
    if sample.engine_pid != watch.engine_pid:
        watch = Watch(sample.engine_pid, seen_since_s=sample.at_s, acted_on=watch.acted_on)
    if sample.engine_pid is None or sample.phase == "stopped" or sample.engine_pid == watch.acted_on:
        return watch, Wait()
    if sample.phase != "serving":
        return _while_loading(watch, sample, settings)
    if watch.serving_since_s is None:
        watch = replace(watch, serving_since_s=sample.at_s)
    fault = None if _compiles(watch, sample, settings) else _fault(watch, sample)
    if fault is None:
        return _good(watch, sample, settings)
    if not fault:
        return replace(watch, last=sample.counters), Ask()
    watch = replace(watch, strikes=watch.strikes + 1, last=sample.counters or watch.last)
    if watch.strikes < settings.strikes:
        return watch, Wait(fault)
    reason = f"the engine is stuck: {fault}, {watch.strikes} times in a row"
    return replace(watch, strikes=0, acted_on=sample.engine_pid), Kill(sample.engine_pid, reason)


def _compiles(watch: Watch, sample: Sample, settings: WatchSettings) -> bool:
    """Whether the engine may still be at its first step."""
    assert watch.serving_since_s is not None
    counters = sample.counters or watch.last
    return (counters is None or counters.steps == 0) and sample.at_s - watch.serving_since_s < settings.first_step_s


def _fault(watch: Watch, sample: Sample) -> str | None:
    """Return what is wrong with a look; None: nothing; empty: the engine has to be asked to know."""
    now, last = sample.counters, watch.last
    if sample.probe == "failed":
        return "it gave no answer to a request for one token"
    if sample.probe is not None:
        return None
    if now is None:
        return "it did not say how far it is (/metrics)"
    if last is not None and now.is_busy and last.is_busy and (now.steps, now.tokens) == (last.steps, last.tokens):
        return f"no step while {now.running:.0f} requests run and {now.waiting:.0f} wait"
    if watch.strikes and not now.is_busy and last is not None and (now.steps, now.tokens) == (last.steps, last.tokens):
        # Those who asked have gone; whether it works again is not known by that.
        return ""
    return None


def _good(watch: Watch, sample: Sample, settings: WatchSettings) -> tuple[Watch, Action]:
    now, last = sample.counters, watch.last
    moved = last is not None and now is not None and (now.steps, now.tokens) != (last.steps, last.tokens)
    answered = sample.probe is not None or moved
    watch = replace(
        watch,
        last=now or last,
        strikes=0,
        progress_s=sample.at_s if answered or now is None or not now.is_busy else watch.progress_s or sample.at_s,
        asked_s=sample.at_s if answered or watch.asked_s is None else watch.asked_s,
    )
    assert watch.asked_s is not None
    is_idle = now is not None and not now.is_busy
    if is_idle and sample.at_s - watch.asked_s >= settings.idle_probe_s:
        return watch, Ask()
    return watch, Wait()


def _while_loading(watch: Watch, sample: Sample, settings: WatchSettings) -> tuple[Watch, Action]:
    assert sample.engine_pid is not None
    watch = replace(watch, last=None, strikes=0, asked_s=None)
    loading_s = sample.at_s - watch.seen_since_s
    if loading_s <= settings.loading_limit_s:
        return watch, Wait()
    reason = f"the engine is stuck: it has been starting for {loading_s:.0f} s"
    return replace(watch, acted_on=sample.engine_pid), Kill(sample.engine_pid, reason)
