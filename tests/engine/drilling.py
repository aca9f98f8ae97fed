"""A real engine under keeper and watchdog, behind a real gateway and under load, whose faults are drilled."""

import json
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from launcher.gateway.choices import gateway_of
from launcher.gateway.keys import new_secret
from launcher.operate.events import FILE_NAME
from launcher.operate.gateway.settings import Settings
from launcher.operate.service_state import ServiceStatus, StateFile
from launcher.plan import Plan
from launcher.profile import Profile, Watch, load_profile
from launcher.ready import follow
from launcher.runtime import host
from launcher.state import ServiceState
from tests.engine.conftest import Bench
from tests.gateway import stack
from tests.gateway.drilling import CHAT, Drill, Step
from tests.gateway.stack import Stack

RESULTS_ENV = "GRAFT_DRILL_RESULTS"
"""A folder that the reports are written to."""
STARTS_S = 240.0


@dataclass(frozen=True)
class Shape:
    """How large a drill is."""

    name: str
    """Of its service, and of its report's file."""
    streams: int
    at_once: int
    """Requests that the engine serves at once; the others wait."""
    kv_cache_gib: int
    """Each of those at once takes a block of 128 tokens at least, which is 5.6 MiB."""
    watch: Watch
    header_timeout_s: int
    """Connections that say nothing are given up after so long."""
    hold_s: float
    """How long slow readers do not read."""


class KeptEngine:
    """vLLM as the host runtime starts it: the `Engine` of a drill."""

    def __init__(self, state: ServiceState, plan: Plan, base_url: str) -> None:
        self.state, self.plan, self.base_url = state, plan, base_url
        self.name = f"vLLM {plan.vllm} with {plan.model} on the CPU, under keeper and watchdog"

    def stream(self, count: int) -> Mapping[str, object]:
        return {**self._body("Count from one to a hundred."), "max_tokens": 16, "ignore_eos": True}

    def short(self) -> Mapping[str, object]:
        return {**self._body("1"), "max_tokens": 1}

    def long(self) -> Mapping[str, object]:
        return {**self._body("Count from one to a million."), "max_tokens": 3000, "ignore_eos": True}

    def kill(self) -> None:
        self._until_replaced(self.child("EngineCore").kill)

    def stop(self) -> None:
        self._until_replaced(self._stop)

    def rss_bytes(self) -> Mapping[str, int]:
        dog = self.child("launcher.operate watch")
        return {"keeper": self.keeper.memory_info().rss, "watchdog": dog.memory_info().rss}

    def starve(self, gateway: Stack) -> str:
        """Let no process of the engine have more memory than it has: the next request that needs some fails."""
        self._until_replaced(lambda: self._starve(gateway))
        return "a limit on its address space, and a long prompt"

    @property
    def file(self) -> StateFile:
        return StateFile(self.state.operate_dir)

    @property
    def status(self) -> ServiceStatus:
        return self.file.read()

    @property
    def events(self) -> list[dict[str, Any]]:
        text = (self.state.operate_dir / FILE_NAME).read_text(encoding="utf-8")
        return [json.loads(line) for line in text.splitlines()]

    @property
    def keeper(self) -> psutil.Process:
        found = host.find(self.state)
        assert found is not None
        return psutil.Process(found.record.pid)

    def keeper_lives(self) -> bool:
        found = host.find(self.state)
        return found is not None and found.state().is_alive

    def child(self, part: str) -> psutil.Process:
        """Return the process of the service whose command line holds a word.

        Raises:
            LookupError: there is none.
        """
        for process in self.keeper.children(recursive=True):
            if part in " ".join(process.cmdline()):
                return process
        raise LookupError(f"no process {part}")

    def wait_for(self, condition: Callable[[], bool], seconds: float = STARTS_S) -> None:
        deadline_s = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline_s, (self.status, self.events[-6:])
            time.sleep(0.1)

    def _until_replaced(self, fault: Callable[[], None]) -> None:
        """Cause a fault, and wait until another engine is started."""
        before = self.status.engine_pid
        fault()
        self.wait_for(lambda: self.status.engine_pid not in (before, None))

    def _body(self, text: str) -> dict[str, object]:
        messages = [{"role": "user", "content": text}]
        return {"model": self.plan.served_name, "messages": messages, "temperature": 0, "stream": True}

    def _stop(self) -> None:
        core = self.child("EngineCore")
        core.send_signal(signal.SIGSTOP)
        for child in core.children(recursive=True):
            child.send_signal(signal.SIGSTOP)
        health = httpx.get(f"{self.base_url}/health", timeout=5, trust_env=False)
        assert health.is_success, "a stopped engine's /health says 200: that is what makes it hard to find"

    def _starve(self, gateway: Stack) -> None:
        for process in (self.child("EngineCore"), self.child("Worker")):
            process.rlimit(resource.RLIMIT_AS, (process.memory_info().vms, process.memory_info().vms))
        long = {**self._body("word " * 3000), "stream": False, "max_tokens": 8}
        with gateway.client() as client:
            for _ in range(3):
                try:
                    if not client.post(CHAT, json=long).is_success:
                        return
                except httpx.TimeoutException:
                    return


