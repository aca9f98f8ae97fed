"""Prometheus and what stands for Grafana, started by the launcher in a real Docker Engine, as hardened as they are.

Prometheus is Debian's in an image of its own; Debian has no Grafana, so a web server takes its place, which does not
start unless it can read the pages and the password and write its data.
"""

import json
import stat
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from launcher.errors import Refused
from launcher.host.facts import Docker
from launcher.images import registry
from launcher.images.pins import load_pins
from launcher.images.registry import RegistryError
from launcher.monitoring import start as monitoring
from launcher.monitoring.services import PASSWORD
from launcher.plan import Plan
from launcher.planner import Inputs, make
from launcher.prepare import models_dir
from launcher.profile import Monitoring, load_model, load_profile
from launcher.runtime import compose
from launcher.service_files import service_files, write
from launcher.state import ServiceState
from tests.compose.conftest import free_port, missing
from tests.compose.standin import image_of, libraries
from tests.monitoring.conftest import program
from tests.monitoring.queries import alert_rules

pytestmark = [pytest.mark.compose, pytest.mark.timeout(300)]
LABEL = "graft.stand-in"
GRAFANA = """\
set -e
test -r /run/secrets/grafana_admin_password
test -r /etc/grafana/dashboards/engine.json
test -r /etc/grafana/provisioning/datasources/prometheus.yaml
touch /var/lib/grafana/database
if touch /etc/anything 2>/dev/null; then exit 1; fi
mkdir -p /tmp/www/api
echo ok > /tmp/www/api/health
exec httpd -f -p 3000 -h /tmp/www
"""
APPLETS = ("sh", "httpd", "mkdir", "touch", "test", "wget")


class Silent:
    """Reports nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments, **named: None


@pytest.fixture(scope="module")
def images(engine: Docker) -> Iterator[None]:
    """Give stand-ins the names of the pinned images, which came from no registry."""
    pins = load_pins(lock=Path("no-digests-recorded.json")).services
    for name in ("prometheus", "grafana"):
        if subprocess.run(["docker", "image", "inspect", pins[name].base], capture_output=True).returncode == 0:
            missing(f"{pins[name].base} is here itself; these tests would take its name for their stand-in")
    prometheus, promtool, busybox = program("prometheus"), program("promtool"), program("busybox")
    path = "ENV PATH=/bin"
    programs: dict[str, bytes | str] = {
        f"bin/{name}": Path(at).read_bytes() for name, at in (("prometheus", prometheus), ("promtool", promtool))
    }
    entry = 'ENTRYPOINT ["/bin/prometheus"]'
    image_of(pins["prometheus"].base, {**libraries(prometheus), **programs}, {"prometheus": 65534}, (path, entry))
    links: dict[str, bytes | str] = {f"bin/{name}": "busybox" for name in APPLETS}
    files = {"bin/busybox": Path(busybox).read_bytes(), "run.sh": GRAFANA.encode(), **links}
    folders = {"var": 0, "var/lib": 0, "var/lib/grafana": 472}
    image_of(pins["grafana"].base, files, folders, (path, 'ENTRYPOINT ["/bin/sh", "/run.sh"]'))
    yield
    argv = ["docker", "image", "rm", "--force", pins["prometheus"].base, pins["grafana"].base]
    subprocess.run(argv, capture_output=True, check=True)


@dataclass(frozen=True)
class Deployed:
    plan: Plan
    state: ServiceState


@pytest.fixture(scope="module")
def deployed(images: None, engine: Docker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    profile = load_profile("cpu")
    ports = Monitoring(grafana_port=free_port(), prometheus_port=free_port())
    profile = profile.model_copy(update={"name": "test-monitoring", "monitoring": ports})
    pin = load_pins(lock=Path("no-digests-recorded.json")).of(profile.vllm)
    plan = make(Inputs(profile, load_model(profile.model), pin, runtime="docker")).plan
    state = ServiceState(tmp_path_factory.mktemp("state") / plan.profile)
    write(state.root, service_files(plan, state, models_dir() / plan.model, engine))
    yield Deployed(plan, state)
    argv = ["docker", "compose", "--file", str(state.compose_file), "--profile", "monitoring", "down", "--volumes"]
    subprocess.run(argv, capture_output=True, check=True)


@pytest.fixture(scope="module")
def started(deployed: Deployed) -> monitoring.Started:
    return monitoring.start(deployed.plan, deployed.state, Silent(), unpinned=True)


def container(deployed: Deployed, service: str) -> dict[str, Any]:
    argv = [
        "docker",
        "compose",
        "--file",
        str(deployed.state.compose_file),
        "--profile",
        "monitoring",
        "ps",
        "-q",
        service,
    ]
    name = subprocess.run(argv, capture_output=True, text=True, check=True).stdout.strip()
    done = subprocess.run(["docker", "inspect", name], capture_output=True, text=True, check=True)
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found[0]


def test_an_image_that_came_from_no_registry_is_taken_only_when_told(
    deployed: Deployed, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def offline(image: str) -> str:
        raise RegistryError("the registry cannot be reached")

    monkeypatch.setenv("GRAFT_STATE", str(tmp_path))
    monkeypatch.setattr(registry, "resolve", offline)
    with pytest.raises(Refused, match="its digest is not known"):
        monitoring.ensure_digests(deployed.plan, unpinned=False)
    assert [pin.name for pin in monitoring.ensure_digests(deployed.plan, unpinned=True)] == ["prometheus", "grafana"]


def test_prometheus_runs_with_the_rendered_rules_and_jobs(started: monitoring.Started) -> None:
    groups = httpx.get(f"{started.prometheus_url}/api/v1/rules", trust_env=False).json()["data"]["groups"]
    assert len([rule for group in groups for rule in group["rules"]]) == len(alert_rules())
    running = httpx.get(f"{started.prometheus_url}/api/v1/status/config", trust_env=False).json()["data"]["yaml"]
    assert "- vllm:8000" in running


def test_grafana_can_read_its_pages_and_its_password_and_nothing_else_can_be_written(
    started: monitoring.Started, deployed: Deployed
) -> None:
    assert httpx.get(f"{started.grafana_url}/api/health", trust_env=False).text == "ok\n"
    password = started.password_file.read_text(encoding="utf-8")
    assert stat.S_IMODE(started.password_file.parent.stat().st_mode) == 0o700
    assert password not in json.dumps(container(deployed, "grafana"))
    assert started.password_file.name == PASSWORD


@pytest.mark.parametrize("service", ["prometheus", "grafana"])
def test_a_service_that_watches_is_closed_to_its_host(
    service: str, started: monitoring.Started, deployed: Deployed
) -> None:
    found = container(deployed, service)
    host = found["HostConfig"]
    assert host["ReadonlyRootfs"]
    assert host["CapDrop"] == ["ALL"]
    assert host["SecurityOpt"] == ["no-new-privileges:true"]
    assert found["Config"]["User"] not in ("", "0", "root", "0:0")
    assert {bound["HostIp"] for ports in host["PortBindings"].values() for bound in ports} == {"127.0.0.1"}
    assert host["LogConfig"] == {"Type": "json-file", "Config": {"max-size": "10m", "max-file": "2"}}


def test_a_second_start_is_none_and_a_stop_takes_them_along(started: monitoring.Started, deployed: Deployed) -> None:
    before = container(deployed, "prometheus")["Id"]
    again = monitoring.start(deployed.plan, deployed.state, Silent(), unpinned=True)
    assert again == started
    assert container(deployed, "prometheus")["Id"] == before
    compose.must(compose.down(deployed.state.compose_file))
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{started.grafana_url}/api/health", trust_env=False)
