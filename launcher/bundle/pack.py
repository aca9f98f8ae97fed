"""Write a bundle: the launcher with its wheels, the model, the images or the engine's wheels, a sum of each file."""

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from launcher.bring import Reporter, bring_image, tell_fetch
from launcher.bundle import images, layout, wheels
from launcher.bundle.layout import Manifest
from launcher.bundle.sink import FolderSink, Sink, TarSink, Writer
from launcher.errors import Refused, UsageError
from launcher.gateway.services import IMAGE as EDGE_IMAGE
from launcher.images.base import ensure_digest
from launcher.images.build import build_wheel, kept_name, tag
from launcher.images.pins import load_pins
from launcher.prepare import Options, chosen_model, host_facts, models_dir, planned
from launcher.profile import Profile, user_folder
from launcher.service import render
from launcher.state import CHECKOUT, ServiceState
from launcher.weights.events import RECORD, Origin
from launcher.weights.fetch import ensure_model
from launcher.weights.hub import is_needed
from launcher.weights.hub_token import stored_token

WHEELS_BYTES = 40_000_000
"""Space for the launcher's wheels (24 MB for four Pythons)."""


@dataclass(frozen=True)
class Packed:
    """A bundle that was written."""

    path: Path
    size_bytes: int
    manifest: Manifest


def pack(
    out: Path, options: Options, profile: Profile, report: Reporter, *, with_engine: bool, unpinned: bool = False
) -> Packed:
    """Write a profile's service into a new folder, or a tar where `out` ends so.

    Args:
        with_engine: for the host runtime, the engine's wheels too.
        unpinned: a base image on this machine that came from no registry will do; it is then in the bundle as well.

    Raises:
        UsageError: `out` is there already, or a profile of the user's own takes a shipped one's name.
        Refused: too little disk, or something cannot be had.
    """
    if out.exists():
        raise UsageError(f"{out}: is there already; name another, or remove it first")
    model = chosen_model(options, profile)
    report.phase("model")
    token = stored_token(ServiceState.of(profile.name).secrets_dir)
    folder = ensure_model(model, models_dir(), lambda event: tell_fetch(event, report), token=token)
    built = _built(options, profile, report, unpinned) if (options.runtime or profile.runtime) == "docker" else ()
    is_host = not built
    with tempfile.TemporaryDirectory(prefix=".graft-bundle-", dir=_existing(out.parent)) as name:
        work = Path(name)
        _refuse_full_disk(work, folder, built, is_tar=out.suffix == ".tar")
        (work / layout.WHEELS).mkdir()
        _bring_wheels(work / layout.WHEELS, report, is_host=is_host, with_engine=with_engine)
        if built:
            report.phase("images")
            (work / layout.IMAGES).mkdir()
            images.save(built, work / layout.IMAGES / f"{profile.name}.tar")
        manifest = Manifest(
            launcher=version("graft-launcher"),
            profile=profile.name,
            model=model.name,
            runtime="host" if is_host else "docker",
            machine=layout.this_machine(),
            images=built,
            digests={pin.base: pin.digest for pin in load_pins().images if pin.digest is not None},
            engine_python=wheels.this_python() if is_host and with_engine else None,
        )
        report.phase("pack")
        size_bytes = _write(out, manifest, folder, work, options, report)
    return Packed(out, size_bytes, manifest)


def _built(options: Options, profile: Profile, report: Reporter, unpinned: bool) -> tuple[str, ...]:
    """Build the image of a profile where Docker lacks it; return it, and its base where only that name knows it."""
    base = ensure_digest(load_pins().of(profile.vllm), unpinned=unpinned)
    made = planned(options, profile, host_facts(profile))
    assert made.plan.image is not None
    edge: tuple[str, ...] = ()
    if made.plan.gateway is not None:
        edge = (kept_name(ensure_digest(load_pins().services[EDGE_IMAGE], unpinned=unpinned).reference),)
    report.phase("render")
    render(made)
    bring_image(made.plan, ServiceState.of(made.plan.profile), report)
    return (tag(made.plan.image, build_wheel()), *((base.base,) if base.digest is None else ()), *edge)


def _bring_wheels(folder: Path, report: Reporter, *, is_host: bool, with_engine: bool) -> None:
    report.phase("wheels")
    served = wheels.bring_launchers(folder, _Pip(report))
    lacking = [python for python in wheels.PYTHONS if python not in served]
    if lacking:
        report.note(f"No wheels of the launcher for Python {', '.join(lacking)}: the other machine needs another one.")
    if is_host and with_engine:
        wheels.bring_engines(folder, _Pip(report))
        report.note(f"The engine's wheels are for Python {wheels.this_python()}.")


