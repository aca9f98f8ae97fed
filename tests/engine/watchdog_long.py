"""The longer drills of the watchdog, which `make drill` runs: minutes of memory, an exhausted budget.

GRAFT_DRILL_RESULTS=FILE python -m pytest tests/engine/test_watchdog_drills.py tests/engine/watchdog_long.py
"""

import os
import time

import pytest

from launcher import service
from tests.engine.drilling import Drill, drill, kinds

__all__ = ["drill"]

pytestmark = [pytest.mark.engine, pytest.mark.timeout(3600)]

MINUTES_ENV = "GRAFT_DRILL_MINUTES"
GROWTH_BYTES = 2 << 20
"""What a process may gain after its first minute."""


def test_memory_of_keeper_and_watchdog_is_flat_under_load(drill: Drill) -> None:
    minutes = float(os.environ.get(MINUTES_ENV, "5"))
    processes = {"keeper": drill.keeper, "watchdog": drill.child("launcher.operate watch")}
    drill.answers()
    begun_s, sizes = time.monotonic(), {name: [0] for name in processes}
    while (passed_s := time.monotonic() - begun_s) < 60 * minutes:
        for name, process in processes.items():
            size = process.memory_info().rss
            sizes[name] = [size] if passed_s < 60 else [*sizes[name], size]
        time.sleep(2)
    for name, found in sizes.items():
        drill.took_s[f"memory of the {name}"] = {
            "minutes": minutes,
            "first_mib": round(found[0] / 2**20, 1),
            "last_mib": round(found[-1] / 2**20, 1),
        }
        assert found[-1] - found[0] < GROWTH_BYTES


def test_an_exhausted_budget_stays_down_and_says_so(drill: Drill, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAFT_STATE", str(drill.state.root.parent))
    drill.answers()
    # The rest of the budget, spent beforehand.
    now_s = time.time()
    drill.file.change(lambda status: status.model_copy(update={"ends_s": (now_s,) * drill.restarts}))
    drill.child("EngineCore").kill()
    drill.wait_for(lambda: drill.status.phase == "stopped")
    drill.wait_for(lambda: not drill.keeper_lives(), 60)
    assert kinds(drill.events)[-1] == "service-stopped"
    found = service.status(drill.state.root.name)
    assert found is not None
    assert not found.is_good
    assert f"{drill.restarts} restarts are allowed" in found.operating.reason
