"""`graft verify` against a real vLLM: the small model finds needles, cannot call tools, and equals itself."""

import json
import random
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from launcher.ask import Connection
from launcher.measure import equality
from launcher.measure.needles import needle
from launcher.measure.target import target_of
from launcher.state import CHECKOUT
from tests.engine.conftest import Running

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]
SEED = "1"


def verify(server: Running, *arguments: str | Path) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "launcher", "verify", "--url", server.service.base_url, "--seed", SEED]
    return subprocess.run([*command, *map(str, arguments)], cwd=CHECKOUT, capture_output=True, text=True, check=False)


def test_a_small_model_passes_as_far_as_it_recalls_and_is_refused_tools_by_its_server(
    server: Running, tmp_path: Path
) -> None:
    ended = verify(server, "--quick", "--json", "--context", "512", "--out", tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    report = json.loads(ended.stdout)
    assert report["model"] == server.plan.served_name
    checks = {check["name"]: check for check in report["checks"]}
    assert checks["needles"]["passed"]
    assert checks["tool calls"]["passed"] is None
    assert "skipped: the server refuses tools" in checks["tool calls"]["said"]
    assert (tmp_path / "needles.svg").is_file()
    assert json.loads((tmp_path / "verify.json").read_text(encoding="utf-8")) == report


def test_lengths_are_counted_as_the_server_counts_them(server: Running) -> None:
    with Connection(server.service.base_url) as connection:
        target = target_of(connection, None)
        task = needle(random.Random(1), 1000, 0.5)
        counted = target.count_tokens(task)
        answer = target.ask(task)
    assert target.is_vllm
    assert target.served.max_model_len == server.plan.max_model_len
    assert answer.prompt_tokens == counted
    assert answer.token_ids
    with Connection(server.service.base_url) as connection:
        assert answer.text.strip() in target_of(connection, None).raw_text(answer)


def test_a_service_equals_itself_token_by_token(server: Running) -> None:
    with Connection(server.service.base_url) as connection:
        target = target_of(connection, None)
        found = equality.probe(
            target,
            lambda: nullcontext(target),
            random.Random(2),
            count=2,
            with_tools=False,
            concurrency=1,
            on_done=lambda done, total: None,
        )
    assert (found.compared, found.wrong) == (2, 0)
