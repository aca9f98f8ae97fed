"""docker.read through the real SDK against an engine's answers on a Unix socket."""

import gc
import hashlib
import json
import os
import re
import subprocess
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingMixIn, UnixStreamServer
from typing import Any

import pytest

from launcher.host import docker
from launcher.host.facts import Docker

VERSION = {"Version": "29.5.2", "ApiVersion": "1.54", "MinAPIVersion": "1.24", "Components": [{"Name": "Engine"}]}
INFO = {
    "Runtimes": {"runc": {}, "nvidia": {}, "io.containerd.runc.v2": {}},
    "DockerRootDir": "/",
    "CDISpecDirs": ["/etc/cdi", "/var/run/cdi"],
    "DiscoveredDevices": [
        {"Source": "cdi", "ID": "nvidia.com/gpu=all"},
        {"Source": "cdi", "ID": "nvidia.com/gpu=GPU-1"},
        {"Source": "other", "ID": "thing"},
    ],
    "OperatingSystem": "Debian GNU/Linux 13 (trixie)",
    "DriverStatus": [["Backing Filesystem", "extfs"]],
}
CONTAINERS = [
    {
        "Names": ["/graft-rtx4090-vllm-1"],
        "Ports": [
            {"PrivatePort": 8000, "PublicPort": 8000, "Type": "tcp", "IP": "127.0.0.1"},
            {"PrivatePort": 9000, "Type": "tcp"},
            {"PrivatePort": 53, "PublicPort": 53, "Type": "udp"},
        ],
    }
]


class _Server(ThreadingMixIn, UnixStreamServer):
    daemon_threads = True
    answers: dict[str, Any]


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def do_GET(self) -> None:
        path = re.sub(r"^/v[\d.]+", "", self.path).partition("?")[0]
        body = json.dumps(self.server.answers[path]).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def address_string(self) -> str:
        return "unix"

    def log_message(self, *args: Any) -> None:
        pass


Engine = Callable[..., Path]


