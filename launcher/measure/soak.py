"""Keep a service under a mixed load for minutes or days, and record what comes of it."""

import functools
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

from launcher.ask import Answer, AskFailed, Unreachable
from launcher.measure import judge, soak_record
from launcher.measure.load_mix import AGENT_SHARE, FIRST_CHARS_A_TOKEN, Turn, next_size, session
from launcher.measure.load_sample import Source, gpu_used_bytes, parse
from launcher.measure.soak_record import Outcome, Record
from launcher.measure.target import Target

SAMPLE_INTERVAL_S = 2.0
SAVE_INTERVAL_S = 10.0
TICK_S = 0.2
RETRY_S = 1.0
GRACE_S = 120.0
"""For the replies that are under way when the time is over."""
REQUEST_TIMEOUT_S = 600.0
TOO_MANY = 429
AWAY = (502, 503, 504)
"""What a gateway says for an engine that is not there: an outage, not a failure of each request that is tried in it."""


class Soak:
    """One run: workers that ask, a look at the server every two seconds, and a record that is saved every ten."""

    def __init__(self, record: Record, target: Target, source: Source | None, state_file: Path) -> None:
        self.record = record
        self._target = target
        self._source = source
        self._file = state_file
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._before_s = record.elapsed_s
        self._begun_s = 0.0
        self._fault: Exception | None = None
        self._is_over = False

    def run(self, on_tick: Callable[[Record], None]) -> None:
        """Ask until the time is over; `on_tick` is told the record several times a second.

        Raises:
            KeyboardInterrupt: the user stopped it; the record is saved and can be resumed.
        """
        self._begun_s = time.monotonic()
        # Not waited for when the user interrupts: a reply may take minutes.
        jobs = [self._work] * self.record.settings.concurrency + [self._watch]
        threads = [threading.Thread(target=self._guarded, args=(job,), daemon=True) for job in jobs]
        for thread in threads:
            thread.start()
        try:
            self._wait(on_tick)
            self._stop.set()
            deadline_s = time.monotonic() + GRACE_S
            for thread in threads:
                thread.join(max(0.0, deadline_s - time.monotonic()))
            self._finish(sum(thread.is_alive() for thread in threads))
        finally:
            self._stop.set()
            with self._lock:
                self._is_over = True
            self._save()

    def _finish(self, left: int) -> None:
        with self._lock:
            # What the last replies took is time under load too.
            self.record.elapsed_s = self._elapsed()
            self.record.is_finished = True
            if left:
                said = f"{left} replies were still under way {GRACE_S:.0f} s after the end, and do not count"
                self.record.tell(self.record.elapsed_s, "end", said)

    def _wait(self, on_tick: Callable[[Record], None]) -> None:
        saved_s = time.monotonic()
        while self._elapsed() < self.record.settings.duration_s:
            time.sleep(TICK_S)
            if self._fault is not None:
                raise self._fault
            with self._lock:
                self.record.elapsed_s = self._elapsed()
                on_tick(self.record)
            if time.monotonic() - saved_s >= SAVE_INTERVAL_S:
                self._save()
                saved_s = time.monotonic()

    def _guarded(self, job: Callable[[], None]) -> None:
        try:
            job()
        except Exception as error:  # noqa: BLE001 - raised again where the user sees it
            self._fault = error

    def _save(self) -> None:
        with self._lock:
            soak_record.save(self.record, self._file)

    def _elapsed(self) -> float:
        return self._before_s + time.monotonic() - self._begun_s

    def _work(self) -> None:
        while not self._stop.is_set():
            with self._lock:
                turns = self._next_session()
            for turn in turns:
                if self._stop.is_set():
                    return
                with self._lock:
                    self.record.asked.update([turn.size, *(("agent",) if turn.is_agent else ())])
                if not self._ask(turn):
                    # A history with a hole is no history: the session ends with what failed.
                    break

    def _next_session(self) -> Iterator[Turn]:
        record = self.record
        settings = record.settings
        size = next_size({name: record.asked[name] for name in ("short", "medium", "long")})
        total = record.asked["short"] + record.asked["medium"] + record.asked["long"]
        record.sessions += 1
        return session(
            size,
            f"{settings.seed}-{record.sessions}",
            settings.context_tokens,
            record.chars_a_token or FIRST_CHARS_A_TOKEN,
            is_agent=record.asked["agent"] <= AGENT_SHARE * total,
            has_tools=settings.has_tools,
        )

    def _ask(self, turn: Turn) -> bool:
        """Ask one request and record what comes; False where nothing right can follow it."""
        began_s = time.monotonic()
        pieces_s: list[float] = []
        request = self._target.request(turn.task, stream=True)
        try:
            answer = self._target.connection.answer(request, lambda text: pieces_s.append(time.monotonic() - began_s))
        except Unreachable:
            self._tell(lambda: self.record.unreachable(self._elapsed()))
            self._stop.wait(RETRY_S)
            return False
        except AskFailed as error:
            return self._failed(turn, error)
        outcome = _outcome(turn, answer, pieces_s)
        chars = sum(len(str(message)) for message in (*turn.task.messages, *turn.task.tools))
        self._tell(lambda: self.record.add(outcome, self._elapsed(), chars))
        return True

    def _failed(self, turn: Turn, error: AskFailed) -> bool:
        self._tell(lambda: self._add_failure(turn, error))
        self._stop.wait(RETRY_S)
        return False

    def _add_failure(self, turn: Turn, error: AskFailed) -> None:
        if error.status == TOO_MANY:
            self.record.turned_away += 1
        elif error.status in AWAY:
            self.record.unreachable(self._elapsed())
        else:
            kind = f"HTTP {error.status}" if error.status else "broken off"
            failed = Outcome(turn.size, turn.is_agent, bool(turn.task.calls), kind, str(error))
            self.record.add(failed, self._elapsed(), 0)

    def _watch(self) -> None:
        while not self._stop.is_set():
            sample = parse(self._source.read() or "") if self._source is not None else None
            used = gpu_used_bytes(self.record.settings.gpu_uuids)
            self._tell(functools.partial(self.record.sample, sample, used, self._elapsed()))
            self._stop.wait(SAMPLE_INTERVAL_S)

    def _tell(self, what: Callable[[], None]) -> None:
        # What was under way when the record was closed breaks off, and says nothing of the service.
        with self._lock:
            if not self._is_over:
                what()


