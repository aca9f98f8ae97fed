"""Fixes that are not in, in a real server: the launcher refuses it, or says so, and always names fix and reason.

The server imports a copy of vllm_graft in which a fix does not know the source that it replaces; nothing that is
installed is changed.
"""

import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from vllm_graft import __main__ as vllm_graft
from vllm_graft.patch import Outcome

from launcher import cli, prepare, service
from launcher.cli.live import Live
from launcher.engine_env import ENGINE
from launcher.errors import FixNotApplied
from launcher.planner import Planned
from launcher.prepare import Options
from launcher.profile import load_profile
from launcher.runtime import host
from launcher.service import FailedStart, Started
from launcher.state import CHECKOUT, ServiceState, cache_root
from tests.engine.conftest import free_port

pytestmark = [pytest.mark.engine, pytest.mark.timeout(240)]

OF_THE_PARSERS = "none-not-null"
OF_THE_ENGINE = "tq-spec-decode"
ANOTHER_SOURCE = (r'"0\.32\.0": "\w{16}"', '"0.32.0": "0123456789abcdef"')
ANOTHER_SOURCE_IN_WORKERS = (
    r'"0\.32\.0": ("\w{16}")',
    r'"0.32.0": \1 if __import__("multiprocessing").current_process().name == "EngineCore" else "0123456789abcdef"',
)
ALWAYS_WANTED = (r"when=When\(.*\)", "when=When()")


@dataclass(frozen=True)
class Drill:
    """The CPU profile as the user's own, and a `vllm` whose processes import a copy of vllm_graft."""

    folder: Path

    @property
    def vllm(self) -> Path:
        return self.folder / "bin" / "vllm"

    @property
    def profiles(self) -> Path:
        return self.folder / "profiles"

    @property
    def logs(self) -> list[Path]:
        return sorted(ServiceState.of("drill").logs_dir.glob("failed-*.log"))

    def prepare(self, port: int) -> None:
        self.profiles.mkdir()
        self.write_profile(port)
        shutil.copytree(CHECKOUT / "patches" / "vllm_graft", self.folder / "copy" / "vllm_graft")
        path, copy = f'PATH="{ENGINE.vllm.parent}:$PATH"', f'PYTHONPATH="{self.folder / "copy"}"'
        self.vllm.parent.mkdir()
        self.vllm.write_text(f'#!/bin/sh\n{path} {copy} exec "{ENGINE.vllm}" "$@"\n', encoding="utf-8")
        self.vllm.chmod(0o755)

    def write_profile(self, port: int, optional_fixes: str = "") -> None:
        text = f"extends: cpu\noptional_fixes: [{optional_fixes}]\nserve:\n  port: {port}\n"
        (self.profiles / "drill.yaml").write_text(text, encoding="utf-8")

    def change(self, fix: str, *changes: tuple[str, str]) -> None:
        """Change a fix's module in the copy: patterns, and what takes their place."""
        module = self.folder / "copy" / "vllm_graft" / "fixes" / f"{fix.replace('-', '_')}.py"
        text = module.read_text(encoding="utf-8")
        for pattern, replacement in changes:
            text, count = re.subn(pattern, replacement, text)
            assert count == 1, pattern
        module.write_text(text, encoding="utf-8")

    def start(self) -> Started:
        profile = load_profile("drill", self.profiles)
        options = Options(profile="drill", profiles_dir=self.profiles)
        return service.up(options, profile, Live(Console(file=StringIO())), force=False, on_plan=lambda made: None)


@pytest.fixture
def drill(model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Drill]:
    caches, state = cache_root(), tmp_path / "state"
    state.mkdir()
    (state / "cache").symlink_to(caches)
    monkeypatch.setenv("GRAFT_STATE", str(state))
    drill = Drill(tmp_path)
    drill.prepare(free_port())
    start = host.start
    monkeypatch.setattr(host, "start", lambda plan, model, state, vllm: start(plan, model, state, drill.vllm))
    yield drill
    service.down("drill")


def test_a_required_fix_that_drifted_ends_the_start_with_fix_reason_and_exit_code_5(
    drill: Drill, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    drill.change(OF_THE_PARSERS, ANOTHER_SOURCE)
    arguments = ["graft", "up", "--profile", "drill", "--profiles", str(drill.profiles)]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == FixNotApplied.exit_code == 5
    said = capsys.readouterr().err
    assert f"required fix {OF_THE_PARSERS} is not applied: drifted: the source of vllm." in said
    assert "patch-drifted" in said
    assert service.find("drill") is None
    (log,) = drill.logs
    assert vllm_graft.main(["status", "--log", str(log)]) == vllm_graft.NOT_APPLIED
    assert f"{OF_THE_PARSERS}: drifted (required)" in capsys.readouterr().out


def test_a_required_fix_that_drifted_in_the_engines_processes_is_named_too(
    drill: Drill, monkeypatch: pytest.MonkeyPatch
) -> None:
    drill.change(OF_THE_ENGINE, ANOTHER_SOURCE, ALWAYS_WANTED)

    def as_for_turboquant(*arguments: Any) -> Planned:
        made = prepare.planned(*arguments)
        required = (*made.plan.required_fixes, OF_THE_ENGINE)
        return replace(made, plan=made.plan.model_copy(update={"required_fixes": required}))

    monkeypatch.setattr("launcher.service.planned", as_for_turboquant)
    with pytest.raises(FailedStart) as failed:
        drill.start()
    assert failed.value.exit_code == FixNotApplied.exit_code
    assert re.search(rf"^EngineCore\w*: required fix {OF_THE_ENGINE} is not applied: drifted: ", str(failed.value))
    diagnosis = service.diagnose_failure(failed.value)
    assert diagnosis is not None
    assert diagnosis.cause == "patch-drifted"
    assert OF_THE_ENGINE in diagnosis.remedy
    assert service.find("drill") is None


def test_an_optional_fix_that_drifted_lets_it_serve_and_is_said(drill: Drill) -> None:
    drill.write_profile(free_port(), optional_fixes=OF_THE_PARSERS)
    drill.change(OF_THE_PARSERS, ANOTHER_SOURCE)
    started = drill.start()
    assert "Paris" in started.answer.text
    (trouble,) = started.reports.trouble
    assert (trouble.id, trouble.outcome) == (OF_THE_PARSERS, Outcome.DRIFTED)
    assert "0123456789abcdef" in trouble.reason
    assert OF_THE_PARSERS not in started.reports.applied
    assert started.reports.applied


def test_processes_that_disagree_are_refused_and_stopped(drill: Drill) -> None:
    drill.change(OF_THE_ENGINE, ANOTHER_SOURCE_IN_WORKERS, ALWAYS_WANTED)
    with pytest.raises(FailedStart, match=f"{OF_THE_ENGINE}: processes disagree: ") as failed:
        drill.start()
    assert failed.value.exit_code == FixNotApplied.exit_code
    assert "applied in pid" in str(failed.value)
    assert "drifted in pid" in str(failed.value)
    assert service.find("drill") is None
    assert [failed.value.log_file] == drill.logs
