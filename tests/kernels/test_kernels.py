"""The tests of the kernels, run with the Python of vLLM 0.33.0: Triton's interpreter computes, or Triton compiles."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.kernels.conftest import COMPILED, FOLDER, NEEDS_TRITON

pytestmark = pytest.mark.timeout(600)
ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-vllm-0.33/bin/python"
TORCHS_OWN_WARNING = "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"
WAYS = {"compiled": COMPILED, "interpreted": tuple(name for name in NEEDS_TRITON if name not in COMPILED)}


@pytest.mark.parametrize("way", WAYS)
def test_kernels(way: str) -> None:
    if not PYTHON.exists():
        pytest.skip("no .venv-vllm-0.33; `make test` installs it")
    environ = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST_", "TRITON_"))}
    environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    environ |= {"TRITON_INTERPRET": "1"} if way == "interpreted" else {"TRITON_DEFAULT_FP_FUSION": "1"}
    files = [str(FOLDER / name) for name in WAYS[way]]
    assert files
    command = [str(PYTHON), "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", TORCHS_OWN_WARNING, *files]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped" not in done.stdout, done.stdout
