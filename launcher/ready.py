"""Follow a start to its first right answer; a dead start ends at once, a silent one after a bounded silence."""

import threading
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Generic, TypeVar

from launcher import canary as canary_of_start
from launcher import startlog
from launcher.ask import Answer, AskFailed, is_healthy
from launcher.canary import Canary
from launcher.errors import StartFailed
from launcher.problems import Problem
from launcher.runtime import RunState, Service, Work
from launcher.startlog import Phase

_Result = TypeVar("_Result")

POLL_INTERVAL_S = 0.2
STATE_INTERVAL_S = 1.0
WORK_INTERVAL_S = 10.0
LAST_LINES = 20
DYING_S = 2.0
"""A server that broke off an answer may need so long to end."""


@dataclass(frozen=True)
class Limits:
    """When a start that is alive counts as hanging."""

    silent_s: float = 600.0
    """Nothing new in the log for so long."""
    idle_s: float = 120.0
    """Nothing new in the log for so long while the processes neither compute nor read from storage."""
    idle_cpu_share: float = 0.05
    """Of one core; below it the processes do not compute."""


@dataclass(frozen=True)
class PhaseStarted:
    phase: Phase
    elapsed_s: float


@dataclass(frozen=True)
class Progress:
    """Something to count in the current phase, such as shards."""

    phase: Phase
    done: int
    total: int


@dataclass(frozen=True)
class LogLine:
    text: str


@dataclass(frozen=True)
class CanaryAsked:
    question: str


@dataclass(frozen=True)
class Ready:
    """The server gave a right answer."""

    answer: Answer
    elapsed_s: float


Event = PhaseStarted | Progress | LogLine | CanaryAsked | Ready


class NotReady(StartFailed):
    """A start that ended without a right answer."""

    def __init__(
        self,
        what: str,
        lines: tuple[str, ...] = (),
        state: RunState | None = None,
        problem: Problem | None = None,
    ) -> None:
        super().__init__("\n".join((what, *(f"  {line}" for line in lines))))
        self.what = what
        self.lines = lines
        """The first error in the log, else its last lines."""
        self.state = state
        self.problem = problem
        """Cause and remedy where the canary knows them; None: the log has to tell."""


@dataclass
class _Follower:
    """What is remembered between two looks at the service."""

    service: Service
    limits: Limits
    started_s: float
    phase: Phase = "start"
    lines: list[str] = field(default_factory=list)
    last_line_s: float = 0.0
    state_asked_s: float = float("-inf")
    idle_since: tuple[float, Work] | None = None
    work_asked_s: float = 0.0

    def look(self) -> Iterator[Event]:
        """Yield what the log says since the last look.

        Raises:
            NotReady: the service ended, was restarted, or hangs.
        """
        now = time.monotonic()
        # The state before the log: what a process wrote before its end is then in the log.
        state = None
        if now - self.state_asked_s >= STATE_INTERVAL_S:
            state, self.state_asked_s = self.service.state(), now
        yield from self._new_lines(now)
        if state is not None and not state.is_alive:
            raise NotReady(self._ended(state), self.relevant_lines(), state)
        self._refuse_hang(now)

    def relevant_lines(self) -> tuple[str, ...]:
        return startlog.first_error(self.lines) or tuple(self.lines[-LAST_LINES:])

    def enter(self, phase: Phase) -> Iterator[Event]:
        if phase != self.phase:
            self.phase = phase
            yield PhaseStarted(phase, time.monotonic() - self.started_s)

    def _new_lines(self, now: float) -> Iterator[Event]:
        for line in self.service.new_log_lines():
            self.lines.append(line)
            if startlog.is_progress(line):
                self.last_line_s = now
                self.idle_since = None
            yield LogLine(line)
            reading = startlog.read(line)
            # Over the question the server serves; a line about its start is a late one.
            if reading is None or self.phase == "canary":
                continue
            yield from self.enter(reading.phase)
            if reading.done is not None and reading.total is not None:
                yield Progress(reading.phase, reading.done, reading.total)

    def _ended(self, state: RunState) -> str:
        during = f"while in phase {self.phase}"
        if state.oom_killed:
            return f"the kernel killed the server for memory {during}"
        if state.status == "restarting" or state.restart_count > 0:
            return f"the server ended {during} and is being restarted (exit code {state.exit_code})"
        if state.status == "absent":
            return f"the server is gone {during}"
        if state.exit_code is not None and state.exit_code < 0:
            return f"the server was ended by signal {-state.exit_code} {during}"
        code = "an unknown exit code" if state.exit_code is None else f"exit code {state.exit_code}"
        return f"the server ended with {code} {during}"

    def _refuse_hang(self, now: float) -> None:
        silent_s = now - self.last_line_s
        if silent_s >= self.limits.silent_s:
            raise NotReady(f"no new log line for {silent_s:.0f} s in phase {self.phase}", self.relevant_lines())
        interval_s = min(WORK_INTERVAL_S, self.limits.idle_s / 4)
        if silent_s < interval_s or now - self.work_asked_s < interval_s:
            return
        self.work_asked_s = now
        work = self.service.work()
        if work is None:
            return
        if self.idle_since is None or self._has_worked(work, now):
            self.idle_since = (now, work)
        elif now - self.idle_since[0] >= self.limits.idle_s:
            raise NotReady(
                f"the server hangs in phase {self.phase}: for {now - self.idle_since[0]:.0f} s it logged nothing, "
                "computed nothing and read nothing from storage",
                self.relevant_lines(),
            )

    def _has_worked(self, work: Work, now: float) -> bool:
        if self.idle_since is None:
            return True
        since_s, before = self.idle_since
        used_s = work.cpu_s - before.cpu_s
        # A negative difference: a process ended, which is a change too.
        return (
            used_s < 0 or used_s > self.limits.idle_cpu_share * (now - since_s) or work.read_bytes != before.read_bytes
        )


