"""Every fix and the plugin itself in a real vLLM, in each version: the contract, the proof, and vLLM's own loader.

One process per version does all that needs vLLM, because importing it takes seconds.
"""

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
from vllm_graft.report import parse_lines

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
def results(python: Path, folder: Path) -> dict[str, Any]:
    """What the program found, and the log."""
    for name, target in {"graft": "vllm_graft:register", "broken": "broken_plugin:register"}.items():
        metadata = folder / f"{name}-0.1.0.dist-info"
        metadata.mkdir(exist_ok=True)
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1.0\n")
        (metadata / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{name} = {target}\n")
    (folder / "broken_plugin.py").write_text("raise RuntimeError('a plugin that fails while it is imported')\n")
    environ = {key: value for key, value in os.environ.items() if not key.startswith(("GRAFT_", "VLLM_"))}
    environ["PYTHONPATH"] = os.pathsep.join([str(folder), str(ROOT / "patches")])
    environ |= {"VLLM_LOGGING_STREAM": "ext://sys.stderr", "VLLM_PLUGINS": "graft,broken"}
    environ |= {"CUDA_VISIBLE_DEVICES": ""}
    program = Path(__file__).with_name("in_vllm_program.py")
    done = subprocess.run([python, program], capture_output=True, text=True, env=environ, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {**found, "log": done.stderr}


@pytest.fixture
def found(environment: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The answer of the program in one environment."""
    return results(environment.python, tmp_path_factory.getbasetemp())


@each_fix
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("check", CHECKS)
def test_a_fix_keeps_the_contract(
    environment: Any, found: dict[str, Any], patch: Patch, order: str, check: str
) -> None:
    if environment.vllm not in SpecifierSet(patch.affects):
        assert patch.id not in found["contract"][order]
        return
    problem = found["contract"][order][patch.id].get(check, "not reached")
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


def test_vllm_finds_and_calls_the_plugin(found: dict[str, Any]) -> None:
    assert [part.split()[0] for part in found["loader"]["all fixes"].split(", ")] == [patch.id for patch in FIXES]
    reports = parse_lines(found["log"])
    assert len(reports) == len(found["loader"]), "one report for each time that vLLM called the plugin"


def test_an_optional_fix_that_drifted_lets_vllm_go_on(found: dict[str, Any]) -> None:
    assert found["loader"]["optional drifted"] == "drifted-fix drifted"


def test_a_required_fix_that_drifted_comes_out_of_vllms_loader(found: dict[str, Any]) -> None:
    expected = "raised RequiredFixError: required fix drifted-fix is not applied: drifted: "
    assert found["loader"]["required drifted"].startswith(expected)


def test_wrong_settings_come_out_of_vllms_loader(found: dict[str, Any]) -> None:
    assert found["loader"]["wrong setting"].startswith("raised SettingsError: GRAFT_REQUIRE: no fix is called")
    assert found["loader"]["wrong facts"].startswith("raised SettingsError: GRAFT_FACTS=")


def test_vllm_swallows_what_a_plugin_raises_while_it_is_imported(found: dict[str, Any]) -> None:
    """The reason why `vllm_graft/__init__.py` imports nothing."""
    assert "Failed to load plugin broken" in found["log"]


def test_prove_holds_without_a_gpu(found: dict[str, Any]) -> None:
    assert found["prove"]["code"] == 0
    assert [fix["id"] for fix in found["prove"]["fixes"]] == [patch.id for patch in FIXES]
    assert {fix["outcome"] for fix in found["prove"]["fixes"]} <= {"applied", "not-affected"}
