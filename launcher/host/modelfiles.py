"""Whether a checkpoint's files are all there, told from the index and the files' own headers."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel, ConfigDict

INDEX = "model.safetensors.index.json"
# A safetensors file: 8 bytes of little-endian header length, the JSON header, the tensors
# (https://github.com/huggingface/safetensors#format); the format's own limit on the header is 100 MB.
_LENGTH = struct.Struct("<Q")
_MAX_HEADER_BYTES = 100_000_000
_LFS_POINTER = b"version https://git-lfs"


class IncompleteFile(BaseModel):
    """One file that is missing or not whole."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: str
    """Relative to the model's folder."""
    reason: str


def incomplete_files(model_dir: Path) -> tuple[IncompleteFile, ...]:
    """Return what is missing or cut short, in the index's order; empty for a whole checkpoint.

    Headers are read, tensors are not: a file of the right length with wrong bytes is found by its hash only.
    """
    if not model_dir.is_dir():
        return (IncompleteFile(path=".", reason="the folder is not there"),)
    found: list[IncompleteFile] = []
    if not (model_dir / "config.json").is_file():
        found.append(IncompleteFile(path="config.json", reason="missing"))
    try:
        names = _weight_files(model_dir)
    except (ValueError, OSError, AttributeError, TypeError, KeyError) as error:
        return (*found, IncompleteFile(path=INDEX, reason=f"not a safetensors index: {error}"))
    if not names:
        found.append(IncompleteFile(path="*.safetensors", reason="no weights: neither an index nor a safetensors file"))
    return (*found, *_incomplete(model_dir, names))


def _weight_files(model_dir: Path) -> list[str]:
    index = model_dir / INDEX
    if not index.is_file():
        return sorted(path.name for path in model_dir.glob("*.safetensors"))
    weight_map: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    return list(dict.fromkeys(weight_map.values()))


def _incomplete(model_dir: Path, names: list[str]) -> Iterator[IncompleteFile]:
    for name in names:
        path = model_dir / name
        reason = _what_is_wrong(path) if path.is_file() else f"missing; {INDEX} lists it"
        if reason is not None:
            yield IncompleteFile(path=name, reason=reason)


def _what_is_wrong(path: Path) -> str | None:
    size_bytes = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(len(_LFS_POINTER))
        if start == _LFS_POINTER:
            return "a Git LFS pointer, not the weights"
        if len(start) < _LENGTH.size:
            return f"cut short: {size_bytes} bytes"
        (header_bytes,) = _LENGTH.unpack(start[: _LENGTH.size])
        if header_bytes > _MAX_HEADER_BYTES:
            return "not a safetensors file"
        if _LENGTH.size + header_bytes > size_bytes:
            return f"cut short: {size_bytes} bytes, its header alone has {_LENGTH.size + header_bytes}"
        file.seek(_LENGTH.size)
        return _length_reason(file.read(header_bytes), size_bytes)


def _length_reason(header: bytes, size_bytes: int) -> str | None:
    try:
        tensors = json.loads(header)
        end = max((entry["data_offsets"][1] for name, entry in tensors.items() if name != "__metadata__"), default=0)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        return "not a safetensors file"
    expected_bytes = _LENGTH.size + len(header) + end
    if size_bytes == expected_bytes:
        return None
    state = "cut short" if size_bytes < expected_bytes else "longer than it says"
    return f"{state}: {size_bytes} bytes of {expected_bytes}"
