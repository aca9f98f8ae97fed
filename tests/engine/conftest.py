"""One real vLLM server on the CPU, started and followed by the launcher, for all tests that need one."""

import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from launcher import render
from launcher.engine_env import ENGINE, is_installed
from launcher.images.pins import load_pins
from launcher.plan import Plan
from launcher.planner import Inputs, make
from launcher.prepare import model_on_disk, models_dir
from launcher.profile import Profile, load_model, load_profile
from launcher.ready import Event, LogLine, follow
from launcher.runtime.host import HostService, start
from launcher.service_files import store_secret, write
from launcher.state import ServiceState
from launcher.weights.fetch import ensure_model


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the tests of the shared server first, and what stops it behind them."""

    def place(item: pytest.Item) -> tuple[bool, bool]:
        stops = item.get_closest_marker("stops_server") is not None
        return "server" not in getattr(item, "fixturenames", ()), stops

    mine = [index for index, item in enumerate(items) if Path(__file__).parent in item.path.parents]
    for index, item in zip(mine, sorted((items[index] for index in mine), key=place), strict=True):
        items[index] = item


@pytest.fixture(scope="session")
def model_dir() -> Path:
    if not is_installed(ENGINE):
        pytest.skip(f"{ENGINE.folder.name} is not installed; run `graft engine install`")
    return ensure_model(load_model(load_profile("cpu").model), models_dir(), lambda event: None)


@dataclass(frozen=True)
class Bench:
    """Plans and starts the shipped CPU profile on a free port, with its state in a folder of the tests."""

    folder: Path
    model_dir: Path

    def plan(self, *extra_args: str, profile: Profile | None = None) -> Plan:
        """Args: profile: in place of the shipped one."""
        profile = profile or load_profile("cpu")
        serve = profile.serve.model_copy(update={"port": free_port(), "extra_args": extra_args})
        profile = profile.model_copy(update={"serve": serve})
        model = load_model(profile.model)
        config, weights = model_on_disk(self.model_dir)
        pin = load_pins().of(profile.vllm)
        return make(Inputs(profile=profile, model=model, pin=pin, config=config, weights=weights)).plan

    def start(self, name: str, plan: Plan, api_key: str | None = None) -> HostService:
        state = ServiceState(self.folder / name)
        state.root.mkdir(parents=True)
        if api_key is not None:
            store_secret(state, "api_key", api_key)
        write(state.root, {name: text.encode() for name, text in render.run(plan).items()})
        return start(plan, self.model_dir, state, ENGINE.vllm)


@pytest.fixture(scope="session")
def bench(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Bench:
    return Bench(tmp_path_factory.mktemp("state"), model_dir)


@dataclass(frozen=True)
class Running:
    """A server that gave its first right answer, and what happened on the way."""

    plan: Plan
    state: ServiceState
    service: HostService
    events: tuple[Event, ...]


@pytest.fixture(scope="session")
def server(bench: Bench) -> Iterator[Running]:
    plan = bench.plan()
    service = bench.start("shared", plan)
    try:
        events = tuple(event for event in follow(service, plan.served_name) if not isinstance(event, LogLine))
        yield Running(plan, ServiceState(bench.folder / "shared"), service, events)
    finally:
        service.stop()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
