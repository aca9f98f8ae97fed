"""Upgrade, failed upgrade and rollback in a real Docker Engine, between two stand-ins labelled as the two pins.

One service goes through all of it, in the order of this file.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from launcher import release
from launcher.ask import is_healthy
from launcher.images import lock
from launcher.images.pins import load_pins
from launcher.prepare import models_dir
from launcher.state import CHECKOUT, ServiceState
from tests.compose import standin
from tests.compose.conftest import free_port, missing

pytestmark = [pytest.mark.compose, pytest.mark.timeout(600)]

NAME = "test-upgrade"
OLD, NEW = "0.32.0", "0.33.0"
BROKEN = """FROM {base}
LABEL org.opencontainers.image.version=0.33.0
RUN printf '#!/bin/sh\\necho "RuntimeError: this release is broken" >&2\\nexit 1\\n' > /usr/local/bin/vllm
"""
GOOD = """FROM {base}
LABEL org.opencontainers.image.version=0.33.0
"""


def docker(*arguments: str, text: str | None = None) -> str:
    done = subprocess.run(["docker", *arguments], input=text, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def pinned(vllm: str) -> str:
    return load_pins(lock=Path("no-digests-recorded.json")).of(vllm).base


@pytest.fixture(scope="module")
def bases(base: standin.Standin) -> Iterator[None]:
    for vllm in (OLD, NEW):
        if standin.is_real(pinned(vllm)):
            missing(f"{pinned(vllm)} is here itself; these tests would take its name for their stand-in")
    docker("tag", base.reference, pinned(OLD))
    yield
    for vllm in (OLD, NEW):
        subprocess.run(["docker", "image", "rm", pinned(vllm)], capture_output=True, check=False)


@dataclass(frozen=True)
class Graft:
    """The launcher with a state folder and one profile of its own."""

    folder: Path

    @property
    def state(self) -> ServiceState:
        return ServiceState(self.folder / "state" / NAME)

    @property
    def url(self) -> str:
        release_now = release.current(self.state)
        assert release_now is not None
        return f"http://127.0.0.1:{release_now.plan.port}"

    def __call__(self, verb: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        environment = {
            **os.environ,
            "GRAFT_STATE": str(self.folder / "state"),
            "GRAFT_PROFILES": str(self.folder / "profiles"),
            "GRAFT_MODELS": str(models_dir()),
        }
        argv = [sys.executable, "-m", "launcher", verb, "--profile", NAME, *arguments]
        return subprocess.run(argv, env=environment, cwd=CHECKOUT, capture_output=True, text=True, check=False)

    def container(self) -> str:
        """Return when the service's container was created."""
        return docker("inspect", "--format", "{{.Created}} {{.Image}}", f"graft-{NAME}")


@pytest.fixture(scope="module")
def graft(bases: None, model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Graft]:
    folder = tmp_path_factory.mktemp("upgrade")
    (folder / "profiles").mkdir()
    text = f"extends: cpu\nruntime: docker\nvllm: {OLD}\nserve:\n  port: {free_port()}\n"
    (folder / "profiles" / f"{NAME}.yaml").write_text(text, encoding="utf-8")
    yield Graft(folder)
    for file in folder.glob("state/*/compose.yaml"):
        argv = ["docker", "compose", "--file", str(file), "down", "--volumes", "--timeout", "1"]
        subprocess.run(argv, capture_output=True, check=True)


def services() -> set[str]:
    """Return the engine's container without what stands around it, and all containers of a server beside it."""
    names = docker("ps", "--format", "{{.Names}}").split()
    return {name for name in names if name == f"graft-{NAME}" or name.startswith(f"graft-{NAME}-next")}


def test_without_a_digest_the_base_is_refused_offline(graft: Graft) -> None:
    refused = graft("up")
    assert refused.returncode == 3
    assert f"{pinned(OLD)}: its digest is not known" in refused.stderr
    assert "--unpinned takes it as it is" in refused.stderr