class _Pip:
    """Passes on what pip downloads."""

    def __init__(self, report: Reporter) -> None:
        self._report = report

    def line(self, text: str) -> None:
        if text.startswith(("Collecting ", "Saved ")):
            self._report.line(text.strip())

    def tick(self) -> None:
        """pip says nothing: nothing to tell."""


def _write(out: Path, manifest: Manifest, model: Path, work: Path, options: Options, report: Reporter) -> int:
    files = [*_files(manifest, model, options)]
    brought = [path for part in (layout.WHEELS, layout.IMAGES) for path in sorted((work / part).glob("*"))]
    total_bytes = sum(path.stat().st_size for path in (*brought, *(path for _, path in files)))
    done_bytes = 0

    def told(more_bytes: int) -> None:
        nonlocal done_bytes
        done_bytes += more_bytes
        report.progress(min(done_bytes, total_bytes), total_bytes, "bytes")

    sink: Sink = TarSink(out) if out.suffix == ".tar" else FolderSink(out)
    writer = Writer(sink, told)
    try:
        for path in brought:
            writer.take(str(path.relative_to(work)), path)
        origin = Origin.read(model)
        hashes = {file.path: file.sha256 for file in origin.files} if origin else {}
        for name, path in files:
            digest = writer.file(name, path, 0o755 if path.stat().st_mode & 0o100 else 0o644)
            recorded = hashes.get(path.name) if path.parent == model else None
            if recorded is not None and recorded != digest:
                raise Refused(f"{path}: sha256 {digest}, its record says {recorded}; fetch the model again")
        writer.text(layout.MANIFEST, manifest.model_dump_json(indent=2) + "\n")
        writer.text(layout.INSTALLER, layout.INSTALL_SCRIPT, 0o755)
        writer.finish()
    except OSError as error:
        sink.abandon()
        raise Refused(f"{out}: cannot be written: {error.strerror or error}; nothing is left of it") from error
    except BaseException:
        sink.abandon()
        raise
    return total_bytes


def _files(manifest: Manifest, model: Path, options: Options) -> Iterator[tuple[str, Path]]:
    """Yield each file's name in the bundle and where it is now."""
    for name, path in _sources(user_folder(options.profiles_dir)):
        yield f"{layout.SOURCE}/{name}", path
    for path in sorted(model.iterdir()):
        if path.is_file() and (is_needed(path.name) or path.name == RECORD):
            yield f"{layout.MODELS}/{manifest.model}/{path.name}", path
    state = ServiceState.of(manifest.profile)
    for name in layout.STATE_FILES:
        if (state.root / name).is_file():
            yield f"{layout.STATE}/{name}", state.root / name


def _sources(user: Path | None) -> Iterator[tuple[str, Path]]:
    for top in layout.SOURCES:
        root = CHECKOUT / top
        for path in sorted(root.rglob("*")) if root.is_dir() else [root]:
            shown = path.relative_to(CHECKOUT)
            if path.is_file() and "__pycache__" not in shown.parts and ".egg-info" not in str(shown):
                yield str(shown), path
    for path in sorted((*user.glob("*.yaml"), *user.glob("models/*.yaml"))) if user else ():
        name = f"profiles/{path.relative_to(user or path)}"
        if (CHECKOUT / name).exists():
            raise UsageError(f"{path}: has the name of a shipped one, which it would replace there; rename it")
        yield name, path


def _existing(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _refuse_full_disk(work: Path, model: Path, built: Sequence[str], *, is_tar: bool) -> None:
    brought_bytes = WHEELS_BYTES + (images.size_bytes(built[0]) if built else 0)
    model_bytes = sum(path.stat().st_size for path in model.iterdir() if path.is_file())
    # Into a tar what was brought is copied.
    needed_bytes = model_bytes + brought_bytes * (2 if is_tar else 1)
    free_bytes = shutil.disk_usage(work).free
    if free_bytes < needed_bytes:
        raise Refused(
            f"{work.parent}: {free_bytes / 1e9:.1f} GB free, the bundle needs {needed_bytes / 1e9:.1f} GB while it is "
            "written; name a place on another disk"
        )
