"""Rendering of fit results: rich tables, sentences, and the waterfall as SVG. Prints nothing.

rich is imported where a table is made, so that planning does not wait for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal
from xml.etree import ElementTree

from launcher.fit.advice import Advice, TargetAdvice
from launcher.fit.budget import Term
from launcher.fit.calibration import Comparison
from launcher.fit.check import CheckReport, CheckRow
from launcher.fit.planner import FitReport
from launcher.fit.request import GIB

if TYPE_CHECKING:
    from rich.table import Table

_STYLE = {"FITS": "green", "LIKELY": "yellow", "NO": "red", "UNKNOWN": "yellow"}
_STATUS_STYLE = {"exact": "green", "within rounding": "yellow", "off": "red", "nothing reported": "red"}
_FAMILIES = (
    # Key prefix, colour: the palette of Okabe and Ito, which colour-blind readers can tell apart.
    ("weights.", "#0072B2"),
    ("gdn_state", "#009E73"),
    ("kv", "#56B4E9"),
    ("activations", "#E69F00"),
    ("other_use", "#999999"),
    ("head_room", "#DDDDDD"),
)
_OTHER_COLOUR = "#CC79A7"


def waterfall_table(report: FitReport) -> Table:
    """Return the memory of one card, term by term, with its basis and error."""
    from rich.table import Table

    card = report.request.card
    table = Table(title=f"Memory of each GPU at {report.context_tokens} tokens", title_justify="left")
    for name in ("term", "GiB", "basis", "±GiB", "what it is"):
        table.add_column(name, justify="right" if "GiB" in name else "left")
    for term in report.waterfall:
        style = "red" if term.key == "head_room" and term.size_bytes < 0 else None
        table.add_row(term.name, _gib(term.size_bytes), term.basis, _error(term), term.note, style=style)
    table.add_section()
    table.add_row("card", _gib(card.total_bytes), card.total_basis, f"{card.total_error_bytes / GIB:.2f}", card.source)
    return table


def verdict_text(report: FitReport) -> str:
    """Return the answer in a few lines, with rich markup."""
    verdict = report.verdict
    style = _STYLE[verdict.value]
    lines = [f"[bold {style}]{verdict.value}[/]: {_sentence(verdict.decided_by)}"]
    lines += [_sentence(reason) for reason in verdict.reasons if reason != verdict.decided_by]
    lines += [f"{_sentence(blocker.remedy)}" for blocker in report.blockers]
    if report.advisable_context_tokens:
        lines.append(f"Longest advisable context: {report.advisable_context_tokens:,} tokens.")
    if report.largest_context_tokens:
        lines.append(
            f"Longest context that vLLM would admit by this estimate (±{_gib(report.available_error_bytes)} GiB): "
            f"{report.largest_context_tokens:,} tokens; beyond the advisable one it may start and not fill."
        )
    if not report.blockers and verdict.value != "NO":
        lines.append(
            f"At {report.context_tokens:,} tokens: {report.num_blocks} blocks of {report.layout.block_tokens} tokens, "
            f"concurrency {report.concurrency:.2f}; vLLM will print {report.reported_tokens:,} tokens."
        )
    return "\n".join(lines)


def alternatives_table(advice: Sequence[TargetAdvice]) -> Table:
    """Return what reaches each context, best answers first."""
    from rich.table import Table

    table = Table(title="To reach a longer context (least loss of quality first)", title_justify="left")
    for name in ("context", "change", "bits lost per value", "verdict"):
        table.add_column(name)
    for target in advice:
        context = f"{target.target_tokens:,}"
        if target.verdict.value != "NO":
            table.add_row(context, "nothing", "0", _coloured(target.verdict.value))
        elif not target.alternatives:
            table.add_row(context, "none of the changes tried reaches it", "", _coloured("NO"))
        for index, one in enumerate(target.alternatives):
            cost = one.rank[0]
            shown = "another model" if cost >= 100 else f"{cost:g}"
            text = " + ".join(change.text for change in one.changes)
            table.add_row(context if index == 0 else "", text, shown, _coloured(one.verdict.value))
        table.add_section()
    return table


def advice_text(advice: Advice, profile: str) -> str:
    """Say whether the profile's numbers are safe, by how much they are not, and what would be chosen."""
    if advice.safe:
        return f"{profile}: its numbers are safe by this estimate."
    lines = [f"[bold yellow]{profile}: unsafe by {_gib(advice.unsafe_by_bytes)} GiB per GPU[/]"]
    lines += [_sentence(finding) for finding in advice.findings]
    for change in advice.changes:
        before = "none" if change.before is None else f"{change.before:g}"
        lines.append(f"serve.{change.setting}: {before} -> {change.after:g}: {_sentence(change.reason)}")
    if not advice.changes:
        lines.append("No utilization, batch or context makes this safe; see the changes below.")
    return "\n".join(lines)