def test_a_start_that_is_not_the_locked_one_is_refused(graft: Graft) -> None:
    done = graft("lock", "--unpinned")
    assert done.returncode == 0, done.stdout + done.stderr
    path = lock.lock_file(graft.state)
    locked = lock.read(path)
    assert locked is not None
    assert (locked.vllm, locked.base) == (OLD, pinned(OLD))
    assert locked.base_id == docker("image", "inspect", "--format", "{{.Id}}", pinned(OLD)).strip()
    assert len(locked.model.files["model.safetensors"].sha256) == 64

    locked.model_copy(update={"wheel_sha256": "0" * 64, "launcher": "9.9"}).write(path)
    refused = graft("up", "--locked", "--unpinned")
    assert refused.returncode == 3, refused.stdout + refused.stderr
    assert f"wheel_sha256: locked {'0' * 64}, now {locked.wheel_sha256}" in refused.stderr
    assert "launcher: locked 9.9" in refused.stderr
    assert services() == set()
    locked.write(path)


def test_the_locked_start_is_made(graft: Graft) -> None:
    locked = lock.lock_file(graft.state).read_bytes()
    up = graft("up", "--locked", "--unpinned")
    assert up.returncode == 0, up.stdout + up.stderr
    assert lock.lock_file(graft.state).read_bytes() == locked
    assert release.current(graft.state) is not None
    assert release.previous(graft.state) is None


def test_what_would_change_is_told_before(graft: Graft) -> None:
    check = graft("upgrade", "--check", "--to", NEW)
    assert check.returncode == 0, check.stderr
    assert f"vLLM {OLD} -> {NEW}" in check.stdout
    assert "fixes that retire: none" in check.stdout


def test_a_failed_upgrade_leaves_the_old_server_alone(graft: Graft, base: standin.Standin) -> None:
    docker("build", "--tag", pinned(NEW), "-", text=BROKEN.format(base=base.reference))
    before, locked = graft.container(), lock.lock_file(graft.state).read_bytes()
    failed = graft("upgrade", "--to", NEW, "--unpinned")
    assert failed.returncode == 4, failed.stdout + failed.stderr
    assert graft.container() == before
    assert is_healthy(graft.url)
    assert services() == {f"graft-{NAME}"}
    assert lock.lock_file(graft.state).read_bytes() == locked
    assert not ServiceState(graft.folder / "state" / f"{NAME}-next").root.exists()
    (log,) = graft.state.logs_dir.glob("next-failed-*.log")
    assert str(log) in failed.stderr
    assert "this release is broken" in log.read_text(encoding="utf-8")


def test_an_upgrade_is_proven_beside_the_old_server_and_then_switched(graft: Graft, base: standin.Standin) -> None:
    docker("build", "--tag", pinned(NEW), "-", text=GOOD.format(base=base.reference))
    before, url = graft.container(), graft.url
    done = graft("upgrade", "--to", NEW, "--unpinned")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"vLLM {OLD} -> {NEW}, proven beside the old server, then switched." in done.stdout
    assert done.stdout.count("Asked: ") == 2
    assert graft.container() != before
    assert graft.url == url
    assert is_healthy(url)
    assert services() == {f"graft-{NAME}"}
    now, former = lock.read(lock.lock_file(graft.state)), lock.read(release.previous_lock_file(graft.state))
    assert now is not None
    assert former is not None
    assert (now.vllm, former.vllm) == (NEW, OLD)

    again = graft("upgrade", "--to", NEW, "--unpinned")
    assert (again.returncode, again.stdout.splitlines()[-1]) == (0, f"{NAME}: runs just that already.")


def test_a_rollback_needs_neither_network_nor_base(graft: Graft) -> None:
    current, previous = release.current(graft.state), release.previous(graft.state)
    assert current is not None
    assert previous is not None
    for vllm in (OLD, NEW):
        docker("image", "rm", pinned(vllm))
    done = graft("rollback", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    answer = json.loads(done.stdout)
    assert answer["vllm"] == OLD
    assert "Paris" in answer["answer"]["text"]
    assert release.rendered_files(graft.state.root) == previous.files
    assert docker("inspect", "--format", "{{.Config.Image}}", f"graft-{NAME}").strip() == previous.image
    assert lock.read(lock.lock_file(graft.state)) == previous.lock
    assert lock.read(release.previous_lock_file(graft.state)) == current.lock
