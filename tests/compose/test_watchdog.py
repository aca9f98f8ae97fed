"""An engine that dies or stands still in its container is replaced there, by a watchdog that has no Docker socket."""

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from launcher import render
from launcher.ask import ask
from launcher.images import build
from launcher.operate.events import FILE_NAME
from launcher.operate.service_state import ServiceStatus, StateFile
from launcher.plan import Plan
from launcher.planner import Inputs, make
from launcher.profile import Gateway, Watch, load_model, load_profile
from launcher.ready import follow
from launcher.runtime.compose import ComposeService
from launcher.service_files import service_files, store_secret, write
from launcher.state import ServiceState
from launcher.watching import folder
from tests.compose.conftest import API_KEY, Deployer, free_port

pytestmark = [pytest.mark.compose, pytest.mark.timeout(600)]

RECOVERS_S = 240


@dataclass
class Watched:
    """A service with a watchdog that looks often."""

    plan: Plan
    state: ServiceState
    service: ComposeService

    @property
    def status(self) -> ServiceStatus:
        return StateFile(self.state.operate_dir).read()

    @property
    def events(self) -> list[dict[str, Any]]:
        lines = (self.state.operate_dir / FILE_NAME).read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines]

    @property
    def watchdog(self) -> str:
        return f"{render.project_name(self.plan.profile)}-watchdog-1"

    def inside(self, command: str, container: str | None = None) -> str:
        """Run a command as the server's user, in its container or another one."""
        argv = ["docker", "exec", container or self.service.container, "sh", "-c", command]
        return subprocess.run(argv, capture_output=True, text=True, check=True).stdout

    def signal(self, pattern: str, signal: str) -> None:
        """Signal the processes whose command line a shell pattern matches; the watchdog is in the same namespace."""
        title = "$(tr '\\0' ' ' < $p/cmdline)"
        self.inside(f"for p in /proc/[0-9]*; do case {title} in {pattern}) kill -{signal} ${{p#/proc/}};; esac; done")

    def wait_for(self, condition: Callable[[], bool], seconds: float = RECOVERS_S) -> None:
        deadline_s = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline_s, (self.status, self.events[-6:])
            time.sleep(0.2)

    def answers(self) -> str:
        return ask(
            self.service.base_url, "What is the capital of France?", api_key=API_KEY, max_tokens=32, timeout_s=120
        ).text

    def recovers(self, signal: str) -> list[dict[str, Any]]:
        """Signal the engine's core and its workers, wait for another engine that serves, and return what was told."""
        pid, told = self.status.engine_pid, len(self.events)
        # A process's title takes the place of its arguments.
        self.signal("VLLM::*", signal)
        self.wait_for(lambda: self.status.engine_pid not in (pid, None) and self.status.phase == "serving")
        return self.events[told:]


@pytest.fixture(scope="module")
def watched(deploy: Deployer, model_dir: Path) -> Iterator[Watched]:
    profile = load_profile("cpu")
    profile = profile.model_copy(
        update={
            "name": "test-watched",
            "serve": profile.serve.model_copy(update={"port": free_port()}),
            "gateway": Gateway(enabled=False),
            "watch": Watch(every_s=2, idle_probe_s=5),
        }
    )
    plan = make(Inputs(profile=profile, model=load_model(profile.model), pin=deploy.pin, runtime="docker")).plan
    state = ServiceState(deploy.folder / plan.profile)
    store_secret(state, "api_key", API_KEY)
    folder.make(state)
    write(state.root, service_files(plan, state, model_dir, deploy.engine))
    assert plan.image is not None
    build.ensure(state.compose_file, build.tag(plan.image, build.build_wheel()))
    service = ComposeService(state.compose_file, plan)
    service.start()
    list(follow(service, plan.served_name, api_key=API_KEY))
    yield Watched(plan, state, service)
    service.stop()


def test_the_watchdog_sees_the_engines_processes_and_nothing_of_docker(watched: Watched) -> None:
    watched.wait_for(lambda: watched.status.looked_s is not None, 30)
    assert watched.status.phase == "serving"
    processes = watched.inside("cat /proc/[0-9]*/cmdline | tr '\\0' ' '", watched.watchdog)
    assert "VLLM::EngineCore" in processes
    assert watched.inside("id -u; test ! -e /var/run/docker.sock && echo none", watched.watchdog).split() == [
        "2000",
        "none",
    ]


def test_a_killed_engine_is_replaced_in_its_container(watched: Watched) -> None:
    told = watched.recovers("KILL")
    assert "engine-ended" in [one["kind"] for one in told]
    assert "Paris" in watched.answers()
    state = watched.service.state()
    # Docker has nothing to start again: its own count of restarts is for a keeper that dies.
    assert (state.status, state.restart_count) == ("running", 0)


def test_a_stopped_engine_is_ended_and_replaced(watched: Watched) -> None:
    told = watched.recovers("STOP")
    ended = next(one for one in told if one["kind"] == "engine-ended")
    assert ended["cause"] == "engine-hang"
    assert "Paris" in watched.answers()


def test_a_watchdog_that_is_killed_is_started_again_by_docker(watched: Watched) -> None:
    started = [one["kind"] for one in watched.events].count("watchdog-started")
    # From inside: what is ended through Docker is not started again.
    watched.signal("*operate.pyz\\ watch*", "KILL")
    watched.wait_for(lambda: [one["kind"] for one in watched.events].count("watchdog-started") > started, 60)
    assert watched.status.phase == "serving"


def test_the_smaller_settings_start_the_same_model(watched: Watched) -> None:
    pid = watched.status.engine_pid
    StateFile(watched.state.operate_dir).change(
        lambda status: status.model_copy(update={"mode": "degraded", "reason": "two ends for lack of memory"})
    )
    watched.inside(f"kill -9 {pid}")
    watched.wait_for(lambda: watched.status.engine_pid not in (pid, None) and watched.status.phase == "serving")
    assert watched.status.is_degraded
    assert "Paris" in watched.answers()
    lines = [line for line in watched.service.log() if line.startswith("graft: exec vllm serve")]
    assert "--max-model-len 4096" in lines[0]
    assert "--max-model-len 2048" in lines[-1]
