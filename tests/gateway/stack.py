"""A real HAProxy and a real relay on this machine, configured as they are for a service, on free ports."""

import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil

from launcher.engine_env import ENGINE
from launcher.gateway import edge
from launcher.gateway.keys import Key, key_map
from launcher.operate.gateway.settings import Settings
from launcher.state import CHECKOUT

INTERNAL_KEY = "the-service-s-own-key"
CLIENT_KEY = "a-client-s-key"
LIMITED_KEY = "a-limited-key"
PARTS = ("edge", "relay")
KEYS = (
    Key.of("client", CLIENT_KEY),
    Key.of("limited", LIMITED_KEY, requests_per_minute=30, concurrency=2),
)


def lacking() -> str | None:
    """Say what this machine lacks for a gateway; None: nothing."""
    if shutil.which("haproxy") is None:
        return "haproxy is not installed; `sudo apt-get install haproxy` installs it"
    if not python().is_file():
        return (
            f"no relay without the packages of vLLM's image; `graft engine install engine` brings {ENGINE.folder.name}"
        )
    return None


def python() -> Path:
    """Return the interpreter that has what vLLM's image has."""
    return ENGINE.folder / "bin" / "python"


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass
class Stack:
    """The edge and the relay in front of an engine."""

    folder: Path
    upstream_port: int
    relay_settings: Mapping[str, object] = field(default_factory=dict)
    edge_settings: Mapping[str, object] = field(default_factory=dict)
    internal_key: str = INTERNAL_KEY
    state_dir: Path | None = None
    """Where a keeper writes; None: a folder of its own."""

    def __post_init__(self) -> None:
        self.port, self.relay_port, self.metrics_port = free_port(), free_port(), free_port()
        self.edge_metrics_port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.shared_dir = self.state_dir or self.folder / "shared"
        self.shared_dir.mkdir(parents=True, exist_ok=True)
        self.keys_file = self.folder / "keys.map"
        self.log_file = self.folder / "edge.log"
        self.relay_log_file = self.folder / "relay.log"

    def __enter__(self) -> "Stack":
        self.keys_file.write_text(key_map(KEYS), encoding="utf-8")
        (self.folder / "api_key").write_text(self.internal_key, encoding="utf-8")
        settings = {
            "upstream": f"http://127.0.0.1:{self.upstream_port}",
            "host": "127.0.0.1",
            "port": self.relay_port,
            "metrics_port": self.metrics_port,
            "api_key_file": self.folder / "api_key",
            "state_dir": self.shared_dir,
            "max_request_bytes": 1 << 20,
            "max_body_bytes": 8 << 20,
            "max_in_flight": 300,
            "max_waiting": 20,
            "poll_interval_s": 0.1,
            "loading_retry_s": 3,
            **self.relay_settings,
        }
        (self.folder / "relay.json").write_text(Settings.model_validate(settings).model_dump_json(), encoding="utf-8")
        described = {
            "bind": f"127.0.0.1:{self.port}",
            "relay": f"127.0.0.1:{self.relay_port}",
            "keys_file": str(self.keys_file),
            "max_request_bytes": 1 << 20,
            "silence_timeout_s": 600,
            "resolve": False,
            "metrics_bind": f"127.0.0.1:{self.edge_metrics_port}",
            **self.edge_settings,
        }
        text = edge.configuration(edge.Edge(**described), "A test's.")  # type: ignore[arg-type]
        (self.folder / "haproxy.cfg").write_text(text, encoding="utf-8")
        try:
            self.start_relay()
            self.start_edge()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        for process in (getattr(self, "edge", None), getattr(self, "relay", None)):
            if process is not None and process.poll() is None:
                for child in psutil.Process(process.pid).children():
                    child.kill()
                process.kill()
                process.wait()

    def start_relay(self, log_file: Path | None = None) -> None:
        """Start the relay, with its log in another file than its own if one is given, and wait until it listens."""
        argv = [str(python()), "-m", "launcher.operate", "gateway", str(self.folder / "relay.json")]
        environment = {**os.environ, "PYTHONPATH": str(CHECKOUT), "PYTHONDONTWRITEBYTECODE": "1"}
        with (log_file or self.relay_log_file).open("ab") as log:
            self.relay = subprocess.Popen(argv, env=environment, cwd=self.folder, stdout=log, stderr=log)
        self._wait_for(self.relay_port, self.relay, self.relay_log_file)

    def start_edge(self, log_file: Path | None = None) -> None:
        """Start the edge, with its log in another file than its own if one is given, and wait until it listens."""
        argv = ["haproxy", "-W", "-db", "-f", str(self.folder / "haproxy.cfg")]
        with (log_file or self.log_file).open("ab") as log:
            self.edge = subprocess.Popen(argv, stdout=log, stderr=log)
        self._wait_for(self.port, self.edge, self.log_file)

    def kill_edge(self) -> None:
        """Kill the edge's worker, and with it the master, as the kernel would for lack of memory."""
        for child in psutil.Process(self.edge.pid).children():
            child.kill()
        self.edge.wait(10)

    def kill_relay(self) -> None:
        """Kill the relay."""
        self.relay.kill()
        self.relay.wait(10)

    def reload(self) -> None:
        """Let the edge read its files again."""
        (before,) = psutil.Process(self.edge.pid).children()
        self.edge.send_signal(signal.SIGUSR2)
        self.until(lambda: any(one.pid != before.pid for one in psutil.Process(self.edge.pid).children()))
        time.sleep(0.3)

    def until(self, holds: Callable[[], bool], timeout_s: float = 10.0) -> None:
        """Wait until something holds."""
        deadline_s = time.monotonic() + timeout_s
        while not holds():
            assert time.monotonic() < deadline_s, "it did not come true in time"
            time.sleep(0.02)

    def rss_bytes(self) -> dict[str, int]:
        """Return the resident memory of the edge's workers together, and of the relay, by the names of `PARTS`."""
        workers = psutil.Process(self.edge.pid).children()
        relay = psutil.Process(self.relay.pid)
        return {"edge": sum(one.memory_info().rss for one in workers), "relay": relay.memory_info().rss}

    def client(self, key: str | None = CLIENT_KEY, timeout_s: float = 20.0) -> httpx.Client:
        """Return a client with a key."""
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return httpx.Client(base_url=self.url, headers=headers, timeout=timeout_s, trust_env=False)

    def log_lines(self) -> list[dict[str, object]]:
        """Return the edge's access log; HAProxy's own notices are no JSON and left out."""
        text = self.log_file.read_text(encoding="utf-8")
        return [json.loads(line) for line in text.splitlines() if line.startswith("{")]

    def _wait_for(self, port: int, process: "subprocess.Popen[bytes]", log: Path) -> None:
        deadline_s = time.monotonic() + 20
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    return
            has_time = time.monotonic() < deadline_s
            assert process.poll() is None, log.read_text(encoding="utf-8")
            assert has_time, log.read_text(encoding="utf-8")
            time.sleep(0.02)