def follow(
    service: Service,
    served_name: str,
    *,
    api_key: str | None = None,
    canary: Canary | None = None,
    limits: Limits = Limits(),
) -> Iterator[Event]:
    """Yield what happens from the start of the server to `Ready`, the last event.

    An interrupt leaves the server as it is.

    Raises:
        NotReady: the server ended or was restarted, hangs, or gave a wrong answer.
    """
    canary = canary or Canary()
    now = time.monotonic()
    follower = _Follower(service, limits, started_s=now, last_line_s=now)
    yield PhaseStarted("start", 0.0)
    health_asked_s = now
    while True:
        yield from follower.look()
        now = time.monotonic()
        if now - health_asked_s >= STATE_INTERVAL_S:
            health_asked_s = now
            if is_healthy(service.base_url):
                break
        time.sleep(POLL_INTERVAL_S)
    yield from follower.enter("serve")
    yield from follower.enter("canary")
    yield CanaryAsked(canary.question)
    server = (service.base_url, served_name, api_key, canary)
    answer = yield from _watched(follower, f"answer {canary.question!r}", lambda: canary_of_start.answer(*server))
    _refuse(canary_of_start.answer_problem(canary, answer))
    if canary.calls_tools:
        yield CanaryAsked("a tool call, whole and streamed")
        replies = yield from _watched(follower, "call a tool", lambda: canary_of_start.call(*server))
        _refuse(canary_of_start.call_problem(canary, replies))
    yield Ready(answer, time.monotonic() - follower.started_s)


class _Inquiry(threading.Thread, Generic[_Result]):
    """A request, beside the loop that watches whether the server is still alive."""

    def __init__(self, ask: Callable[[], _Result]) -> None:
        super().__init__(daemon=True, name="canary")
        self._ask = ask
        self.result: _Result | None = None
        self.failure: AskFailed | None = None

    def run(self) -> None:
        try:
            self.result = self._ask()
        except AskFailed as error:
            self.failure = error


def _watched(follower: _Follower, what: str, ask: Callable[[], _Result]) -> Generator[Event, None, _Result]:
    """Ask while watching the server; return what it answered.

    Raises:
        NotReady: it ended, hangs, or gave no answer.
    """
    inquiry = _Inquiry(ask)
    inquiry.start()
    while inquiry.is_alive():
        yield from follower.look()
        inquiry.join(POLL_INTERVAL_S)
    # The server may have died over the question: then its end is the reason, not the broken answer before it.
    given_up_s = time.monotonic() + (DYING_S if inquiry.result is None else 0.0)
    while True:
        follower.state_asked_s = float("-inf")
        yield from follower.look()
        if time.monotonic() >= given_up_s:
            break
        time.sleep(POLL_INTERVAL_S)
    if inquiry.result is None:
        raise NotReady(f"the server did not {what}: {inquiry.failure}", startlog.first_error(follower.lines))
    return inquiry.result


def _refuse(problem: Problem | None) -> None:
    if problem is not None:
        raise NotReady(problem.message, problem=problem)


def save_log(service: Service, logs_dir: Path) -> Path:
    """Write every line of this start to `failed-<UTC time>.log` and return its path."""
    logs_dir.mkdir(parents=True, exist_ok=True)
    path = logs_dir / f"failed-{datetime.now(UTC):%Y%m%dT%H%M%S%fZ}.log"
    with path.open("w", encoding="utf-8") as file:
        file.writelines(f"{line}\n" for line in service.log())
    return path


def save_and_stop(service: Service, logs_dir: Path) -> Path:
    """End a failed start: save its log, then stop it, so that nothing goes on restarting; return the log's path."""
    try:
        return save_log(service, logs_dir)
    finally:
        service.stop()
