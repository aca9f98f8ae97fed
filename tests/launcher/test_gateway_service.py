"""The gateway of a service: what is rendered, planned and installed, and the commands about its keys."""

import json
import os
import re
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from launcher import render
from launcher.composefile import Service
from launcher.errors import UsageError
from launcher.gateway import change, install, keys, services
from launcher.gateway.choices import gateway_of
from launcher.operate.gateway.settings import Settings
from launcher.plan import Gateway, Plan
from launcher.profile import Profile, load_profile
from launcher.state import CHECKOUT, ServiceState
from tests.launcher.golden import HOST, NVIDIA, PODMAN, Variant, plan_for, surroundings


def profile_with(**changed: object) -> Profile:
    profile = load_profile("rtx4090")
    return profile.model_copy(update={"gateway": profile.gateway.model_copy(update=changed)})


def gateway(**changed: object) -> Gateway:
    made = gateway_of(profile_with(**changed), "docker", 2)
    assert made is not None
    return made


def document(variant: Variant = NVIDIA, **changed: object) -> dict[str, Any]:
    files = render.run(plan_for(profile_with(**changed), variant), surroundings(variant))
    loaded = yaml.safe_load(files["compose.yaml"])
    assert isinstance(loaded, dict)
    return loaded


def test_only_the_gateway_is_reached_from_outside() -> None:
    found = document()
    serving = {name: one for name, one in found["services"].items() if not one.get("profiles")}
    assert [name for name, one in serving.items() if "ports" in one] == ["gateway"]
    assert [name for name, one in serving.items() if "outside" in one.get("networks", ())] == ["gateway"]
    assert found["networks"] == {"inside": {"internal": True}, "outside": {"internal": False}}
    for one in found["services"].values():
        assert ("networks" in one) != ("network_mode" in one)


def test_what_watches_is_on_the_networks_too() -> None:
    found = document()["services"]
    assert found["prometheus"]["networks"] == found["grafana"]["networks"] == ["inside", "outside"]
    assert found["gpu-exporter"]["networks"] == ["inside"]


def test_a_service_that_names_its_networks_keeps_them() -> None:
    own = Service(image="i", user="1:1", restart="no", networks=("outside",))
    none = Service(image="i", user="1:1", restart="no", network_mode="none")
    assert services.connected({"own": own, "none": none}) == {"own": own, "none": none}


@pytest.mark.parametrize("variant", [NVIDIA, PODMAN], ids=lambda variant: variant.name)
def test_the_gateway_s_services_are_closed_like_the_server(variant: Variant) -> None:
    found = document(variant)["services"]
    for name in ("relay", "gateway"):
        one = found[name]
        assert one["user"] in ("2000:0", "99:99")
        assert (one["read_only"], one["cap_drop"], one["restart"]) == (True, ["ALL"], "on-failure")
        assert "no-new-privileges:true" in one["security_opt"]
        assert one["mem_limit"]
        assert all(mount["read_only"] for mount in one["volumes"])
    assert "secrets" not in found["gateway"], "the edge never sees vLLM's own key"
    assert found["relay"]["image"] == found["vllm"]["image"]


def test_no_key_is_in_any_rendered_file() -> None:
    files = render.run(plan_for(load_profile("rtx4090"), NVIDIA), surroundings(NVIDIA))
    a_key = re.compile(f"{keys.PREFIX}[A-Za-z0-9_-]{{43}}")
    assert a_key.fullmatch(keys.new_secret())
    assert not any(a_key.search(text) for text in files.values())


def test_the_relay_is_told_what_the_plan_says() -> None:
    plan = plan_for(load_profile("rtx5090"), NVIDIA)
    files = render.run(plan, surroundings(NVIDIA))
    settings = Settings.model_validate_json(files["gateway/relay.json"])
    assert plan.gateway is not None
    assert settings.upstream == "http://vllm:8000"
    assert (settings.max_in_flight, settings.max_waiting) == (plan.gateway.max_in_flight, plan.gateway.max_waiting)
    assert f"req.body_size gt {settings.max_request_bytes}" in files["gateway/haproxy.cfg"]


def test_without_a_gateway_the_server_publishes_its_port_as_before() -> None:
    found = document(enabled=False)
    assert "networks" not in found
    assert not {"relay", "gateway"} & set(found["services"])
    assert [port["host_ip"] for port in found["services"]["vllm"]["ports"]] == ["127.0.0.1"]


def test_a_local_process_has_none_and_says_so_where_it_is_asked_for() -> None:
    assert plan_for(load_profile("cpu"), HOST).gateway is None
    with pytest.raises(UsageError, match=r"gateway\.enabled.*: the gateway runs by Docker Compose"):
        gateway_of(profile_with(enabled=True), "host", 1)


def test_tls_takes_the_outside_and_leaves_the_plain_port_to_this_machine() -> None:
    profile = profile_with(tls_certificate="/etc/tls/all.pem")
    profile = profile.model_copy(update={"serve": profile.serve.model_copy(update={"host": "0.0.0.0"})})
    files = render.run(plan_for(profile, NVIDIA), surroundings(NVIDIA))
    ports = yaml.safe_load(files["compose.yaml"])["services"]["gateway"]["ports"]
    assert [(port["target"], port["published"], port["host_ip"]) for port in ports] == [
        (8000, "8000", "127.0.0.1"),
        (8443, "8443", "0.0.0.0"),
    ]
    assert "ssl crt /run/graft/gateway-secrets/tls.pem" in files["gateway/haproxy.cfg"]


