"""Base images from a real registry, and the builder that Docker Engine 20.10 brings along."""

import os
import subprocess
from pathlib import Path

import httpx
import pytest

from launcher.errors import StartFailed
from launcher.images import build
from launcher.images.build import PullProgress
from launcher.images.pins import load_pins, record_digest
from tests.compose.conftest import Deployer

pytestmark = [pytest.mark.compose, pytest.mark.timeout(600)]

MIB = 1 << 20
MANIFEST_TYPE = "application/vnd.docker.distribution.manifest.v2+json"


def digest_in_registry(reference: str) -> str:
    host, _, name = reference.partition("/")
    repository, _, tag = name.rpartition(":")
    url = f"http://{host}/v2/{repository}/manifests/{tag}"
    return httpx.head(url, headers={"Accept": MANIFEST_TYPE}, trust_env=False).headers["Docker-Content-Digest"]


def test_a_base_is_pulled_with_its_progress_and_known_by_its_digest(pushed: str, tmp_path: Path) -> None:
    seen: list[PullProgress] = []
    assert not build.is_there(pushed)
    digest = build.pull(pushed, seen.append)
    assert build.is_there(pushed)
    assert digest == digest_in_registry(pushed)
    assert seen[-1].done_bytes == seen[-1].total_bytes >= 4 * MIB

    pins, lock = tmp_path / "pins.yaml", tmp_path / "lock.json"
    pins.write_text(f"0.33.0: {{role: current, base: '{pushed}', python: '3.12', torch: 2.14.0}}\n", encoding="utf-8")
    record_digest(pushed, digest, lock)
    reference = load_pins(pins, lock).current.reference
    assert reference == f"{pushed.rpartition(':')[0]}@{digest}"
    assert build.is_there(reference)
    assert build.pull(reference) == digest


def test_a_base_that_is_there_is_not_pulled_again(pushed: str) -> None:
    build.pull(pushed)
    seen: list[PullProgress] = []
    build.pull(pushed, seen.append)
    assert seen == []


def test_a_base_that_the_registry_does_not_have_is_named(registry: str) -> None:
    reference = f"{registry}/graft-test/base:no-such-tag"
    with pytest.raises(StartFailed, match=f"{reference}: cannot be pulled: .*(not found|unknown)"):
        build.pull(reference)


def test_an_image_that_came_from_no_registry_has_no_digest(deploy: Deployer) -> None:
    assert build.pull(deploy.pin.base) is None


def test_the_builder_of_docker_20_10_can_build_it_too(deploy: Deployer, tmp_path: Path) -> None:
    context = deploy("classic", tmp_path).state.root / "image"
    argv = ["docker", "build", "--tag", "graft-test:classic", str(context)]
    environment = {**os.environ, "DOCKER_BUILDKIT": "0"}
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert '"vllm-graft": ' in done.stdout
    subprocess.run(["docker", "image", "rm", "graft-test:classic"], capture_output=True, check=True)
