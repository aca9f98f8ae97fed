"""Bytes of a checkpoint by part: from safetensors headers where the files are, else from listed sizes."""

import json
import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from launcher.fit.geometry import FitError, Geometry

GIB = 2**30
Part = Literal["linear", "embeddings", "lm_head", "mtp", "vision"]
PART_NAMES: dict[Part, str] = {
    "linear": "linear and other layers",
    "embeddings": "token embeddings",
    "lm_head": "output head",
    "mtp": "MTP head",
    "vision": "vision tower",
}
LOADED_ERROR_BYTES = round(0.1 * GIB)
"""Files against what vLLM holds after loading: repacking and padding."""
MAX_HEADER_BYTES = 100_000_000
"""The format's own limit of a header."""

_PATTERNS: tuple[tuple[Part, re.Pattern[str]], ...] = (
    ("vision", re.compile(r"(^|\.)(visual|vision_tower|vision_model|multi_modal_projector)\.")),
    ("mtp", re.compile(r"(^|\.)mtp\.")),
    ("embeddings", re.compile(r"(^|\.)(embed_tokens|wte|word_embeddings)\.")),
    ("lm_head", re.compile(r"(^|\.)lm_head\.")),
)


@dataclass(frozen=True, slots=True)
class WeightPart:
    """One part of the weights, over all GPUs."""

    part: Part
    size_bytes: int
    basis: Literal["exact", "assumed"]
    error_bytes: int
    note: str


@dataclass(frozen=True, slots=True)
class Weights:
    """A checkpoint's parts."""

    parts: tuple[WeightPart, ...]
    source: str

    def loaded(self, language_model_only: bool, mtp: bool) -> tuple[WeightPart, ...]:
        """Return the parts that vLLM keeps: no tower in text-only mode, no MTP head without MTP."""
        left_out = {"vision"} if language_model_only else set()
        if not mtp:
            left_out.add("mtp")
        return tuple(part for part in self.parts if part.part not in left_out)

    @property
    def total_bytes(self) -> int:
        return sum(part.size_bytes for part in self.parts)

    @property
    def has_vision(self) -> bool:
        return any(part.part == "vision" and part.size_bytes for part in self.parts)


def weights_from_folder(folder: Path) -> Weights:
    """Read the sizes from the headers of a folder's safetensors files; no tensor is read.

    Raises:
        FitError: a file is missing or its header is not one.
    """
    sizes: dict[Part, int] = defaultdict(int)
    for path in _safetensors_files(folder):
        for name, size_bytes in _tensor_sizes(path):
            sizes[_part_of(name)] += size_bytes
    note = "safetensors headers"
    return Weights(
        tuple(
            WeightPart(part, sizes[part], "exact", LOADED_ERROR_BYTES if part == "linear" else 0, note)
            for part in PART_NAMES
            if sizes[part]
        ),
        f"{folder}: safetensors headers",
    )


def weights_from_sizes(
    geometry: Geometry,
    total_bytes: int,
    source: str,
    vision_bytes: int | None = None,
    mtp_bytes: int | None = None,
) -> Weights:
    """Split a checkpoint's listed size as far as arithmetic can: one 16-bit matrix of vocabulary x hidden size for the
    embeddings, one for an untied output head; what no figure is given for stays in `linear and other layers`.

    Raises:
        FitError: the parts are larger than the total.
    """
    vocabulary = geometry.vocab_size * geometry.hidden_size * 2
    matrix = f"{geometry.vocab_size} x {geometry.hidden_size} x 2 bytes; taken to be unquantized"
    parts = [WeightPart("embeddings", vocabulary, "assumed", 0, matrix)]
    if not geometry.tie_word_embeddings:
        parts.append(WeightPart("lm_head", vocabulary, "assumed", 0, matrix))
    if mtp_bytes:
        parts.append(WeightPart("mtp", mtp_bytes, "assumed", 0, source))
    if vision_bytes:
        parts.append(WeightPart("vision", vision_bytes, "assumed", 0, source))
    rest = total_bytes - sum(part.size_bytes for part in parts)
    if rest < 0:
        raise FitError(
            f"{source}: {total_bytes / GIB:.2f} GiB in all is less than its parts ({_listing(parts)}); "
            "correct the listed sizes, or fetch the files and read theirs"
        )
    unknown = [
        name
        for name, missing in (
            ("MTP head", bool(geometry.mtp_layers) and not mtp_bytes),
            ("vision tower", geometry.has_vision and not vision_bytes),
        )
        if missing
    ]
    note = f"the rest of {total_bytes / GIB:.2f} GiB" + (f", with the {' and the '.join(unknown)}" if unknown else "")
    linear = WeightPart("linear", rest, "assumed", LOADED_ERROR_BYTES, note)
    return Weights((linear, *parts), source)


def _listing(parts: list[WeightPart]) -> str:
    return ", ".join(f"{PART_NAMES[part.part]} {part.size_bytes / GIB:.2f}" for part in parts)


def _part_of(tensor: str) -> Part:
    return next((part for part, pattern in _PATTERNS if pattern.search(tensor)), "linear")


def _safetensors_files(folder: Path) -> tuple[Path, ...]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(_json(index.read_bytes(), index).get("weight_map", {}).values()))
        missing = [name for name in names if not (folder / name).is_file()]
        if missing or not names:
            raise FitError(f"{index}: lists {', '.join(missing) or 'no file'}; fetch the whole checkpoint")
        return tuple(folder / name for name in names)
    found = tuple(sorted(folder.glob("model*.safetensors"))) or tuple(sorted(folder.glob("*.safetensors")))
    if not found:
        raise FitError(f"{folder}: no safetensors file; the weights' size is not known")
    return found


def _tensor_sizes(path: Path) -> list[tuple[str, int]]:
    """Sizes by tensor: 8 bytes of little-endian header length, then JSON with `data_offsets` (safetensors format)."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= MAX_HEADER_BYTES:
            raise FitError(f"{path}: not a safetensors file, or cut off; fetch it again")
        header = _json(file.read(length), path)
    sizes = []
    for name, tensor in header.items():
        if name == "__metadata__":
            continue
        offsets = tensor.get("data_offsets") if isinstance(tensor, dict) else None
        if not (isinstance(offsets, list) and len(offsets) == 2 and all(isinstance(at, int) for at in offsets)):
            raise FitError(f"{path}: {name} has no data_offsets; fetch the file again")
        sizes.append((name, offsets[1] - offsets[0]))
    return sizes


def _json(content: bytes, path: Path) -> dict[str, Any]:
    try:
        document = json.loads(content)
    except ValueError as error:
        raise FitError(f"{path}: not readable: {error}; fetch it again") from error
    if not isinstance(document, dict):
        raise FitError(f"{path}: not readable: a mapping is needed; fetch it again")
    return document
