"""What ran last and what ran before it: the locks of a service, and the rendered files that belong to them."""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from launcher import render
from launcher.errors import UsageError
from launcher.images import lock
from launcher.images.lock import Lock
from launcher.plan import Plan
from launcher.service_files import write
from launcher.state import ServiceState

RENDERED = (
    *("compose.yaml", "entrypoint.sh", "facts.json", "keep.json", "plan.json", "watch.json"),
    *("gateway/*", "image/*", "monitoring/**/*"),
)


@dataclass(frozen=True)
class Release:
    """A start that gave a right answer: its lock, and every file that it was made of."""

    lock: Lock
    files: Mapping[str, bytes]

    @property
    def plan(self) -> Plan:
        return Plan.model_validate_json(self.files["plan.json"])

    @property
    def image(self) -> str | None:
        """Tag of its image; None for the host runtime."""
        if "compose.yaml" not in self.files:
            return None
        return str(yaml.safe_load(self.files["compose.yaml"])["services"][render.SERVICE]["image"])


def previous_lock_file(state: ServiceState) -> Path:
    """Return where the lock of the start before lies."""
    return state.root / "lock.previous.json"


def locked_base(state: ServiceState) -> str | None:
    """Return the base image that a service's lock names; None without a lock or without an image."""
    found = lock.read(lock.lock_file(state))
    return None if found is None else found.base


def refuse_unlocked(state: ServiceState, now: Lock) -> None:
    """Stop a start that is not what the service's lock says.

    Raises:
        Refused: naming every difference.
        UsageError: there is no lock.
    """
    path = lock.lock_file(state)
    locked = lock.read(path)
    if locked is None:
        raise UsageError(f"{path}: no lock; `graft lock` writes one, or copy it from the machine that has it")
    lock.refuse_differences(locked, now, path)


def refuse_unlocked_running(state: ServiceState) -> None:
    """Say so where a running service is not what its lock says.

    Raises:
        Refused: naming every difference.
        UsageError: there is no lock, or what the service was made of is not recorded.
    """
    running = current(state)
    if running is None:
        raise UsageError(f"{state.root.name}: runs, and what it was made of is not recorded; start it anew")
    refuse_unlocked(state, running.lock)


def rendered_files(root: Path) -> dict[str, bytes]:
    """Return the files of a service's folder that its start is made of."""
    paths = (path for pattern in RENDERED for path in sorted(root.glob(pattern)) if path.is_file())
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in paths}


def keep(state: ServiceState, now: Lock) -> None:
    """Keep a start that gave a right answer; the one before stays as the previous one where it was another."""
    current, previous = _current(state), _previous(state)
    former = lock.read(current / "lock.json")
    if former is not None and former.id != now.id:
        shutil.rmtree(previous, ignore_errors=True)
        current.rename(previous)
        former.write(previous_lock_file(state))
    shutil.rmtree(current, ignore_errors=True)
    _store(current, Release(now, rendered_files(state.root)))
    now.write(lock.lock_file(state))


def current(state: ServiceState) -> Release | None:
    """Return what ran last."""
    return _load(_current(state))


def previous(state: ServiceState) -> Release | None:
    """Return what ran before that."""
    return _load(_previous(state))


def restore(state: ServiceState, files: Mapping[str, bytes]) -> None:
    """Put the files of a release into the service's folder."""
    write(state.root, files)


def swap(state: ServiceState) -> None:
    """Make the previous release the current one, and the other way round."""
    current, previous = _current(state), _previous(state)
    aside = current.with_name("aside")
    shutil.rmtree(aside, ignore_errors=True)
    current.rename(aside)
    previous.rename(current)
    aside.rename(previous)
    for folder, path in ((current, lock.lock_file(state)), (previous, previous_lock_file(state))):
        found = lock.read(folder / "lock.json")
        if found is not None:
            found.write(path)


def _current(state: ServiceState) -> Path:
    return state.root / "releases" / "current"


def _previous(state: ServiceState) -> Path:
    return state.root / "releases" / "previous"


def _store(folder: Path, release: Release) -> None:
    # The lock last: a folder without one is no release.
    write(folder, release.files)
    release.lock.write(folder / "lock.json")


def _load(folder: Path) -> Release | None:
    found = lock.read(folder / "lock.json")
    return None if found is None else Release(found, rendered_files(folder))
