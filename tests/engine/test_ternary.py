"""A real model, converted by the launcher, in a real vLLM on the CPU: its tokens are those of its weights."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from launcher.engine_env import ENGINE, ensure
from launcher.weights.ternary import Request, Summary, convert

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]
PROGRAM = Path(__file__).with_name("ternary_program.py")


def run(mode: str, folder: Path) -> tuple[dict[str, Any], str]:
    """The program's answer and its log."""
    environ = {key: value for key, value in os.environ.items() if not key.startswith(("GRAFT_", "VLLM_", "PYTHON"))}
    command = (str(ENGINE.python), str(PROGRAM), mode, str(folder))
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environ, cwd=folder)
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = (line for line in done.stdout.splitlines() if line.startswith('{"tokens"'))  # vLLM logs its end after it
    answer: dict[str, Any] = json.loads(line)
    return answer, done.stdout + done.stderr


@pytest.mark.parametrize("group_size", [None, 64], ids=["a scale a row", "a scale for 64 columns"])
def test_a_converted_model_answers_with_the_tokens_of_its_weights(
    model_dir: Path, tmp_path: Path, group_size: int | None
) -> None:
    ensure(ENGINE, lambda event: None)
    target = tmp_path / "ternary"
    summary = convert(Request(model_dir, target, group_size), ENGINE.python, lambda *event: None)
    assert isinstance(summary, Summary)
    assert summary.ternary_modules == 210
    assert summary.target_bytes < 0.35 * summary.source_bytes  # the embedding, 57 MB, stays as it is
    served, log = run("engine", target)
    assert served["quantization"] == "ternary"
    assert "the tensors are" not in log  # config.json is right about them
    expected, _ = run("reference", target)
    assert served["tokens"] == expected["tokens"]
