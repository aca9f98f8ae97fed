"""From two recordings to an answer: each point's difference, what its dtype allows, and where the first leaves."""

import math
from pathlib import Path
from typing import Any

import torch

from launcher.reconcile.program.measure import Apart, apart, distributions, finite, mean, runs
from launcher.reconcile.program.problems import Problem
from launcher.reconcile.program.recorder import Recorded

UNIT_ROUNDOFF = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
ROUNDINGS = 8
"""So many independent roundings of a layer, each of one unit, add up to the tolerance of the first layer."""
ROW_FACTOR = 4
"""A row may be so much farther apart than a column, which is a mean over rows: where large terms cancel, a single token
carries the rounding of what was cancelled. In SmolLM2-135M in bfloat16 one does, to 2.4 times what a column may."""


def tolerance(dtype: str, width: int, layers: int) -> float:
    """What rounding alone may do to a point: relative to a row's or a column's norm.

    A stored value is rounded once to `dtype`; a sum over `width` products is made in float32. Roundings of layer after
    layer are independent, and add up as the root of their number.
    """
    unit = UNIT_ROUNDOFF[dtype] + math.sqrt(width) * UNIT_ROUNDOFF["float32"]
    return ROUNDINGS * unit * math.sqrt(1 + layers)


def compare(folder_a: Path, folder_b: Path, rows: list[list[int]], scale: float) -> dict[str, Any]:
    """Compare two recordings of the same tokens, point by point in the order of computation.

    Args:
        folder_a: the recording that differences are relative to.
        folder_b: the other.
        rows: the tokens of each prompt.
        scale: a factor for the tolerances.

    Raises:
        Problem: the two have different layers or sizes.

    """
    a, b = Recorded.read(folder_a), Recorded.read(folder_b)
    names = _common(a, b)
    coarser = max((_dtype(a), _dtype(b)), key=lambda dtype: UNIT_ROUNDOFF[dtype])
    # Where both sides are compiled, nothing but logits tells how wide the model is.
    hooked = [point.columns for side in (a, b) for name, point in side.points.items() if name != "logits"]
    width = max(hooked, default=a.points["logits"].columns)
    points, depth = [], 0
    first: dict[str, Any] | None = None
    for name in names:
        depth = max(depth, _layer(name) or 0, a.facts["layers"] if name in ("norm", "logits") else 0)
        allowed = scale * tolerance(coarser, width, depth)
        found = apart(a.load(name), b.load(name))
        point = _point(name, found, allowed)
        points.append(point)
        if first is None and not point["within"]:
            first = point | _where(found, allowed, rows, a.points[name].columns, a.facts.get("head_dim"), name)
    return {
        "dtype": coarser,
        "points": points,
        "first": first,
        "only_a": sorted((set(a.points) | set(a.unusable)) - set(names)),
        "only_b": sorted((set(b.points) | set(b.unusable)) - set(names)),
        "logits": _logits(a, b, rows),
    }


def _common(a: Recorded, b: Recorded) -> list[str]:
    """The points of both, in the order of a.

    Raises:
        Problem: a layer or the logits are missing on one side, or a point has another size there.

    """
    hooked = [side for side in (a, b) if any(name.startswith("layers.") for name in side.points)]
    needed = {f"layers.{number}" for number in range(a.facts["layers"])} if len(hooked) == 2 else set()
    for label, side in (("A", a), ("B", b)):
        if missing := sorted((needed | {"logits"}) - set(side.points), key=lambda name: (len(name), name)):
            why = f" ({side.unusable[missing[0]]})" if missing[0] in side.unusable else ""
            raise Problem(
                f"{label}, {side.facts['side']}: no {', '.join(missing[:3])}{why}; it has "
                f"{side.facts['layers']} layers, {', '.join(list(side.points)[:4])}, ...: not the same model"
            )
    if a.facts["layers"] != b.facts["layers"]:
        raise Problem(f"A has {a.facts['layers']} decoder layers, B has {b.facts['layers']}: not the same model")
    names = [name for name in a.points if name in b.points]
    for name in names:
        one, other = a.points[name], b.points[name]
        if one.columns != other.columns:
            raise Problem(f"{name}: {one.columns} channels in A, {other.columns} in B: the two are not the same model")
    return names


def _dtype(side: Recorded) -> str:
    """What a side computes in."""
    return str(side.facts["dtype"])


def _layer(name: str) -> int | None:
    parts = name.split(".")
    return int(parts[1]) if parts[0] == "layers" else None


def _point(name: str, found: Apart, allowed: float) -> dict[str, Any]:
    row, column = float(found.by_row.max()), float(found.by_column.max())
    return {
        "name": name,
        "layer": _layer(name),
        "max_abs": finite(found.max_abs),
        "relative": finite(found.relative),
        "worst_row": finite(row),
        "worst_column": finite(column),
        "cosine": finite(found.cosine),
        "tolerance": allowed,
        "strain": finite(max(row / ROW_FACTOR, column) / allowed) if allowed else None,
        "within": row <= ROW_FACTOR * allowed and column <= allowed,
    }


def _where(
    found: Apart, allowed: float, rows: list[list[int]], columns: int, head_dim: int | None, name: str
) -> dict[str, Any]:
    """Where a point leaves its tolerance: the worst row and column, and all that are beyond."""
    row, column = int(found.by_row.argmax()), int(found.by_column.argmax())
    prompt = 0
    position = row
    while position >= len(rows[prompt]):
        position -= len(rows[prompt])
        prompt += 1
    rows_beyond, columns_beyond = found.by_row > ROW_FACTOR * allowed, found.by_column > allowed
    return {
        "row": row,
        "prompt": prompt,
        "position": position,
        "token": rows[prompt][position],
        "row_share": float(found.row_share[row]),
        "rows": len(found.by_row),
        "rows_beyond": int(rows_beyond.sum()),
        "row_runs": runs(rows_beyond),
        "column": column,
        "column_share": float(found.column_share[column]),
        "columns": columns,
        "columns_beyond": int(columns_beyond.sum()),
        "column_runs": runs(columns_beyond),
        "head": column // head_dim if head_dim and name.endswith("self_attn.o_proj.input") else None,
    }


def _logits(a: Recorded, b: Recorded, rows: list[list[int]]) -> dict[str, Any]:
    following = torch.tensor([token for row in rows for token in (*row[1:], -1)])
    found = distributions(a.load("logits"), b.load("logits"), following)
    nll_a, nll_b = mean(found.nll_a), mean(found.nll_b)
    worst = int(found.kl.argmax())
    return {
        "kl_mean": mean(found.kl),
        "kl_max": finite(float(found.kl.max())),
        "kl_worst_row": worst,
        "kl": [finite(value) for value in found.kl.tolist()],
        "top1_agreement": float(found.same_top.float().mean()),
        "perplexity_a": None if nll_a is None else finite(math.exp(min(nll_a, 700))),
        "perplexity_b": None if nll_b is None else finite(math.exp(min(nll_b, 700))),
    }
