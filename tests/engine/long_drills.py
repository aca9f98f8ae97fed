"""The longer drills of a real engine, which `make drill` runs: 200 streams for ten minutes, an exhausted budget.

GRAFT_DRILL_RESULTS=FOLDER python -m pytest tests/engine/test_fault_drills.py tests/engine/long_drills.py
"""

import os
import time

import pytest

from launcher import service
from launcher.profile import Watch
from tests.engine.drilling import KeptEngine, Shape, drill, engine, kinds
from tests.gateway import steps
from tests.gateway.drilling import Drill

__all__ = ["drill", "engine"]

pytestmark = [pytest.mark.engine, pytest.mark.timeout(3600)]

MINUTES_ENV = "GRAFT_DRILL_MINUTES"


@pytest.fixture(scope="module")
def shape() -> Shape:
    # A step of so many takes seconds on a CPU.
    watch = Watch(every_s=10, strikes=3, idle_probe_s=20, restarts=20)
    return Shape("long_drills", streams=200, at_once=240, kv_cache_gib=2, watch=watch, header_timeout_s=10, hold_s=20.0)


def test_two_hundred_streams_are_served_whatever_is_done(drill: Drill) -> None:
    drill.answers()
    drill.run(steps.ALL, 60 * float(os.environ.get(MINUTES_ENV, "10")))
    report = drill.judged()
    assert report.problems() == []
    assert set(report.memory) == {"edge", "relay", "keeper", "watchdog"}


def test_an_exhausted_budget_stays_down_and_says_so(
    drill: Drill, engine: KeptEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRAFT_STATE", str(engine.state.root.parent))
    drill.answers()
    assert engine.plan.watch is not None
    # The rest of the budget, spent beforehand.
    ends_s = (time.time(),) * engine.plan.watch.restarts
    engine.file.change(lambda status: status.model_copy(update={"ends_s": ends_s}))
    engine.child("EngineCore").kill()
    engine.wait_for(lambda: engine.status.phase == "stopped")
    engine.wait_for(lambda: not engine.keeper_lives(), 60)
    assert kinds(engine.events)[-1] == "service-stopped"
    found = service.status(engine.state.root.name)
    assert found is not None
    assert not found.is_good
    told = f"{engine.plan.watch.restarts} restarts are allowed"
    assert told in found.operating.reason
    with drill.stack.client() as client:
        answer = client.get("/v1/models")
        assert (answer.status_code, answer.json()["status"]) == (503, "degraded")
        assert told in answer.json()["reason"]
