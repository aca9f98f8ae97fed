"""The files of Prometheus and Grafana, by their path in the service's folder. Pure but for reading the shipped ones."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import yaml

from launcher.monitoring import dashboards
from launcher.state import CHECKOUT

SHIPPED = CHECKOUT / "compose" / "monitoring"
FOLDER = "monitoring"
PROMETHEUS_FILE = f"{FOLDER}/prometheus/prometheus.yaml"
ALERTS_FILE = f"{FOLDER}/prometheus/alerts.yaml"
DATASOURCES_FILE = f"{FOLDER}/grafana/provisioning/datasources/prometheus.yaml"
PROVIDERS_FILE = f"{FOLDER}/grafana/provisioning/dashboards/graft.yaml"
DASHBOARDS_DIR = f"{FOLDER}/grafana/dashboards"
DASHBOARDS_IN_CONTAINER = "/etc/grafana/dashboards"
PROMETHEUS_URL = "http://prometheus:9090"
SCRAPE_INTERVAL = "5s"
"""Also what Grafana takes for the shortest useful step of a rate."""


@dataclass(frozen=True)
class Job:
    """One kind of thing that is scraped; the job's name is what alerts and dashboards go by."""

    name: str
    target: str
    """Host and port, as Prometheus reaches them."""


def files(profile: str, jobs: tuple[Job, ...]) -> dict[str, str]:
    """Return all files for the jobs of one service."""
    return {
        PROMETHEUS_FILE: _yaml(prometheus(profile, jobs)),
        ALERTS_FILE: (SHIPPED / "alerts.yaml").read_text(encoding="utf-8"),
        DATASOURCES_FILE: _yaml(DATASOURCES),
        PROVIDERS_FILE: _yaml(PROVIDERS),
        **_pages(),
    }


@cache
def _pages() -> dict[str, str]:
    return {
        f"{DASHBOARDS_DIR}/{name}.json": json.dumps(dashboards.grafana(name, page), indent=1) + "\n"
        for name, page in shipped_dashboards().items()
    }


def digest(texts: Mapping[str, str], folder: str) -> str:
    """Return 12 hex digits that change with any file of a folder: containers that read them are then made anew."""
    parts = [f"{path}\n{text}" for path, text in sorted(texts.items()) if path.startswith(f"{FOLDER}/{folder}/")]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


@cache
def shipped_dashboards() -> dict[str, dashboards.Dashboard]:
    """Return the dashboards that come with the launcher."""
    return dashboards.read(yaml.safe_load((SHIPPED / "dashboards.yaml").read_text(encoding="utf-8")))


def prometheus(profile: str, jobs: tuple[Job, ...]) -> dict[str, Any]:
    """Return Prometheus' configuration."""
    return {
        "global": {
            "scrape_interval": SCRAPE_INTERVAL,
            "scrape_timeout": "4s",
            "evaluation_interval": "10s",
            "external_labels": {"profile": profile},
        },
        "rule_files": ["alerts.yaml"],
        "scrape_configs": [{"job_name": job.name, "static_configs": [{"targets": [job.target]}]} for job in jobs],
    }


DATASOURCES = {
    "apiVersion": 1,
    "datasources": [
        {
            "name": "Prometheus",
            "uid": dashboards.DATASOURCE["uid"],
            "type": "prometheus",
            "access": "proxy",
            "url": PROMETHEUS_URL,
            "isDefault": True,
            "editable": False,
            "jsonData": {"httpMethod": "POST", "timeInterval": SCRAPE_INTERVAL, "manageAlerts": True},
        }
    ],
}
PROVIDERS = {
    "apiVersion": 1,
    "providers": [
        {
            "name": "graft",
            "folder": "Graft",
            "type": "file",
            "allowUiUpdates": False,
            "disableDeletion": True,
            "options": {"path": DASHBOARDS_IN_CONTAINER},
        }
    ],
}


def _yaml(document: Mapping[str, Any]) -> str:
    heading = "# Rendered by graft: change compose/monitoring or the profile, this file is written again.\n"
    return heading + yaml.safe_dump(dict(document), sort_keys=False, width=120)
