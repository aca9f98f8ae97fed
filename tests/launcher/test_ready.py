"""Following a start: phases and progress, the first right answer, and an end as soon as there is none to wait for."""

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest

from launcher import ready
from launcher.ready import CanaryAsked, Limits, LogLine, NotReady, PhaseStarted, Progress, Ready, follow
from launcher.runtime import RunState, Work
from tests.launcher.fake_vllm import CRASH_LOG, START_LOG, Handler, unused_port

RUNNING = RunState("running")


@dataclass
class Scripted:
    """A service that plays a script: at each look one state, and the log that comes with it."""

    script: list[tuple[RunState, str]]
    base_url: str = field(default_factory=lambda: f"http://127.0.0.1:{unused_port()}")
    worked: list[Work | None] = field(default_factory=lambda: [None])
    told: list[str] = field(default_factory=list)
    stops: int = 0
    _pending: str = ""

    def state(self) -> RunState:
        state, self._pending = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        return state

    def new_log_lines(self) -> tuple[str, ...]:
        lines, self._pending = tuple(self._pending.splitlines()), ""
        self.told += lines
        return lines

    def log(self) -> Iterator[str]:
        yield from self.told

    def work(self) -> Work | None:
        return self.worked.pop(0) if len(self.worked) > 1 else self.worked[0]

    def stop(self) -> None:
        self.stops += 1


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ready, "POLL_INTERVAL_S", 0.01)
    monkeypatch.setattr(ready, "STATE_INTERVAL_S", 0.01)
    monkeypatch.setattr(ready, "DYING_S", 0.1)


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Iterator[str]:
    """A server that answers; the parameter is its answer."""
    handler = type("Set", (Handler,), {"answer": getattr(request, "param", Handler.answer)})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()


def test_a_start_goes_through_its_phases_to_a_right_answer(server: str) -> None:
    service = Scripted([(RUNNING, START_LOG), (RUNNING, "")], base_url=server)
    events = list(follow(service, "small"))
    phases = [event.phase for event in events if isinstance(event, PhaseStarted)]
    assert phases == ["start", "engine", "load", "compile", "serve", "canary"]
    assert [event for event in events if isinstance(event, Progress)] == [
        Progress("load", 0, 2),
        Progress("load", 2, 2),
    ]
    assert [event.text for event in events if isinstance(event, LogLine)] == START_LOG.splitlines()
    assert CanaryAsked("What is the capital of France?") in events
    last = events[-1]
    assert isinstance(last, Ready)
    assert "Paris" in last.answer.text


@pytest.mark.parametrize("server", ["London."], indirect=True)
def test_a_wrong_answer_is_a_failed_start(server: str) -> None:
    with pytest.raises(NotReady, match=r"What is the capital of France\?.*got 'London.'.*must contain 'Paris'"):
        list(follow(Scripted([(RUNNING, "")], base_url=server), "small"))


def test_a_server_that_serves_another_model_is_not_ready(server: str) -> None:
    with pytest.raises(NotReady, match=r"HTTP 404.*`large` does not exist"):
        list(follow(Scripted([(RUNNING, "")], base_url=server), "large"))


@pytest.mark.parametrize(
    ("state", "said"),
    [
        (RunState("exited", exit_code=1), "ended with exit code 1 while in phase load"),
        (RunState("exited", exit_code=-9), "ended by signal 9 while in phase load"),
        (RunState("exited"), "ended with an unknown exit code"),
        (RunState("restarting", exit_code=1), "is being restarted"),
        (RunState("running", restart_count=1, exit_code=1), "is being restarted"),
        (RunState("exited", exit_code=137, oom_killed=True), "the kernel killed the server for memory"),
        (RunState("absent"), "the server is gone"),
    ],
)
def test_a_server_that_ends_fails_the_start_at_once_with_its_first_error(state: RunState, said: str) -> None:
    boot = "\n".join(START_LOG.splitlines()[:4])
    service = Scripted([(RUNNING, boot), (state, CRASH_LOG)])
    started_s = time.monotonic()
    with pytest.raises(NotReady, match=said) as caught:
        list(follow(service, "small"))
    assert time.monotonic() - started_s < 2
    assert caught.value.state == state
    assert caught.value.lines[-1] == "ValueError: No available memory for the cache blocks."
    assert "Engine core initialization failed" not in str(caught.value)


def test_without_an_error_in_the_log_its_last_lines_are_told() -> None:
    with pytest.raises(NotReady) as caught:
        list(follow(Scripted([(RunState("exited", exit_code=-9), START_LOG)]), "small"))
    assert caught.value.lines == tuple(START_LOG.splitlines())


def test_a_server_that_dies_over_the_question_is_told_as_dead(server: str) -> None:
    dead = RunState("exited", exit_code=3)
    service = Scripted([(RUNNING, START_LOG), (RUNNING, ""), (dead, CRASH_LOG)], base_url=server)
    with pytest.raises(NotReady, match="ended with exit code 3 while in phase canary"):
        list(follow(service, "small"))


def test_a_silent_idle_server_hangs() -> None:
    service = Scripted([(RUNNING, START_LOG), (RUNNING, "")], worked=[Work(cpu_s=12.0, read_bytes=5)])
    with pytest.raises(NotReady, match="hangs in phase serve"):
        list(follow(service, "small", limits=Limits(silent_s=60, idle_s=0.2)))


def test_a_silent_server_that_computes_or_reads_is_left_alone_until_the_longer_limit() -> None:
    busy: list[Work | None] = [Work(cpu_s=float(second), read_bytes=0) for second in range(500)]
    reading: list[Work | None] = [Work(cpu_s=0.0, read_bytes=step) for step in range(500)]
    for worked in (busy, reading, [None]):
        service = Scripted([(RUNNING, START_LOG), (RUNNING, "")], worked=list(worked))
        with pytest.raises(NotReady, match="no new log line for"):
            list(follow(service, "small", limits=Limits(silent_s=0.6, idle_s=0.2)))


def test_lines_that_come_by_the_clock_do_not_hide_a_hang() -> None:
    notice = (
        "(EngineCore pid=1) INFO 05-15 16:03:36 [shm_broadcast.py:878] No available shared memory broadcast block found"
    )
    with pytest.raises(NotReady, match="no new log line for"):
        list(follow(Scripted([(RUNNING, notice)]), "small", limits=Limits(silent_s=0.2)))


def test_an_interrupt_leaves_the_server_running(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    service = Scripted([(RUNNING, START_LOG)])
    monkeypatch.setattr(time, "sleep", interrupt)
    with pytest.raises(KeyboardInterrupt):
        list(follow(service, "small"))
    assert service.stops == 0


def test_a_failed_start_keeps_its_log_and_is_stopped(tmp_path: Path) -> None:
    service = Scripted([(RunState("exited", exit_code=1), CRASH_LOG)])
    with pytest.raises(NotReady):
        list(follow(service, "small"))
    saved = ready.save_and_stop(service, tmp_path / "logs")
    assert saved.read_text(encoding="utf-8") == CRASH_LOG
    assert saved.name.startswith("failed-")
    assert service.stops == 1
