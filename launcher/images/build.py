"""The image of a service: the pinned base, the vllm-graft wheel, and a proof of every fix. Built once per input."""

import hashlib
import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flit_core.wheel import WheelBuilder

from launcher import render
from launcher.errors import StartFailed
from launcher.host.docker import connect, endpoint_in_use
from launcher.images import operate
from launcher.plan import Image
from launcher.runtime import compose
from launcher.state import CHECKOUT

PATCHES = CHECKOUT / "patches"
REPOSITORY = "graft-vllm"
PULL_TIMEOUT_S = 600
"""Longest silence of the engine while it pulls: it sends progress all the time, except while it unpacks a layer."""
API_TIMEOUT_S = 10
_ZIP_EPOCH = (1980, 1, 1, 0, 0, 0)


@dataclass(frozen=True)
class Wheel:
    """The vllm-graft wheel; the same sources give the same bytes."""

    name: str
    content: bytes

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()


def build_wheel(source: Path = PATCHES) -> Wheel:
    """Build the wheel of a flit project in memory (some 30 ms), without pip and without network."""
    buffer = io.BytesIO()
    builder = WheelBuilder.from_ini_path(source / "pyproject.toml", buffer)
    builder.source_time_stamp = _ZIP_EPOCH
    builder.build()
    return Wheel(name=builder.wheel_filename, content=buffer.getvalue())


@dataclass(frozen=True)
class PullProgress:
    """Bytes of all layers whose size the registry has told so far."""

    done_bytes: int
    total_bytes: int


def tag(image: Image, wheel: Wheel) -> str:
    """Return the image's name: equal inputs, equal tag."""
    programs = hashlib.sha256(operate.operate_zip()).hexdigest()
    inputs = "\n".join((render.dockerfile(image, wheel.name), render.manifest_script(), wheel.sha256, programs))
    return f"{REPOSITORY}:{image.vllm}-{hashlib.sha256(inputs.encode()).hexdigest()[:12]}"


def build_context(image: Image) -> dict[str, bytes]:
    """Return what an image is built from, by name."""
    wheel = build_wheel()
    return {
        "Dockerfile": render.dockerfile(image, wheel.name).encode(),
        "manifest.py": render.manifest_script().encode(),
        operate.NAME: operate.operate_zip(),
        wheel.name: wheel.content,
    }


def is_there(reference: str) -> bool:
    """Return whether Docker has the image."""
    return compose.run(compose.image_inspect(reference)).exit_code == 0


def is_current(reference: str, base: str) -> bool:
    """Return whether Docker has the image, and it needs no look at the base.

    A digest names one image for ever; a tag without one can have been given to another since: while that is here the
    builder compares, which takes a second or two.
    """
    return is_there(reference) and ("@" in base or not is_there(base))


def ensure(file: Path, reference: str, on_line: Callable[[str], None] | None = None) -> bool:
    """Build the image of a rendered compose file unless Docker has it; return whether it was built.

    Raises:
        DockerFailed: the build failed; its lines say why, a fix that cannot be applied among them.
    """
    if is_there(reference):
        return False
    rebuild(file, on_line)
    return True


def rebuild(file: Path, on_line: Callable[[str], None] | None = None) -> None:
    """Build the image of a rendered compose file.

    Raises:
        DockerFailed: as for `ensure`.
    """
    compose.must(compose.build(file), on_line)


@dataclass(frozen=True)
class LocalImage:
    """An image that Docker has."""

    id: str
    digest: str | None
    """What a registry knows it by; None for one that came from none."""
    layers: tuple[str, ...] = ()
    """Digests of the unpacked layers, the lowest first."""


def local_image(reference: str) -> LocalImage | None:
    """Return the image of this name on this machine; None where Docker has none.

    Raises:
        StartFailed: Docker does not answer.
    """
    import docker
    import requests

    try:
        with connect(endpoint_in_use(), API_TIMEOUT_S) as client:
            image: dict[str, Any] = client.inspect_image(reference)  # type: ignore[no-untyped-call]
    except docker.errors.ImageNotFound:
        return None
    except (docker.errors.DockerException, requests.RequestException, OSError) as error:
        raise StartFailed(f"{reference}: Docker cannot be asked: {' '.join(str(error).split())}") from error
    layers = tuple(image.get("RootFS", {}).get("Layers") or ())
    return LocalImage(id=str(image["Id"]), digest=_digest(reference, image), layers=layers)


def pull(base: str, on_progress: Callable[[PullProgress], None] | None = None) -> str | None:
    """Pull the base image unless Docker has it, and return its digest; None for one that came from no registry.

    Raises:
        StartFailed: it cannot be pulled.
    """
    import docker
    import requests

    try:
        with connect(endpoint_in_use(), PULL_TIMEOUT_S) as client:
            try:
                image: dict[str, Any] = client.inspect_image(base)  # type: ignore[no-untyped-call]
            except docker.errors.ImageNotFound:
                _follow_pull(base, client.pull(base, stream=True, decode=True), on_progress)
                image = client.inspect_image(base)  # type: ignore[no-untyped-call]
            return _digest(base, image)
    except (docker.errors.DockerException, requests.RequestException, OSError) as error:
        raise StartFailed(f"{base}: cannot be pulled: {' '.join(str(error).split())}") from error


def kept_name(reference: str) -> str:
    """Return the name that an image which is run as it is has on this machine.

    Docker forgets the digest of an image that is saved and loaded, as bundles do: the name carries it.
    """
    repository, at, digest = reference.partition("@sha256:")
    return f"graft-{repository.rpartition('/')[2]}:{digest[:12]}" if at else reference


def keep(reference: str, on_progress: Callable[[PullProgress], None] | None = None) -> None:
    """Have an image under its `kept_name`, pulled unless it is there.

    Raises:
        StartFailed: it cannot be pulled.
    """
    name = kept_name(reference)
    if not is_there(name):
        pull(reference, on_progress)
    if not is_there(name):
        compose.must(("docker", "image", "tag", reference, name))


def _follow_pull(
    base: str, events: Iterator[dict[str, Any]], on_progress: Callable[[PullProgress], None] | None
) -> None:
    sizes: dict[str, tuple[int, int]] = {}
    for event in events:
        if "error" in event:
            raise StartFailed(f"{base}: cannot be pulled: {event['error']}")
        detail, layer = event.get("progressDetail") or {}, event.get("id", "")
        if event.get("status") == "Downloading" and detail.get("total"):
            sizes[layer] = (int(detail["current"]), int(detail["total"]))
        elif event.get("status") in ("Download complete", "Pull complete") and layer in sizes:
            sizes[layer] = (sizes[layer][1], sizes[layer][1])
        if on_progress is not None and sizes:
            on_progress(PullProgress(*(sum(part) for part in zip(*sizes.values(), strict=True))))


def _digest(base: str, image: dict[str, Any]) -> str | None:
    repository = base.partition("@")[0] if "@" in base else base.rpartition(":")[0]
    for known in image.get("RepoDigests") or ():
        name, _, digest = known.partition("@")
        if name == repository.removeprefix("docker.io/"):
            return str(digest)
    return None
