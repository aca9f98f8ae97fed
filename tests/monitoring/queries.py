"""Every query of the dashboards and alerts, and the metrics that it asks for."""

import re
from collections.abc import Iterator
from typing import Any

import yaml

from launcher.monitoring import files

_QUOTED = re.compile(r'"[^"]*"')
_GROUPED = re.compile(r"\b(?:by|on|group_left|group_right|without|ignoring)\s*\([^)]*\)")
_METRIC = re.compile(r"\b(?:vllm:[a-z_]+|(?:graft|haproxy|nvidia_smi|process|http)_[a-z_]+|up)\b")


def alert_rules() -> list[dict[str, Any]]:
    document = yaml.safe_load((files.SHIPPED / "alerts.yaml").read_text(encoding="utf-8"))
    return [rule for group in document["groups"] for rule in group["rules"]]


def panel_queries() -> Iterator[tuple[str, str]]:
    """Yield where a query stands, and the query as Grafana sends it."""
    for name, page in files.shipped_dashboards().items():
        for row in page.rows:
            for panel in row.panels:
                for expression in panel.queries.values():
                    yield f"{name}: {panel.title}", expression.replace("$__rate_interval", "1m")


def all_queries() -> list[tuple[str, str]]:
    return [*panel_queries(), *((rule["alert"], rule["expr"]) for rule in alert_rules())]


def metrics(query: str) -> frozenset[str]:
    """Return the names of the series that a query reads."""
    return frozenset(_METRIC.findall(_GROUPED.sub("", re.sub(r"{[^}]*}", "", _QUOTED.sub("", query)))))


def all_metrics(prefix: str = "") -> frozenset[str]:
    return frozenset(name for _, query in all_queries() for name in metrics(query) if name.startswith(prefix))
