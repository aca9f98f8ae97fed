"""Activations on disk: one file a point, rows appended as they are computed, read back memory-mapped."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

INDEX = "points.json"


@dataclass
class Point:
    """A place in the model: `rows` tokens of `columns` channels in the file `number`.bin, in the engine's own dtype."""

    number: int
    columns: int
    dtype: str
    rows: int = 0


class Recorder:
    """Writes what hooks hand over at once, so that no more than one activation is held.

    `rows_now` is how many tokens the engine computes in this step: rows beyond are padding.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rows_now = 0
        self.points: dict[str, Point] = {}
        self.unusable: dict[str, str] = {}
        folder.mkdir(parents=True, exist_ok=True)

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Append the step's rows of a point: `tensor` is [..., columns] with one row a token.

        Raises:
            OSError: the disk is full.

        """
        rows = tensor.detach().reshape(-1, tensor.shape[-1])
        if rows.shape[0] < self.rows_now:
            self.unusable[name] = f"{rows.shape[0]} rows for {self.rows_now} tokens"
            return
        rows = rows[: self.rows_now].contiguous().cpu()
        dtype = str(rows.dtype).removeprefix("torch.")
        point = self.points.setdefault(name, Point(len(self.points), rows.shape[1], dtype))
        if (point.columns, point.dtype) != (rows.shape[1], dtype):
            self.unusable[name] = f"{dtype} [{rows.shape[1]}] after {point.dtype} [{point.columns}]"
            return
        with (self.folder / f"{point.number}.bin").open("ab") as file:
            rows.view(torch.uint8).numpy().tofile(file)
        point.rows += rows.shape[0]

    def finish(self, facts: dict[str, Any], tokens: int) -> None:
        """Write the index; points that were not computed once for each token are named and left out."""
        for name, point in list(self.points.items()):
            if point.rows != tokens:
                self.unusable.setdefault(name, f"{point.rows} rows for {tokens} tokens")
        points = {name: asdict(point) for name, point in self.points.items() if name not in self.unusable}
        index = facts | {"points": points, "unusable": self.unusable}
        (self.folder / INDEX).write_text(json.dumps(index), encoding="utf-8")


@dataclass(frozen=True)
class Recorded:
    """One side, read back."""

    folder: Path
    facts: dict[str, Any]
    points: dict[str, Point]
    unusable: dict[str, str]

    @classmethod
    def read(cls, folder: Path) -> "Recorded":
        """Read the index."""
        facts = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        points = {name: Point(**point) for name, point in facts.pop("points").items()}
        return cls(folder, facts, points, facts.pop("unusable"))

    def load(self, name: str) -> torch.Tensor:
        """Map a point's [rows, columns]; nothing is read before it is used."""
        point = self.points[name]
        file = str(self.folder / f"{point.number}.bin")
        dtype = getattr(torch, point.dtype)
        return torch.from_file(file, shared=False, size=point.rows * point.columns, dtype=dtype).view(
            point.rows, point.columns
        )
