"""Short drills of the gateway; `python -m tests.gateway.drill` runs the long one (tests/gateway/results/)."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.gateway import drill
from tests.gateway.drill import Drill, EngineProcess, Report
from tests.gateway.flat import flatness
from tests.gateway.load import Tally
from tests.gateway.stack import Stack, free_port

pytestmark = pytest.mark.timeout(180)
GROWING = flatness([index << 20 for index in range(40)])


@pytest.fixture
def engine() -> Iterator[EngineProcess]:
    engine = EngineProcess(free_port())
    yield engine
    engine.stop()


def test_no_request_is_lost_whatever_is_killed(engine: EngineProcess, tmp_path: Path) -> None:
    steps = [drill.edge_killed, drill.relay_killed, drill.engine_killed, drill.engine_stopped]
    with Stack(tmp_path, engine.port) as stack:
        report = asyncio.run(Drill(stack, engine, 40, 20).run(steps))
    assert report.problems() == []
    assert [event.name for event in report.events] == [step.__name__ for step in steps]
    assert all(event.recovery_s is not None and event.recovery_s < 30 for event in report.events)
    assert report.tally.outcomes["told"] > 0, "a stream of the killed engine was told so"


def test_nothing_reachable_is_reached_by_an_attack(engine: EngineProcess, tmp_path: Path) -> None:
    steps = [drill.silent_connections, drill.large_prompts, drill.wrong_keys, drill.path_tricks, drill.slow_readers]
    with Stack(tmp_path, engine.port, edge_settings={"header_timeout_s": 3}) as stack:
        report = asyncio.run(Drill(stack, engine, 20, 20).run(steps))
    assert report.problems() == []
    assert report.edge is not None, "memory was judged"


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
        (lambda report: report.tally.outcomes.clear(), "no request was answered"),
        (
            lambda report: setattr(report, "relay", flatness([one << 20 for one in range(40)])),
            "memory of the relay grew",
        ),
    ],
)
def test_each_threshold_of_the_drill_can_fail(spoil: Callable[[Report], object], problem: str) -> None:
    report = Report(1, 1.0, Tally())
    report.tally.outcomes["whole"] = 1
    report.edge = report.relay = flatness([1 << 20] * 40)
    assert report.problems() == []
    spoil(report)
    assert [problem in found for found in report.problems()] == [True]
