"""The Docker Engine as its API reports it; Podman's Docker-compatible service answers the same questions."""

import os
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from launcher.host.facts import Docker
from launcher.host.system import free_gib

if TYPE_CHECKING:
    from docker import APIClient

DEFAULT_SOCKET = Path("/var/run/docker.sock")
TIMEOUT_S = 5
# Docker Engine 29 keeps images there, on machines that it was installed on first.
_CONTAINERD_ROOT = Path("/var/lib/containerd")
_SPEC_SUFFIXES = (".yaml", ".yml", ".json")


class Engine(Protocol):
    """The calls of the Docker SDK that are used here."""

    def version(self) -> dict[str, Any]: ...

    def info(self) -> dict[str, Any]: ...

    def containers(self) -> list[dict[str, Any]]: ...


@dataclass(frozen=True)
class Reading:
    """The engine's facts, and what helps to read other facts."""

    docker: Docker
    published: Mapping[int, str] = field(default_factory=dict)
    """Container names by the host TCP port that they publish."""
    is_local: bool = False
    """The engine's paths are paths of this machine."""


def read(socket: Path = DEFAULT_SOCKET) -> Reading:
    """Return what the engine says that the Docker CLI would use; none there is an answer (`Docker.error`).

    Args:
        socket: used where neither $DOCKER_HOST nor a Docker context names an engine.
    """
    endpoint = endpoint_in_use(socket)
    reason = _unusable(endpoint)
    if reason is not None:
        return Reading(Docker(error=reason))
    compose = _ask_compose()
    # Imported late: the SDK takes longer than everything else that a command without Docker does. Compose answers
    # in the meantime.
    import docker
    import requests

    try:
        with connect(endpoint, TIMEOUT_S) as client:
            reading = describe(client, is_unix_socket=endpoint.startswith("unix://"))
    except (docker.errors.DockerException, requests.RequestException, OSError) as error:
        reading = Reading(Docker(error=f"{endpoint}: {' '.join(str(error).split())}"))
    return replace(reading, docker=reading.docker.model_copy(update=_compose_answer(compose)))


def endpoint_in_use(socket: Path = DEFAULT_SOCKET) -> str:
    """Return the address of the engine that the Docker CLI would use, such as `unix:///var/run/docker.sock`."""
    return os.environ.get("DOCKER_HOST") or _context_host() or f"unix://{socket}"


def connect(endpoint: str, timeout_s: int) -> "APIClient":
    """Return a client of the engine at `endpoint`, speaking the engine's own API version.

    Raises:
        docker.errors.DockerException, requests.RequestException, OSError: none answered.
    """
    import docker

    return docker.APIClient(version="auto", timeout=timeout_s, **_connection(endpoint))


def describe(engine: Engine, is_unix_socket: bool) -> Reading:
    """Return the facts that an engine's own answers hold; the rest is read from this machine where it is local."""
    version, info = engine.version(), engine.info()
    # Docker Desktop's engine lives in a virtual machine: its paths are not ours.
    is_local = is_unix_socket and info.get("OperatingSystem") != "Docker Desktop"
    flavor = _flavor(version)
    spec_dirs = tuple(info.get("CDISpecDirs") or ()) or (("/etc/cdi", "/var/run/cdi") if flavor == "podman" else ())
    listed = tuple(sorted(item["ID"] for item in info.get("DiscoveredDevices") or () if item.get("Source") == "cdi"))
    images_dir = _images_dir(info)
    return Reading(
        Docker(
            flavor=flavor,
            engine=version.get("Version"),
            api=version.get("ApiVersion"),
            runtimes=tuple(sorted(info.get("Runtimes") or ())),
            nvidia_hook=shutil.which("nvidia-container-runtime-hook") is not None if is_local else None,
            cdi_spec_dirs=spec_dirs,
            cdi_devices=listed or (tuple(sorted(set(spec_devices(spec_dirs)))) if is_local else ()),
            root_dir=images_dir,
            root_free_gib=free_gib(Path(images_dir)) if is_local and images_dir else None,
        ),
        published=_published(engine.containers()),
        is_local=is_local,
    )


