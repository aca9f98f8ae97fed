"""Install a bundle: everything is verified before anything of it is used."""

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from launcher import durable, engine_env
from launcher.bring import Reporter, install, tell_fetch
from launcher.bundle import images, layout, wheels
from launcher.bundle.layout import Manifest
from launcher.errors import CheckFailed, Refused, UsageError
from launcher.images.build import is_there
from launcher.images.pins import record_digest
from launcher.prepare import models_dir
from launcher.profile import load_model, load_profile, user_folder
from launcher.state import ServiceState
from launcher.weights.fetch import ensure_model
from launcher.weights.verify import sha256

_LINE = re.compile(r"^([0-9a-f]{64})  (\S.*)$")
_MOST_NAMED = 20


@dataclass(frozen=True)
class _Sum:
    """One line of the sums."""

    name: str
    sha256: str


def install_bundle(folder: Path, report: Reporter) -> Manifest:
    """Verify a bundle and install what it carries beside the launcher: images, model, engine, lock.

    Raises:
        UsageError: it is no bundle of this launcher.
        CheckFailed: a file is missing or not what was written; nothing is installed.
        Refused: it is for another machine, or something of it cannot be installed.
    """
    manifest = Manifest.read(folder)
    if manifest.machine != layout.this_machine():
        raise Refused(f"{folder}: made for {manifest.machine}, this machine is {layout.this_machine()}")
    if manifest.engine_python not in (None, wheels.this_python()):
        raise Refused(
            f"{folder}: the engine's wheels are for Python {manifest.engine_python}, the launcher runs on "
            f"{wheels.this_python()}; install again with that one: PYTHON=python{manifest.engine_python} sh install.sh"
        )
    user = user_folder(None)
    load_profile(manifest.profile, user)
    report.phase("verify")
    verify(folder, lambda name, done, total: report.progress(done, total, "bytes", name))
    if manifest.images:
        report.phase("load")
        _load_images(folder, manifest)
    report.phase("model")
    model = load_model(manifest.model, user)
    source = folder / layout.MODELS / manifest.model
    ensure_model(model, models_dir(), lambda event: tell_fetch(event, report), source=str(source))
    _install_state(folder, manifest)
    if manifest.engine_python is not None:
        # For pip, which is started below; nothing else reads them. A URL, since pip splits the variable at spaces.
        os.environ.update(PIP_NO_INDEX="1", PIP_FIND_LINKS=(folder / layout.WHEELS).resolve().as_uri())
        install(engine_env.ENGINE, report)
    return manifest


def verify(folder: Path, on_bytes: Callable[[str, int, int], None] = lambda name, done, total: None) -> None:
    """Compare every file of a bundle with its sum; `on_bytes` gets the file, the bytes so far and all bytes.

    Raises:
        UsageError: the sums cannot be read.
        CheckFailed: naming what is missing or differs.
    """
    sums = _sums(folder)
    missing = [f"  {one.name}: missing" for one in sums if not (folder / one.name).is_file()]
    sizes = {one.name: (folder / one.name).stat().st_size for one in sums} if not missing else {}
    total_bytes, before_bytes, wrong = sum(sizes.values()), 0, missing
    for one in sums if not missing else ():
        if sha256(folder / one.name) != one.sha256:
            wrong.append(f"  {one.name}: not the bytes that were written, or cut short ({sizes[one.name]} bytes)")
        before_bytes += sizes[one.name]
        on_bytes(one.name, before_bytes, total_bytes)
    if wrong:
        more = f"\n  and {len(wrong) - _MOST_NAMED} more" if len(wrong) > _MOST_NAMED else ""
        listed = "\n".join(wrong[:_MOST_NAMED])
        raise CheckFailed(f"{folder}: not whole; copy it from its source again. Nothing was installed:\n{listed}{more}")


def _sums(folder: Path) -> tuple[_Sum, ...]:
    path = folder / layout.SUMS
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: cannot be read: {error}; the bundle was not written to its end") from error
    sums = tuple(_parsed(path, lines))
    if layout.MANIFEST not in {one.name for one in sums}:
        raise UsageError(f"{path}: does not list {layout.MANIFEST}; the bundle was not written to its end")
    return sums


def _parsed(path: Path, lines: list[str]) -> Iterator[_Sum]:
    for number, line in enumerate(lines, start=1):
        match = _LINE.match(line)
        inside = match is not None and not PurePosixPath(match[2]).is_absolute() and ".." not in match[2].split("/")
        if match is None or not inside:
            raise UsageError(f"{path}: line {number} is not a sum of a file in the bundle")
        yield _Sum(name=match[2], sha256=match[1])


def _load_images(folder: Path, manifest: Manifest) -> None:
    if all(is_there(reference) for reference in manifest.images):
        return
    for path in sorted((folder / layout.IMAGES).glob("*.tar")):
        images.load(path, manifest.images)


def _install_state(folder: Path, manifest: Manifest) -> None:
    for base, digest in manifest.digests.items():
        record_digest(base, digest)
    state = ServiceState.of(manifest.profile)
    for name in layout.STATE_FILES:
        carried = folder / layout.STATE / name
        if carried.is_file():
            state.root.mkdir(parents=True, exist_ok=True)
            durable.write_text(state.root / name, carried.read_text(encoding="utf-8"))
