"""A real engine under load whose faults are drilled, and what each drill took."""

import json
import os
import platform
import resource
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from launcher import render
from launcher.engine_env import ENGINE
from launcher.operate.events import FILE_NAME
from launcher.operate.service_state import ServiceStatus, StateFile
from launcher.plan import Plan
from launcher.profile import Watch
from launcher.ready import follow
from launcher.runtime import host
from launcher.service_files import write
from launcher.state import ServiceState
from tests.engine.conftest import Bench

RESULTS_ENV = "GRAFT_DRILL_RESULTS"
"""A file that the recovery times are added to."""
RECOVERS_S = 240
LOADERS = 3
WATCH = Watch(every_s=3, strikes=3, idle_probe_s=5)


@dataclass
class Load:
    """Clients that ask one question after the other and count what came of it."""

    base_url: str
    model: str
    answered: int = 0
    failed: int = 0
    is_over: threading.Event = field(default_factory=threading.Event)

    def start(self) -> None:
        self._threads = [threading.Thread(target=self._ask, args=(number,)) for number in range(LOADERS)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self.is_over.set()
        for thread in self._threads:
            thread.join()

    def _ask(self, number: int) -> None:
        body = {"model": self.model, "prompt": f"Client {number} counts: 1, 2, 3,", "max_tokens": 32}
        while not self.is_over.is_set():
            try:
                answer = httpx.post(f"{self.base_url}/v1/completions", json=body, timeout=15, trust_env=False)
                answer.raise_for_status()
                self.answered += 1
            except httpx.HTTPError:
                self.failed += 1
                self.is_over.wait(0.2)


@dataclass
class Drill:
    """A service under load, and what its drills took."""

    state: ServiceState
    plan: Plan
    load: Load
    took_s: dict[str, dict[str, float | int]] = field(default_factory=dict)

    @property
    def file(self) -> StateFile:
        return StateFile(self.state.operate_dir)

    @property
    def status(self) -> ServiceStatus:
        return self.file.read()

    @property
    def restarts(self) -> int:
        assert self.plan.watch is not None
        return self.plan.watch.restarts

    def keeper_lives(self) -> bool:
        found = host.find(self.state)
        return found is not None and found.state().is_alive

    @property
    def events(self) -> list[dict[str, Any]]:
        text = (self.state.operate_dir / FILE_NAME).read_text(encoding="utf-8")
        return [json.loads(line) for line in text.splitlines()]

    @property
    def keeper(self) -> psutil.Process:
        found = host.find(self.state)
        assert found is not None
        return psutil.Process(found.record.pid)

    def child(self, part: str) -> psutil.Process:
        """Return the process of the service whose command line holds a word."""
        for process in self.keeper.children(recursive=True):
            if part in " ".join(process.cmdline()):
                return process
        raise AssertionError(f"no process {part}")

    def wait_for(self, condition: Callable[[], bool], seconds: float = RECOVERS_S) -> None:
        deadline_s = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline_s, (self.status, self.events[-6:])
            time.sleep(0.1)

    def answers(self) -> None:
        """Wait until the load is answered."""
        before = self.load.answered
        self.wait_for(lambda: self.load.answered > before)

    def recovers(self, name: str, fault: Callable[[], None]) -> list[dict[str, Any]]:
        """Cause a fault, wait until the load is answered by another engine, and return the events of the fault."""
        self.answers()
        pid, told, failed = self.status.engine_pid, len(self.events), self.load.failed
        begun_s = time.monotonic()
        fault()
        self.wait_for(lambda: self.status.engine_pid not in (pid, None))
        started_s = time.monotonic() - begun_s
        self.wait_for(lambda: self.status.phase == "serving")
        self.answers()
        self.took_s[name] = {
            "until_started_again_s": round(started_s, 1),
            "until_answered_s": round(time.monotonic() - begun_s, 1),
            "requests_failed": self.load.failed - failed,
        }
        return self.events[told:]

    def starve(self) -> None:
        """Let no process of the engine have more memory than it has: the next request that needs some fails."""
        for process in (self.child("EngineCore"), self.child("Worker")):
            process.rlimit(resource.RLIMIT_AS, (process.memory_info().vms, process.memory_info().vms))
        long = {"model": self.load.model, "prompt": "word " * 3000, "max_tokens": 8}
        for _ in range(3):
            try:
                httpx.post(f"{self.load.base_url}/v1/completions", json=long, timeout=20, trust_env=False)
            except httpx.HTTPError:
                return


@pytest.fixture(scope="module")
def drill(bench: Bench) -> Iterator[Drill]:
    profile_name = "drill"
    plan = bench.plan().model_copy(update={"profile": profile_name})
    assert plan.watch is not None
    quick = {"every_s": WATCH.every_s, "strikes": WATCH.strikes, "idle_probe_s": WATCH.idle_probe_s, "restarts": 20}
    plan = plan.model_copy(update={"watch": plan.watch.model_copy(update=quick)})
    state = ServiceState(bench.folder / profile_name)
    state.root.mkdir(parents=True)
    write(state.root, {name: text.encode() for name, text in render.run(plan).items()})
    started = host.start(plan, bench.model_dir, state, ENGINE.vllm)
    load = Load(started.base_url, plan.served_name)
    drill = Drill(state, plan, load)
    try:
        list(follow(started, plan.served_name))
        load.start()
        yield drill
    finally:
        load.stop()
        started.stop()
        _report(drill)


def _report(drill: Drill) -> None:
    if not os.environ.get(RESULTS_ENV) or not drill.took_s:
        return
    file = Path(os.environ[RESULTS_ENV])
    # The long ones have a server of their own.
    before = json.loads(file.read_text(encoding="utf-8"))["drills"] if file.is_file() else {}
    document = {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{os.cpu_count()} CPUs, {platform.machine()}, Linux {platform.release()}",
        "vllm": drill.plan.vllm,
        "model": drill.plan.model,
        "load": f"{LOADERS} clients, 32 tokens each",
        "watch": {"every_s": WATCH.every_s, "strikes": WATCH.strikes, "idle_probe_s": WATCH.idle_probe_s},
        "drills": {**before, **drill.took_s},
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def kinds(events: list[dict[str, Any]]) -> list[str]:
    return [one["kind"] for one in events]