def profile_of(shape: Shape) -> Profile:
    """Return the shipped CPU profile in another size."""
    shipped = load_profile("cpu")
    size = {"max_num_seqs": shape.at_once, "cpu_kv_cache_gib": shape.kv_cache_gib}
    serve = shipped.serve.model_copy(update=size)
    return shipped.model_copy(update={"name": shape.name, "serve": serve, "watch": shape.watch})


@pytest.fixture(scope="module")
def engine(bench: Bench, shape: Shape) -> Iterator[KeptEngine]:
    if (lacking := stack.lacking()) is not None:
        pytest.skip(lacking)
    plan = bench.plan(profile=profile_of(shape))
    key = new_secret()
    started = bench.start(plan.profile, plan, api_key=key)
    try:
        list(follow(started, plan.served_name, api_key=key))
        yield KeptEngine(ServiceState(bench.folder / plan.profile), plan, started.base_url)
    finally:
        started.stop()


@pytest.fixture(scope="module")
def drill(engine: KeptEngine, shape: Shape, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Drill]:
    # With Docker the plan of the same profile has it.
    planned = gateway_of(profile_of(shape), "docker", shape.at_once)
    assert planned is not None
    relay_settings = {
        "max_waiting": planned.max_waiting,
        "max_in_flight": planned.max_in_flight,
        "poll_interval_s": Settings.model_fields["poll_interval_s"].default,
    }
    gateway = Stack(
        tmp_path_factory.mktemp("gateway"),
        engine.plan.port,
        relay_settings,
        edge_settings={"header_timeout_s": shape.header_timeout_s},
        internal_key=(engine.state.secrets_dir / "api_key").read_text(encoding="utf-8"),
        state_dir=engine.state.operate_dir,
    )
    with gateway:
        with Drill(gateway, engine, shape.streams, shape.hold_s) as drill:
            yield drill
        if os.environ.get(RESULTS_ENV):
            file = Path(os.environ[RESULTS_ENV]) / f"{shape.name}.json"
            file.write_text(json.dumps(drill.judged().document(), indent=1) + "\n", encoding="utf-8")


def recovers(drill: Drill, engine: KeptEngine, step: Step) -> list[dict[str, Any]]:
    """Take a step, and return what keeper and watchdog tell of it once the engine serves again."""
    drill.answers()
    told = len(engine.events)
    assert drill.take(step).recovery_s is not None
    engine.wait_for(lambda: engine.status.phase == "serving")
    return engine.events[told:]


def kinds(events: list[dict[str, Any]]) -> list[str]:
    return [one["kind"] for one in events]
