"""The reference model in a real vLLM engine on the CPU, by the profile for it: right calls and needles."""

import json
import random
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from reference_config import WEIGHTS

from launcher import render
from launcher.ask import Connection
from launcher.canary import canary_of
from launcher.engine_env import ENGINE, is_installed
from launcher.images.pins import load_pins
from launcher.measure import judge, verify
from launcher.measure.dialogues import KINDS, tasks
from launcher.measure.needles import needle
from launcher.measure.target import Target
from launcher.planner import Inputs, make
from launcher.prepare import model_on_disk
from launcher.profile import load_model, load_profile
from launcher.ready import CanaryAsked, LogLine, Ready, follow
from launcher.runtime.host import start
from launcher.state import ServiceState
from tests.engine.conftest import free_port

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]
PROFILES = WEIGHTS.parent / "profiles"
DEPTHS = (0.2, 0.8)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    if not is_installed(ENGINE):
        pytest.skip(f"{ENGINE.folder.name} is not installed; run `graft engine install`")
    profile = load_profile("reference-cpu", PROFILES)
    serve = profile.serve.model_copy(update={"port": free_port()})
    profile = profile.model_copy(update={"serve": serve})
    config, weights = model_on_disk(WEIGHTS)
    model, pin = load_model(profile.model, PROFILES), load_pins().of(profile.vllm)
    plan = make(Inputs(profile=profile, model=model, pin=pin, config=config, weights=weights)).plan
    state = ServiceState(tmp_path_factory.mktemp("state") / "reference")
    for file, text in render.run(plan).items():
        (state.root / file).parent.mkdir(parents=True, exist_ok=True)
        (state.root / file).write_text(text, encoding="utf-8")
    service = start(plan, WEIGHTS, state, ENGINE.vllm)
    try:
        events = follow(service, plan.served_name, canary=canary_of(plan))
        *_, called, last = (event for event in events if not isinstance(event, LogLine))
        assert isinstance(last, Ready), last
        assert called == CanaryAsked("a tool call, whole and streamed")
        with Connection(service.base_url) as connection:
            yield Target(connection, connection.models()[0])
    finally:
        service.stop()


@pytest.mark.parametrize("kind", KINDS)
def test_it_calls_the_tool_with_the_values_of_the_conversation(target: Target, kind: str) -> None:
    for task in tasks(kind, random.Random(kind), "held-out"):  # type: ignore[arg-type]
        assert judge.faults(task, target.ask(task)) == ()


def test_streamed_replies_at_once_equal_whole_ones(target: Target) -> None:
    asked = [task for kind in KINDS for task in tasks(kind, random.Random(7), "held-out")][:6]
    with ThreadPoolExecutor(len(asked)) as pool:
        streamed = list(pool.map(lambda task: target.ask(task, stream=True), asked))
    for task, answer in zip(asked, streamed, strict=True):
        assert judge.differences(target.ask(task), answer) == ()


@pytest.mark.parametrize("chars", [1000, 7500])
def test_it_finds_a_needle(target: Target, chars: int) -> None:
    for depth in DEPTHS:
        task = needle(random.Random(f"{chars} {depth}"), chars, depth, "held-out")
        assert judge.number_fault(task, target.ask(task)) is None


def test_it_passes_the_quick_verification(target: Target) -> None:
    settings = replace(verify.quick(1, 8192), prefix_tokens=1200, concurrency=2)
    report = verify.verify(target, settings, Silent())
    assert report.passed, report.failures
    assert [one.passed for one in report.checks] == [True, True, True, True, None]


class Silent:
    """Where the verification's progress goes."""

    def phase(self, name: str) -> None: ...

    def progress(self, done: float, total: float, unit: str, detail: str = "") -> None: ...


@cache
def run(program: str) -> dict[str, float]:
    """Run a program of this folder with the engine's Python, and return what it prints."""
    if not is_installed(ENGINE):
        pytest.skip(f"{ENGINE.folder.name} is not installed; run `graft engine install`")
    path = Path(__file__).with_name(program)
    done = subprocess.run([str(ENGINE.python), str(path)], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    found: dict[str, float] = json.loads(done.stdout)
    return found


def test_transformers_reads_the_tokenizer_and_the_template_as_the_training_does() -> None:
    assert run("reference_text.py")["texts"] > 50


def test_the_network_that_is_trained_is_transformers_own() -> None:
    found = run("reference_parity.py")
    assert found["largest"] > 1
    assert found["difference"] < 1e-4


def test_the_training_scores_right_replies_as_right_and_wrong_ones_as_wrong() -> None:
    found = run("reference_parity.py")
    assert found["right"] == 1
    assert found["wrong"] == 0
    assert found["accepted"] > 0.9