def test_the_queue_follows_the_requests_that_run() -> None:
    waiting = {requests: gateway_of(load_profile("rtx4090"), "docker", requests) for requests in (1, 8)}
    assert [one.max_waiting for one in waiting.values() if one] == [16, 32]
    assert [one.max_in_flight for one in waiting.values() if one] == [17, 40]
    assert gateway(max_waiting=3).max_in_flight == 5


def test_every_choice_has_its_reason_and_its_file() -> None:
    for choice in gateway(tls_certificate="/x.pem").choices:
        assert choice.name.startswith("gateway.")
        assert choice.reason
        assert choice.source.startswith("profiles/rtx4090.yaml: gateway.")


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ServiceState:
    monkeypatch.setenv("GRAFT_STATE", str(tmp_path))
    return ServiceState.of("rtx4090")


def test_the_service_s_own_key_is_made_once_and_known_to_the_edge(state: ServiceState) -> None:
    install.install(gateway(), state)
    secret = install.own_key_file(state).read_text(encoding="utf-8")
    assert secret.startswith(keys.PREFIX)
    keys.add(state, "ann", 60)
    install.install(gateway(), state)
    assert install.own_key_file(state).read_text(encoding="utf-8") == secret
    text = (install.secrets_dir(state) / "keys.map").read_text(encoding="utf-8")
    assert [line.split(" ")[1] for line in text.splitlines()] == ["graft:1000000000:1000000000", "ann:60:1000000000"]
    assert secret not in text
    assert stat.S_IMODE(state.secrets_dir.stat().st_mode) == 0o700


def test_a_key_that_the_user_chose_stays(state: ServiceState) -> None:
    state.secrets_dir.mkdir(parents=True)
    (state.secrets_dir / "api_key").write_text("my own\n", encoding="utf-8")
    install.install(gateway(), state)
    assert (state.secrets_dir / "api_key").read_text(encoding="utf-8") == "my own\n"
    assert keys.Key.of(keys.OWN, "my own").sha256 in (install.secrets_dir(state) / "keys.map").read_text()


def test_a_certificate_is_copied_or_refused_by_name(state: ServiceState, tmp_path: Path) -> None:
    pem = tmp_path / "all.pem"
    with pytest.raises(UsageError, match=r"gateway\.tls_certificate: .*all\.pem: cannot be read"):
        install.install(gateway(tls_certificate=str(pem)), state)
    pem.write_text("-----BEGIN CERTIFICATE-----\n", encoding="utf-8")
    with pytest.raises(UsageError, match="no PRIVATE KEY in it"):
        install.install(gateway(tls_certificate=str(pem)), state)
    pem.write_text("-----BEGIN CERTIFICATE-----\n-----BEGIN PRIVATE KEY-----\n", encoding="utf-8")
    install.install(gateway(tls_certificate=str(pem)), state)
    assert (install.secrets_dir(state) / "tls.pem").read_text(encoding="utf-8") == pem.read_text(encoding="utf-8")


def test_a_key_is_in_the_map_as_soon_as_it_is_made(state: ServiceState) -> None:
    install.install(gateway(), state)
    profile = load_profile("rtx4090")
    added = change.add(profile, "ann", None, 2)
    assert not added.in_force
    path = install.secrets_dir(state) / "keys.map"
    assert keys.Key.of("ann", added.secret).sha256 in path.read_text(encoding="utf-8")
    change.remove(profile, "ann")
    assert " ann:" not in path.read_text(encoding="utf-8")


def test_a_key_for_a_service_without_gateway_is_refused(state: ServiceState) -> None:
    with pytest.raises(UsageError, match=r"cpu: has no gateway \(.*gateway.enabled \(default\)\)"):
        change.add(load_profile("cpu"), "ann", None, None)


def test_the_commands_about_keys(state: ServiceState, tmp_path: Path) -> None:
    def graft(*arguments: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "GRAFT_STATE": str(tmp_path)}
        argv = [sys.executable, "-m", "launcher", "keys", *arguments, "--profile", "rtx4090"]
        return subprocess.run(argv, env=environment, cwd=CHECKOUT, capture_output=True, text=True, check=False)

    added = graft("add", "ann", "--rpm", "60", "--concurrency", "4")
    assert added.returncode == 0, added.stderr
    assert added.stdout.strip().startswith(keys.PREFIX)
    assert "its next start takes the keys" in added.stderr
    again = graft("add", "ann")
    assert (again.returncode, "there is a key of this name" in again.stderr) == (2, True)
    listed = json.loads(graft("list", "--json").stdout)
    assert [(key["name"], key["requests_per_minute"], key["concurrency"]) for key in listed] == [("ann", 60, 4)]
    assert "sha256" not in listed[0]
    assert graft("remove", "ann").stdout.strip() == "ann: removed."
    assert json.loads(graft("list", "--json").stdout) == []


def test_a_plan_without_a_gateway_can_still_be_read() -> None:
    plan = plan_for(load_profile("rtx4090"), NVIDIA)
    before = plan.model_dump(mode="json", exclude={"gateway"})
    assert Plan.model_validate(before).gateway is None
