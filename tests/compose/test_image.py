"""Base images from a real registry, and the builder that Docker Engine 20.10 brings along."""

import io
import os
import shutil
import subprocess
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from launcher.errors import StartFailed
from launcher.host.facts import Docker
from launcher.images import build
from launcher.images.build import PullProgress
from launcher.images.pins import load_pins, record_digest
from tests.compose.conftest import Deployer, free_port, missing

pytestmark = [pytest.mark.compose, pytest.mark.timeout(600)]

MIB = 1 << 20
MANIFEST_TYPE = "application/vnd.docker.distribution.manifest.v2+json"


@pytest.fixture(scope="module")
def registry(engine: Docker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yield the address of an OCI registry on this machine."""
    program = shutil.which("docker-registry")
    if program is None:
        missing("no docker-registry on PATH")
    folder, address = tmp_path_factory.mktemp("registry"), f"127.0.0.1:{free_port()}"
    configuration = folder / "config.yml"
    configuration.write_text(
        f"version: 0.1\nstorage: {{filesystem: {{rootdirectory: {folder}}}}}\nhttp: {{addr: '{address}'}}\n",
        encoding="utf-8",
    )
    argv = [program, "serve", str(configuration)]
    with subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            wait_for(f"http://{address}/v2/")
            yield address
        finally:
            server.terminate()


def wait_for(url: str) -> None:
    deadline_s = time.monotonic() + 20
    while True:
        try:
            if httpx.get(url, trust_env=False).status_code == httpx.codes.OK:
                return
        except httpx.ConnectError:
            assert time.monotonic() < deadline_s, f"{url} does not answer"
        time.sleep(0.1)


@pytest.fixture
def pushed(registry: str) -> Iterator[str]:
    """Yield the reference of an image that the registry has and Docker has not."""
    reference = f"{registry}/graft-test/base:v1"
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        entry = tarfile.TarInfo("data")
        entry.size = 4 * MIB
        tar.addfile(entry, io.BytesIO(os.urandom(entry.size)))
    subprocess.run(["docker", "import", "-", reference], input=archive.getvalue(), capture_output=True, check=True)
    subprocess.run(["docker", "push", reference], capture_output=True, check=True)
    subprocess.run(["docker", "image", "rm", reference], capture_output=True, check=True)
    yield reference
    subprocess.run(["docker", "image", "rm", "--force", reference], capture_output=True, check=True)


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
