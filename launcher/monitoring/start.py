"""Start Prometheus and Grafana beside a service that runs by Docker Compose."""

import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.errors import Refused, StartFailed, UsageError
from launcher.images.pins import ServicePin, load_pins
from launcher.monitoring import files
from launcher.monitoring.services import PROFILE, has_gpu_exporter
from launcher.plan import Plan
from launcher.service_files import ensure_password
from launcher.state import ServiceState

if TYPE_CHECKING:
    from launcher.bring import Reporter

READY_TIMEOUT_S = 90.0
POLL_INTERVAL_S = 0.5


@dataclass(frozen=True)
class Started:
    """Where to look."""

    grafana_url: str
    prometheus_url: str
    password_file: Path
    """What `admin` logs in to Grafana with."""


def refuse_host(runtime: str, state: ServiceState) -> None:
    """Stop where there is no Compose project to be beside.

    Raises:
        UsageError: the service is a local process.
    """
    if runtime == "host":
        raise UsageError(
            "MONITORING: Prometheus and Grafana run in Docker, and this service runs without it; "
            f"{state.root / files.PROMETHEUS_FILE} is for a Prometheus of your own (docs/monitoring.md)"
        )


def refuse_taken_ports(plan: Plan) -> None:
    """Stop where somebody else listens on a port.

    Raises:
        Refused: naming it and the profile's key.
    """
    ports = {"grafana_port": plan.monitoring.grafana_port, "prometheus_port": plan.monitoring.prometheus_port}
    for key, port in ports.items():
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                raise Refused(f"127.0.0.1:{port} is taken; write another port in the profile's monitoring.{key}")


def ensure_digests(plan: Plan, *, unpinned: bool) -> tuple[ServicePin, ...]:
    """Return the pins of the images that will run, their digests known.

    Raises:
        Refused: a digest is not known and the registry does not tell it.
    """
    from launcher.images.base import ensure_digest

    pins = load_pins().services
    names = ("prometheus", "grafana", *(("gpu-exporter",) if has_gpu_exporter(plan) else ()))
    return tuple(ensure_digest(pins[name], unpinned=unpinned) for name in names)


def start(plan: Plan, state: ServiceState, report: "Reporter", *, unpinned: bool) -> Started:
    """Pull what is missing, start the services and wait until both answer.

    Raises:
        Refused: a port is taken, or the digest of an image cannot be known.
        StartFailed: Docker refused, or a service does not answer.
    """
    from launcher.images import build
    from launcher.runtime import compose

    report.phase("monitoring")
    started = Started(
        grafana_url=f"http://127.0.0.1:{plan.monitoring.grafana_port}",
        prometheus_url=f"http://127.0.0.1:{plan.monitoring.prometheus_port}",
        password_file=ensure_password(state),
    )
    pins = ensure_digests(plan, unpinned=unpinned)
    names = tuple(pin.name for pin in pins)
    if not compose.runs_any(state.compose_file, PROFILE, names):
        refuse_taken_ports(plan)
    _write_references(state.compose_file, pins)
    for pin in pins:
        build.pull(pin.reference, lambda at: report.progress(at.done_bytes, at.total_bytes, "bytes"))
    compose.must(compose.up_services(state.compose_file, PROFILE, names), report.line)
    for url in (f"{started.prometheus_url}/-/ready", f"{started.grafana_url}/api/health"):
        _wait_for(url, state.compose_file, names)
    return started


def _write_references(file: Path, pins: tuple[ServicePin, ...]) -> None:
    """Put digests that became known after the file was written in the place of the tags."""
    text = file.read_text(encoding="utf-8")
    for pin in pins:
        text = text.replace(f"image: {pin.base}\n", f"image: {pin.reference}\n")
    partial = file.with_name(f".{file.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.chmod(0o644)
    partial.replace(file)


def _wait_for(url: str, file: Path, names: tuple[str, ...]) -> None:
    import httpx

    from launcher.runtime import compose

    deadline_s = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < deadline_s:
        try:
            if httpx.get(url, timeout=2, trust_env=False).is_success:
                return
        except httpx.TransportError:
            pass
        time.sleep(POLL_INTERVAL_S)
    said = compose.run(compose.service_logs(file, PROFILE, names)).lines
    raise StartFailed("\n".join((f"{url}: no answer after {READY_TIMEOUT_S:.0f} s. The last lines:", *said[-20:])))
