"""The watchdog decides by samples and their times; it ends an engine that is stuck and leaves the others alone."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.operate import events, watchdog
from launcher.operate.service_state import ServiceStatus, StateFile
from launcher.operate.watchdog import Server, Watchdog, WatchdogSettings, counters_in
from launcher.operate.watchdog_state import Ask, Counters, Kill, Sample, Wait, Watch, WatchSettings, look
from launcher.operate.webhook import Webhook, text_of, url_of
from tests.launcher.webhook_stand_in import Hook, hook

__all__ = ["hook"]

SETTINGS = WatchSettings(every_s=20, strikes=3, idle_probe_s=60, probe_timeout_s=30, first_step_s=300)
PAGE = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
vllm:num_requests_running{engine="0",model_name="m"} 2.0
vllm:num_requests_running{engine="1",model_name="m"} 1.0
vllm:num_requests_waiting{engine="0",model_name="m"} 0.0
vllm:iteration_tokens_total_bucket{engine="0",le="1.0",model_name="m"} 7.0
vllm:iteration_tokens_total_count{engine="0",model_name="m"} 41.0
vllm:iteration_tokens_total_sum{engine="0",model_name="m"} 1.5e+03
"""


def busy(steps: float, running: float = 2, waiting: float = 0) -> Counters:
    return Counters(steps=steps, tokens=10 * steps, running=running, waiting=waiting)


def idle(steps: float) -> Counters:
    return busy(steps, running=0)


class Clock:
    """Looks at an engine every 20 s."""

    def __init__(self) -> None:
        self.watch, self.at_s = Watch(), 1000.0

    def look(self, counters: Counters | None, **sample: Any) -> Any:
        given = {"phase": "serving", "engine_pid": 7, **sample}
        self.watch, action = look(self.watch, Sample(self.at_s, counters=counters, **given), SETTINGS)
        if not isinstance(action, Ask):
            self.at_s += 20
        return action

    def until_killed(self, counters: Counters | None, most: int = 30) -> float:
        """Return the seconds of looks that all show the same until the engine is ended."""
        begun_s = self.at_s
        for _ in range(most):
            if isinstance(self.look(counters), Kill):
                return self.at_s - begun_s
        raise AssertionError("it was not ended")


def test_an_engine_that_makes_steps_is_left_alone() -> None:
    clock = Clock()
    assert {type(clock.look(busy(1 + step))) for step in range(100)} == {Wait}
    assert clock.watch.strikes == 0


def test_requests_without_a_step_end_the_engine_at_the_third_look() -> None:
    clock = Clock()
    clock.look(busy(5))
    assert clock.look(busy(5)) == Wait("no step while 2 requests run and 0 wait")
    assert clock.look(busy(5)).struck
    action = clock.look(busy(5))
    assert action == Kill(7, "the engine is stuck: no step while 2 requests run and 0 wait, 3 times in a row")
    # It is ended once, however long its end takes.
    assert clock.look(busy(5)) == Wait()


def test_a_step_in_time_takes_all_strikes_back() -> None:
    clock = Clock()
    for counters in (busy(5), busy(5), busy(5), busy(6), busy(6), busy(6)):
        assert not isinstance(clock.look(counters), Kill)
    assert clock.watch.strikes == 2


def test_requests_that_only_wait_are_stuck_too() -> None:
    clock = Clock()
    clock.look(busy(5, running=0, waiting=1))
    assert clock.until_killed(busy(5, running=0, waiting=1)) == 60


def test_an_idle_engine_is_asked_now_and_then_and_not_in_between() -> None:
    clock = Clock()
    asked = []
    for _ in range(12):
        at_s = clock.at_s
        if isinstance(clock.look(idle(5)), Ask):
            asked.append(at_s)
            clock.look(idle(5), probe="answered")
    assert asked == [1060.0, 1120.0, 1180.0]


def test_an_idle_engine_that_does_not_answer_is_ended() -> None:
    clock = Clock()
    clock.look(idle(5))
    for _ in range(20):
        action = clock.look(idle(5))
        if isinstance(action, Ask):
            action = clock.look(idle(5), probe="failed")
        if isinstance(action, Kill):
            break
    assert isinstance(action, Kill)
    assert "no answer to a request for one token" in action.reason
    assert clock.at_s - 1000 <= 60 + 3 * 20 + 20


def test_a_refused_request_shows_that_the_server_works() -> None:
    clock = Clock()
    for _ in range(30):
        if isinstance(clock.look(idle(5)), Ask):
            assert clock.look(idle(5), probe="refused") == Wait()


def test_a_server_that_does_not_even_give_its_counters_is_ended() -> None:
    clock = Clock()
    clock.look(busy(5))
    assert clock.until_killed(None) == 60


