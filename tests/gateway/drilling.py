"""What a drill of the gateway is: streams all the while, faults and attacks, and a judgement of what came of it."""

import asyncio
import contextlib
import json
import os
import platform
import subprocess
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Protocol

import psutil

from tests.gateway.flat import Flatness, flatness
from tests.gateway.load import Tally, one, streams
from tests.gateway.stack import PARTS, Stack

CHAT = "/v1/chat/completions"
SAMPLE_S = 0.5
LEAST_SAMPLES = 30
"""Fewer since a process was started say nothing: a new one grows."""
PROBE_AFTER_S, PROBE_EVERY_S = 0.1, 0.1
RECOVERS_S = 300.0
KILL_WINDOW_S = 10.0
"""Connections that a killed part of the gateway held may break within so long."""


class Engine(Protocol):
    """What stands behind the gateway; its own faults are part of a drill."""

    name: str

    def stream(self, count: int) -> Mapping[str, object]:
        """Return the body of a request of the load, in which so many run at once."""

    def short(self) -> Mapping[str, object]:
        """Return the body of a request whose stream ends at once."""

    def long(self) -> Mapping[str, object]:
        """Return the body of a request whose stream goes on and on."""

    def kill(self) -> None:
        """End it by SIGKILL, and return when another is started."""

    def stop(self) -> None:
        """Stop it by SIGSTOP, and return when it goes on, or another is started."""

    def rss_bytes(self) -> Mapping[str, int]:
        """Return the resident memory of what keeps it, by name."""


@dataclass(frozen=True)
class Step:
    """One thing that is done to the gateway or to the engine; what it returns is noted."""

    name: str
    act: Callable[["Drill"], str]
    is_borne: bool
    """Whether others must be answered while it goes on; else after it."""


def fault(act: Callable[["Drill"], str]) -> Step:
    """Make a step of what breaks something."""
    return Step(act.__name__, act, is_borne=False)


def attack(act: Callable[["Drill"], str]) -> Step:
    """Make a step of what must break nothing."""
    return Step(act.__name__, act, is_borne=True)


@dataclass(frozen=True)
class Event:
    """One step that was taken."""

    name: str
    at_s: float
    """Seconds since the drill began."""
    recovery_s: float | None
    """From its beginning until a new, short request was answered whole; None: none was in time."""
    note: str = ""