def comparison_table(comparison: Comparison) -> Table:
    """Return predicted against reported figures of one boot."""
    from rich.table import Table

    table = Table(title="Predicted against reported", title_justify="left", caption=comparison_text(comparison))
    for name in ("figure", "predicted", "reported", "difference"):
        table.add_column(name, justify="left" if name == "figure" else "right")
    for figure in comparison.figures:
        decimals = 0 if figure.unit in ("blocks", "tokens") else 2
        table.add_row(
            f"{figure.name} ({figure.unit})",
            f"{figure.predicted:,.{decimals}f}",
            f"{figure.reported:,.{decimals}f}",
            f"{figure.reported - figure.predicted:+,.{decimals}f}",
        )
    return table


def comparison_text(comparison: Comparison) -> str:
    """Return one sentence about a boot."""
    if comparison.cause is not None:
        return f"{comparison.block_deviation:+d} blocks. Off: {comparison.cause}."
    return f"{comparison.block_deviation:+d} blocks: within one block, or nothing to compare."


def check_table(report: CheckReport) -> Table:
    """Return predicted against reported blocks, tokens and concurrency of recorded boots."""
    from rich.table import Table

    table = Table(title="Recorded boots: predicted / reported", title_justify="left")
    for name in ("boot", "marked", "blocks", "tokens", "concurrency", "other", "result"):
        table.add_column(name)
    for row in report.rows:
        others = [_pair(row, name) for name in ("needed GiB", "estimated max_model_len")]
        table.add_row(
            row.id,
            "exact" if row.marked_exact else "",
            _pair(row, "blocks"),
            _pair(row, "tokens"),
            _pair(row, "concurrency"),
            " ".join(text for text in others if text),
            f"[{_STATUS_STYLE[row.status]}]{row.status}[/]",
        )
    return table


@dataclass(frozen=True, slots=True)
class ModelRow:
    """One model on one card for `graft models`; `reason` stands in for a report where there is none."""

    model: str
    title: str
    report: FitReport | None
    is_refused: bool
    """Whether the plan says no; without a report and a refusal the model's size or geometry is not known."""
    reason: str

    @property
    def verdict(self) -> Literal["FITS", "LIKELY", "NO", "UNKNOWN"]:
        if self.report is not None:
            return self.report.verdict.value
        return "NO" if self.is_refused else "UNKNOWN"


def models_table(rows: Sequence[ModelRow], card: str) -> Table:
    """Return which models fit a card at what context, best first."""
    from rich.table import Table

    table = Table(title=f"Models on {card}", title_justify="left")
    for name in ("model", "verdict", "advisable context", "KV cache", "what decides"):
        table.add_column(name)
    for row in ranked_models(rows):
        if row.report is None:
            table.add_row(row.model, _coloured(row.verdict), "", "", row.reason)
            continue
        context = f"{row.report.advisable_context_tokens:,}" if row.report.advisable_context_tokens else "none"
        table.add_row(
            row.model,
            _coloured(row.verdict),
            context,
            row.report.request.settings.kv_cache_dtype,
            row.report.verdict.decided_by,
        )
    return table


def ranked_models(rows: Sequence[ModelRow]) -> tuple[ModelRow, ...]:
    """Order by verdict, then by advisable context, then by the size of the weights, largest first."""
    order = {"FITS": 3, "LIKELY": 2, "UNKNOWN": 1, "NO": 0}

    def merit(row: ModelRow) -> tuple[int, int, int]:
        if row.report is None:
            return order[row.verdict], 0, 0
        weights = row.report.request.weights.total_bytes
        return order[row.verdict], row.report.advisable_context_tokens, weights

    return tuple(sorted(rows, key=merit, reverse=True))


