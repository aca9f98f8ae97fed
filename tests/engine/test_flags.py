"""Every flag that a plan sets is one that vLLM's own parser takes, in both pinned versions."""

import json
import subprocess
from pathlib import Path

import pytest

from launcher.engine_env import ENGINE, VLLM_0_33, EngineEnv, is_installed
from launcher.images.pins import load_pins
from launcher.planner import Inputs, make
from launcher.profile import Profile, Speculation, load_model, load_profile, model_files, profile_files

PROGRAM = Path(__file__).parent / "parse_flags.py"
PARSERS = {"0.32.0": ENGINE, "0.33.0": VLLM_0_33}


def _parsed(env: EngineEnv, lines: list[tuple[str, ...]]) -> list[str | None]:
    done = subprocess.run(
        (env.python, PROGRAM), input=json.dumps(lines), capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    result: list[str | None] = json.loads(done.stdout.splitlines()[-1])
    return result


def _argv(profile: Profile, model: str, vllm: str) -> tuple[str, ...]:
    other = profile.model_copy(update={"vllm": vllm})
    return make(Inputs(other, load_model(model), load_pins().of(vllm))).plan.argv()


@pytest.fixture(params=PARSERS)
def vllm(request: pytest.FixtureRequest) -> str:
    version: str = request.param
    if not is_installed(PARSERS[version]):
        pytest.skip(f"{PARSERS[version].folder.name} is not installed: graft engine install {PARSERS[version].name}")
    return version


@pytest.mark.engine
def test_vllm_takes_every_flag_of_every_profile_with_every_model(vllm: str) -> None:
    pairs = [(profile, model) for profile in profile_files() for model in model_files()]
    lines = [_argv(load_profile(profile), model, vllm) for profile, model in pairs]
    complaints = dict(zip(pairs, _parsed(PARSERS[vllm], lines), strict=True))
    assert {pair: said for pair, said in complaints.items() if said} == {}


@pytest.mark.engine
def test_vllm_takes_the_flags_of_safe_mode_and_of_the_other_speculation(vllm: str) -> None:
    base = load_profile("rtx4090")
    ngram = base.serve.model_copy(update={"speculation": Speculation(method="ngram", num_speculative_tokens=4)})
    variants = [
        base.model_copy(update={"disabled_fixes": ("tq-spec-decode",)}),
        base.model_copy(update={"serve": ngram}),
    ]
    lines = [_argv(one, "qwen3.6-27b-int4", vllm) for one in variants]
    assert _parsed(PARSERS[vllm], lines) == [None] * len(lines)


@pytest.mark.engine
def test_the_parser_refuses_a_flag_that_does_not_exist(vllm: str) -> None:
    (said,) = _parsed(PARSERS[vllm], [("--swap-space", "16")])
    assert said is not None
    assert "--swap-space" in said
