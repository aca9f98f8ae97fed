"""What a service is doing, in one small JSON file that its keeper and its watchdog write and everyone may read."""

import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

FILE_NAME = "service.json"
Phase = Literal["loading", "serving", "restarting", "stopped"]
"""loading: the first start. serving: answers. restarting: ended, or about to be ended, and comes back. stopped: ended,
and nobody starts it again."""
Mode = Literal["normal", "degraded"]


class ServiceStatus(BaseModel):
    """What a service is doing, and why; times are seconds since the epoch."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    phase: Phase = "loading"
    mode: Mode = "normal"
    reason: str = ""
    """Why it is not simply serving, one sentence for people; empty when it is."""
    cause: str | None = None
    """A key of `launcher.problems` where one was found."""
    remedy: str | None = None
    since_s: float = 0.0
    """When the phase began."""
    next_start_s: float | None = None
    """When the engine is started again; None unless that is settled."""
    engine_pid: int | None = None
    """The engine's process, which leads its process group; None while there is none."""
    ends_s: tuple[float, ...] = ()
    """When the engine ended without being asked to, as far back as the budget of restarts looks."""
    restarts: int = 0
    """How often the engine was started again since `graft up`."""
    memory_deaths: int = 0
    """How often it ended for lack of memory since `graft up`."""
    looked_s: float | None = None
    """When the watchdog looked last; None where none has."""
    progress_s: float | None = None
    """When the watchdog last saw the engine work, or have nothing to do."""
    requests_running: int = 0
    """At the watchdog's last look."""

    @property
    def is_degraded(self) -> bool:
        """The planned smaller settings are in force."""
        return self.mode == "degraded"

    def retry_after_s(self, now_s: float, start_takes_s: float = 60.0) -> int | None:
        """Return what a `Retry-After` header may promise, at least 1; None where nothing will change by itself."""
        if self.phase == "stopped":
            return None
        if self.phase == "serving":
            return 1
        begins_s = self.next_start_s if self.next_start_s is not None else self.since_s
        return max(1, round(begins_s + start_takes_s - now_s))


class StateFile:
    """The file of one service; writers are few and take turns, readers need no lock and never see half a file."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE_NAME

    def read(self) -> ServiceStatus:
        """Return what is written; the default where nothing is, or nothing that can be read."""
        try:
            return ServiceStatus.model_validate_json(self.path.read_bytes())
        except (OSError, ValueError):
            return ServiceStatus()

    def change(self, edit: Callable[[ServiceStatus], ServiceStatus]) -> ServiceStatus:
        """Write what `edit` makes of the present status, and return it.

        A disk that takes no more writes changes nothing: the old file stays, and the engine matters more.
        """
        with self._locked():
            before = self.read()
            after = edit(before)
            if after.phase != before.phase or after.since_s == 0.0:
                after = after.model_copy(update={"since_s": time.time()})
            self._write(after)
        return after

    def _write(self, status: ServiceStatus) -> None:
        partial = self.path.with_name(f".{FILE_NAME}.{os.getpid()}")
        try:
            # Indented: the entrypoint of a container, which is a shell script, may look for a line.
            partial.write_text(json.dumps(status.model_dump(), indent=2) + "\n", encoding="utf-8")
            partial.chmod(0o644)
            partial.replace(self.path)
        except OSError:
            partial.unlink(missing_ok=True)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        # The folder itself is the lock: it is there, takes no space, and anyone who may read it may lock it.
        try:
            descriptor = os.open(self.path.parent, os.O_RDONLY)
        except OSError:
            yield
            return
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)


class StatusReader:
    """The status for a busy reader: the file is read again only when it was replaced."""

    def __init__(self, folder: Path) -> None:
        self._file = StateFile(folder)
        self._seen: tuple[int, int] | None = None
        self._status = ServiceStatus()

    def read(self) -> ServiceStatus:
        """Return the present status; costs one `stat` while nothing changes."""
        try:
            found = self._file.path.stat()
        except OSError:
            self._seen, self._status = None, ServiceStatus()
            return self._status
        if (seen := (found.st_ino, found.st_mtime_ns)) != self._seen:
            self._seen, self._status = seen, self._file.read()
        return self._status