@pytest.fixture(autouse=True)
def _no_configuration(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("DOCKER_HOST", "DOCKER_CONTEXT", "DOCKER_TLS_VERIFY", "DOCKER_CERT_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker-config"))


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    servers: list[_Server] = []

    def start(version: dict[str, Any] | None = None, **info: Any) -> Path:
        socket = tmp_path / f"{len(servers)}.sock"
        server = _Server(str(socket), _Handler)
        server.answers = {
            "/version": {**VERSION, **(version or {})},
            "/info": {**INFO, **info},
            "/containers/json": CONTAINERS,
        }
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        servers.append(server)
        return socket

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def compose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Puts a `docker` command on PATH that is the given shell script."""

    def install(script: str) -> None:
        command = tmp_path / "bin" / "docker"
        command.parent.mkdir(exist_ok=True)
        command.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
        command.chmod(0o755)
        monkeypatch.setenv("PATH", str(command.parent))

    return install


def test_an_engine_is_read_with_its_runtimes_devices_and_ports(engine: Engine, compose: Callable[[str], None]) -> None:
    compose("echo v5.0.2")
    reading = docker.read(engine())
    assert reading.is_local
    assert reading.published == {8000: "graft-rtx4090-vllm-1"}
    free_gib = reading.docker.root_free_gib
    assert free_gib is not None
    assert free_gib > 0
    assert reading.docker.model_copy(update={"root_free_gib": None}) == Docker(
        flavor="docker",
        engine="29.5.2",
        api="1.54",
        compose="5.0.2",
        runtimes=("io.containerd.runc.v2", "nvidia", "runc"),
        nvidia_hook=False,
        cdi_spec_dirs=("/etc/cdi", "/var/run/cdi"),
        cdi_devices=("nvidia.com/gpu=GPU-1", "nvidia.com/gpu=all"),
        root_dir="/",
    )


def test_devices_come_from_the_specifications_where_the_engine_does_not_list_them(
    engine: Engine, tmp_path: Path
) -> None:
    specs = tmp_path / "cdi"
    specs.mkdir()
    (specs / "nvidia.yaml").write_text(
        "cdiVersion: 0.5.0\nkind: nvidia.com/gpu\ndevices:\n- name: GPU-1\n- name: all\n", encoding="utf-8"
    )
    (specs / "other.json").write_text('{"kind": "vendor.com/net", "devices": [{"name": "0"}]}', encoding="utf-8")
    (specs / "broken.yaml").write_text("kind: [", encoding="utf-8")
    (specs / "README.txt").write_text("kind: nvidia.com/gpu\ndevices: [{name: no}]", encoding="utf-8")
    socket = engine(CDISpecDirs=[str(specs), str(tmp_path / "absent")], DiscoveredDevices=None)
    assert docker.read(socket).docker.cdi_devices == ("nvidia.com/gpu=GPU-1", "nvidia.com/gpu=all", "vendor.com/net=0")


def test_an_engine_without_cdi_has_no_devices(engine: Engine) -> None:
    found = docker.read(engine(CDISpecDirs=None, DiscoveredDevices=None)).docker
    assert (found.cdi_spec_dirs, found.cdi_devices) == ((), ())


def test_the_disk_of_docker_desktop_is_unknown(engine: Engine) -> None:
    reading = docker.read(engine(OperatingSystem="Docker Desktop"))
    assert not reading.is_local
    assert (reading.docker.root_free_gib, reading.docker.nvidia_hook) == (None, None)


def test_podman_is_told_from_docker(engine: Engine) -> None:
    version = {"Version": "5.4.2", "ApiVersion": "1.41", "Components": [{"Name": "Podman Engine"}]}
    found = docker.read(engine(version, Runtimes={"crun": {}}, CDISpecDirs=None)).docker
    assert (found.flavor, found.engine, found.cdi_spec_dirs) == ("podman", "5.4.2", ("/etc/cdi", "/var/run/cdi"))


def test_images_of_the_containerd_store_lie_in_containerds_folder(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(docker, "_CONTAINERD_ROOT", tmp_path)
    socket = engine(DriverStatus=[["driver-type", "io.containerd.snapshotter.v1"]])
    assert docker.read(socket).docker.root_dir == str(tmp_path)


def test_no_socket_is_an_error_in_the_facts(tmp_path: Path) -> None:
    reading = docker.read(tmp_path / "none.sock")
    assert reading.docker.error == f"no Docker Engine runs here ({tmp_path / 'none.sock'} does not exist)"
    assert not reading.is_local


def test_a_socket_of_others_is_permission_denied(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    socket = engine()
    # Its mode would not stop the root user.
    monkeypatch.setattr(os, "access", lambda path, mode: path != socket)
    assert docker.read(socket).docker.error == f"permission denied on {socket}"


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
def test_a_socket_that_nobody_serves_is_an_error_in_the_facts(tmp_path: Path) -> None:
    socket = tmp_path / "dead.sock"
    UnixStreamServer(str(socket), _Handler).server_close()
    error = docker.read(socket).docker.error
    assert error is not None
    assert "Connection refused" in error
    # The SDK leaves the socket that did not connect to the garbage collector.
    gc.collect()


def test_docker_host_wins(engine: Engine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{engine()}")
    assert docker.read(tmp_path / "none.sock").docker.engine == "29.5.2"


def test_an_engine_over_ssh_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "ssh://gpu-box")
    error = docker.read().docker.error
    assert error is not None
    assert "ssh://gpu-box is another machine" in error


def test_the_docker_context_in_use_is_used(engine: Engine, tmp_path: Path) -> None:
    folder = tmp_path / "docker-config"
    # The CLI's store names a context's folder by the hash of its name.
    meta = folder / "contexts" / "meta" / hashlib.sha256(b"rootless").hexdigest()
    meta.mkdir(parents=True)
    endpoint = {"docker": {"Host": f"unix://{engine()}", "SkipTLSVerify": False}}
    (meta / "meta.json").write_text(
        json.dumps({"Name": "rootless", "Metadata": {}, "Endpoints": endpoint}), encoding="utf-8"
    )
    (folder / "config.json").write_text('{"currentContext": "rootless"}', encoding="utf-8")
    assert docker.read(tmp_path / "none.sock").docker.engine == "29.5.2"


@pytest.mark.parametrize(
    ("script", "error"),
    [
        ("echo 'unknown flag: --short' >&2; exit 125", "the Compose plugin of the docker command is not installed"),
        ("echo broken >&2; exit 3", "`docker compose version`: broken"),
        ("exit 3", "`docker compose version`: exit code 3"),
    ],
)
def test_a_compose_that_does_not_run_says_why(
    engine: Engine, compose: Callable[[str], None], script: str, error: str
) -> None:
    compose(script)
    found = docker.read(engine()).docker
    assert (found.compose, found.compose_error) == (None, error)


def test_a_compose_that_hangs_is_not_waited_for(
    engine: Engine, compose: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(docker, "TIMEOUT_S", 0.2)
    compose("exec /bin/sleep 60")
    assert docker.read(engine()).docker.compose_error == "`docker compose version` gave no answer in 0.2 s"


def test_a_missing_docker_command_says_so(engine: Engine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert docker.read(engine()).docker.compose_error == "the docker command is not on PATH"


@pytest.mark.compose
def test_a_real_engine_is_read() -> None:
    said = (
        subprocess.run(
            ["docker", "version", "--format", "{{.Server.Version}}"], capture_output=True, text=True, check=False
        )
        if docker.DEFAULT_SOCKET.exists()
        else None
    )
    if said is None or said.returncode != 0:
        pytest.skip("no Docker Engine")
    found = docker.read().docker
    assert (found.error, found.engine, found.flavor) == (None, said.stdout.strip(), "docker")
    assert "runc" in found.runtimes
