"""Make files appear whole or not at all, also after a power cut: write, flush to the disk, rename."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from launcher.errors import Refused


def sync(path: Path) -> None:
    """Flush a file, or a folder's list of names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Write a file that appears whole or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    publish(partial, path)


def publish(partial: Path, final: Path) -> Path:
    """Flush a finished file or folder and give it its name, which must be free unless both are files."""
    if partial.is_dir():
        for path in partial.rglob("*"):
            sync(path)
    sync(partial)
    partial.replace(final)
    sync(final.parent)
    return final


@contextmanager
def held(folder: Path, what: str) -> Iterator[None]:
    """Keep other processes of this launcher out of a folder; the kernel lets go whatever ends this one.

    Raises:
        Refused: another process holds it.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise Refused(f"{folder}: {what}; wait until that ends, or end it") from error
    finally:
        os.close(descriptor)
