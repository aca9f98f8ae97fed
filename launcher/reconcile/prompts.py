"""The prompts: a text, or lines of JSON; without either the first chapter of a book that is in the public domain."""

import json
from pathlib import Path
from typing import Any

from launcher.errors import UsageError

BUNDLED = Path(__file__).with_name("alice.txt")
"""Lewis Carroll, Alice's Adventures in Wonderland (Macmillan, London 1865), from chapter I; in the public domain.
Quotation marks and dashes are ASCII, and italics are left out."""


def read(path: Path | None) -> list[str | list[int]]:
    """Return texts or lists of token ids: the whole of a text file, or each line of a .jsonl.

    A line is a string, a list of token ids, or an object with `prompt` or `text`.

    Raises:
        UsageError: the file cannot be read, or a line is none of these.

    """
    path = path or BUNDLED
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: {error}; name a text file or a .jsonl") from error
    if path.suffix != ".jsonl":
        found: list[str | list[int]] = [text]
    else:
        found = [_line(line, f"{path}:{number}") for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    if not any(found):
        raise UsageError(f"{path}: is empty")
    return found


def _line(line: str, where: str) -> str | list[int]:
    try:
        value: Any = json.loads(line)
    except ValueError as error:
        raise UsageError(f"{where}: {error}") from error
    if isinstance(value, dict):
        value = value.get("prompt", value.get("text"))
    if isinstance(value, str) or (isinstance(value, list) and all(type(token) is int for token in value)):
        return value
    raise UsageError(f'{where}: write a string, a list of token ids, or {{"prompt": ...}}')
