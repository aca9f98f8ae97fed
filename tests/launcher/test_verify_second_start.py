"""Greedy equality of one's own service: it is started once more without speculation, and put back whatever happens."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from launcher import service
from launcher.errors import UsageError
from launcher.measure.second_start import without_speculation
from launcher.profile import Profile
from tests.launcher.test_host_runtime import make_plan

Done = list[tuple[str, Any]]


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Done:
    """What was stopped and started, in order: profiles by whether they speculate."""
    monkeypatch.setenv("GRAFT_STATE", str(tmp_path))
    found: Done = []

    def prepared(options: Any, profile: Profile, *_: Any, **__: Any) -> tuple[Profile, None]:
        assert options.model == "small"
        return profile, None

    def start(profile: Profile, *_: Any) -> Any:
        found.append(("start", profile.serve.speculation is not None))
        return SimpleNamespace(base_url="http://127.0.0.1:8000")

    monkeypatch.setattr(service, "prepared", prepared)
    monkeypatch.setattr(service, "start", start)
    monkeypatch.setattr(service, "down", lambda name: found.append(("down", name)))
    return found


def test_the_service_runs_without_speculation_for_the_block_and_with_it_behind(done: Done) -> None:
    with without_speculation(make_plan(8000, profile="rtx4090"), None) as url:  # type: ignore[arg-type]
        assert url == "http://127.0.0.1:8000"
        assert done == [("down", "rtx4090"), ("start", False)]
    assert done[2:] == [("down", "rtx4090"), ("start", True)]


def test_what_ran_is_put_back_after_a_failure_too(done: Done) -> None:
    block = without_speculation(make_plan(8000, profile="rtx4090"), None)  # type: ignore[arg-type]
    with pytest.raises(ZeroDivisionError), block:
        raise ZeroDivisionError
    assert done[-1] == ("start", True)


def test_a_service_that_does_not_speculate_is_left_alone(done: Done) -> None:
    with (
        pytest.raises(UsageError, match="cpu: does not speculate"),
        without_speculation(make_plan(8000, profile="cpu"), None),  # type: ignore[arg-type]
    ):
        pass
    assert done == []
