"""The Hugging Face hub: what a repository holds, asked within a bound, and its download in a process of its own."""

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.errors import Refused, UsageError
from launcher.profile import ModelFile
from launcher.weights.events import FetchEvent, Progress

PROBE_TIMEOUT_S = 5.0
STALL_TIMEOUT_S = 180.0
"""The hub's client gives up a silent connection after 10 s and tries again; then nothing comes for longer."""
POLL_INTERVAL_S = 0.5
DEFAULT_ENDPOINT = "https://huggingface.co"
_SKIPPED_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".gguf", ".tflite", ".mlmodel")
"""Other forms of the same weights: vLLM reads the safetensors."""


@dataclass(frozen=True)
class Unreachable:
    """The hub gave no answer in time, or none that is a hub's."""

    endpoint: str
    reason: str


@dataclass(frozen=True)
class Listing:
    """A repository at one commit: the files that serving needs."""

    revision: str
    files: tuple[ModelFile, ...]

    @property
    def total_bytes(self) -> int:
        return sum(file.size_bytes or 0 for file in self.files)


def endpoint() -> str:
    """Return the hub's URL: `$HF_ENDPOINT`, else huggingface.co."""
    return os.environ.get("HF_ENDPOINT", "").rstrip("/") or DEFAULT_ENDPOINT


def look(repo: str, revision: str | None, token: str | None = None) -> Listing | Unreachable:
    """List a repository; an answer that takes longer than 5 s, name resolution included, counts as none.

    Raises:
        UsageError: the hub has no such repository or revision.
        Refused: it wants a token, or a licence to be accepted.
    """
    answers: list[Listing | Unreachable | UsageError | Refused] = []
    # A thread, since no client bounds the time that resolving a name takes.
    asking = threading.Thread(target=lambda: answers.append(_ask(repo, revision, token)), daemon=True, name="hub-probe")
    asking.start()
    asking.join(PROBE_TIMEOUT_S)
    answer = answers[0] if answers else Unreachable(endpoint(), f"no answer within {PROBE_TIMEOUT_S:g} s")
    if isinstance(answer, UsageError | Refused):
        raise answer
    return answer


def download(repo: str, listing: Listing, folder: Path, progress: Progress, token: str | None = None) -> None:
    """Download a listing's files; what an earlier call left in the folder is continued.

    Raises:
        Refused: it failed or stalled; what is there stays.
    """
    folder.mkdir(parents=True, exist_ok=True)
    request = {
        "repo_id": repo,
        "revision": listing.revision,
        "local_dir": str(folder),
        "endpoint": endpoint(),
        "allow_patterns": [file.path for file in listing.files],
    }
    environment = {**os.environ, "HF_HUB_DISABLE_PROGRESS_BARS": "1", **({"HF_TOKEN": token} if token else {})}
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors,
        subprocess.Popen(
            (sys.executable, str(Path(__file__).with_name("hub_download.py"))),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            text=True,
            env=environment,
        ) as process,
    ):
        try:
            assert process.stdin is not None
            process.stdin.write(json.dumps(request))
            process.stdin.close()
            _watch(process, folder, listing.total_bytes, progress, repo)
        except BaseException:
            process.kill()
            raise
        errors.seek(0)
        said = errors.read().strip()
    if process.returncode != 0:
        last = said.splitlines()[-1] if said else f"exit code {process.returncode}"
        raise Refused(f"{repo}: the download broke off: {last}; run the command again, it continues")


def _watch(process: "subprocess.Popen[str]", folder: Path, total_bytes: int, progress: Progress, repo: str) -> None:
    have_bytes, moved_s = -1, time.monotonic()
    while not _ends_within(process, POLL_INTERVAL_S):
        now_bytes = written_bytes(folder)
        if now_bytes != have_bytes:
            have_bytes, moved_s = now_bytes, time.monotonic()
            progress(FetchEvent(detail=repo, done_bytes=min(have_bytes, total_bytes), total_bytes=total_bytes))
        elif time.monotonic() - moved_s > STALL_TIMEOUT_S:
            raise Refused(
                f"{repo}: the download stalls: nothing for {STALL_TIMEOUT_S:.0f} s after {have_bytes / 1e9:.2f} GB; "
                "run the command again, it continues (HF_HUB_DISABLE_XET=1 avoids the hub's newer transfer)"
            )


def _ends_within(process: "subprocess.Popen[str]", timeout_s: float) -> bool:
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return False
    return True


def written_bytes(folder: Path) -> int:
    """Return the bytes on disk, those of unfinished files too; blocks, since an unfinished file may have holes."""
    total_bytes = 0
    for path in folder.rglob("*"):
        try:
            total_bytes += path.stat().st_blocks * 512 if path.is_file() else 0
        except FileNotFoundError:
            continue
    return total_bytes


def _ask(repo: str, revision: str | None, token: str | None) -> Listing | Unreachable | UsageError | Refused:
    from huggingface_hub import HfApi, errors

    hub = endpoint()
    try:
        info = HfApi(endpoint=hub, token=token).model_info(
            repo, revision=revision, timeout=PROBE_TIMEOUT_S, files_metadata=True
        )
    except errors.GatedRepoError:
        return Refused(f"{repo}: gated; accept its licence at {hub}/{repo} and set HF_TOKEN to a token of that account")
    except errors.RevisionNotFoundError:
        return UsageError(f"{repo}: {hub} has no revision {revision}; correct it in the model's YAML")
    except errors.RepositoryNotFoundError:
        return UsageError(f"{repo}: {hub} has no such repository, or it is private; check the name, or set HF_TOKEN")
    # HTTPError is the base of the hub's own errors and of its HTTP client's, which changed with the hub's releases.
    except (errors.OfflineModeIsEnabled, errors.HTTPError, OSError, ValueError) as error:  # type: ignore[attr-defined]
        return Unreachable(hub, " ".join(str(error).split())[:200] or type(error).__name__)
    files = tuple(_needed([_file(sibling) for sibling in info.siblings or ()]))
    if info.sha is None or not files:
        return UsageError(f"{repo}: no safetensors in it; vLLM is served from safetensors here")
    return Listing(info.sha, files)


def _file(sibling: Any) -> ModelFile:
    lfs: Mapping[str, Any] | None = sibling.lfs
    return ModelFile(path=sibling.rfilename, size_bytes=sibling.size or None, sha256=lfs["sha256"] if lfs else None)


def _needed(files: Sequence[ModelFile]) -> Iterator[ModelFile]:
    """Yield the files at the top, less other forms of the weights; nothing where there are no safetensors."""
    if not any(file.path.endswith(".safetensors") for file in files):
        return
    for file in files:
        if "/" not in file.path and not file.path.endswith(_SKIPPED_SUFFIXES):
            yield file
