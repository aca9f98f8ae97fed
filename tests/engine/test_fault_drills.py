"""Faults of a real engine behind a real gateway under load: no request is lost, and how long each is felt is told."""

import resource
import time

import pytest

from launcher import service
from launcher.profile import Watch
from launcher.runtime import host
from tests.engine.drilling import KeptEngine, Shape, drill, engine, kinds, recovers
from tests.gateway import steps
from tests.gateway.drilling import Drill, Step

__all__ = ["drill", "engine"]

pytestmark = [pytest.mark.engine, pytest.mark.timeout(420)]


@pytest.fixture(scope="module")
def shape() -> Shape:
    watch = Watch(every_s=3, strikes=3, idle_probe_s=5, restarts=20)
    return Shape("fault_drills", streams=6, at_once=4, kv_cache_gib=1, watch=watch, header_timeout_s=3, hold_s=3.0)


def test_an_engine_core_that_is_killed_is_replaced(drill: Drill, engine: KeptEngine) -> None:
    told = recovers(drill, engine, steps.engine_killed)
    assert "engine-ended" in kinds(told)
    assert told[-1]["kind"] == "engine-serving"
    assert told[-1]["took_s"] > 0
    (words, *_) = engine.state.operate_dir.glob("last-words-*.log")
    assert "EngineDeadError" in words.read_text(encoding="utf-8")


def test_a_stopped_engine_is_found_though_health_says_200(drill: Drill, engine: KeptEngine) -> None:
    told = recovers(drill, engine, steps.engine_stopped)
    ended = next(one for one in told if one["kind"] == "engine-ended")
    assert ended["cause"] == "engine-hang"
    assert "3 times in a row" in ended["message"]


def test_an_engine_out_of_memory_is_replaced(drill: Drill, engine: KeptEngine) -> None:
    starved = Step("engine_out_of_memory", lambda drill: engine.starve(drill.stack), is_borne=False)
    told = recovers(drill, engine, starved)
    # How it ends is the allocator's choice: with an error that the rules know, or with a crash that names no memory.
    assert "engine-ended" in kinds(told)
    assert kinds(told)[-1] == "engine-serving"


def test_a_watchdog_that_is_killed_comes_back_and_stays_small(drill: Drill, engine: KeptEngine) -> None:
    dog = engine.child("launcher.operate watch")
    before = dog.memory_info().rss

    def killed(drill: Drill) -> str:
        dog.kill()
        begun_s = time.monotonic()
        engine.wait_for(lambda: kinds(engine.events)[-1] == "watchdog-started", 20)
        return f"SIGKILL, back after {time.monotonic() - begun_s:.1f} s"

    drill.take(Step("watchdog_killed", killed, is_borne=True))
    drill.begins_anew("watchdog")
    looked_s = engine.status.looked_s
    engine.wait_for(lambda: engine.status.looked_s != looked_s, 20)
    again = engine.child("launcher.operate watch")
    assert again.pid != dog.pid
    assert again.memory_info().rss < before + (8 << 20)
    assert engine.keeper.memory_info().rss < 120 << 20


def test_a_log_that_takes_no_more_does_not_stop_the_service(drill: Drill, engine: KeptEngine) -> None:
    keeper = engine.keeper
    log = engine.state.logs_dir / host.LOG_NAME
    limits = keeper.rlimit(resource.RLIMIT_FSIZE)

    def filled(drill: Drill) -> str:
        # The same as a full disk, for this one process: no file of it grows beyond what the log has already.
        keeper.rlimit(resource.RLIMIT_FSIZE, (log.stat().st_size, limits[1]))
        try:
            told = len(engine.events)
            engine.wait_for(lambda: "log-not-written" in kinds(engine.events[told:]), 60)
            drill.answers()
        finally:
            keeper.rlimit(resource.RLIMIT_FSIZE, limits)
        return "the keeper's log took no more"

    drill.take(Step("engine_log_full", filled, is_borne=True))
    assert engine.status.phase == "serving"


@pytest.mark.parametrize(
    "step", [steps.logs_on_a_full_disk, steps.edge_killed, steps.relay_killed, *steps.ATTACKS], ids=lambda one: one.name
)
def test_a_gateway_whatever_is_done_to_it_serves_again(drill: Drill, step: Step) -> None:
    recovery_s = drill.take(step).recovery_s
    assert recovery_s is not None
    assert recovery_s < 30


def test_the_status_tells_what_happened(drill: Drill, engine: KeptEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAFT_STATE", str(engine.state.root.parent))
    found = service.status(engine.state.root.name)
    assert found is not None
    assert found.is_good
    assert found.operating.restarts == len(found.operating.ends_s) == 3


def test_no_request_was_lost_and_clients_were_told_why(drill: Drill, engine: KeptEngine) -> None:
    drill.answers()
    # Until each has run long enough since it was killed.
    engine.wait_for(lambda: set(drill.judged().memory) == {"edge", "relay", "keeper", "watchdog"}, 30)
    report = drill.judged()
    assert report.problems() == []
    assert report.tally.outcomes["told"] > 0, "a stream of an engine that ended was told so"
    ends = {one["message"] for one in engine.events if one["kind"] == "engine-ended"}
    assert ends & set(report.tally.reasons), "the keeper's own words reached clients"