def spec_devices(spec_dirs: Iterable[str]) -> Iterator[str]:
    """Yield the names of the devices that CDI specifications define, such as `nvidia.com/gpu=0`."""
    for folder in map(Path, spec_dirs):
        for path in sorted(folder.glob("*")) if folder.is_dir() else ():
            if path.suffix in _SPEC_SUFFIXES:
                yield from _devices_in(path)


def _devices_in(path: Path) -> Iterator[str]:
    import yaml

    # Specifications run to thousands of lines; JSON is YAML too. The C loader is there in all usual builds.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        spec = yaml.load(path.read_text(encoding="utf-8"), Loader=loader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        # The engine ignores what it cannot read, too.
        return
    if isinstance(spec, dict):
        for device in spec.get("devices") or ():
            if isinstance(device, dict) and "name" in device:
                yield f"{spec.get('kind')}={device['name']}"


def _context_host() -> str | None:
    """Return the endpoint of the Docker context in use, such as that of a rootless engine or of Docker Desktop."""
    folder = Path(os.environ.get("DOCKER_CONFIG") or Path.home() / ".docker")
    if not os.environ.get("DOCKER_CONTEXT") and not (folder / "config.json").is_file():
        return None
    import docker

    try:
        context = docker.context.ContextAPI.get_current_context()
    except (docker.errors.DockerException, OSError, ValueError):
        return None
    # Without a context of its own the SDK answers with its default, which may be none of the machine's sockets.
    return None if context is None or context.Name == "default" else str(context.Host)


def _unusable(endpoint: str) -> str | None:
    """Say why no engine can answer, where that can be told without asking it."""
    if endpoint.startswith("ssh://"):
        return f"{endpoint} is another machine; a local engine is needed (unset DOCKER_HOST, or docker context use)"
    if not endpoint.startswith("unix://"):
        return None
    socket = Path(endpoint.removeprefix("unix://"))
    if not socket.exists():
        return f"no Docker Engine runs here ({socket} does not exist)"
    if not os.access(socket, os.R_OK | os.W_OK):
        return f"permission denied on {socket}"
    return None


def _connection(endpoint: str) -> dict[str, Any]:
    from docker.utils import kwargs_from_env

    # $DOCKER_TLS_VERIFY and $DOCKER_CERT_PATH belong to $DOCKER_HOST.
    return dict(kwargs_from_env()) if os.environ.get("DOCKER_HOST") else {"base_url": endpoint}


def _flavor(version: Mapping[str, Any]) -> Literal["docker", "podman"]:
    names = (str(component.get("Name")) for component in version.get("Components") or ())
    return "podman" if any("podman" in name.lower() for name in names) else "docker"


def _images_dir(info: Mapping[str, Any]) -> str | None:
    status = dict(pair for pair in info.get("DriverStatus") or () if len(pair) == 2)
    uses_containerd = str(status.get("driver-type", "")).startswith("io.containerd.snapshotter")
    return str(_CONTAINERD_ROOT) if uses_containerd and _CONTAINERD_ROOT.is_dir() else info.get("DockerRootDir")


def _published(containers: Iterable[Mapping[str, Any]]) -> dict[int, str]:
    return {
        port["PublicPort"]: container["Names"][0].removeprefix("/")
        for container in containers
        for port in container.get("Ports") or ()
        if port.get("PublicPort") and port.get("Type") == "tcp" and container.get("Names")
    }


def _ask_compose() -> "subprocess.Popen[str] | None":
    """Start `docker compose version`; None where there is no docker command."""
    command = ["docker", "compose", "version", "--short"]
    try:
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    except FileNotFoundError:
        return None


def _compose_answer(process: "subprocess.Popen[str] | None") -> dict[str, str | None]:
    """Return the facts about Compose: its version, or why it does not run."""
    if process is None:
        return {"compose_error": "the docker command is not on PATH"}
    with process:
        try:
            stdout, stderr = process.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            return {"compose_error": f"`docker compose version` gave no answer in {TIMEOUT_S} s"}
    if process.returncode == 0:
        return {"compose": stdout.strip().removeprefix("v")}
    if "unknown" in stderr:
        return {"compose_error": "the Compose plugin of the docker command is not installed"}
    said = (stderr or stdout).strip().splitlines()
    return {"compose_error": f"`docker compose version`: {said[0] if said else f'exit code {process.returncode}'}"}
