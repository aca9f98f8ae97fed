"""Every flag that a plan sets is one that vLLM's own parser takes, in both pinned versions."""

import json
import subprocess

import pytest

from launcher.engine_env import ENGINE, VLLM_0_33, EngineEnv, is_installed
from launcher.images.pins import load_pins
from launcher.planner import Inputs, make
from launcher.profile import Profile, Speculation, load_model, load_profile, model_files, profile_files
from launcher.state import CHECKOUT

PROGRAM = CHECKOUT / "launcher" / "parse_flags.py"
PARSERS = {"0.32.0": ENGINE, "0.33.0": VLLM_0_33}
UNKNOWN = "a flag that vLLM does not have"


def _argv(profile: Profile, model: str, vllm: str) -> tuple[str, ...]:
    other = profile.model_copy(update={"vllm": vllm})
    return make(Inputs(other, load_model(model), load_pins().of(vllm))).plan.argv()


def _lines(vllm: str) -> dict[str, tuple[str, ...]]:
    """Return every command line to try, by what it stands for."""
    base = load_profile("rtx4090")
    ngram = base.serve.model_copy(update={"speculation": Speculation(method="ngram", num_speculative_tokens=4)})
    return {
        **{
            f"{profile} with {model}": _argv(load_profile(profile), model, vllm)
            for profile in profile_files()
            for model in model_files()
        },
        "safe mode": _argv(base.model_copy(update={"disabled_fixes": ("tq-spec-decode",)}), base.model, vllm),
        "ngram": _argv(base.model_copy(update={"serve": ngram}), base.model, vllm),
        UNKNOWN: ("--swap-space", "16"),
    }


def _parsed(env: EngineEnv, lines: list[tuple[str, ...]]) -> list[str | None]:
    done = subprocess.run(
        (env.python, "-P", PROGRAM), input=json.dumps(lines), capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    result: list[str | None] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.mark.engine
@pytest.mark.parametrize("vllm", PARSERS)
def test_vllm_takes_every_flag_of_every_profile_with_every_model(vllm: str) -> None:
    if not is_installed(PARSERS[vllm]):
        pytest.skip(f"{PARSERS[vllm].folder.name} is not installed: graft engine install {PARSERS[vllm].name}")
    lines = _lines(vllm)
    complaints = dict(zip(lines, _parsed(PARSERS[vllm], list(lines.values())), strict=True))
    assert "--swap-space" in (complaints.pop(UNKNOWN) or "")
    assert {line: said for line, said in complaints.items() if said} == {}
