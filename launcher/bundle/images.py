"""Images as files: saved by Docker, loaded by Docker."""

from collections.abc import Sequence
from pathlib import Path

from launcher.errors import CheckFailed
from launcher.images import build
from launcher.runtime import compose


def size_bytes(reference: str) -> int:
    """Return the bytes of an image's layers, unpacked: more than its saved form has, or as many."""
    (line,) = compose.must(("docker", "image", "inspect", "--format", "{{.Size}}", reference)).lines
    return int(line)


def save(references: Sequence[str], path: Path) -> None:
    """Write images into one file, in which they share their layers.

    Raises:
        DockerFailed: Docker cannot.
    """
    compose.must(("docker", "image", "save", "--output", str(path), *references))


def load(path: Path, references: Sequence[str]) -> None:
    """Load saved images.

    Raises:
        DockerFailed: Docker cannot.
        CheckFailed: one of these was not in it.
    """
    compose.must(("docker", "image", "load", "--input", str(path)))
    lacking = [reference for reference in references if not build.is_there(reference)]
    if lacking:
        raise CheckFailed(f"{path}: loaded, and Docker has no {', '.join(lacking)}")
