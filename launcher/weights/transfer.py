"""Download a listing's files in a watched process of its own, again where it broke off, and from that byte."""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from launcher.errors import GraftError, Refused
from launcher.weights.events import FetchEvent, FileProgress, Progress
from launcher.weights.hub import Hub, Listing, token_remedy

STALL_TIMEOUT_S = 90.0
"""The hub's client notices a silent connection after 10 s and connects again; then nothing comes for longer."""
RETRY_WAITS_S = (2.0, 10.0, 30.0)
"""Waits before the attempts that follow a failed one; an attempt that brought bytes begins the row anew."""
POLL_INTERVAL_S = 0.5
PARTS = ".parts"
"""Folder of unfinished files: each grows from its first byte, so its size is how far it is."""

Kind = Literal["denied", "missing", "disk", "crashed", "transient"]


@dataclass(frozen=True)
class _Failure:
    """Why an attempt ended early."""

    kind: Kind
    text: str


def download(hub: Hub, repo: str, listing: Listing, folder: Path, progress: Progress) -> None:
    """Download a listing's files; what an earlier call left in the folder is continued.

    Raises:
        Refused: it cannot go on; what is there stays.
    """
    (folder / PARTS).mkdir(parents=True, exist_ok=True)
    waits_s = list(RETRY_WAITS_S)
    while True:
        before_bytes = have_bytes(folder, listing)
        failure = _attempt(hub, repo, listing, folder, progress)
        if failure is None:
            (folder / PARTS).rmdir()
            return
        if have_bytes(folder, listing) > before_bytes:
            waits_s = list(RETRY_WAITS_S)
        if failure.kind != "transient" or not waits_s:
            raise _refusal(failure, hub, repo, folder)
        wait_s = waits_s.pop(0)
        progress(FetchEvent(note=f"{failure.text}: trying again in {wait_s:g} s, from where it broke off"))
        time.sleep(wait_s)


def have_bytes(folder: Path, listing: Listing) -> int:
    """Return how many bytes of a listing's files are there, those of unfinished files too."""
    return sum(file.done_bytes for file in _files(folder, listing))


def _attempt(hub: Hub, repo: str, listing: Listing, folder: Path, progress: Progress) -> _Failure | None:
    request = {
        "repo": repo,
        "revision": listing.revision,
        "endpoint": hub.endpoint,
        "token": hub.token,
        "folder": str(folder),
        "parts": str(folder / PARTS),
        "files": [file.model_dump() for file in listing.files if not (folder / file.path).is_file()],
    }
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as said,
        subprocess.Popen(
            # -P: modules beside the script must not stand in for the standard library's.
            (sys.executable, "-P", str(Path(__file__).with_name("hub_download.py"))),
            stdin=subprocess.PIPE,
            stdout=said,
            stderr=subprocess.STDOUT,
            text=True,
        ) as process,
    ):
        try:
            assert process.stdin is not None
            # On stdin, and so in no list of processes: the token is in it.
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            stalled = _watch(process, folder, listing, progress)
        except BaseException:
            process.kill()
            raise
        if stalled is not None:
            return stalled
        said.seek(0)
        lines = said.read().strip().splitlines()
    return None if process.returncode == 0 else _failure_in(lines, process.returncode)


def _watch(process: "subprocess.Popen[str]", folder: Path, listing: Listing, progress: Progress) -> _Failure | None:
    known_bytes, moved_s = -1, time.monotonic()
    while not _ends_within(process, POLL_INTERVAL_S):
        files = _files(folder, listing)
        now_bytes = sum(file.done_bytes for file in files)
        if now_bytes != known_bytes:
            known_bytes, moved_s = now_bytes, time.monotonic()
            under_way = tuple(file for file in files if (folder / PARTS / file.path).exists())
            progress(FetchEvent("", now_bytes, listing.total_bytes, files=under_way))
        elif time.monotonic() - moved_s > STALL_TIMEOUT_S:
            process.kill()
            process.wait()
            return _Failure("transient", f"nothing came for {STALL_TIMEOUT_S:g} s after {known_bytes / 1e9:.2f} GB")
    return None


def _ends_within(process: "subprocess.Popen[str]", timeout_s: float) -> bool:
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return False
    return True


def _files(folder: Path, listing: Listing) -> list[FileProgress]:
    return [FileProgress(file.path, _size(folder, file.path), file.size_bytes) for file in listing.files]


def _size(folder: Path, name: str) -> int:
    # Finished files first: one that is renamed between the two looks is then counted, not missed.
    for path in (folder / name, folder / PARTS / name, folder / name):
        try:
            return path.stat().st_size
        except FileNotFoundError:
            continue
    return 0


def _failure_in(lines: Sequence[str], exit_code: int) -> _Failure:
    last = lines[-1] if lines else ""
    try:
        return _Failure(**json.loads(last))
    except (ValueError, TypeError):
        # Ended by a signal, such as that of a machine without memory, it may do better the next time.
        kind: Kind = "transient" if exit_code < 0 else "crashed"
        return _Failure(kind, last or f"the download's process ended with exit code {exit_code}")


def _refusal(failure: _Failure, hub: Hub, repo: str, folder: Path) -> GraftError:
    remedies = {
        "denied": token_remedy(f"{hub.endpoint}/{repo}"),
        "missing": "its listing has it: run the command again later, or fetch from another source with --from",
        "disk": f"free some space on the disk of {folder.parent} and run the command again, it continues",
        "crashed": "the launcher's environment is not whole: delete .venv and run make again",
        "transient": "run the command again, it continues",
    }
    return Refused(f"{repo}: the download broke off: {failure.text}; {remedies[failure.kind]}")
