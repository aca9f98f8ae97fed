"""The drift report against both releases: the same code is the same, and other code is told."""

import json
import os
import subprocess
from typing import Any

import pytest
from vllm_graft.fixes import FIXES

from launcher.engine_env import ENGINE, VLLM_0_33, EngineEnv, is_installed
from launcher.state import CHECKOUT


def drift(env: EngineEnv) -> tuple[int, Any]:
    if not is_installed(env):
        pytest.skip(f"{env.folder.name} is not installed: graft engine install {env.name}")
    argv = [str(env.python), str(CHECKOUT / "images" / "drift.py"), "--json"]
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT / "patches")}
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.stdout, done.stderr[-2000:]
    return done.returncode, json.loads(done.stdout)


@pytest.mark.engine
def test_the_newest_pinned_release_has_not_drifted() -> None:
    code, found = drift(VLLM_0_33)
    assert (code, found["vllm"]) == (0, "0.33.0")
    assert {one["id"]: one["state"] for one in found["fixes"]} == {fix.id: "same" for fix in FIXES}


@pytest.mark.engine
def test_code_that_is_another_is_told_with_its_fingerprint() -> None:
    code, found = drift(ENGINE)
    states = {one["id"]: (one["state"], one["found"]) for one in found["fixes"]}
    other = {fix.id for fix in FIXES if fix.fingerprints["0.32.0"] != fix.fingerprints["0.33.0"]}
    assert code == (1 if other else 0)
    assert {name for name, (state, _) in states.items() if state == "changed"} == other
    assert all(states[fix.id][1] == fix.fingerprints["0.32.0"] for fix in FIXES)
