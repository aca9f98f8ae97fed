"""Short drills of the gateway; `python -m tests.gateway.drill` runs the long one (tests/gateway/results/)."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.gateway import steps
from tests.gateway.drilling import Drill, Event, Report
from tests.gateway.fake_engine import EngineProcess
from tests.gateway.flat import flatness
from tests.gateway.load import Tally
from tests.gateway.stack import Stack, free_port

pytestmark = pytest.mark.timeout(180)
GROWING = flatness([index << 20 for index in range(40)])


@pytest.fixture
def engine() -> Iterator[EngineProcess]:
    with EngineProcess(free_port()) as engine:
        yield engine


def test_no_request_is_lost_whatever_is_killed(engine: EngineProcess, tmp_path: Path) -> None:
    taken = [steps.edge_killed, steps.relay_killed, steps.engine_killed, steps.engine_stopped]
    with Stack(tmp_path, engine.port) as stack:
        with Drill(stack, engine, 40) as drill:
            drill.run(taken, 20)
        report = drill.judged()
    assert report.problems() == []
    assert [event.name for event in report.events] == [step.name for step in taken]
    assert all(event.recovery_s is not None and event.recovery_s < 30 for event in report.events)
    assert report.tally.outcomes["told"] > 0, "a stream of the killed engine was told so"


def test_nothing_reachable_is_reached_by_an_attack(engine: EngineProcess, tmp_path: Path) -> None:
    with Stack(tmp_path, engine.port, edge_settings={"header_timeout_s": 3}) as stack:
        with Drill(stack, engine, 20) as drill:
            drill.run(steps.ATTACKS, 20)
        report = drill.judged()
    assert report.problems() == []
    assert set(report.memory) == {"edge", "relay"}, "memory was judged"


def test_a_refusal_is_known_by_its_words() -> None:
    tally, error = Tally(), {"error": {"code": "engine_unavailable"}}
    degraded = {**error, "status": "degraded", "reason": "it ended"}
    assert [tally.refused(503, json.dumps(one).encode()) for one in (degraded, error, {"detail": "no"})] == [
        "refused",
        "refused",
        "lost",
    ]
    assert (dict(tally.reasons), len(tally.not_degraded), len(tally.not_openai)) == ({"it ended": 1}, 1, 1)


def test_memory_that_grows_is_not_flat() -> None:
    assert flatness([50 << 20] * 40).is_flat
    settling = [(40 + min(index, 10)) << 20 for index in range(40)]
    assert flatness(settling).is_flat
    leaking = [(50 + index) << 20 for index in range(40)]
    assert not flatness(leaking).is_flat
    assert flatness(leaking).growth_bytes > 20 << 20


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (lambda report: report.tally.outcomes.update(lost=1), "1 requests were lost without an error"),
        (lambda report: setattr(report, "cut_outside_kills", 2), "2 connections broke although"),
        (lambda report: setattr(report, "reached_without_key", 3), "3 requests came through that had no right to"),
        (lambda report: report.tally.not_openai.append("502: b'<html>'"), "refusals that are no errors of the API"),
        (lambda report: report.tally.not_degraded.append("503: b'{}'"), "refusals that do not say what is wrong"),
        (lambda report: report.tally.outcomes.clear(), "no request was answered"),
        (lambda report: report.events.append(Event("fault", 1.0, None)), "nothing was answered after fault"),
        (lambda report: report.memory.update(relay=GROWING), "memory of the relay grew"),
    ],
)
def test_each_threshold_of_the_drill_can_fail(spoil: Callable[[Report], object], problem: str) -> None:
    report = Report("none", 1, Tally())
    report.tally.outcomes["whole"] = 1
    report.events.append(Event("fault", 1.0, 2.0))
    report.memory = dict.fromkeys(("edge", "relay"), flatness([1 << 20] * 40))
    assert report.problems() == []
    spoil(report)
    assert [problem in found for found in report.problems()] == [True]
