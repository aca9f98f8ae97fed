"""What Graft has left on this machine, how large it is, and what of it can go; never another program's."""

import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from launcher import durable
from launcher.errors import Refused, UsageError
from launcher.plan import Plan
from launcher.prepare import models_dir
from launcher.profile import load_profile, model_files, profile_files
from launcher.state import cache_root, state_root
from launcher.weights.events import RECORD

VOLUME = re.compile(r"^(graft-[a-z0-9_-]+)-cache-[0-9a-f]{12}$")
HALF_DOWNLOAD = re.compile(r"^\.(.+)\.partial$")
DOCKER_TIMEOUT_S = 120
"""Docker measures every volume before it answers."""
HOST_CACHES = ("vllm", "inductor", "huggingface")
"""Folders of the cache that servers on this machine write, without a container."""

Verdict = Literal["safe", "by-name", "in-use"]
Kind = Literal["compile cache", "failed log", "half download", "model"]


@dataclass(frozen=True)
class Volume:
    """A Docker volume with a compile cache, as Docker describes it."""

    name: str
    project: str
    size_bytes: int
    container_count: int


@dataclass(frozen=True)
class Leftover:
    """One thing that can be removed, or says why not."""

    name: str
    """What to type to remove it."""
    kind: Kind
    size_bytes: int
    verdict: Verdict
    why: str
    path: Path | None = None
    """None for a Docker volume, whose name is `name`."""


def find(running: Sequence[Plan], volumes: Sequence[Volume], user: Path | None = None) -> tuple[Leftover, ...]:
    """Return everything that could go, the largest of each kind first.

    Args:
        running: plans of the services that run.
        volumes: of `docker_volumes`.
        user: folder of the user's own profiles.
    """
    found = (*_caches(running, volumes), *_half_downloads(), *_logs(), *_models(running, user))
    return tuple(sorted(found, key=lambda one: (one.kind, -one.size_bytes, one.name)))


def chosen(found: Sequence[Leftover], names: Sequence[str]) -> tuple[Leftover, ...]:
    """Return the named ones; without a name all that are safe.

    Raises:
        UsageError: there is no such thing here.
        Refused: one of them is in use.
    """
    if not names:
        return tuple(one for one in found if one.verdict == "safe")
    known = {one.name: one for one in found}
    for name in names:
        if name not in known:
            raise UsageError(f"{name}: nothing of Graft with this name; `graft clean` lists what there is")
        if known[name].verdict == "in-use":
            raise Refused(f"{name}: {known[name].why}")
    return tuple(known[name] for name in dict.fromkeys(names))


def remove(one: Leftover) -> None:
    """Remove one of them.

    Raises:
        Refused: it came into use in the meantime, or the system does not allow it.
    """
    try:
        if one.path is None:
            _remove_volume(one.name)
        elif one.path.is_dir():
            with durable.held(one.path, "in use by another process"):
                shutil.rmtree(one.path)
        else:
            one.path.unlink()
    except OSError as error:
        raise Refused(f"{one.name}: cannot be removed: {error.strerror or error}") from error


def docker_volumes() -> tuple[Volume, ...] | None:
    """Return the compile caches among Docker's volumes: by name and label; None where no Docker answers."""
    import docker
    import requests

    from launcher.host.docker import connect, endpoint_in_use, read

    if read().docker.error is not None:
        return None
    try:
        with connect(endpoint_in_use(), DOCKER_TIMEOUT_S) as client:
            answer = client.df()["Volumes"] or ()
    except (docker.errors.DockerException, requests.RequestException, OSError):
        return None
    volumes = []
    for volume in answer:
        labels, usage = volume.get("Labels") or {}, volume.get("UsageData") or {}
        match = VOLUME.match(volume["Name"])
        is_ours = labels.get("com.docker.compose.volume") == "cache" and match is not None
        if is_ours and labels.get("com.docker.compose.project", "").startswith("graft-"):
            size_bytes, count = int(usage.get("Size", 0)), int(usage.get("RefCount", 0))
            # Docker says -1 where it does not know: then a container may use it.
            volumes.append(Volume(volume["Name"], match[1] if match else "", max(size_bytes, 0), abs(count)))
    return tuple(volumes)


