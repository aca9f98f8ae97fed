"""The Compose profile `monitoring`: who can reach it, what it scrapes, and that its pages are whole."""

import json
import re
import socket
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from launcher import render
from launcher.errors import Refused, UsageError
from launcher.images.pins import load_pins
from launcher.monitoring import dashboards, files, services, start
from launcher.plan import Plan
from launcher.profile import Monitoring, load_profile
from launcher.service_files import ensure_password, store_secret, write
from launcher.state import ServiceState
from tests.launcher.golden import CDI, HOST, NO_GPU, NVIDIA, PODMAN, Variant, plan_for, surroundings

NAMES = ("prometheus", "grafana", "gpu-exporter")
PANELS = [
    pytest.param(panel, id=f"{name}: {panel['title']}")
    for name, page in files.shipped_dashboards().items()
    for panel in dashboards.grafana(name, page)["panels"]
    if panel["type"] != "row"
]


@cache
def plan(profile: str = "rtx4090", variant: Variant = NVIDIA) -> Plan:
    return plan_for(load_profile(profile), variant)


def rendered(made: Plan, variant: Variant = NVIDIA) -> dict[str, str]:
    return render.run(made, None if variant is HOST else surroundings(variant))


def compose(made: Plan, variant: Variant = NVIDIA) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(_compose(made.profile, made.monitoring, variant))
    return document


@cache
def _compose(profile: str, ports: Monitoring, variant: Variant) -> str:
    made = plan(profile, variant).model_copy(update={"monitoring": ports})
    return json.dumps(yaml.safe_load(rendered(made, variant)["compose.yaml"]))


def scraped(texts: dict[str, str]) -> dict[str, str]:
    document = yaml.safe_load(texts[files.PROMETHEUS_FILE])
    return {job["job_name"]: job["static_configs"][0]["targets"][0] for job in document["scrape_configs"]}


@pytest.mark.parametrize("name", NAMES)
def test_a_service_that_watches_has_no_rights_and_starts_only_when_asked_for(name: str) -> None:
    service = compose(plan())["services"][name]
    assert service["profiles"] == ["monitoring"]
    assert service["read_only"]
    assert service["cap_drop"] == ["ALL"]
    assert "no-new-privileges:true" in service["security_opt"]
    assert not service["user"].startswith(("0", "root"))
    assert all(port["host_ip"] == "127.0.0.1" for port in service.get("ports", ()))
    assert all(mount["read_only"] for mount in service.get("volumes", ()) if mount["type"] == "bind")
    assert service["logging"]["options"] == {"max-size": "10m", "max-file": "2"}


def test_grafana_lets_no_one_in_without_its_password() -> None:
    document = compose(plan())
    grafana = document["services"]["grafana"]
    assert grafana["environment"]["GF_AUTH_ANONYMOUS_ENABLED"] == "false"
    assert grafana["environment"]["GF_USERS_ALLOW_SIGN_UP"] == "false"
    assert grafana["environment"]["GF_SECURITY_ADMIN_PASSWORD__FILE"] == f"/run/secrets/{services.PASSWORD}"
    assert grafana["secrets"] == [services.PASSWORD]
    assert document["secrets"][services.PASSWORD] == {"file": f"./secrets/{services.PASSWORD}"}


def test_the_password_is_made_once_for_each_service(tmp_path: Path) -> None:
    one, other = ServiceState(tmp_path / "one"), ServiceState(tmp_path / "other")
    path = ensure_password(one)
    password = path.read_text(encoding="utf-8")
    assert len(password) >= 20
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert ensure_password(one).read_text(encoding="utf-8") == password
    assert ensure_password(other).read_text(encoding="utf-8") != password
    store_secret(one, services.PASSWORD, "chosen")
    assert ensure_password(one).read_text(encoding="utf-8") == "chosen"


def test_the_folders_are_open_to_the_users_of_the_containers(tmp_path: Path) -> None:
    write(tmp_path, {name: text.encode() for name, text in rendered(plan()).items()})
    assert all(path.stat().st_mode & 0o005 for path in (tmp_path / files.FOLDER).rglob("*"))


@pytest.mark.parametrize(
    ("variant", "key", "value"),
    [
        (NVIDIA, "deploy", {"capabilities": ["gpu"], "device_ids": ["GPU-00000000-0000-4000-8000-000000000000"]}),
        (CDI, "devices", ["nvidia.com/gpu=GPU-00000000-0000-4000-8000-000000000000"]),
    ],
)
def test_the_exporter_reads_the_cards_of_the_plan(variant: Variant, key: str, value: Any) -> None:
    exporter = compose(plan(variant=variant), variant)["services"]["gpu-exporter"]
    found = exporter[key] if key == "devices" else exporter[key]["resources"]["reservations"]["devices"][0]
    assert found == value or found == {**value, "driver": "nvidia"}
    assert exporter["environment"] == {"NVIDIA_DRIVER_CAPABILITIES": "utility"}


