"""Images in bundles, and compile caches that can go, with a real Docker Engine."""

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from launcher import cleaning
from launcher.bundle.layout import Manifest
from launcher.errors import Refused
from launcher.host.facts import Docker
from launcher.images.pins import load_pins
from launcher.profile import load_profile
from launcher.state import CHECKOUT
from tests.compose import standin
from tests.compose.conftest import free_port, missing

pytestmark = [pytest.mark.compose, pytest.mark.timeout(600)]
PROJECT = "graft-test-files"


def docker(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(["docker", *arguments], capture_output=True, text=True, check=True)


@pytest.fixture
def named_as_pinned(base: standin.Standin) -> Iterator[None]:
    pinned = load_pins(lock=Path("no-digests-recorded.json")).of(load_profile("cpu").vllm).base
    if standin.is_real(pinned):
        missing(f"{pinned} is here itself; these tests would take its name for their stand-in")
    docker("tag", base.reference, pinned)
    yield
    docker("image", "rm", pinned)


@dataclass(frozen=True)
class Machine:
    """The launcher with a state folder of its own."""

    folder: Path
    models: Path
    profiles: Path

    def __call__(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        environment = {
            **os.environ,
            "GRAFT_STATE": str(self.folder / "state"),
            "GRAFT_MODELS": str(self.models),
            "GRAFT_PROFILES": str(self.profiles),
        }
        argv = [sys.executable, "-m", "launcher", *arguments]
        return subprocess.run(argv, env=environment, cwd=CHECKOUT, capture_output=True, text=True, check=False)


def test_a_service_starts_from_the_image_in_its_bundle(named_as_pinned: None, model_dir: Path, tmp_path: Path) -> None:
    profiles = tmp_path / "profiles"
    profiles.mkdir()
    (profiles / "test-files.yaml").write_text(f"extends: cpu\nruntime: docker\nserve:\n  port: {free_port()}\n")
    here = Machine(tmp_path / "here", model_dir.parent, profiles)
    there = Machine(tmp_path / "there", tmp_path / "there" / "models", profiles)

    written = here("bundle", str(tmp_path / "out"), "--profile", "test-files", "--unpinned")
    assert written.returncode == 0, written.stdout + written.stderr
    images = Manifest.read(tmp_path / "out").images
    assert len(images) == 3, "vLLM's, its base, and the gateway's"
    before = ids(*images)
    docker("image", "rm", *images)
    installed = there("bundle", "install", str(tmp_path / "out"))
    assert installed.returncode == 0, installed.stdout + installed.stderr
    assert ids(*images) == before
    try:
        up = there("up", "--profile", "test-files", "--unpinned")
        assert up.returncode == 0, up.stdout + up.stderr
        assert "Paris" in up.stdout
    finally:
        there("down", "--profile", "test-files")
        for volume in cleaning.docker_volumes() or ():
            if volume.project == PROJECT:
                docker("volume", "rm", volume.name)


def ids(*images: str) -> list[str]:
    return docker("image", "inspect", "--format", "{{.Id}}", *images).stdout.split()


@pytest.fixture
def volumes(engine: Docker) -> Iterator[tuple[str, ...]]:
    names = (f"{PROJECT}-cache-000000000000", f"{PROJECT}-cache-111111111111", "test-files-cache-222222222222")
    for name in names:
        project = f"--label=com.docker.compose.project={name.rpartition('-cache-')[0]}"
        docker("volume", "create", project, "--label=com.docker.compose.volume=cache", name)
    yield names
    for name in names:
        subprocess.run(["docker", "volume", "rm", "--force", name], capture_output=True, check=True)


def test_caches_of_former_images_go_and_no_other_volume(
    volumes: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    former, present, not_ours = volumes
    monkeypatch.setenv("GRAFT_STATE", str(tmp_path))
    (tmp_path / "test-files").mkdir()
    (tmp_path / "test-files" / "compose.yaml").write_text(f"volumes: {{cache: {{name: {present}}}}}\n")
    found = cleaning.find((), cleaning.docker_volumes() or ())
    verdicts = {one.name: one.verdict for one in found}
    assert (verdicts[former], verdicts[present], not_ours in verdicts) == ("safe", "by-name", False)
    for one in cleaning.chosen(found, ()):
        cleaning.remove(one)
    left = docker("volume", "ls", "--quiet").stdout.split()
    assert (former in left, present in left, not_ours in left) == (False, True, True)
    (named,) = cleaning.chosen(found, (present,))
    docker("volume", "rm", present)
    with pytest.raises(Refused, match="Docker does not remove it"):
        cleaning.remove(named)