def _remove_volume(name: str) -> None:
    from launcher.runtime import compose

    finished = compose.run(("docker", "volume", "rm", name))
    if finished.exit_code != 0:
        raise Refused(f"{name}: Docker does not remove it: {' '.join(finished.lines)}")


def _caches(running: Sequence[Plan], volumes: Sequence[Volume]) -> Iterator[Leftover]:
    rendered = {path: path.read_text(encoding="utf-8", errors="replace") for path in state_root().rglob("compose.yaml")}
    known_projects = {f"graft-{path.relative_to(state_root()).parts[0].replace('.', '-')}" for path in rendered}
    for volume in volumes:
        verdict: Verdict = "by-name"
        why = f"of {volume.project}, which is not started from this state folder"
        if volume.container_count:
            verdict, why = "in-use", "a container has it mounted"
        elif any(volume.name in text for text in rendered.values()):
            why = "of a service's image and fixes as they are: its next start would compile again"
        elif volume.project in known_projects:
            verdict, why = "safe", "of an image, a GPU or fixes that are no longer used"
        yield Leftover(volume.name, "compile cache", volume.size_bytes, verdict, why)
    is_running = any(plan.runtime == "host" for plan in running)
    for name in HOST_CACHES:
        path = cache_root() / name
        if path.is_dir() and not path.is_symlink():
            why = "a server uses it" if is_running else "of servers without a container: the next start compiles again"
            yield _at(path, f"cache/{name}", "compile cache", "in-use" if is_running else "by-name", why)


def _half_downloads() -> Iterator[Leftover]:
    is_ours = models_dir().is_relative_to(state_root())
    for path in _entries(models_dir()):
        match = HALF_DOWNLOAD.match(path.name)
        if match is None or not path.is_dir():
            continue
        verdict: Verdict = "safe" if is_ours else "by-name"
        why = "its next fetch begins anew" if is_ours else "in $GRAFT_MODELS, where other programs may write too"
        try:
            with durable.held(path, "busy"):
                pass
        except Refused:
            verdict, why = "in-use", "a fetch is under way"
        yield _at(path, f"models/{path.name}", "half download", verdict, why)


def _logs() -> Iterator[Leftover]:
    for service in _entries(state_root()):
        logs = sorted((service / "logs").glob("*failed-*.log"), key=lambda path: path.stat().st_mtime)
        for path in logs:
            is_last = path == logs[-1]
            why = "of the last failed start" if is_last else "of an earlier failed start"
            name = path.relative_to(state_root()).as_posix()
            yield _at(path, name, "failed log", "by-name" if is_last else "safe", why)


def _models(running: Sequence[Plan], user: Path | None) -> Iterator[Leftover]:
    profiles = [load_profile(name, user) for name in profile_files(user)]
    known = model_files(user)
    for path in _entries(models_dir()):
        if path.name.startswith(".") or not (path.name in known or (path / RECORD).is_file()):
            continue
        users = [profile.name for profile in profiles if profile.model == path.name]
        why = f"the model of {', '.join(users)}" if users else "no profile uses it"
        served = [plan.profile for plan in running if plan.model == path.name]
        verdict: Verdict = "in-use" if served else "by-name"
        yield _at(path, f"models/{path.name}", "model", verdict, f"{', '.join(served)} serves it" if served else why)


def _entries(folder: Path) -> list[Path]:
    """Return the folders in a folder; links lead to what is not Graft's."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if path.is_dir() and not path.is_symlink())


def _at(path: Path, name: str, kind: Kind, verdict: Verdict, why: str) -> Leftover:
    return Leftover(name, kind, _size_bytes(path), verdict, why, path)


def _size_bytes(path: Path) -> int:
    """Return what a file or a folder takes on the disk."""
    files = path.rglob("*") if path.is_dir() else (path,)
    return sum(file.lstat().st_blocks * 512 for file in files)
