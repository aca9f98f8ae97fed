"""What `graft verify` shows people: rich renderables made from its report. Prints nothing."""

from collections.abc import Sequence

from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from launcher.measure.ladder import Ladder
from launcher.measure.replies import Failure
from launcher.measure.verdict import Check, Skipped, percent
from launcher.measure.verify import VerifyReport

SHOWN_FAILURES = 5
_LONGEST_RAW_CHARS = 600
_MARK = {True: "[green]pass[/]", False: "[bold red]FAIL[/]", None: "[yellow]skip[/]"}


def report_view(report: VerifyReport) -> Group:
    """Return the checks, what stands behind them, and the first failures with their raw text."""
    parts: list[Table | Text] = [_checks_table(report.checks)]
    if not isinstance(report.tools, Skipped) and len(report.tools.kinds) > 1:
        parts.append(_kinds_table(report))
    if not isinstance(report.needles, Skipped):
        parts.append(_ladder_table(report.needles))
    if report.failures:
        parts.append(_failures_text(report.failures))
    word = "[bold green]PASSED[/]" if report.passed else "[bold red]FAILED[/]"
    about = f"{report.model} at {report.url}, {report.elapsed_s:.1f} s, --seed {report.settings.seed}"
    parts.append(Text.from_markup(f"{word} {escape(about)}"))
    return Group(*parts)


def _checks_table(checks: Sequence[Check]) -> Table:
    table = Table("", "check", "found", box=None, pad_edge=False, show_header=False)
    for check in checks:
        table.add_row(_MARK[check.passed], check.name, escape(check.said))
    return table


def _kinds_table(report: VerifyReport) -> Table:
    assert not isinstance(report.tools, Skipped)
    table = Table("replies", "right", "of", "share", box=None, pad_edge=False)
    for name, share in {**report.tools.kinds, **report.tools.hows}.items():
        style = None if share.right == share.total else "red"
        table.add_row(name, str(share.right), str(share.total), percent(share.rate), style=style)
    return table


def _ladder_table(ladder: Ladder) -> Table:
    depths = sorted({cell.depth for cell in ladder.cells})
    table = Table("needles, tokens", *(f"depth {depth:.0%}" for depth in depths), box=None, pad_edge=False)
    for step in sorted({cell.step_tokens for cell in ladder.cells}):
        row = {cell.depth: cell for cell in ladder.cells if cell.step_tokens == step}
        marks = ["" if depth not in row else "found" if row[depth].found else "[red]missed[/]" for depth in depths]
        table.add_row(f"{step:,}", *marks)
    return table


def _failures_text(failures: Sequence[Failure]) -> Text:
    lines = []
    for failed in failures[:SHOWN_FAILURES]:
        lines.append(f"[red]{escape(failed.kind)}, {failed.how}[/]: {escape('; '.join(failed.faults))}")
        lines.append(f"  [dim]asked[/] {escape(_short(failed.asked))}")
        lines.append(f"  [dim]wrote[/] {escape(_short(failed.raw))}")
    if len(failures) > SHOWN_FAILURES:
        lines.append(f"and {len(failures) - SHOWN_FAILURES} more; --json and --out have them all")
    return Text.from_markup("\n".join(lines))


def _short(text: str) -> str:
    shown = repr(text)[1:-1]
    return shown if len(shown) <= _LONGEST_RAW_CHARS else f"{shown[:_LONGEST_RAW_CHARS]}…"
