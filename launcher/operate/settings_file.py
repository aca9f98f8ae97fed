"""What the programs of a service are told, read from the files that their arguments and settings name."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel

Model = TypeVar("Model", bound=BaseModel)


def read(program: str, kind: type[Model], argv: Sequence[str]) -> Model | None:
    """Return a program's settings; None, with the reason on standard error, where there are none to go by."""
    if len(argv) != 1:
        print(f"{program}: one argument is needed, the file of its settings", file=sys.stderr)
        return None
    try:
        return kind.model_validate_json(Path(argv[0]).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        print(f"{program}: {argv[0]}: {error}", file=sys.stderr)
        return None


def read_key(path: Path | None) -> str | None:
    """Return the engine's API key; None where it wants none, so that nothing is in its file."""
    if path is None:
        return None
    try:
        return path.read_text(encoding="utf-8").strip() or None
    except FileNotFoundError:
        return None
