"""The files that need vLLM, run with each version's own Python: the launcher's environment has none.

One process per version runs them all, because importing vLLM takes seconds; nothing in them may be skipped.
"""

import os
import subprocess
import xml.etree.ElementTree as ET
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.patches.conftest import PROOFS, ROOT

pytestmark = pytest.mark.timeout(600)
TORCHS_OWN_WARNING = "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"
TRITON = next((ROOT / ".venv-vllm-0.33").glob("lib/python3*/site-packages/triton"), None)


def with_triton(vllm: str, folder: Path) -> str:
    """Make what the CPU engine's environment lacks for Triton's interpreter, and return the folder to import it from.

    A version that names the CPU makes vLLM do without Triton.
    """
    if TRITON is not None and not (folder / "triton").exists():
        (folder / "triton").symlink_to(TRITON)
        metadata = folder / f"vllm-{vllm}.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {vllm}\n")
    return str(folder)


@cache
def outcomes(vllm: str, python: Path, folder: Path) -> tuple[dict[str, list[ET.Element]], str]:
    """The test cases of each file, and what pytest printed."""
    environ = {key: value for key, value in os.environ.items() if not key.startswith(("GRAFT_", "VLLM_", "PYTEST_"))}
    environ |= {"PYTHONPATH": with_triton(vllm, folder), "CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"}
    results = folder / f"results-{vllm}.xml"
    files = [str(Path(__file__).with_name(name)) for name in PROOFS]
    options = ("-q", "-p", "no:cacheprovider", "-W", TORCHS_OWN_WARNING, f"--junitxml={results}")
    command = (str(python), "-m", "pytest", *options, *files)
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False, timeout=600)
    if not results.exists():
        return {}, done.stdout + done.stderr
    cases: dict[str, list[ET.Element]] = {}
    for case in ET.parse(results).getroot().iter("testcase"):
        cases.setdefault(f"{(case.get('classname') or '').rpartition('.')[2]}.py", []).append(case)
    return cases, done.stdout


@pytest.mark.parametrize("proof", PROOFS)
def test_a_proof_holds(environment: Any, proof: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.getbasetemp() / f"proofs-{environment.vllm}"
    folder.mkdir(exist_ok=True)
    found, printed = outcomes(environment.vllm, environment.python, folder)
    cases = found.get(proof, [])
    assert cases, printed
    bad = [case for case in cases for kind in ("failure", "error", "skipped") if case.find(kind) is not None]
    assert not bad, printed