def test_without_a_card_there_is_no_exporter_to_scrape() -> None:
    made = plan("cpu", NO_GPU)
    assert "gpu-exporter" not in compose(made, NO_GPU)["services"]
    assert "gpu-exporter" not in scraped(rendered(made, NO_GPU))
    assert scraped(rendered(plan()))["gpu-exporter"] == "gpu-exporter:9835"


def test_podman_keeps_no_mounted_folder_away() -> None:
    assert "label=disable" in compose(plan(variant=PODMAN), PODMAN)["services"]["grafana"]["security_opt"]


def test_what_is_scraped_is_a_service_of_the_project() -> None:
    document = compose(plan())
    for job, target in scraped(rendered(plan())).items():
        host, _, port = target.partition(":")
        assert host == job
        assert host in document["services"]
        assert port.isdigit()


def test_the_host_runtime_gets_a_configuration_for_a_prometheus_of_this_machine() -> None:
    made = plan("cpu", HOST)
    assert scraped(rendered(made, HOST)) == {"vllm": f"127.0.0.1:{made.port}"}


def test_a_container_is_made_anew_when_what_it_reads_changes() -> None:
    texts = rendered(plan())
    changed = {**texts, files.ALERTS_FILE: "groups: []\n"}
    assert files.digest(texts, "prometheus") != files.digest(changed, "prometheus")
    assert files.digest(texts, "grafana") == files.digest(changed, "grafana")


def test_ports_of_the_profile_are_used_and_do_not_change_the_run() -> None:
    profile = load_profile("rtx4090").model_copy(update={"monitoring": Monitoring(grafana_port=4000)})
    made = plan_for(profile, NVIDIA)
    assert compose(made)["services"]["grafana"]["ports"][0]["published"] == "4000"
    assert made.run_id == plan().run_id


# Pages.


def test_every_page_has_one_id_and_its_file() -> None:
    texts = rendered(plan())
    pages = {path: json.loads(text) for path, text in texts.items() if path.startswith(files.DASHBOARDS_DIR)}
    assert len({page["uid"] for page in pages.values()}) == len(pages) == 5
    home = services.GRAFANA_SETTINGS["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert f"{files.DASHBOARDS_DIR}/{Path(home).name}" in pages
    assert yaml.safe_load(texts[files.PROVIDERS_FILE])["providers"][0]["options"]["path"] == str(Path(home).parent)


@pytest.mark.parametrize("name", files.shipped_dashboards())
def test_no_two_panels_of_a_page_share_an_id_or_a_place(name: str) -> None:
    panels = dashboards.grafana(name, files.shipped_dashboards()[name])["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        own = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert max(x for x, _ in own) < dashboards.WIDTH
        assert cells.isdisjoint(own)
        cells |= own


@pytest.mark.parametrize("panel", PANELS)
def test_a_panel_asks_the_datasource_that_is_provisioned(panel: dict[str, Any]) -> None:
    provisioned = {(one["type"], one["uid"]) for one in files.DATASOURCES["datasources"]}  # type: ignore[attr-defined]
    assert (panel["datasource"]["type"], panel["datasource"]["uid"]) in provisioned
    assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
    for target in panel["targets"]:
        labels = re.findall(r"{{(\w+)}}", target["legendFormat"])
        # A label that the query has summed away would leave the legend empty.
        assert all(re.search(rf"\b{label}\b", target["expr"]) for label in labels), target


# Starting.


def test_the_host_runtime_is_told_what_to_do_instead(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"monitoring/prometheus/prometheus\.yaml is for a Prometheus of your own"):
        start.refuse_host("host", ServiceState(tmp_path))
    start.refuse_host("docker", ServiceState(tmp_path))


@pytest.mark.parametrize("key", ["grafana_port", "prometheus_port"])
def test_a_port_that_is_taken_is_named_with_its_key(key: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        ports = {"grafana_port": 1, "prometheus_port": 1, key: other.getsockname()[1]}
        made = plan().model_copy(update={"monitoring": Monitoring(**ports)})
        with pytest.raises(Refused, match=rf"is taken; write another port in the profile's monitoring\.{key}"):
            start.refuse_taken_ports(made)


def test_a_digest_that_becomes_known_takes_the_place_of_the_tag(tmp_path: Path) -> None:
    file = tmp_path / "compose.yaml"
    file.write_text(rendered(plan())["compose.yaml"], encoding="utf-8")
    pin = load_pins().services["grafana"].model_copy(update={"digest": f"sha256:{'a' * 64}"})
    start._write_references(file, (pin,))
    assert yaml.safe_load(file.read_text(encoding="utf-8"))["services"]["grafana"]["image"] == pin.reference
