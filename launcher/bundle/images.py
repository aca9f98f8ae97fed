"""Images as files: saved by Docker, loaded by Docker."""

from pathlib import Path

from launcher.errors import CheckFailed
from launcher.images import build
from launcher.runtime import compose


def size_bytes(reference: str) -> int:
    """Return the bytes of an image's layers, unpacked: more than its saved form has, or as many."""
    (line,) = compose.must(("docker", "image", "inspect", "--format", "{{.Size}}", reference)).lines
    return int(line)


def save(reference: str, path: Path) -> None:
    """Write an image into a file.

    Raises:
        DockerFailed: Docker cannot.
    """
    compose.must(("docker", "image", "save", "--output", str(path), reference))


def load(path: Path, references: tuple[str, ...]) -> None:
    """Load a saved image.

    Raises:
        DockerFailed: Docker cannot.
        CheckFailed: it was loaded and has none of the names that it should have.
    """
    compose.must(("docker", "image", "load", "--input", str(path)))
    if not any(build.is_there(reference) for reference in references):
        raise CheckFailed(f"{path}: loaded, and Docker has no {', '.join(references)}")
