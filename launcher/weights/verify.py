"""Whether a checkpoint's files are whole: the index against the disk, sizes and hashes against their source."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from launcher.host.modelfiles import IncompleteFile, incomplete_files
from launcher.profile import ModelFile

_CHUNK_BYTES = 1 << 22


def faults(folder: Path, expected: Sequence[ModelFile] = ()) -> tuple[IncompleteFile, ...]:
    """Return what is missing or not whole, by index, safetensors headers and expected sizes; reads no tensors."""
    found = incomplete_files(folder)
    named = {fault.path for fault in found}
    return (*found, *(fault for fault in _wrong_sizes(folder, expected) if fault.path not in named))


def hashed(
    folder: Path, files: Sequence[ModelFile], on_bytes: Callable[[str, int], None] = lambda path, done_bytes: None
) -> tuple[ModelFile, ...]:
    """Return the files with the sizes and hashes that they have here; `on_bytes` gets the path and the bytes so far."""
    found: list[ModelFile] = []
    for file in files:
        before_bytes = sum(one.size_bytes or 0 for one in found)
        digest = sha256(folder / file.path, partial(_told, on_bytes, file.path, before_bytes))
        size_bytes = (folder / file.path).stat().st_size
        found.append(ModelFile(path=file.path, size_bytes=size_bytes or None, sha256=digest))
    return tuple(found)


def wrong_hashes(expected: Sequence[ModelFile], found: Sequence[ModelFile]) -> tuple[IncompleteFile, ...]:
    """Return the files whose SHA-256 is not the expected one, where one is expected."""
    hashes = {file.path: file.sha256 for file in found}
    return tuple(
        IncompleteFile(path=file.path, reason=f"sha256 {hashes[file.path]}, its source says {file.sha256}")
        for file in expected
        if file.sha256 is not None and hashes[file.path] != file.sha256
    )


def sha256(path: Path, on_bytes: Callable[[int], None] = lambda done_bytes: None) -> str:
    """Return a file's SHA-256, in hex."""
    digest = hashlib.sha256()
    done_bytes = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            done_bytes += len(chunk)
            on_bytes(done_bytes)
    return digest.hexdigest()


def _wrong_sizes(folder: Path, expected: Sequence[ModelFile]) -> Iterator[IncompleteFile]:
    for file in expected:
        path = folder / file.path
        if not path.is_file():
            yield IncompleteFile(path=file.path, reason="missing")
        elif file.size_bytes is not None and path.stat().st_size != file.size_bytes:
            yield IncompleteFile(path=file.path, reason=f"{path.stat().st_size} bytes of {file.size_bytes}")


def _told(on_bytes: Callable[[str, int], None], path: str, before_bytes: int, done_bytes: int) -> None:
    on_bytes(path, before_bytes + done_bytes)
