"""Load like that of agents: conversations of several tool calls behind long prefixes that they share, some twice.

Every reply has one right answer, and a conversation that comes again must get the replies of the first time.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import paths  # noqa: F401

from launcher.ask import Unreachable
from launcher.measure import judge, prefix
from launcher.measure.dialogues import Kind, Task, tasks, turn
from launcher.measure.replies import Failure, failure, reply
from launcher.measure.target import Target, as_received

TURNS = 5
KINDS: tuple[Kind, ...] = ("single", "nested", "code", "unicode")
REMEMBERED = 24
"""Conversations that may come again."""
AGAIN = 0.5
KEPT_FAILURES = 20


@dataclass
class Bucket:
    """What happened in an interval."""

    from_s: float
    asked: int = 0
    wrong: int = 0
    changed: int = 0
    """Replies unlike the first ones to the same request."""


@dataclass
class Soak:
    """What happened so far."""

    interval_s: float
    buckets: list[Bucket] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    ended: str | None = None
    """Why it ended early."""

    def bucket(self, elapsed_s: float) -> Bucket:
        """Return the interval of a time, made when it is first asked for."""
        while len(self.buckets) * self.interval_s <= elapsed_s:
            self.buckets.append(Bucket(len(self.buckets) * self.interval_s))
        return self.buckets[int(elapsed_s // self.interval_s)]

    def totals(self) -> Bucket:
        """Return the sums over all intervals."""
        return Bucket(0.0, *(sum(getattr(one, name) for one in self.buckets) for name in ("asked", "wrong", "changed")))

    def document(self) -> dict[str, Any]:
        """Return it as JSON."""
        return {**asdict(self), "totals": asdict(self.totals())}


def conversation(seed: str, texts: Sequence[str]) -> list[Task]:
    """Return the requests of one conversation: each with the right calls of those before, as an agent sends them."""
    rng = random.Random(seed)
    text = rng.choice(texts)
    asked = prefix.sharing(text, [tasks(rng.choice(KINDS), rng)[0] for _ in range(TURNS)])
    history: tuple[dict[str, Any], ...] = asked[0].messages[:1]
    found = []
    for number, task in enumerate(asked):
        history = (*history, task.messages[-1])
        found.append(Task(task.kind, history, task.tools, task.calls))
        history = (*history, *turn(task.calls[0], {"ok": True}, f"call_{number}"))
    return found


class Agents:
    """So many agents that talk to a service until a time, or until it is gone."""

    def __init__(self, target: Target, texts: Sequence[str], seed: str, *, agents: int, interval_s: float) -> None:
        self._target = target
        self._texts = texts
        self._agents = agents
        self._rng = random.Random(seed)
        self._lock = threading.Lock()
        self._started: list[str] = []
        self._first: dict[tuple[str, int], Any] = {}
        self.soak = Soak(interval_s)

    def run(self, seconds: float, on_interval: Callable[[Soak], None]) -> Soak:
        """Talk for so long; `on_interval` is told what has happened, at every interval's end and at the end."""
        begun = time.monotonic()
        threads = [
            threading.Thread(target=self._talk, args=(begun, begun + seconds), daemon=True) for _ in range(self._agents)
        ]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            threads[0].join(self.soak.interval_s) if threads[0].is_alive() else time.sleep(0.2)
            with self._lock:
                on_interval(self.soak)
        return self.soak

    def _talk(self, begun: float, until: float) -> None:
        while time.monotonic() < until and self.soak.ended is None:
            seed = self._next_seed()
            for place, task in enumerate(conversation(seed, self._texts)):
                if time.monotonic() >= until or self.soak.ended is not None:
                    return
                try:
                    self._ask(seed, place, task, begun)
                except Unreachable as error:
                    self.soak.ended = str(error)

    def _next_seed(self) -> str:
        with self._lock:
            if len(self._started) >= self._agents and self._rng.random() < AGAIN:
                return self._rng.choice(self._started[-REMEMBERED:])
            seed = f"{self._rng.random()}"
            self._started.append(seed)
            return seed

    def _ask(self, seed: str, place: int, task: Task, begun: float) -> None:
        got = reply(self._target, task, "whole")
        with self._lock:
            bucket = self.soak.bucket(time.monotonic() - begun)
            bucket.asked += 1
            first = self._first.setdefault((seed, place), got.answer)
            if got.faults:
                bucket.wrong += 1
                self._keep(failure(got))
            if first is not None and got.answer is not None and (found := judge.differences(first, got.answer)):
                bucket.changed += 1
                shown = f"first:\n{as_received(first)}\nagain:\n{as_received(got.answer)}"
                self._keep(Failure(task.kind, "again", found, str(task.messages[-1]["content"]), shown))

    def _keep(self, one: Failure) -> None:
        if len(self.soak.failures) < KEPT_FAILURES:
            self.soak.failures.append(one)
