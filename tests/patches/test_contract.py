"""Every fix keeps the contract of DESIGN.md's "One fix" on every vLLM version that it is for."""

import ast
import json
import os
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from packaging.specifiers import SpecifierSet
from vllm_graft.fixes import FIXES
from vllm_graft.patch import Patch

ROOT = Path(__file__).parents[2]
CHECKS = (
    "fingerprint is known",
    "applies",
    "apply twice is apply once",
    "caller reaches it",
    "no stale alias",
    "signature is kept",
    "undo restores the same object",
)
ORDERS = ("target imported after the plugin", "target imported before the plugin")
each_fix = pytest.mark.parametrize("patch", FIXES, ids=lambda patch: patch.id)


@cache
def results(python: Path) -> dict[str, dict[str, dict[str, str]]]:
    """What the program found in one environment."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT / "patches"), "CUDA_VISIBLE_DEVICES": ""}
    environ |= {"VLLM_LOGGING_STREAM": "ext://sys.stderr"}
    done = subprocess.run(
        [python, Path(__file__).with_name("contract_program.py")],
        capture_output=True,
        text=True,
        env=environ,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, dict[str, dict[str, str]]] = json.loads(done.stdout.splitlines()[-1])
    return found


@each_fix
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("check", CHECKS)
def test_a_fix_keeps_the_contract(environment: Any, patch: Patch, order: str, check: str) -> None:
    if environment.vllm not in SpecifierSet(patch.affects):
        pytest.skip(f"vLLM {environment.vllm} is outside of {patch.affects}")
    problem = results(environment.python)[order][patch.id].get(check, "not reached")
    assert problem == "", f"{patch.id} on vLLM {environment.vllm}, {order}: {problem}"


@each_fix
def test_a_fix_has_its_two_proofs(patch: Patch) -> None:
    path = ROOT / patch.proof
    names = {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}
    assert {"test_fault_without_fix", "test_fixed_with_fix"} <= names


@each_fix
def test_a_fix_is_small_and_a_module_of_its_own(patch: Patch) -> None:
    module = ROOT / "patches" / "vllm_graft" / "fixes" / f"{patch.id.replace('-', '_')}.py"
    assert patch.build.__module__ == f"vllm_graft.fixes.{module.stem}"
    assert len(module.read_text().splitlines()) <= 120


def test_fixes_are_few_and_named_once() -> None:
    ids = [patch.id for patch in FIXES]
    assert len(ids) == len(set(ids)) <= 12
