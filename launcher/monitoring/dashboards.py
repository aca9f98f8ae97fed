"""Grafana's dashboards, written out from their short form in compose/monitoring/dashboards.yaml. Pure."""

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

DATASOURCE = {"type": "prometheus", "uid": "prometheus"}
SCHEMA_VERSION = 39
"""Grafana's version of this format; a newer Grafana takes it and migrates it in memory."""
WIDTH = 24
SIZES: Mapping[str, tuple[int, int]] = {"stat": (4, 4), "timeseries": (12, 8), "table": (24, 8)}


class Part(BaseModel):
    """Base of the short form."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Panel(Part):
    """One picture: what it shows, by the legend of each query."""

    title: str
    kind: Literal["stat", "timeseries", "table"] = "timeseries"
    about: str = ""
    unit: str = "short"
    decimals: int | None = None
    max: float | None = None
    warn: float | None = None
    critical: float | None = None
    size: tuple[int, int] | None = None
    """Width of 24 and height, in Grafana's grid."""
    columns: tuple[str, ...] = ()
    """Labels that a table shows, in this order."""
    queries: dict[str, str] = Field(min_length=1)

    @property
    def grid(self) -> tuple[int, int]:
        return self.size or SIZES[self.kind]


class Row(Part):
    """Panels below one heading."""

    title: str
    panels: tuple[Panel, ...]


class Dashboard(Part):
    """One page."""

    title: str
    rows: tuple[Row, ...]


def read(document: Mapping[str, Any]) -> dict[str, Dashboard]:
    """Return the dashboards of the short form by their names."""
    return {name: Dashboard.model_validate(page) for name, page in document.items()}


def grafana(name: str, dashboard: Dashboard) -> dict[str, Any]:
    """Return a dashboard as Grafana's file provisioning reads it."""
    return {
        "uid": f"graft-{name}",
        "title": dashboard.title,
        "tags": ["graft"],
        "schemaVersion": SCHEMA_VERSION,
        "editable": False,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "templating": {"list": []},
        "annotations": {"list": []},
        "links": [
            {"type": "dashboards", "title": "Graft", "tags": ["graft"], "asDropdown": False, "keepTime": True},
        ],
        "panels": list(_panels(dashboard)),
    }


def _panels(dashboard: Dashboard) -> Iterator[dict[str, Any]]:
    """Lay the panels out from left to right, each row of them below its heading."""
    number = y = 0
    for row in dashboard.rows:
        number += 1
        heading = {"id": number, "type": "row", "title": row.title, "collapsed": False, "panels": []}
        yield {**heading, "gridPos": {"x": 0, "y": y, "w": WIDTH, "h": 1}}
        y += 1
        x = height = 0
        for panel in row.panels:
            w, h = panel.grid
            if x + w > WIDTH:
                x, y, height = 0, y + height, 0
            number += 1
            yield {**_panel(number, panel), "gridPos": {"x": x, "y": y, "w": w, "h": h}}
            x, height = x + w, max(height, h)
        y += height


def _panel(number: int, panel: Panel) -> dict[str, Any]:
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.about,
        "datasource": DATASOURCE,
        "targets": [
            _target(chr(ord("A") + index), legend, expression, panel)
            for index, (legend, expression) in enumerate(panel.queries.items())
        ],
        "fieldConfig": {"defaults": _defaults(panel), "overrides": []},
        "options": _OPTIONS[panel.kind],
        "transformations": _columns(panel.columns) if panel.kind == "table" else [],
    }


def _target(letter: str, legend: str, expression: str, panel: Panel) -> dict[str, Any]:
    is_series = panel.kind == "timeseries"
    return {
        "refId": letter,
        "datasource": DATASOURCE,
        "expr": expression,
        "legendFormat": legend or panel.title,
        "range": is_series,
        "instant": not is_series,
        "format": "table" if panel.kind == "table" else "time_series",
    }


def _defaults(panel: Panel) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [{"color": "green", "value": None}]
    steps += [{"color": "orange", "value": panel.warn}] if panel.warn is not None else []
    steps += [{"color": "red", "value": panel.critical}] if panel.critical is not None else []
    defaults: dict[str, Any] = {"unit": panel.unit, "thresholds": {"mode": "absolute", "steps": steps}}
    if panel.kind == "timeseries":
        defaults |= {"min": 0, "custom": {"fillOpacity": 8, "lineWidth": 2, "showPoints": "never"}}
    if panel.max is not None:
        defaults["max"] = panel.max
    if panel.decimals is not None:
        defaults["decimals"] = panel.decimals
    return defaults


def _columns(columns: tuple[str, ...]) -> list[dict[str, Any]]:
    """Show these labels and no value: what is always 1 says nothing."""
    order = {name: index for index, name in enumerate(columns)}
    return [
        {"id": "filterFieldsByName", "options": {"include": {"names": list(columns)}}},
        {"id": "organize", "options": {"indexByName": order, "excludeByName": {}, "renameByName": {}}},
    ]


_OPTIONS: Mapping[str, dict[str, Any]] = {
    "stat": {
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "colorMode": "value",
        "graphMode": "none",
        "textMode": "value",
    },
    "timeseries": {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
        "tooltip": {"mode": "multi", "sort": "desc"},
    },
    "table": {"showHeader": True, "cellHeight": "sm"},
}
