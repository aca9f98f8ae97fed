"""What load tests show people: rich renderables made from results. Prints nothing."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from launcher.measure.compare import Ratio
from launcher.measure.load_verdict import seconds, tokens_a_second
from launcher.measure.soak_record import Record

_MARK = {True: "[green]ok[/]", False: "[bold red]failed[/]", None: "[dim]not asked[/]"}


def soak_line(record: Record) -> str:
    """Return where a soak stands, for one line beside its bar."""
    parts = [f"{record.replies:,} replies", f"{record.errors.total():,} errors"]
    if (rate := tokens_a_second(record)) is not None:
        parts.append(f"{rate:.1f} tokens/s")
    if (first := record.quantile("first_token", 0.95)) is not None:
        parts.append(f"first token p95 {seconds(first)}")
    if record.last_sample is not None and record.last_sample.kv_usage is not None:
        parts.append(f"KV {record.last_sample.kv_usage * 100:.0f} %")
    if record.down_since_s is not None:
        parts.append("NO ANSWER")
    return ", ".join(parts)


def document_view(document: Mapping[str, Any]) -> Group:
    """Return the verdict of a report."""
    table = Table(title=f"{document['kind']} of {document['settings']['model']}", title_justify="left")
    for column in ("check", "", "what was measured"):
        table.add_column(column, overflow="fold")
    for check in document["checks"]:
        table.add_row(check["name"], _MARK[check["passed"]], escape(check["said"]))
    words = "[bold green]passed[/]" if document["passed"] else "[bold red]failed[/]"
    return Group(table, Text.from_markup(f"{document['kind']}: {words}"))


def comparison_view(ratios: Sequence[Ratio], unlike: Sequence[str]) -> Group:
    """Return two reports beside each other."""
    table = Table(title="B as a ratio of A", title_justify="left")
    table.add_column("figure")
    for column in ("A", "B", "B / A"):
        table.add_column(column, justify="right")
    table.add_column("")
    words = {True: "[green]better[/]", False: "[red]worse[/]", None: ""}
    for one in ratios:
        if one.first is None and one.second is None:
            continue
        ratio = "-" if one.ratio is None else f"{one.ratio:.3f}"
        table.add_row(one.name, _number(one.first), _number(one.second), ratio, words[one.is_better])
    warning = [Text("Not alike: " + "; ".join(unlike), style="yellow")] if unlike else []
    return Group(table, *warning)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.4g}"
