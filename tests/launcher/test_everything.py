"""The run of all GPU measurements, with small programs in their place: its order, its time, its exit status."""

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

GPU = Path(__file__).resolve().parents[1] / "gpu"
sys.path.append(str(GPU))

import everything  # noqa: E402 - after the folder is on the path
from everything import LEFT, Ended, Step, run, status_of  # noqa: E402

PROGRAM = """
import json, pathlib, sys, time
name, status, seconds, *options = sys.argv[1:]
begun = time.time()
time.sleep(float(seconds))
log = pathlib.Path(options[options.index("--results") + 1]).with_name(name)
log.write_text(json.dumps([begun, time.time(), options]))
sys.exit(int(status))
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM, encoding="utf-8")
    return path


def step(program: Path, name: str, status: int = 0, seconds: float = 0.0, **changes: Any) -> Step:
    return Step(name, str(program), 60, (name, str(status), str(seconds)), **changes)


def logged(folder: Path, name: str) -> Any:
    return json.loads((folder / name).read_text(encoding="utf-8"))


def test_what_shares_the_card_runs_at_once_and_the_rest_alone_and_behind_it(program: Path, tmp_path: Path) -> None:
    shared = [step(program, name, seconds=0.5, shares=True) for name in ("a", "b")]
    alone = [step(program, name) for name in ("c", "d")]
    ended = run([alone[0], *shared, alone[1]], tmp_path, tmp_path, 100)
    assert {name: one.status for name, one in ended.items()} == {"a": 0, "b": 0, "c": 0, "d": 0}
    (a, b, c, d) = (logged(tmp_path, name) for name in "abcd")
    assert max(a[0], b[0]) < min(a[1], b[1])
    assert max(a[1], b[1]) <= c[0] < c[1] <= d[0]
    assert a[2] == ["--results", str(tmp_path / "program.json"), "--budget-s", "60"]


def test_no_more_share_the_card_than_there_are_places(
    program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(everything, "PLACES", 1)
    run([step(program, name, seconds=0.2, shares=True) for name in ("a", "b")], tmp_path, tmp_path, 100)
    assert logged(tmp_path, "a")[1] <= logged(tmp_path, "b")[0]


def test_nothing_is_begun_that_has_no_time_and_what_does_not_end_is_ended(
    program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(everything, "GRACE_S", 0.2)
    endless = replace(step(program, "endless", seconds=60), most_s=0.3)
    begun = time.monotonic()
    ended = run([endless, step(program, "late")], tmp_path, tmp_path, 10)
    assert time.monotonic() - begun < 10
    assert (ended["endless"].status, ended["late"]) == (LEFT, Ended(None))
    assert status_of(ended) == LEFT
    assert not (tmp_path / "late").exists()


@pytest.mark.parametrize(
    ("statuses", "status"), [((0, 0), 0), ((0, 3), 3), ((0, None), 3), ((3, 1), 1), ((-9, 0), 1), ((), 0)]
)
def test_a_failure_counts_for_more_than_what_is_left(statuses: tuple[int | None, ...], status: int) -> None:
    assert status_of({str(index): Ended(one) for index, one in enumerate(statuses)}) == status


@pytest.mark.parametrize("one", everything.STEPS, ids=lambda one: one.name)
def test_every_measurement_knows_the_options_that_it_is_given(one: Step, tmp_path: Path) -> None:
    path = GPU / one.program
    known = path.read_text(encoding="utf-8")
    if "add_bench(" in known:
        known += (GPU / "measured.py").read_text(encoding="utf-8")
    options = [word for word in one.command(tmp_path, 60.0)[2:] if word.startswith("--")]
    assert [option for option in options if f'"{option}"' not in known] == []


def test_it_lists_what_it_would_run() -> None:
    listed = [sys.executable, str(GPU / "everything.py"), "--list", "--only", "soak", "headline"]
    assert subprocess.run(listed, capture_output=True, text=True, check=True).stdout.split() == ["soak", "headline"]