def test_clients_that_gave_up_do_not_hide_a_stuck_engine() -> None:
    clock = Clock()
    for counters in (busy(5), busy(5)):
        clock.look(counters)
    assert isinstance(clock.look(idle(5)), Ask)
    assert clock.look(idle(5), probe="failed").struck
    assert isinstance(clock.look(idle(5)), Ask)
    assert isinstance(clock.look(idle(5), probe="failed"), Kill)


def test_the_first_step_may_take_long_since_it_compiles() -> None:
    clock = Clock()
    for _ in range(14):
        assert clock.look(busy(0)) == Wait()
    assert clock.until_killed(busy(0)) <= 100


def test_loading_is_no_fault_until_it_takes_too_long() -> None:
    clock = Clock()
    for _ in range(90):
        assert clock.look(None, phase="loading") == Wait()
    clock.at_s += 1
    assert isinstance(clock.look(None, phase="loading"), Kill)


@pytest.mark.parametrize("sample", [{"phase": "stopped"}, {"engine_pid": None}, {"phase": "restarting"}])
def test_what_does_not_run_is_not_ended(sample: dict[str, Any]) -> None:
    clock = Clock()
    for _ in range(10):
        assert clock.look(None, **sample) == Wait()


def test_a_new_engine_begins_without_strikes() -> None:
    clock = Clock()
    for counters in (busy(5), busy(5), busy(5)):
        clock.look(counters)
    assert clock.watch.strikes == 2
    assert clock.look(busy(5), engine_pid=8) == Wait()
    assert clock.watch.strikes == 0


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2), st.booleans()), max_size=40))
def test_an_engine_that_answers_whenever_it_is_asked_is_never_ended(looks: list[tuple[int, int, bool]]) -> None:
    clock, steps = Clock(), 1
    for made, running, is_late in looks:
        # Whoever works moves on, at the latest with the next look.
        steps += max(made, 1) if running else 0
        clock.at_s += 100 if is_late else 0
        action = clock.look(busy(steps, running))
        if isinstance(action, Ask):
            steps += 1
            action = clock.look(busy(steps, running), probe="answered")
        assert not isinstance(action, Kill)


def test_counters_are_summed_over_engines_and_none_may_be_missing() -> None:
    assert counters_in(PAGE) == Counters(steps=41, tokens=1500, running=3, waiting=0)
    assert counters_in(PAGE.replace("iteration_tokens_total_count", "other")) is None
    assert counters_in("<html>") is None
    assert counters_in(PAGE.replace("41.0", "x41")) is None


class _Vllm(BaseHTTPRequestHandler):
    """vLLM's routes, as `page`, `status` and `seen` say."""

    page: ClassVar[str] = PAGE
    status: ClassVar[int] = 200
    seen: ClassVar[list[tuple[str, Any, str | None]]] = []

    def do_GET(self) -> None:
        self._answer(200, self.page.encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        type(self).seen.append((self.path, body, self.headers.get("Authorization")))
        self._answer(self.status, b"{}")

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response_only(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: Any) -> None:
        """Say nothing."""


@pytest.fixture
def vllm() -> Iterator[str]:
    _Vllm.page, _Vllm.status, _Vllm.seen = PAGE, 200, []
    with ThreadingHTTPServer(("127.0.0.1", 0), _Vllm) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(("status", "probe"), [(200, "answered"), (401, "refused"), (500, "failed")])
def test_a_tiny_request_is_asked_with_the_key(vllm: str, status: int, probe: str) -> None:
    _Vllm.status = status
    assert Server(vllm, "small", "secret-key").probe(5) == probe
    ((path, body, key),) = _Vllm.seen
    assert (path, key) == ("/v1/completions", "Bearer secret-key")
    assert body == {"model": "small", "prompt": "1", "max_tokens": 1, "temperature": 0}


def test_a_server_that_is_not_there_gives_nothing() -> None:
    server = Server("http://127.0.0.1:9", "small", None)
    assert server.counters() is None
    assert server.probe(1) == "failed"


def test_a_stuck_engine_is_marked_ended_and_told(vllm: str, tmp_path: Path) -> None:
    argv = [sys.executable, "-c", "import time; print(1, flush=True); time.sleep(60)"]
    with subprocess.Popen(argv, process_group=0, stdout=subprocess.PIPE) as engine:
        try:
            assert engine.stdout is not None
            engine.stdout.readline()
            os.kill(engine.pid, signal.SIGSTOP)
            state = StateFile(tmp_path)
            state.change(lambda _: ServiceStatus(phase="serving", engine_pid=engine.pid))
            quick = WatchSettings(every_s=0.01, strikes=2)
            chosen = WatchdogSettings(service="cpu", folder=tmp_path, base_url=vllm, served_name="small", watch=quick)
            dog = Watchdog(chosen, Server(vllm, "small", None), os.open(os.devnull, os.O_WRONLY))
            for _ in range(3):
                dog.look()
            assert engine.wait(5) == -signal.SIGKILL
        finally:
            engine.kill()
    status = state.read()
    assert (status.phase, status.cause, status.requests_running) == ("restarting", "engine-hang", 3)
    assert "no step while 3 requests run" in status.reason
    told = [json.loads(line)["message"] for line in (tmp_path / events.FILE_NAME).read_text("utf-8").splitlines()]
    assert told[-1].endswith("it is ended")


def test_an_engine_that_was_replaced_meanwhile_is_not_ended(vllm: str, tmp_path: Path) -> None:
    state = StateFile(tmp_path)
    state.change(lambda _: ServiceStatus(phase="serving", engine_pid=os.getpid()))
    chosen = WatchdogSettings(service="cpu", folder=tmp_path, base_url=vllm, served_name="small")
    dog = Watchdog(chosen, Server(vllm, "small", None), os.open(os.devnull, os.O_WRONLY))
    dog._kill(Kill(1, "stuck"))
    assert state.read().phase == "serving"


def test_wrong_settings_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "watch.json").write_text('{"service": "cpu", "surprise": 1}', encoding="utf-8")
    assert watchdog.main([str(tmp_path / "watch.json")]) == 2
    assert "surprise" in capsys.readouterr().err
    assert watchdog.main([]) == 2