@dataclass
class Report:
    """What a drill found."""

    engine: str
    streams: int
    tally: Tally
    duration_s: float = 0.0
    events: list[Event] = field(default_factory=list)
    memory: dict[str, Flatness] = field(default_factory=dict)
    """By the name of the process; those that did not run long enough are left out."""
    reached_without_key: int = 0
    """Requests that came through to the engine although they had no right to."""
    cut_outside_kills: int = 0

    def problems(self) -> list[str]:
        """Return what is not as it must be."""
        found = []
        if self.tally.outcomes["lost"]:
            found.append(f"{self.tally.outcomes['lost']} requests were lost without an error")
        if self.tally.not_openai:
            found.append(f"refusals that are no errors of the API: {self.tally.not_openai[:3]}")
        if self.tally.not_degraded:
            found.append(f"refusals that do not say what is wrong with the service: {self.tally.not_degraded[:3]}")
        if self.cut_outside_kills:
            found.append(f"{self.cut_outside_kills} connections broke although no part of the gateway was killed")
        if self.reached_without_key:
            found.append(f"{self.reached_without_key} requests came through that had no right to")
        if not self.tally.outcomes["whole"]:
            found.append("no request was answered")
        found += [f"nothing was answered after {event.name}" for event in self.events if event.recovery_s is None]
        for name, memory in self.memory.items():
            if not memory.is_flat:
                found.append(f"the memory of the {name} grew by {memory.growth_bytes / 1e6:.1f} MB")
        return found

    def document(self) -> dict[str, Any]:
        """Return it as a result file holds it."""
        haproxy = subprocess.run(["haproxy", "-v"], capture_output=True, text=True, check=True).stdout.split("\n")[0]
        first_byte = sorted(self.tally.first_byte_s)
        return {
            "what": f"{self.streams} streams at once for {self.duration_s / 60:.1f} minutes through HAProxy and relay, "
            f"in front of {self.engine}",
            "date": datetime.now(UTC).date().isoformat(),
            "haproxy": haproxy,
            "python": platform.python_version(),
            "cores": os.cpu_count(),
            "outcomes": dict(self.tally.outcomes),
            "statuses": {str(status): count for status, count in sorted(self.tally.statuses.items())},
            "refusals": dict(self.tally.refusals.most_common()),
            "reasons": dict(self.tally.reasons.most_common()),
            "cut_outside_kills": self.cut_outside_kills,
            "reached_without_key": self.reached_without_key,
            "first_byte_p50_s": round(first_byte[len(first_byte) // 2], 4),
            "first_byte_p99_s": round(first_byte[len(first_byte) * 99 // 100], 4),
            "events": [asdict(event) for event in self.events],
            "memory": {
                name: {**asdict(memory), "growth_bytes": memory.growth_bytes, "is_flat": memory.is_flat}
                for name, memory in self.memory.items()
            },
            "problems": self.problems(),
        }


class Drill:
    """One run: the load in a thread of its own, memory samples, and what is done meanwhile."""

    def __init__(self, stack: Stack, engine: Engine, count: int, hold_s: float = 1.0) -> None:
        """Args: hold_s: how long an attack goes on that has no end of its own."""
        self.stack = stack
        self.engine = engine
        self.hold_s = hold_s
        self.tally = Tally()
        self.reached_without_key = 0
        self._count = count
        self._events: list[Event] = []
        self._memory: defaultdict[str, list[int]] = defaultdict(list)
        self._kills_s: list[float] = []
        self._is_over = threading.Event()
        self._threads = ThreadPoolExecutor(2)

    def __enter__(self) -> "Drill":
        self._begun_s = time.monotonic()
        self._load = self._threads.submit(asyncio.run, self._loaded())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over.set()
        self._load.result()
        self._threads.shutdown()

    def run(self, steps: Sequence[Step], duration_s: float) -> None:
        """Take the steps at equal distances."""
        pause_s = duration_s / (len(steps) + 1)
        for index, step in enumerate(steps, 1):
            self._sleep_until(index * pause_s)
            self.take(step)
        self._sleep_until(duration_s)

    def take(self, step: Step) -> Event:
        """Take one step, and see how long it is felt."""
        begun_s = time.monotonic()
        if step.is_borne:
            probing = self._threads.submit(self._recovery, begun_s)
            note, recovery_s = step.act(self), probing.result()
        else:
            note, recovery_s = step.act(self), self._recovery(begun_s)
        event = Event(step.name, round(begun_s - self._begun_s, 1), recovery_s, note)
        self._events.append(event)
        return event

    def answers(self) -> None:
        """Wait until a stream of the load ends as it should."""
        before, deadline_s = self.tally.outcomes["whole"], time.monotonic() + RECOVERS_S
        while self.tally.outcomes["whole"] == before:
            if self._load.done():
                self._load.result()
            assert time.monotonic() < deadline_s, self.tally.outcomes
            time.sleep(0.1)

    def is_killing(self) -> None:
        """Note that a part of the gateway dies now, with the connections that it holds."""
        self._kills_s.append(time.monotonic())
        self.begins_anew(*PARTS)

    def begins_anew(self, *names: str) -> None:
        """Forget the memory of processes that are replaced."""
        for name in names:
            self._memory.pop(name, None)

    def judged(self) -> Report:
        """Return what was found until now."""
        return Report(
            self.engine.name,
            self._count,
            self.tally,
            time.monotonic() - self._begun_s,
            list(self._events),
            {name: flatness(found) for name, found in self._memory.items() if len(found) >= LEAST_SAMPLES},
            self.reached_without_key,
            sum(
                not any(0 <= cut_s - kill_s <= KILL_WINDOW_S for kill_s in self._kills_s)
                for cut_s in self.tally.cut_at_s
            ),
        )

    def _sleep_until(self, since_begin_s: float) -> None:
        time.sleep(max(0.0, self._begun_s + since_begin_s - time.monotonic()))

    async def _loaded(self) -> None:
        sampling = asyncio.create_task(self._sample())
        body = self.engine.stream(self._count)
        await streams(self.stack.port, self._count, body, CHAT, self.tally, self._is_over.is_set)
        sampling.cancel()

    async def _sample(self) -> None:
        while True:
            # What is just being replaced has no memory to tell.
            with contextlib.suppress(psutil.NoSuchProcess, LookupError):
                for name, size in {**self.stack.rss_bytes(), **self.engine.rss_bytes()}.items():
                    self._memory[name].append(size)
            await asyncio.sleep(SAMPLE_S)

    def _recovery(self, since_s: float) -> float | None:
        # Long enough that what was done has begun to be felt.
        time.sleep(max(0.0, since_s + PROBE_AFTER_S - time.monotonic()))
        unwritten, body = Tally(), json.dumps(self.engine.short()).encode()
        while time.monotonic() - since_s < RECOVERS_S:
            if asyncio.run(one(self.stack.port, body, CHAT, unwritten)) == "whole":
                return round(time.monotonic() - since_s, 2)
            time.sleep(PROBE_EVERY_S)
        return None
