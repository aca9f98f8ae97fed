"""The gateway in front of a real vLLM, as the rendered compose file starts it: the only door, never a cut socket."""

import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from launcher.gateway import install, keys
from launcher.images import build
from launcher.profile import Gateway
from launcher.ready import Ready, follow
from tests.compose.conftest import Deployed, Deployer

pytestmark = [pytest.mark.compose, pytest.mark.timeout(600)]
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def running(deploy: Deployer, model_dir: Path) -> Iterator[tuple[Deployed, Ready]]:
    deployed = deploy("gateway", model_dir, gateway=Gateway())
    service = deployed.service
    build.ensure(deployed.state.compose_file, deployed.image)
    service.start()
    *_, ready = follow(service, deployed.plan.served_name, api_key=own_key(deployed))
    assert isinstance(ready, Ready)
    yield deployed, ready
    service.stop()


@pytest.fixture
def deployed(running: tuple[Deployed, Ready]) -> Deployed:
    return running[0]


def own_key(deployed: Deployed) -> str:
    return install.own_key_file(deployed.state).read_text(encoding="utf-8").strip()


def client(deployed: Deployed, key: str | None = None) -> httpx.Client:
    headers = {"Authorization": f"Bearer {key or own_key(deployed)}"}
    return httpx.Client(base_url=deployed.service.base_url, headers=headers, timeout=120, trust_env=False)


def container(deployed: Deployed, service: str) -> dict[str, Any]:
    listed = ["docker", "compose", "--file", str(deployed.state.compose_file), "ps", "--quiet", service]
    name = subprocess.run(listed, capture_output=True, text=True, check=True).stdout.strip()
    found = subprocess.run(["docker", "inspect", name], capture_output=True, text=True, check=True).stdout
    (document,) = json.loads(found)
    assert isinstance(document, dict)
    return document


def asked(deployed: Deployed, **changed: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "Write a long story about the sea."}]
    body = {"model": deployed.plan.served_name, "messages": messages, "temperature": 0, "max_tokens": 24}
    return {**body, **changed}


def test_the_first_answer_comes_through_the_gateway(running: tuple[Deployed, Ready]) -> None:
    deployed, ready = running
    assert "Paris" in ready.answer.text
    assert container(deployed, "gateway")["State"]["Running"]
    health = httpx.get(f"{deployed.service.base_url}/health", trust_env=False)
    assert (health.status_code, health.json()) == (200, {"status": "ready"})


def test_only_the_gateway_has_a_port_of_this_machine(deployed: Deployed) -> None:
    for name in ("vllm", "relay", "gateway"):
        ports = container(deployed, name)["NetworkSettings"]["Ports"] or {}
        published = [port["HostIp"] for each in ports.values() for port in each or ()]
        assert published == (["127.0.0.1"] if name == "gateway" else []), name


def test_the_server_has_no_way_out(deployed: Deployed) -> None:
    networks = {name: set(container(deployed, name)["NetworkSettings"]["Networks"]) for name in ("vllm", "relay")}
    project = deployed.service.container
    assert networks == {"vllm": {f"{project}_inside"}, "relay": {f"{project}_inside"}}
    command = "import socket; socket.create_connection(('192.0.2.1', 80), timeout=3)"
    argv = ["docker", "exec", project, "python3", "-c", command]
    assert subprocess.run(argv, capture_output=True, check=False).returncode != 0


@pytest.mark.parametrize("service", ["relay", "gateway"])
def test_its_containers_are_closed(deployed: Deployed, service: str) -> None:
    found = container(deployed, service)
    host = found["HostConfig"]
    assert (host["ReadonlyRootfs"], host["CapDrop"], host["Privileged"]) == (True, ["ALL"], False)
    assert "no-new-privileges:true" in host["SecurityOpt"]
    assert found["Config"]["User"] not in ("", "0", "0:0", "root")
    assert all(not mount["RW"] for mount in found["Mounts"])
    assert own_key(deployed) not in json.dumps(found)


def test_without_a_key_nothing_is_answered(deployed: Deployed) -> None:
    with httpx.Client(base_url=deployed.service.base_url, timeout=30, trust_env=False) as stranger:
        for path in ("/v1/models", "/metrics", "/docs", "/invocations", "/version"):
            assert stranger.get(path).status_code == httpx.codes.UNAUTHORIZED
    with client(deployed) as known:
        for path in ("/metrics", "/docs", "/invocations", "/version", "/v1/load_lora_adapter", "/v1/../metrics"):
            assert known.get(path).status_code == httpx.codes.NOT_FOUND
        assert known.get("/v1/models").status_code == httpx.codes.OK


def test_a_key_is_in_force_as_soon_as_it_is_made(deployed: Deployed) -> None:
    secret = keys.add(deployed.state, "ann", 60, 4)
    install.write_map(deployed.state)
    deployed.service.reload_gateway()
    with client(deployed, secret) as ann:
        deadline_s = time.monotonic() + 10
        while (status := ann.get("/v1/models").status_code) != httpx.codes.OK and time.monotonic() < deadline_s:
            time.sleep(0.1)
        assert status == httpx.codes.OK
        assert ann.post("/tokenize", json={"model": deployed.plan.served_name, "prompt": "a"}).is_success


def test_a_stream_comes_piece_by_piece(deployed: Deployed) -> None:
    arrived_s = []
    with client(deployed) as known, known.stream("POST", CHAT, json=asked(deployed, stream=True)) as answer:
        for line in answer.iter_lines():
            if line:
                arrived_s.append(time.monotonic())
                last = line
    assert last == "data: [DONE]"
    assert len(arrived_s) > 10
    assert arrived_s[-1] - arrived_s[0] > 0.1, "all at once: it was held back"


def test_a_killed_engine_ends_its_stream_with_an_error_event(deployed: Deployed) -> None:
    # Last in this file: the engine needs its time to come back.
    body = asked(deployed, stream=True, max_tokens=3000, ignore_eos=True)
    lines: list[str] = []
    with client(deployed) as known, known.stream("POST", CHAT, json=body) as answer:
        for line in answer.iter_lines():
            lines += [line] if line else []
            if len(lines) == 5:
                argv = ["docker", "exec", deployed.service.container, "python3", "-c", KILL_ENGINE]
                subprocess.run(argv, capture_output=True, check=True)
    assert lines[-1] == "data: [DONE]"
    assert "error" in json.loads(lines[-2].removeprefix("data: "))
    with client(deployed) as known:
        away = known.post(CHAT, json=asked(deployed))
    assert away.status_code == httpx.codes.SERVICE_UNAVAILABLE
    assert away.json()["status"] == "degraded"
    assert away.json()["reason"]
    assert int(away.headers["retry-after"]) >= 1


# The kernel cuts a name after 15 characters.
KILL_ENGINE = """
import os, pathlib, signal
for path in pathlib.Path("/proc").glob("[0-9]*/comm"):
    if "EngineCor" in path.read_text():
        os.kill(int(path.parent.name), signal.SIGKILL)
"""
