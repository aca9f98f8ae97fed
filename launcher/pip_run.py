"""Run pip and turn what it prints into progress."""

import queue
import re
import subprocess
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal, Protocol

Stage = Literal["create", "download", "install", "patches", "verify"]
TICK_S = 0.5
_LAST_LINES = 8
_MAX_LINES = 20


@dataclass(frozen=True)
class InstallEvent:
    """How far an install is; `done` and `total` count packages, None where there is nothing to count."""

    stage: Stage
    done: int | None = None
    total: int | None = None
    done_bytes: int | None = None
    total_bytes: int | None = None
    detail: str = ""


class Listener(Protocol):
    """Takes pip's output as it comes."""

    def line(self, text: str) -> None:
        """Take one line."""

    def tick(self) -> None:
        """Called while pip says nothing."""


class Tracker:
    """Tells how far an install of pinned packages is."""

    _PROGRESS = re.compile(r"^Progress (\d+) of (\d+)")
    """pip's `--progress-bar raw`."""

    def __init__(
        self, progress: Callable[[InstallEvent], None], site_packages: Path, total: int, total_bytes: int
    ) -> None:
        self._progress = progress
        self._site_packages = site_packages
        self._total = total
        self._total_bytes = total_bytes
        self._done = 0
        self._done_bytes = 0
        self._name = ""
        self._is_installing = False

    def line(self, text: str) -> None:
        text = text.strip()
        if text.startswith("Collecting "):
            self._is_installing = False
            self._done += 1
            self._name = text.split()[1]
            self._tell_download(0)
        elif text.startswith("Requirement already satisfied"):
            self._done += 1
        elif match := self._PROGRESS.match(text):
            at_bytes, of_bytes = int(match[1]), int(match[2])
            self._tell_download(at_bytes)
            if at_bytes == of_bytes:
                self._done_bytes += of_bytes
        elif text.startswith("Installing collected packages"):
            self._is_installing = True
            self.tick()

    def tick(self) -> None:
        """While pip installs it says nothing: count what is there."""
        if self._is_installing:
            there = sum(1 for _ in self._site_packages.glob("*.dist-info/RECORD"))
            self._progress(InstallEvent("install", min(there, self._total), self._total))

    def _tell_download(self, at_bytes: int) -> None:
        done_bytes = min(self._done_bytes + at_bytes, self._total_bytes)
        done = min(self._done, self._total)
        self._progress(InstallEvent("download", done, self._total, done_bytes, self._total_bytes, self._name))


def run(argv: Sequence[str], listener: Listener | None = None) -> str | None:
    """Run pip; return None when it succeeded, else what it said from its first error on (else its last lines)."""
    lines: queue.Queue[str | None] = queue.Queue()
    said: list[str] = []
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace") as pip:
        assert pip.stdout is not None
        threading.Thread(target=_read, args=(pip.stdout, lines), daemon=True).start()
        try:
            while (line := _next(lines, listener)) is not None:
                if not line.startswith("Progress "):
                    said.append(line.rstrip())
                if listener is not None:
                    listener.line(line)
        except BaseException:
            # An interrupt: pip must not go on behind the user's back.
            pip.terminate()
            raise
    if pip.returncode == 0:
        return None
    first = next((at for at, line in enumerate(said) if line.startswith("ERROR:")), -_LAST_LINES)
    return "\n".join(said[first:][:_MAX_LINES])


def _next(lines: "queue.Queue[str | None]", listener: Listener | None) -> str | None:
    while True:
        try:
            return lines.get(timeout=TICK_S)
        except queue.Empty:
            if listener is not None:
                listener.tick()


def _read(stream: IO[str], lines: "queue.Queue[str | None]") -> None:
    for line in stream:
        lines.put(line)
    lines.put(None)