def wait_until(condition: Any, seconds: float = 5) -> None:
    deadline_s = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


STOPPED = events.event("service-stopped", "cpu", "a GPU was lost", cause="gpu-lost", remedy="Reboot.")


def test_a_webhook_is_told_in_slacks_form_and_asked_again_when_it_fails(hook: str) -> None:
    Hook.failures = 2
    told = Webhook(hook, lambda error: None, waits_s=(0.01, 0.01))
    told.tell(events.event("engine-started", "cpu", "process 7"))
    told.tell(STOPPED)
    wait_until(lambda: Hook.texts)
    assert Hook.texts == ["graft cpu: a GPU was lost\ncause: gpu-lost\n-> Reboot."]
    assert text_of(STOPPED) == Hook.texts[0]


def test_a_webhook_that_never_answers_is_given_up_without_its_address(hook: str) -> None:
    Hook.failures = 99
    failed: list[str] = []
    told = Webhook(hook, failed.append, waits_s=(0.01, 0.01))
    begun_s = time.monotonic()
    for _ in range(200):
        told.tell(STOPPED)
    assert time.monotonic() - begun_s < 1
    wait_until(lambda: failed)
    assert "secret-path" not in failed[0]
    assert Hook.failures < 99


@pytest.mark.parametrize(
    ("content", "is_one"), [("https://example.org/x\n", True), ("ftp://x", False), ("two words", False), ("", False)]
)
def test_an_address_is_read_from_its_file(tmp_path: Path, content: str, is_one: bool) -> None:
    (tmp_path / "url").write_text(content, encoding="utf-8")
    assert (url_of(tmp_path / "url") is not None) is is_one
    assert url_of(tmp_path / "none") is None


def test_events_are_lines_in_a_file_that_does_not_grow_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "MAX_BYTES", 2000)
    log = events.EventLog(tmp_path, os.open(os.devnull, os.O_WRONLY))
    follower = events.Follower(tmp_path)
    seen = []
    for number in range(100):
        log.write(events.event("engine-started", "cpu", f"process {number}"))
        # Not after each: a file may become the old one in between.
        seen += [one.message for one in follower.new()] if number % 5 == 4 else []
    assert seen == [f"process {number}" for number in range(100)]
    sizes = [(tmp_path / name).stat().st_size for name in (events.FILE_NAME, events.OLD_NAME)]
    assert max(sizes) < 2400


def test_a_follower_begins_with_what_comes_after_it(tmp_path: Path) -> None:
    log = events.EventLog(tmp_path, os.open(os.devnull, os.O_WRONLY))
    log.write(STOPPED)
    follower = events.Follower(tmp_path)
    assert follower.new() == ()
    with log.path.open("a", encoding="utf-8") as file:
        file.write("not an event\n")
    log.write(replace_message("later"))
    assert [one.message for one in follower.new()] == ["later"]


def replace_message(message: str) -> events.Event:
    return STOPPED.model_copy(update={"message": message})


def test_a_full_disk_loses_an_event_and_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    with Path("/dev/full").open("wb") as full:
        log = events.EventLog(folder, full.fileno())
        log.write(STOPPED)
