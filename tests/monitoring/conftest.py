"""Debian's Prometheus, and exporters that show what is in tests/data/metrics."""

import shutil
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.compose.conftest import missing

METRICS = Path(__file__).parent.parent / "data" / "metrics"
JOBS = tuple(sorted(path.stem for path in METRICS.glob("*.txt")))
"""One file for each job that is scraped."""


def program(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        missing(f"no {name} on PATH; .ci/monitoring brings Debian's")
    return found


@pytest.fixture(scope="session")
def promtool() -> str:
    return program("promtool")


@pytest.fixture(scope="session")
def prometheus() -> str:
    return program("prometheus")


def names_in(text: str) -> frozenset[str]:
    """Return the names of all samples of a /metrics page."""
    return frozenset(sample.name for family in text_string_to_metric_families(text) for sample in family.samples)


def grown(text: str, times: float) -> str:
    """Return a /metrics page later on: its counters and histograms are so many times as large."""
    lines = []
    for family in text_string_to_metric_families(text):
        grows = family.type in ("counter", "histogram") or family.name.endswith("_total")
        lines.append(f"# TYPE {family.name}{'_total' if family.type == 'counter' else ''} {family.type}")
        for sample in family.samples:
            labels = ",".join(f'{key}="{value}"' for key, value in sample.labels.items())
            lines.append(f"{sample.name}{{{labels}}} {sample.value * (times if grows else 1)}")
    return "\n".join(lines) + "\n"


@contextmanager
def exporter(text: str) -> Iterator[str]:
    """Serve a page whose counters grow with each look; yield its host and port."""
    looks = 0

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            nonlocal looks
            looks += 1
            body = grown(text, looks).encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
