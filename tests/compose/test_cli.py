"""The launcher's own commands through Docker, with the stand-in under the name that the pins give."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from launcher.images.pins import load_pins
from launcher.prepare import models_dir
from launcher.profile import load_profile
from launcher.state import CHECKOUT
from tests.compose import standin
from tests.compose.conftest import free_port, missing

pytestmark = [pytest.mark.compose, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def named_as_pinned(base: standin.Standin) -> Iterator[None]:
    pinned = load_pins(lock=Path("no-digests-recorded.json")).of(load_profile("cpu").vllm).base
    if standin.is_real(pinned):
        missing(f"{pinned} is here itself; these tests would take its name for their stand-in")
    subprocess.run(["docker", "tag", base.reference, pinned], check=True)
    yield
    subprocess.run(["docker", "image", "rm", pinned], capture_output=True, check=True)


@dataclass(frozen=True)
class Graft:
    """The launcher with a state folder and profiles of its own."""

    folder: Path

    def __call__(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        environment = {
            **os.environ,
            "GRAFT_STATE": str(self.folder / "state"),
            "GRAFT_PROFILES": str(self.folder / "profiles"),
            "GRAFT_MODELS": str(models_dir()),
        }
        argv = [sys.executable, "-m", "launcher", *arguments]
        return subprocess.run(argv, env=environment, cwd=CHECKOUT, capture_output=True, text=True, check=False)

    def profile(self, name: str, extra: str = "") -> None:
        text = f"extends: cpu\nruntime: docker\nserve:\n  port: {free_port()}\n{extra}"
        (self.folder / "profiles" / f"{name}.yaml").write_text(text, encoding="utf-8")


@pytest.fixture
def graft(named_as_pinned: None, model_dir: Path, tmp_path: Path) -> Iterator[Graft]:
    (tmp_path / "profiles").mkdir()
    yield Graft(tmp_path)
    for file in tmp_path.glob("state/*/compose.yaml"):
        argv = ["docker", "compose", "--file", str(file), "down", "--volumes", "--timeout", "1"]
        subprocess.run(argv, capture_output=True, check=True)


def containers() -> set[str]:
    argv = ["docker", "ps", "--all", "--format", "{{.Names}}"]
    return set(subprocess.run(argv, capture_output=True, text=True, check=True).stdout.split())


def test_up_ask_status_down(graft: Graft) -> None:
    graft.profile("test-cli")
    up = graft("up", "--unpinned", "--profile", "test-cli")
    assert up.returncode == 0, up.stdout + up.stderr
    assert "Paris" in up.stdout
    assert "READY smollm2-135m-instruct at http://127.0.0.1:" in up.stdout

    again = graft("up", "--unpinned", "--profile", "test-cli")
    assert (again.returncode, "already up and healthy" in again.stdout) == (0, True)
    assert "2" in graft("ask", "--profile", "test-cli", "--", "What is 1 + 1?").stdout
    status = graft("status", "--profile", "test-cli", "--json")
    assert status.returncode == 0, status.stdout + status.stderr
    assert json.loads(status.stdout)
    assert "graft: exec vllm serve" in graft("logs", "--profile", "test-cli").stdout

    down = graft("down", "--profile", "test-cli")
    assert down.returncode == 0, down.stdout + down.stderr
    assert "graft-test-cli" not in containers()
    assert graft("status", "--profile", "test-cli").returncode == 1


def test_a_failed_up_names_the_cause_keeps_the_log_and_leaves_nothing_running(graft: Graft) -> None:
    graft.profile("test-flag", "  extra_args: [--no-such-flag]\n")
    up = graft("up", "--unpinned", "--profile", "test-flag")
    assert up.returncode == 4, up.stdout + up.stderr
    assert "unknown-vllm-flag" in up.stdout + up.stderr
    assert "--no-such-flag" in up.stdout + up.stderr
    logs = list(graft.folder.glob("state/test-flag/logs/failed-*.log"))
    assert len(logs) == 1
    assert "unrecognized arguments: --no-such-flag" in logs[0].read_text(encoding="utf-8")
    assert "graft-test-flag" not in containers()
