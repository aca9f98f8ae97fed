"""Faults of a real engine under load: each ends in an engine that answers again, and how long that took is told."""

import resource
import signal
import time

import httpx
import pytest

from launcher import service
from launcher.runtime import host
from tests.engine.drilling import Drill, drill, kinds

__all__ = ["drill"]

pytestmark = [pytest.mark.engine, pytest.mark.timeout(420)]


def test_an_engine_core_that_is_killed_is_replaced(drill: Drill) -> None:
    told = drill.recovers("engine core killed", lambda: drill.child("EngineCore").kill())
    assert "engine-ended" in kinds(told)
    assert told[-1]["kind"] == "engine-serving"
    assert told[-1]["took_s"] > 0
    (words, *_) = drill.state.operate_dir.glob("last-words-*.log")
    assert "EngineDeadError" in words.read_text(encoding="utf-8")


def test_a_stopped_engine_is_found_though_health_says_200(drill: Drill) -> None:
    health: list[int] = []

    def stop() -> None:
        core = drill.child("EngineCore")
        core.send_signal(signal.SIGSTOP)
        for child in core.children(recursive=True):
            child.send_signal(signal.SIGSTOP)
        health.append(httpx.get(f"{drill.load.base_url}/health", timeout=5, trust_env=False).status_code)

    told = drill.recovers("engine stopped", stop)
    assert health == [200]
    ended = next(one for one in told if one["kind"] == "engine-ended")
    assert ended["cause"] == "engine-hang"
    assert "3 times in a row" in ended["message"]


def test_an_engine_out_of_memory_is_replaced(drill: Drill) -> None:
    told = drill.recovers("engine out of memory", drill.starve)
    # How it ends is the allocator's choice: with an error that the rules know, or with a crash that names no memory.
    assert "engine-ended" in kinds(told)
    assert kinds(told)[-1] == "engine-serving"


def test_a_watchdog_that_is_killed_comes_back_and_stays_small(drill: Drill) -> None:
    dog = drill.child("launcher.operate watch")
    before = dog.memory_info().rss
    dog.kill()
    begun_s = time.monotonic()
    drill.wait_for(lambda: kinds(drill.events)[-1] == "watchdog-started", 20)
    drill.took_s["watchdog killed"] = {"until_started_again_s": round(time.monotonic() - begun_s, 1)}
    looked_s = drill.status.looked_s
    drill.wait_for(lambda: drill.status.looked_s != looked_s, 20)
    again = drill.child("launcher.operate watch")
    assert again.pid != dog.pid
    assert again.memory_info().rss < before + (8 << 20)
    assert drill.keeper.memory_info().rss < 120 << 20


def test_a_log_that_takes_no_more_does_not_stop_the_service(drill: Drill) -> None:
    keeper = drill.keeper
    log = drill.state.logs_dir / host.LOG_NAME
    limits = keeper.rlimit(resource.RLIMIT_FSIZE)
    # The same as a full disk, for this one process: no file of it grows beyond what the log has already.
    keeper.rlimit(resource.RLIMIT_FSIZE, (log.stat().st_size, limits[1]))
    try:
        told = len(drill.events)
        drill.wait_for(lambda: "log-not-written" in kinds(drill.events[told:]), 60)
        drill.answers()
    finally:
        keeper.rlimit(resource.RLIMIT_FSIZE, limits)
    assert drill.status.phase == "serving"


def test_the_status_tells_what_happened(drill: Drill, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAFT_STATE", str(drill.state.root.parent))
    found = service.status(drill.state.root.name)
    assert found is not None
    assert found.is_good
    assert found.operating.restarts == len(found.operating.ends_s) == 3
