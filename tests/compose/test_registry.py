"""Digests from a real registry: read, compared when the tag moves, and held to when bytes are tampered with."""

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.errors import StartFailed
from launcher.host.facts import Docker
from launcher.images import base, build
from launcher.images.pins import Pin, lock_file
from launcher.images.registry import NotInRegistry, RegistryError, resolve
from tests.compose.conftest import free_port, missing, push_random, wait_for

pytestmark = [pytest.mark.compose, pytest.mark.timeout(120)]


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAFT_STATE", str(tmp_path / "state"))


def docker(*arguments: str) -> str:
    done = subprocess.run(["docker", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def pin_of(reference: str, digest: str | None = None) -> Pin:
    return Pin(vllm="0.33.0", role="current", base=reference, digest=digest, python="3.12", torch="2.14.0")


def blob(registry_dir: Path, digest: str) -> Path:
    """Return the registry's file of a manifest or a layer."""
    hexadecimal = digest.removeprefix("sha256:")
    return registry_dir / "docker/registry/v2/blobs/sha256" / hexadecimal[:2] / hexadecimal / "data"


def test_the_digest_that_is_read_is_the_one_that_docker_pulls(pushed: str) -> None:
    digest = resolve(pushed)
    assert build.pull(pushed) == digest
    found = build.local_image(pushed)
    assert found is not None
    assert found.digest == digest


def test_a_tag_that_moves_is_reported_and_not_followed(pushed: str) -> None:
    pin = base.ensure_digest(pin_of(pushed), unpinned=False)
    assert json.loads(lock_file().read_text(encoding="utf-8")) == {pushed: pin.digest}
    assert base.check(pin).state == "same"

    push_random(pushed)
    moved = base.check(pin)
    assert moved.state == "moved"
    assert moved.tagged not in (None, pin.digest)
    assert base.ensure_digest(pin, unpinned=False) == pin
    assert build.pull(pin.reference) == pin.digest
    docker("image", "rm", pin.reference)


def test_an_image_that_is_not_there_is_known_from_one_that_cannot_be_asked_for(registry: str) -> None:
    with pytest.raises(NotInRegistry, match="answered 404: no such image"):
        resolve(f"{registry}/graft-test/none:v1")
    gone = base.check(pin_of(f"{registry}/graft-test/none:v1", f"sha256:{'a' * 64}"))
    assert gone.state == "gone"
    with pytest.raises(RegistryError, match="cannot be reached"):
        resolve(f"127.0.0.1:{free_port()}/graft-test/none:v1")


@pytest.mark.parametrize("what", ["manifest", "layer"])
def test_a_base_whose_bytes_are_not_those_of_its_digest_is_refused(what: str, pushed: str, registry_dir: Path) -> None:
    pin = pin_of(pushed, resolve(pushed))
    assert pin.digest is not None
    file = blob(registry_dir, pin.digest)
    if what == "layer":
        file = blob(registry_dir, json.loads(file.read_bytes())["layers"][0]["digest"])
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(StartFailed, match="cannot be pulled"):
        build.pull(pin.reference)
    assert not build.is_there(pin.reference)


def test_what_is_built_on_a_digest_is_pushed_and_pulled_by_its_own(pushed: str, tmp_path: Path) -> None:
    pin = base.ensure_digest(pin_of(pushed), unpinned=False)
    build.pull(pin.reference)
    (tmp_path / "Dockerfile").write_text(f"FROM {pin.reference}\nCOPY Dockerfile /added\n", encoding="utf-8")
    built = pushed.replace(":v1", "-built:v1")
    docker("build", "--tag", built, str(tmp_path))
    docker("push", built)
    first = build.local_image(built)
    assert first is not None
    docker("image", "rm", built)

    released = pin_of(built, resolve(built))
    assert build.pull(released.reference) == released.digest
    again = build.local_image(released.reference)
    assert again is not None
    assert (again.id, again.layers) == (first.id, first.layers)
    docker("image", "rm", "--force", released.reference, pin.reference)


@pytest.fixture
def closed_registry(engine: Docker, tmp_path: Path) -> Iterator[str]:
    """Yield the address of a registry that lets nobody in."""
    program = shutil.which("docker-registry")
    if program is None:
        missing("no docker-registry on PATH")
    address = f"127.0.0.1:{free_port()}"
    (tmp_path / "users").touch()
    configuration = tmp_path / "config.yml"
    configuration.write_text(
        f"version: 0.1\nstorage: {{filesystem: {{rootdirectory: {tmp_path}}}}}\nhttp: {{addr: '{address}'}}\n"
        f"auth: {{htpasswd: {{realm: closed, path: {tmp_path / 'users'}}}}}\n",
        encoding="utf-8",
    )
    argv = [program, "serve", str(configuration)]
    with subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            wait_for(f"http://{address}/")
            yield address
        finally:
            server.terminate()


def test_a_registry_that_wants_a_login_says_how_to_bring_the_image(closed_registry: str) -> None:
    with pytest.raises(RegistryError, match=r"answered 401: it wants a login, .*`docker login` and `docker pull"):
        resolve(f"{closed_registry}/graft-test/base:v1")
