"""Where a bundle is written to: a folder or a tar. Each file is hashed while it is written; the sums come last."""

import hashlib
import io
import shutil
import tarfile
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from launcher import durable
from launcher.bundle.layout import SUMS
from launcher.weights.verify import sha256

_CHUNK_BYTES = 1 << 22


class Told(Protocol):
    """Takes how many bytes were written more."""

    def __call__(self, more_bytes: int) -> None: ...


class Source(Protocol):
    """What a file is read from."""

    def read(self, size: int = -1, /) -> bytes: ...


class HashingReader:
    """Passes a file on and hashes it on the way."""

    def __init__(self, source: Source, told: Told) -> None:
        self._source = source
        self._told = told
        self.digest = hashlib.sha256()

    def read(self, size: int = -1, /) -> bytes:
        piece = self._source.read(size)
        self.digest.update(piece)
        self._told(len(piece))
        return piece


class Sink(Protocol):
    """Takes a bundle's files; `finish` gives it its name."""

    def put(self, name: str, source: Source, size_bytes: int, mode: int) -> None:
        """Write one file."""

    def finish(self) -> None:
        """Flush everything and let the bundle appear under its name."""

    def abandon(self) -> None:
        """Remove what was written."""


class FolderSink:
    """Writes a folder."""

    def __init__(self, out: Path) -> None:
        self._out = out
        self._partial = out.with_name(f".{out.name}.partial")
        shutil.rmtree(self._partial, ignore_errors=True)
        self._partial.mkdir(parents=True)

    def put(self, name: str, source: Source, size_bytes: int, mode: int) -> None:
        path = self._partial / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as target:
            shutil.copyfileobj(source, target, _CHUNK_BYTES)
        # A disk without modes, such as a USB disk with exFAT, has none to change.
        with suppress(PermissionError):
            path.chmod(mode)

    def move(self, name: str, path: Path) -> None:
        """Take a file of this disk in, without writing it a second time."""
        target = self._partial / name
        target.parent.mkdir(parents=True, exist_ok=True)
        path.replace(target)

    def finish(self) -> None:
        durable.publish(self._partial, self._out)

    def abandon(self) -> None:
        shutil.rmtree(self._partial, ignore_errors=True)


class TarSink:
    """Writes a tar whose one folder has the tar's name; not compressed, since weights and images do not shrink."""

    def __init__(self, out: Path) -> None:
        self._out = out
        self._partial = out.with_name(f".{out.name}.partial")
        out.parent.mkdir(parents=True, exist_ok=True)
        self._tar = tarfile.open(  # noqa: SIM115 - finish and abandon close it
            self._partial, "w", format=tarfile.PAX_FORMAT
        )

    def put(self, name: str, source: Source, size_bytes: int, mode: int) -> None:
        entry = tarfile.TarInfo(f"{self._out.stem}/{name}")
        entry.size, entry.mode = size_bytes, mode
        self._tar.addfile(entry, source)

    def finish(self) -> None:
        self._tar.close()
        durable.publish(self._partial, self._out)

    def abandon(self) -> None:
        self._tar.close()
        self._partial.unlink(missing_ok=True)


class Writer:
    """Puts files into a sink and keeps their sums."""

    def __init__(self, sink: Sink, told: Told) -> None:
        self._sink = sink
        self._told = told
        self._sums: dict[str, str] = {}

    def file(self, name: str, path: Path, mode: int = 0o644) -> str:
        """Put a file of this machine into the bundle, and return its SHA-256."""
        with path.open("rb") as source:
            return self._put(name, source, path.stat().st_size, mode)

    def take(self, name: str, path: Path) -> None:
        """Put a file into the bundle that is needed for nothing else; it lies beside the bundle."""
        if isinstance(self._sink, FolderSink):
            self._sums[name] = sha256(path)
            self._told(path.stat().st_size)
            self._sink.move(name, path)
        else:
            self.file(name, path)

    def text(self, name: str, text: str, mode: int = 0o644) -> None:
        """Put a text into the bundle."""
        content = text.encode()
        self._put(name, io.BytesIO(content), len(content), mode)

    def finish(self) -> None:
        """Write the sums and let the bundle appear."""
        lines = "".join(f"{digest}  {name}\n" for name, digest in sorted(self._sums.items())).encode()
        self._sink.put(SUMS, io.BytesIO(lines), len(lines), 0o644)
        self._sink.finish()

    def _put(self, name: str, source: Source, size_bytes: int, mode: int) -> str:
        reader = HashingReader(source, self._told)
        self._sink.put(name, reader, size_bytes, mode)
        self._sums[name] = reader.digest.hexdigest()
        return self._sums[name]
