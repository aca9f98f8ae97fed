"""One HTML page with plots that opens from a disk: no script, no font, no file beside it. Pure."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import groupby

from launcher.measure.verdict import Check

WIDTH, HEIGHT = 560, 240
LEFT, RIGHT, TOP, BOTTOM = 64, 12, 14, 30
COLOURS = ("#3b7dd8", "#d9822b", "#3a9d5d", "#b0479a", "#c0392b", "#7a6ff0")
"""Told apart with any kind of colour vision by their brightness too."""
MOST_TICKS = 5
SPACE = "\N{NO-BREAK SPACE}"
"""Between a number and its unit."""
Points = Sequence[tuple[float, float | None]]
Written = Callable[[float], str]


@dataclass(frozen=True)
class Mark:
    """Something that happened at a place of the horizontal axis."""

    x: float
    said: str
    is_trouble: bool = True


@dataclass(frozen=True)
class Chart:
    """Lines over one axis; a point without a value breaks its line."""

    title: str
    lines: Mapping[str, Points]
    y: Written = lambda value: f"{value:,g}"
    """How a value is written."""
    x: Written = lambda value: f"{value:g}"
    about: str = ""
    highest: float | None = None
    """Upper end of the vertical axis; None: what the values need."""
    marks: Sequence[Mark] = ()
    has_points: bool = False


@dataclass(frozen=True)
class Table:
    """Rows below a heading."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Page:
    """A whole report."""

    title: str
    facts: Mapping[str, str]
    passed: bool
    checks: Sequence[Check]
    charts: Sequence[Chart] = ()
    tables: Sequence[Table] = field(default_factory=tuple)


def html(page: Page) -> str:
    """Return the page's text."""
    verdict = "passed" if page.passed else "failed"
    facts = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in page.facts.items())
    charts = "".join(_figure(chart) for chart in page.charts if any(_values(chart)))
    tables = "".join(_table(table) for table in page.tables if table.rows)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(page.title)}</title><style>{STYLE}</style></head><body><main>"
        f'<h1>{escape(page.title)} <span class="{verdict}">{verdict}</span></h1><dl>{facts}</dl>'
        f"{_checks(page.checks)}<section>{charts}</section>{tables}</main></body></html>\n"
    )


def clock(value: float) -> str:
    """Write a time since the beginning as hours, minutes and seconds."""
    whole = round(value)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"


def gib(value: float) -> str:
    """Write a size that is given in GiB."""
    return f"{value:.3g}{SPACE}GiB"


def percent(value: float) -> str:
    """Write a share."""
    return f"{value * 100:.4g}{SPACE}%"


def milliseconds(value: float) -> str:
    """Write a time in seconds that is often short."""
    return f"{value * 1000:.3g}{SPACE}ms" if value < 1 else f"{value:.3g}{SPACE}s"


def ticks(low: float, high: float) -> list[float]:
    """Return round numbers from `low` to `high`, at most so many."""
    if high <= low:
        return [low]
    rough = (high - low) / MOST_TICKS
    power = 10 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(number * step, 12) for number in range(first, math.floor(high / step + 1e-9) + 1)]


def time_ticks(high: float) -> list[float]:
    """Return round times from 0 to `high` seconds."""
    steps = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400)
    step = next((one for one in steps if high / one <= MOST_TICKS + 1), 2 * 86400)
    return [float(at) for at in range(0, int(high) + 1, step)]


def _values(chart: Chart) -> Iterable[bool]:
    return (value is not None for points in chart.lines.values() for _, value in points)


def _figure(chart: Chart) -> str:
    legend = "".join(
        f'<span><i style="background:{COLOURS[number % len(COLOURS)]}"></i>{escape(name)}</span>'
        for number, name in enumerate(chart.lines)
    )
    legend += '<span class="events">dashed: events, see below</span>' if chart.marks else ""
    about = f"<p>{escape(chart.about)}</p>" if chart.about else ""
    return f"<figure><h2>{escape(chart.title)}</h2>{about}{svg(chart)}<figcaption>{legend}</figcaption></figure>"


def svg(chart: Chart) -> str:
    """Return a chart as SVG."""
    points = [point for line in chart.lines.values() for point in line]
    right = max((x for x, _ in points), default=1.0) or 1.0
    top = chart.highest or max((value for _, value in points if value is not None), default=1.0) * 1.08 or 1.0
    inner_w, inner_h = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def place(x: float, y: float) -> tuple[float, float]:
        return LEFT + x / right * inner_w, TOP + inner_h - min(y / top, 1.0) * inner_h

    parts = [*_axes(chart, right, top, place), *_marks(chart, place)]
    for number, (name, line) in enumerate(chart.lines.items()):
        parts += _line(chart, name, line, COLOURS[number % len(COLOURS)], place)
    label = escape(f"{chart.title}: {', '.join(chart.lines)}", quote=True)
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">{"".join(parts)}</svg>'