def waterfall_svg(report: FitReport, title: str) -> str:
    """Draw the waterfall: one bar per term, each starting where the one before ends, and the card's total as a line."""
    width, left, right, row, top = 960, 250, 170, 26, 64
    terms = report.waterfall
    total = report.request.card.total_bytes
    ends = [0]
    for term in terms:
        ends.append(ends[-1] + term.size_bytes)
    span = max(*ends, total)
    scale = (width - left - right) / span
    height = top + row * len(terms) + 34
    svg = ElementTree.Element(
        "svg",
        {
            "xmlns": "http://www.w3.org/2000/svg",
            "viewBox": f"0 0 {width} {height}",
            "width": str(width),
            "height": str(height),
            "font-family": "system-ui, sans-serif",
            "font-size": "13",
            "role": "img",
        },
    )
    ElementTree.SubElement(svg, "title").text = title
    ElementTree.SubElement(svg, "rect", {"width": "100%", "height": "100%", "fill": "#FFFFFF"})
    _text(svg, 16, 26, title, {"font-size": "17", "font-weight": "600"})
    summary = f"{report.verdict.value}: {report.verdict.decided_by}"
    _text(svg, 16, 47, summary, {"fill": "#444444", "font-size": "12"})
    _text(svg, width - right + 8, 47, "GiB per GPU", {"fill": "#444444", "font-size": "12"})
    for index, (term, start, end) in enumerate(zip(terms, ends, ends[1:], strict=False)):
        y = top + row * index
        low, high = min(start, end), max(start, end)
        bar = {
            "x": f"{left + low * scale:.1f}",
            "y": str(y + 4),
            "width": f"{max(1.0, (high - low) * scale):.1f}",
            "height": str(row - 8),
            "fill": _colour(term),
        }
        _text(svg, left - 10, y + 17, term.name, {"text-anchor": "end"})
        element = ElementTree.SubElement(svg, "rect", bar)
        ElementTree.SubElement(element, "title").text = f"{term.name}: {_gib(term.size_bytes)} GiB; {term.note}"
        label = f"{_gib(term.size_bytes)} ±{_error(term)} {term.basis}"
        _text(svg, width - right + 8, y + 17, label, {"fill": "#444444", "font-size": "12"})
    x = f"{left + total * scale:.1f}"
    line = {
        "x1": x,
        "x2": x,
        "y1": str(top - 4),
        "y2": str(height - 26),
        "stroke": "#D55E00",
        "stroke-dasharray": "4 3",
    }
    ElementTree.SubElement(svg, "line", line)
    _text(svg, float(x), height - 10, f"card {_gib(total)} GiB", {"text-anchor": "middle", "fill": "#D55E00"})
    ElementTree.indent(svg)
    return ElementTree.tostring(svg, encoding="unicode") + "\n"


def _text(parent: ElementTree.Element, x: float, y: float, content: str, attributes: dict[str, str]) -> None:
    element = ElementTree.SubElement(parent, "text", {"x": f"{x:g}", "y": f"{y:g}", **attributes})
    element.text = content


def _colour(term: Term) -> str:
    if term.key == "head_room" and term.size_bytes < 0:
        return "#D55E00"
    return next((colour for prefix, colour in _FAMILIES if term.key.startswith(prefix)), _OTHER_COLOUR)


def _pair(row: CheckRow, name: str) -> str:
    figure = row.figure(name)
    if figure is None or figure.reported is None:
        return ""
    predicted = "?" if figure.predicted is None else _number(figure.predicted)
    return f"{predicted} / {_number(figure.reported)}"


def _number(value: float | int) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.2f}"


def _coloured(value: str) -> str:
    return f"[{_STYLE[value]}]{value}[/]"


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / GIB:.2f}"


def _error(term: Term) -> str:
    return f"{term.error_bytes / GIB:.2f}"


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + ("" if text.endswith(".") else ".")
