"""A real Docker Engine, a stand-in for the vllm-openai image, a small real model, and services made of them."""

import hashlib
import io
import os
import shutil
import socket
import subprocess
import tarfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import httpx
import pytest

from launcher.gateway.install import install
from launcher.gateway.services import IMAGE as EDGE_IMAGE
from launcher.host import docker
from launcher.host.facts import Docker
from launcher.images import build
from launcher.images.pins import Pin, load_pins
from launcher.plan import Plan
from launcher.planner import Inputs, make
from launcher.prepare import models_dir
from launcher.profile import Gateway, load_model, load_profile
from launcher.runtime.compose import ComposeService
from launcher.service_files import service_files, store_secret, write
from launcher.state import ServiceState
from launcher.watching import folder
from launcher.weights.fetch import ensure_model
from tests.compose import standin

API_KEY = "a-key-that-must-not-leak"
NO_GATEWAY = Gateway(enabled=False)


def missing(what: str) -> NoReturn:
    """Skip for what this machine lacks; where CI runs it is there, so its absence is a failure."""
    if os.environ.get("CI"):
        pytest.fail(what)
    pytest.skip(what)


@pytest.fixture(scope="session")
def engine() -> Docker:
    facts = docker.read().docker
    if facts.error or facts.compose is None:
        missing(f"no Docker Engine with Compose: {facts.error or facts.compose_error}")
    return facts


@pytest.fixture(scope="session")
def base(engine: Docker) -> standin.Standin:
    lacking = standin.lacking()
    if lacking is not None:
        missing(lacking)
    standin.ensure_edge(load_pins(lock=Path("no-digests-recorded.json")).services[EDGE_IMAGE].base)
    return standin.ensure()


@pytest.fixture(scope="session")
def pin(base: standin.Standin) -> Pin:
    return Pin(vllm="0.32.0", role="current", base=base.reference, python=standin.PYTHON, torch="2.13.0")


@pytest.fixture(scope="session")
def model_dir() -> Path:
    if not standin.has_engine():
        missing(standin.NO_ENGINE)
    return ensure_model(load_model(load_profile("cpu").model), models_dir(), lambda event: None)


@dataclass(frozen=True)
class Deployed:
    """A service whose files are written, not yet started."""

    plan: Plan
    state: ServiceState
    image: str
    service: ComposeService


@dataclass(frozen=True)
class Deployer:
    """Writes the files of a service for the Docker Engine of this machine."""

    pin: Pin
    engine: Docker
    folder: Path

    def __call__(
        self, name: str, model_dir: Path, api_key: str | None = None, *, gateway: Gateway = NO_GATEWAY
    ) -> Deployed:
        profile = load_profile("cpu")
        serve = profile.serve.model_copy(update={"port": free_port()})
        profile = profile.model_copy(update={"name": f"test-{name}", "serve": serve, "gateway": gateway})
        inputs = Inputs(profile=profile, model=load_model(profile.model), pin=self.pin, runtime="docker")
        plan = make(inputs).plan
        state = ServiceState(self.folder / plan.profile)
        if api_key is not None:
            store_secret(state, "api_key", api_key)
        assert plan.image is not None
        if plan.gateway is not None:
            install(plan.gateway, state)
        folder.make(state)
        write(state.root, service_files(plan, state, model_dir, self.engine))
        image = build.tag(plan.image, build.build_wheel())
        return Deployed(plan, state, image, ComposeService(state.compose_file, plan))


@pytest.fixture(scope="module")
def deploy(pin: Pin, engine: Docker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployer]:
    deployer = Deployer(pin, engine, tmp_path_factory.mktemp("state"))
    yield deployer
    for file in deployer.folder.glob("*/compose.yaml"):
        # Not through the launcher: a test that failed may have left a server that does not end on request.
        argv = ["docker", "compose", "--file", str(file), "down", "--volumes", "--timeout", "1"]
        subprocess.run(argv, capture_output=True, check=True)
    shutil.rmtree(deployer.folder)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture(scope="session")
def registry_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder that the registry keeps its blobs in."""
    return tmp_path_factory.mktemp("registry")


@pytest.fixture(scope="session")
def registry(engine: Docker, registry_dir: Path) -> Iterator[str]:
    """Yield the address of an OCI registry on this machine."""
    program = shutil.which("docker-registry")
    if program is None:
        missing("no docker-registry on PATH")
    folder, address = registry_dir, f"127.0.0.1:{free_port()}"
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


def push_random(reference: str) -> None:
    """Push an image of 4 MiB that no other is like, and keep no copy of it in Docker."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        entry = tarfile.TarInfo("data")
        entry.size = 4 << 20
        tar.addfile(entry, io.BytesIO(os.urandom(entry.size)))
    subprocess.run(["docker", "import", "-", reference], input=archive.getvalue(), capture_output=True, check=True)
    subprocess.run(["docker", "push", reference], capture_output=True, check=True)
    subprocess.run(["docker", "image", "rm", reference], capture_output=True, check=True)


@pytest.fixture
def pushed(registry: str, request: pytest.FixtureRequest) -> Iterator[str]:
    """Yield the reference of an image that the registry has and Docker has not."""
    name = hashlib.sha256(request.node.nodeid.encode()).hexdigest()[:12]
    reference = f"{registry}/graft-test/base-{name}:v1"
    push_random(reference)
    yield reference
    subprocess.run(["docker", "image", "rm", "--force", reference], capture_output=True, check=True)
