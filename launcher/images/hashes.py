"""SHA-256 of large files, kept so that each is read once; losing them costs time, never data."""

from collections.abc import Callable
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from launcher.state import cache_root
from launcher.weights import verify


class Entry(BaseModel):
    """A file as it was when it was read."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    inode: int
    size_bytes: int
    mtime_ns: int
    ctime_ns: int
    sha256: str

    @classmethod
    def of(cls, path: Path, sha256: str) -> "Entry":
        found = path.stat()
        return cls(
            inode=found.st_ino,
            size_bytes=found.st_size,
            mtime_ns=found.st_mtime_ns,
            ctime_ns=found.st_ctime_ns,
            sha256=sha256,
        )


class Hashes(BaseModel):
    """What is kept, by path."""

    model_config = ConfigDict(extra="forbid")

    files: dict[str, Entry] = {}

    @classmethod
    def read(cls) -> "Hashes":
        """Return what is kept; nothing where it cannot be read."""
        try:
            return cls.model_validate_json(_file().read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, ValidationError):
            return cls()

    def sha256(self, path: Path, on_bytes: Callable[[int], None]) -> str:
        """Return a file's hash; it is read unless it is the same file as before, written to by nobody since."""
        key = str(path.resolve())
        kept = self.files.get(key)
        if kept is None or Entry.of(path, kept.sha256) != kept:
            # The state before reading: what is written meanwhile makes it another file.
            before = Entry.of(path, "")
            self.files[key] = before.model_copy(update={"sha256": verify.sha256(path, on_bytes)})
        return self.files[key].sha256

    def write(self) -> None:
        """Keep them."""
        _file().parent.mkdir(parents=True, exist_ok=True)
        unfinished = _file().with_suffix(".partial")
        unfinished.write_text(self.model_dump_json(indent=1) + "\n", encoding="utf-8")
        unfinished.replace(_file())


def _file() -> Path:
    return cache_root() / "hashes.json"
