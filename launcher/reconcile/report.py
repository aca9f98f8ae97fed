"""What a reconciliation says: sentences, a document for JSON, and a page with plots. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from launcher.measure.html_report import Chart, Page, Table
from launcher.measure.verdict import Check, passed
from launcher.reconcile.run import MOST_KL, Pair, Settings

SCHEMA = 1
_SPREAD = 0.5
"""A row or column with so large a share of the error is where the error is; else it is spread."""
_HIGHEST_PLOTTED = 4.0
"""In tolerances; beyond, a plot would hide what lies below."""


def checks(pairs: Sequence[Pair]) -> tuple[Check, ...]:
    """Return every check of every pair with its answer."""
    return tuple(check for pair in pairs for check in _checks(pair))


def _checks(pair: Pair) -> tuple[Check, ...]:
    found, kl = pair.found, pair.found["logits"]["kl_mean"]
    worst = max((_strain(point) for point in found["points"]), default=0.0)
    beyond = sum(not point["within"] for point in found["points"])
    said = (
        where(found["first"])
        if found["first"]
        else f"all {len(found['points'])} points are within; the widest is at {worst:.0%} of its tolerance"
    )
    if found["first"]:
        said += f"; {beyond} of {len(found['points'])} points are beyond"
    elif not pair.is_eager:
        said += "; compiled layers cannot be seen: only logits are compared"
    kl_said = f"mean {number(kl)} nats, at most {MOST_KL:g}; largest {number(found['logits']['kl_max'])}"
    return (
        Check(f"layers of {pair.b}", found["first"] is None, worst, 1.0, said),
        Check(f"KL of {pair.b}", pair.kl_is_small, kl, MOST_KL, kl_said),
    )


def where(first: Mapping[str, Any]) -> str:
    """Say in a sentence where the first point leaves its tolerance."""
    parts = [
        f"first at {first['name']}: relative error {number(first['worst_column'])} in a column and "
        f"{number(first['worst_row'])} in a row, tolerance {number(first['tolerance'])}"
    ]
    head = f" (head {first['head']})" if first["head"] is not None else ""
    if first["column_share"] >= _SPREAD:
        parts.append(f"column {first['column']}{head} has {first['column_share']:.0%} of the error")
    elif first["columns_beyond"]:
        parts.append(
            f"{first['columns_beyond']} of {first['columns']} columns ({first['column_runs']}), most in column "
            f"{first['column']}{head}"
        )
    place = f"prompt {first['prompt']}, position {first['position']}, token {first['token']}"
    if first["row_share"] >= _SPREAD:
        parts.append(f"row {first['row']} ({place}) has {first['row_share']:.0%} of it")
    else:
        parts.append(f"{first['rows_beyond']} of {first['rows']} rows, most in row {first['row']} ({place})")
    return "; ".join(parts)


def number(value: float | None) -> str:
    """Write a figure that JSON may lack for being infinite."""
    return "infinite" if value is None else f"{value:.3g}"


def layer_rows(pair: Pair) -> list[dict[str, Any]]:
    """Return one row a layer: of its points the one that is nearest to its tolerance, or farthest beyond."""
    worst: dict[object, dict[str, Any]] = {}
    for point in pair.found["points"]:
        key = point["layer"] if point["layer"] is not None else point["name"]
        if key not in worst or _strain(point) > _strain(worst[key]):
            worst[key] = point
    return list(worst.values())


COLUMNS = ("point", "max error", "relative", "worst row", "worst column", "least cosine", "tolerance")


def cells(point: Mapping[str, Any]) -> tuple[str, ...]:
    """Write a point's figures in the order of COLUMNS."""
    figures = (point[key] for key in ("max_abs", "relative", "worst_row", "worst_column"))
    cosine = "-" if point["cosine"] is None else f"{point['cosine']:.6f}"
    return (point["name"], *map(number, figures), cosine, number(point["tolerance"]))


QUALITY = ("side", "perplexity", "against A", "KL mean", "KL max", "same first choice")


def quality_rows(pairs: Sequence[Pair]) -> list[tuple[str, ...]]:
    """Return what each side's differences cost on these prompts; A first."""
    base = pairs[0].found["logits"]["perplexity_a"]
    rows: list[tuple[str, ...]] = [(pairs[0].a, number(base), "", "", "", "")]
    for pair in pairs:
        found = pair.found["logits"]
        change = f"{found['perplexity_b'] / base - 1:+.2%}" if base and found["perplexity_b"] else "-"
        figures = (number(found["perplexity_b"]), change, number(found["kl_mean"]), number(found["kl_max"]))
        rows.append((pair.b, *figures, f"{found['top1_agreement']:.2%}"))
    return rows


def document(pairs: Sequence[Pair], settings: Settings, prompts: str) -> dict[str, Any]:
    """Return everything, with the verdict."""
    found = checks(pairs)
    return {
        "schema": SCHEMA,
        "kind": "reconcile",
        "passed": passed(found),
        "checks": [asdict(check) for check in found],
        "settings": asdict(settings) | {"prompts": prompts},
        "pairs": [{"a": pair.a, "b": pair.b, **pair.found} for pair in pairs],
    }


def page(pairs: Sequence[Pair], settings: Settings, prompts: str) -> Page:
    """Return the page of a reconciliation."""
    found = checks(pairs)
    return Page(
        title=f"Reconciliation with {pairs[0].a}",
        facts={
            "Prompts": f"{prompts}, passages of at most {settings.tokens} tokens, the last {settings.decoded} decoded",
            "Tolerance": f"from the coarser dtype, times {settings.tolerance_scale:g}: what rounding alone may do",
        },
        passed=passed(found),
        checks=found,
        charts=[chart for pair in pairs for chart in _charts(pair)],
        tables=[
            Table("Cost on these prompts", QUALITY, quality_rows(pairs)),
            *(
                Table(f"Points of {pair.b}", COLUMNS, [cells(point) for point in pair.found["points"]])
                for pair in pairs
            ),
        ],
    )


def _charts(pair: Pair) -> list[Chart]:
    streams = [point for point in pair.found["points"] if point["name"] == f"layers.{point['layer']}"]
    worst = [point for point in layer_rows(pair) if point["layer"] is not None]
    highest = max((_strain(point) for point in pair.found["points"]), default=0.0)
    return [
        Chart(
            f"Error by layer, {pair.b}",
            {
                "residual stream": [(point["layer"], _strain(point)) for point in streams],
                "worst point of the layer": [(point["layer"], _strain(point)) for point in worst],
                "tolerance": [(point["layer"], 1.0) for point in worst],
            },
            y=lambda value: f"{value:.3g}",
            about="Largest error of a row or column, in tolerances"
            + (f"; cut at {_HIGHEST_PLOTTED:g}" if highest > _HIGHEST_PLOTTED else ""),
            highest=max(1.2, min(highest * 1.08, _HIGHEST_PLOTTED)),
        ),
        Chart(
            f"KL by position, {pair.b}",
            {"KL": list(enumerate(pair.found["logits"]["kl"]))},
            y=lambda value: f"{value:.3g}",
            about="Nats, of B's next-token distribution from A's; prompts one after the other",
        ),
    ]


def _strain(point: Mapping[str, Any]) -> float:
    """How far a point is apart, in tolerances."""
    return float("inf") if point["strain"] is None else float(point["strain"])
