"""Take a checkpoint from a folder, such as a USB disk: found, copied with a hash, read back."""

import hashlib
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

from launcher.errors import Refused, UsageError
from launcher.profile import Model, ModelFile
from launcher.weights import verify
from launcher.weights.events import RECORD, FetchEvent, Origin, Progress
from launcher.weights.hub import is_needed

_CHUNK_BYTES = 1 << 22
_COMMIT = re.compile(r"^[0-9a-f]{40}$")


def find(folder: Path, model: Model) -> Path:
    """Return the folder of the model's files: this one, or one in it that is named after the model or the repository.

    A cache of the Hugging Face libraries will do, too: the snapshot of the pinned revision is taken, else the newest.

    Raises:
        UsageError: there is none.
    """
    if not folder.is_dir():
        raise UsageError(f"{folder}: no such folder; give --from a folder, or the URL of a mirror of the hub")
    cached = folder / f"models--{model.repo.replace('/', '--')}" / "snapshots"
    candidates = (
        folder,
        folder / model.name,
        folder / model.repo,
        folder / model.repo.rpartition("/")[2],
        *([cached / model.revision] if model.revision else sorted(cached.glob("*"), key=_age_s)),
    )
    for candidate in candidates:
        if (candidate / "config.json").is_file():
            return candidate
    looked = ", ".join(str(candidate / "config.json") for candidate in candidates)
    raise UsageError(f"{folder}: no files of {model.name} in it; looked for {looked}")


def recorded(source: Path, model: Model) -> Origin:
    """Return what a source says about itself: its record, or the commit that a cache names its snapshots by."""
    is_cached = source.parent.name == "snapshots" and _COMMIT.match(source.name)
    return Origin.read(source) or Origin(repo=model.repo, revision=source.name if is_cached else None, files=())


def listed(source: Path) -> tuple[ModelFile, ...]:
    """Return the files to take, with their sizes, and their hashes where the source has a record of them."""
    origin = Origin.read(source)
    hashes = {file.path: file.sha256 for file in origin.files} if origin else {}
    return tuple(
        ModelFile(path=path.name, size_bytes=path.stat().st_size or None, sha256=hashes.get(path.name))
        for path in sorted(source.iterdir())
        if path.is_file() and is_needed(path.name) and path.name != RECORD
    )


def refuse_another(source: Path, model: Model) -> None:
    """Refuse a folder that says that it is another model or revision.

    Raises:
        Refused: naming both.
    """
    origin = recorded(source, model)
    if origin.repo != model.repo:
        raise Refused(f"{source}: holds {origin.repo}; {model.name} is {model.repo}")
    if model.revision is not None and origin.revision not in (None, model.revision):
        raise Refused(f"{source}: revision {origin.revision}; {model.source or model.name} says {model.revision}")


def copy(source: Path, files: tuple[ModelFile, ...], target: Path, progress: Progress) -> tuple[ModelFile, ...]:
    """Copy what an earlier call did not, and return the files with the hashes of what was read from the source.

    Raises:
        Refused: a file cannot be read or written, or is not what the source's record says; what is copied stays.
    """
    target.mkdir(parents=True, exist_ok=True)
    total_bytes = sum(file.size_bytes or 0 for file in files)
    taken: list[ModelFile] = []
    for file in files:
        before_bytes = sum(one.size_bytes or 0 for one in taken)
        tell = partial(_tell, progress, file.path, before_bytes, total_bytes)
        try:
            found = _copied(source / file.path, target / file.path, tell)
        except OSError as error:
            raise Refused(
                f"{source / file.path}: cannot be copied to {target.parent}: {error.strerror}; "
                "run the command again, it goes on with this file"
            ) from error
        if file.sha256 is not None and found != file.sha256:
            (target / file.path).unlink()
            raise Refused(f"{source / file.path}: sha256 {found}, its record says {file.sha256}; copy it there again")
        taken.append(file.model_copy(update={"sha256": found}))
    return tuple(taken)


def _age_s(path: Path) -> float:
    return -path.stat().st_mtime


def _copied(source: Path, target: Path, tell: Callable[[int], None]) -> str:
    if target.is_file() and target.stat().st_size == source.stat().st_size:
        return verify.sha256(source, tell)
    unfinished = target.with_name(f".{target.name}.part")
    digest, done_bytes = hashlib.sha256(), 0
    with source.open("rb") as read, unfinished.open("wb") as written:
        while chunk := read.read(_CHUNK_BYTES):
            written.write(chunk)
            digest.update(chunk)
            done_bytes += len(chunk)
            tell(done_bytes)
    unfinished.replace(target)
    return digest.hexdigest()


def _tell(progress: Progress, name: str, before_bytes: int, total_bytes: int, done_bytes: int) -> None:
    progress(FetchEvent(f"copy {name}", before_bytes + done_bytes, total_bytes))
