"""What happened to a service, one JSON object a line, in a file and in the log."""

import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

FILE_NAME = "events.jsonl"
OLD_NAME = "events.1.jsonl"
MAX_BYTES = 1 << 20
"""A file that has grown to it becomes the old one, whose place it takes: two of them at most."""
PREFIX = "graft-event "
Kind = Literal[
    "engine-started",
    "engine-serving",
    "engine-ended",
    "engine-stalled",
    "engine-restarting",
    "service-degraded",
    "service-stopped",
    "log-not-written",
    "watchdog-started",
    "probe-refused",
    "webhook-failed",
]
TOLD: frozenset[Kind] = frozenset(
    {"engine-ended", "engine-stalled", "engine-serving", "service-degraded", "service-stopped"}
)
"""Kinds that a webhook is told of; the others are for who reads the file."""


class Event(BaseModel):
    """One thing that happened."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    at: str
    """UTC, ISO 8601."""
    at_s: float
    kind: Kind
    service: str
    message: str
    cause: str | None = None
    remedy: str | None = None
    took_s: float | None = None
    """Seconds from the engine's end to its serving again."""


def event(kind: Kind, service: str, message: str, **more: object) -> Event:
    """Return an event of this moment."""
    now_s = time.time()
    at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now_s))
    return Event.model_validate(
        {"at": at, "at_s": round(now_s, 3), "kind": kind, "service": service, "message": message, **more}
    )


def line_of(one: Event) -> str:
    """Return an event as its line."""
    return json.dumps(one.model_dump(exclude_none=True), ensure_ascii=False)


class EventLog:
    """Appends events; a disk that takes no more loses the file's line and never stops the writer."""

    def __init__(self, folder: Path, out: int = 1) -> None:
        """Args: out: file descriptor of the log."""
        self.path = folder / FILE_NAME
        self._out = out

    def write(self, one: Event) -> None:
        line = line_of(one)
        # Each may lie on a disk that is full, and then the other has it.
        with suppress(OSError):
            os.write(self._out, f"{PREFIX}{line}\n".encode())
        with suppress(OSError):
            self._append(f"{line}\n".encode())

    def _append(self, line: bytes) -> None:
        if self.path.is_file() and self.path.stat().st_size > MAX_BYTES:
            self.path.replace(self.path.with_name(OLD_NAME))
        # One write of one line: those of two processes do not mix.
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(descriptor, line)
        finally:
            os.close(descriptor)


class Follower:
    """Reads the events that were written since it was made."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE_NAME
        found = self._stat()
        self._inode, self._offset = (found.st_ino, found.st_size) if found else (0, 0)

    def new(self) -> tuple[Event, ...]:
        """Return the events written since the last call; a line that is no event is left out."""
        found = self._stat()
        if found is None:
            return ()
        lines: list[bytes] = []
        if found.st_ino != self._inode:
            lines += self._rest_of_old()
            self._inode, self._offset = found.st_ino, 0
        if found.st_size > self._offset:
            text = _read_from(self._path, self._offset)
            whole = text.rfind(b"\n") + 1
            self._offset += whole
            lines += text[:whole].splitlines()
        return tuple(one for line in lines if (one := parsed(line)) is not None)

    def _rest_of_old(self) -> list[bytes]:
        """Return what was written to the file before it became the old one."""
        old = self._path.with_name(OLD_NAME)
        try:
            is_the_one = old.stat().st_ino == self._inode
        except OSError:
            return []
        return _read_from(old, self._offset).splitlines() if is_the_one else []

    def _stat(self) -> os.stat_result | None:
        try:
            return self._path.stat()
        except OSError:
            return None


def _read_from(path: Path, offset: int) -> bytes:
    with path.open("rb") as file:
        file.seek(offset)
        return file.read()


def parsed(line: bytes) -> Event | None:
    """Return the event of a line; None where it is none."""
    try:
        return Event.model_validate_json(line)
    except ValueError:
        return None
