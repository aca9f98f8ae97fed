"""The picture of a needle ladder: depth over length, one field for each question. Pure."""

import textwrap
from dataclasses import dataclass

import jinja2

from launcher.measure.ladder import Cell, Ladder

FOUND, MISSED, UNASKED = "#009E73", "#D55E00", "#DDDDDD"
"""Of the palette of Okabe and Ito, which colour-blind readers can tell apart; the fields also carry a word."""
_WIDTH, _HEIGHT, _LEFT = 92, 34, 80
_LINE, _LETTER = 18, 7
"""Of the summary's text."""

_TEMPLATE = jinja2.Environment(
    autoescape=True, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
).from_string(
    """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {{ width }} {{ height }}" width="{{ width }}" \
height="{{ height }}" font-family="system-ui, sans-serif" font-size="12" role="img">
  <title>{{ title }}</title>
  <rect width="100%" height="100%" fill="#FFFFFF"/>
  <text x="16" y="24" font-size="16" font-weight="600">{{ title }}</text>
  {% for line in summary %}
  <text x="16" y="{{ line.y }}" fill="#444444">{{ line.text }}</text>
  {% endfor %}
  <text x="{{ left + 2 }}" y="{{ top - 26 }}" fill="#444444">tokens of the prompt</text>
  <text x="16" y="{{ top - 8 }}" fill="#444444">depth</text>
  {% for label in columns %}
  <text x="{{ label.x }}" y="{{ top - 8 }}" text-anchor="middle">{{ label.text }}</text>
  {% endfor %}
  {% for label in rows %}
  <text x="{{ left - 10 }}" y="{{ label.y }}" text-anchor="end">{{ label.text }}</text>
  {% endfor %}
  {% for field in fields %}
  <g><title>{{ field.title }}</title>
    <rect x="{{ field.x }}" y="{{ field.y }}" width="{{ field_width }}" height="{{ field_height }}" rx="3" \
fill="{{ field.colour }}"/>
    <text x="{{ field.x + field_width // 2 }}" y="{{ field.y + 19 }}" text-anchor="middle" fill="{{ field.ink }}">\
{{ field.word }}</text>
  </g>
  {% endfor %}
</svg>
"""
)


@dataclass(frozen=True)
class _Label:
    text: str
    x: int = 0
    y: int = 0


@dataclass(frozen=True)
class _Field:
    x: int
    y: int
    colour: str
    ink: str
    word: str
    title: str


def heatmap_svg(ladder: Ladder, title: str) -> str:
    """Draw a ladder: lengths from left to right, depths downwards."""
    lengths = sorted({cell.step_tokens for cell in ladder.cells})
    depths = sorted({cell.depth for cell in ladder.cells})
    cells = {(cell.step_tokens, cell.depth): cell for cell in ladder.cells}
    width = max(640, _LEFT + _WIDTH * len(lengths) + 16)
    lines = textwrap.wrap(summary(ladder), (width - 32) // _LETTER)
    top = 76 + _LINE * len(lines)
    fields = [
        _field(column, top + row * _HEIGHT, cells.get((length, depth)))
        for column, length in enumerate(lengths)
        for row, depth in enumerate(depths)
    ]
    columns = [_Label(f"{length:,}", x=_LEFT + column * _WIDTH + _WIDTH // 2) for column, length in enumerate(lengths)]
    rows = [_Label(f"{depth:.0%}", y=top + row * _HEIGHT + 21) for row, depth in enumerate(depths)]
    return _TEMPLATE.render(
        title=title,
        summary=[_Label(line, y=46 + number * _LINE) for number, line in enumerate(lines)],
        width=width,
        height=top + _HEIGHT * len(depths) + 16,
        left=_LEFT,
        top=top,
        columns=columns,
        rows=rows,
        fields=fields,
        field_width=_WIDTH - 4,
        field_height=_HEIGHT - 4,
    )


def summary(ladder: Ladder) -> str:
    """Return what the ladder shows in one sentence."""
    planned = f"planned context {ladder.planned_tokens:,} tokens"
    if ladder.recall_tokens is not None and ladder.recall_tokens < ladder.planned_tokens:
        planned += f", of which the model itself recalls {ladder.recall_tokens:,} reliably"
    if ladder.climbed:
        return f"Every number came back up to prompts of {ladder.holds_tokens:,} tokens; {planned}."
    missed = next(cell for cell in ladder.cells if not cell.found)
    holds = f"It holds up to {ladder.holds_tokens:,} tokens" if ladder.holds_tokens else "No length holds"
    return f"{holds}; first miss at {missed.prompt_tokens:,} tokens, depth {missed.depth:.0%}; {planned}."


def _field(column: int, row_y: int, cell: Cell | None) -> _Field:
    x, y = _LEFT + column * _WIDTH + 2, row_y + 2
    if cell is None:
        return _Field(x, y, UNASKED, "#444444", "not asked", "not asked")
    if cell.found:
        return _Field(x, y, FOUND, "#FFFFFF", "found", f"{cell.prompt_tokens:,} tokens, depth {cell.depth:.0%}: found")
    return _Field(
        x, y, MISSED, "#FFFFFF", "missed", f"{cell.prompt_tokens:,} tokens, depth {cell.depth:.0%}: {cell.fault}"
    )