Place = Callable[[float, float], tuple[float, float]]


def _axes(chart: Chart, right: float, top: float, place: Place) -> Iterable[str]:
    for value in ticks(0, top):
        _, y = place(0, value)
        yield f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{escape(chart.y(value))}</text>'
    for value in time_ticks(right) if chart.x is clock else ticks(0, right):
        x, y = place(value, 0)
        yield f'<text x="{x:.1f}" y="{y + 18:.1f}" text-anchor="middle">{escape(chart.x(value))}</text>'


def _marks(chart: Chart, place: Place) -> Iterable[str]:
    for mark in chart.marks:
        x, bottom = place(mark.x, 0)
        said = escape(f"{chart.x(mark.x)}: {mark.said}")
        look = "mark trouble" if mark.is_trouble else "mark"
        place_of = f'x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{bottom:.1f}"'
        yield f'<line class="{look}" {place_of}><title>{said}</title></line>'


def _line(chart: Chart, name: str, points: Points, colour: str, place: Place) -> Iterable[str]:
    for is_there, run in groupby(points, key=lambda point: point[1] is not None):
        if not is_there:
            continue
        placed = [(*place(x, value), x, value) for x, value in run if value is not None]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y, _, _ in placed)
        yield f'<polyline points="{path}" stroke="{colour}"/>'
        for x, y, at, value in placed:
            said = escape(f"{name}, {chart.x(at)}: {chart.y(value)}")
            # Alone, a point has no line to be seen by; among others it is there to be pointed at.
            is_seen = chart.has_points or len(placed) == 1
            look = f'r="3" fill="{colour}"' if is_seen else 'r="5" class="hover"'
            yield f'<circle cx="{x:.1f}" cy="{y:.1f}" {look}><title>{said}</title></circle>'


def _checks(checks: Sequence[Check]) -> str:
    words = {True: "ok", False: "failed", None: "not asked"}
    classes = {True: "passed", False: "failed", None: "skipped"}
    rows = "".join(
        f'<tr><td>{escape(check.name)}</td><td class="{classes[check.passed]}">{words[check.passed]}</td>'
        f"<td>{escape(check.said)}</td></tr>"
        for check in checks
    )
    return f'<table class="checks"><tbody>{rows}</tbody></table>'


def _table(table: Table) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in table.columns)
    rows = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in table.rows)
    return f"<h2>{escape(table.title)}</h2><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


STYLE = """
:root{color-scheme:light dark;--text:#1d2530;--soft:#5d6b7c;--back:#f6f7f9;--card:#fff;--line:#dfe4ea}
@media(prefers-color-scheme:dark){:root{--text:#e4e9ef;--soft:#97a4b4;--back:#12161b;--card:#1b2128;--line:#2d3640}}
*{box-sizing:border-box}
body{margin:0;background:var(--back);color:var(--text);font:15px/1.5 system-ui,sans-serif}
main{max-width:1180px;margin:0 auto;padding:28px 20px 60px}
h1{font-size:24px;margin:0 0 12px}h2{font-size:15px;margin:0 0 6px}
h1 span{font-size:14px;padding:3px 10px;border-radius:12px;vertical-align:middle;border:1px solid currentColor}
dl{display:grid;grid-template-columns:max-content 1fr;gap:2px 18px;margin:0 0 20px}dt{color:var(--soft)}dd{margin:0}
section{display:grid;grid-template-columns:repeat(auto-fit,minmax(420px,1fr));gap:16px;margin:20px 0}
figure{margin:0;background:var(--card);border:1px solid var(--line);border-radius:8px;padding:14px}
figure p{margin:0 0 6px;color:var(--soft);font-size:13px}
figcaption{display:flex;flex-wrap:wrap;gap:4px 16px;font-size:13px;color:var(--soft);padding-left:8px}
figcaption i{display:inline-block;width:18px;height:3px;margin-right:6px;vertical-align:middle}
svg{width:100%;height:auto;display:block}svg text{font-size:11px;fill:var(--soft)}
polyline{fill:none;stroke-width:1.8;stroke-linejoin:round}
.grid{stroke:var(--line)}.mark{stroke:var(--soft);stroke-width:1.2;stroke-dasharray:3 4}
.trouble{stroke:#c0392b;stroke-width:1.6}
.hover{fill:transparent}.hover:hover{fill:var(--soft)}
table{border-collapse:collapse;width:100%;background:var(--card);margin:0 0 24px;font-size:14px}
th,td{text-align:left;padding:6px 12px;border:1px solid var(--line);vertical-align:top}
th{color:var(--soft);font-weight:600}
.checks td:first-child{white-space:nowrap;font-weight:600}.checks td:nth-child(2){white-space:nowrap}
.passed{color:#2e8b57}.failed{color:#d0392b}.skipped{color:var(--soft)}
"""