def refusal_of_tools(target: Target) -> str | None:
    """Return why a service that was not started here cannot be asked for tool calls; None where it can.

    Raises:
        Unreachable: the server is gone.
    """
    from launcher.measure.dialogues import Task

    tool = {"type": "function", "function": {"name": "noop", "parameters": {"type": "object", "properties": {}}}}
    task = Task("probe", ({"role": "user", "content": "Say yes."},), tools=(tool,), max_tokens=1)
    try:
        target.connection.answer(target.request(task))
    except Unreachable:
        raise
    except AskFailed as error:
        return f"the service refuses requests with tools: {error}"
    return None


def _outcome(turn: Turn, answer: Answer, pieces_s: list[float]) -> Outcome:
    task = turn.task
    said, right = "", None
    if turn.is_judged:
        is_needle = task.kind == "needle"
        fault = judge.number_fault(task, answer) if is_needle else "; ".join(judge.faults(task, answer))
        right, said = not fault, f"{task.kind}: {fault}" if fault else ""
    return Outcome(
        size=turn.size,
        is_agent=turn.is_agent,
        is_call=bool(task.tools),
        error=None,
        said=said,
        first_token_s=answer.first_token_s,
        gaps_s=tuple(after - before for before, after in pairwise(pieces_s)),
        elapsed_s=answer.elapsed_s,
        prompt_tokens=answer.prompt_tokens or 0,
        reply_tokens=answer.completion_tokens or 0,
        is_right=right,
    )
