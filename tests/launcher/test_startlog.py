"""What the log of a start says: its phase, how far it is, and the error that came first."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from launcher import startlog
from launcher.startlog import Reading
from tests.launcher.fake_vllm import CRASH_LOG

CASES = Path(__file__).parents[1] / "data" / "failures"
_COMPOSE_PREFIX = re.compile(r"^[\w-]+ +\| ")


def cases(kind: str) -> list[Any]:
    loaded = [(path.stem, yaml.safe_load(path.read_text(encoding="utf-8"))) for path in sorted(CASES.glob("*.yaml"))]
    return [pytest.param(case, id=name) for name, case in loaded if isinstance(case, dict) and case.get("kind") == kind]


def lines_of(case: dict[str, Any]) -> list[str]:
    return [_COMPOSE_PREFIX.sub("", line) for line in case["log"].splitlines()]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("(EngineCore pid=2) INFO 11-30 02:39:22 [core.py:133] Initializing a V1 LLM engine (v0", Reading("engine")),
        (
            "Loading safetensors checkpoint shards:  27% Completed | 3/11 [00:41<01:50, 13.8s/it]",
            Reading("load", 3, 11),
        ),
        ("INFO 05-15 16:02:47 [decorators.py:326] Directly load AOT compilation from path /c", Reading("compile")),
        ("INFO 05-15 16:02:47 [backends.py:1188] Dynamo bytecode transform time: 9.61 s", Reading("compile")),
        ("Capturing CUDA graphs (mixed prefill-decode, PIECEWISE):  33%|███▎  | 1/3 [00:00", Reading("capture", 1, 3)),
        ("Capturing multi-module MTP CUDA graphs: 100%|██████████| 2/2 [00:01<00:00]", Reading("capture", 2, 2)),
        ("INFO 05-15 16:02:47 [kernel_warmup.py:291] Warming up FlashInfer attention.", Reading("warm-up")),
        ("INFO 05-15 16:02:47 [cpu_model_runner.py:87] Warming up model for the compilation...", Reading("compile")),
        ("INFO 05-15 16:02:47 [cpu_model_runner.py:91] Warming up done.", None),
        ("(APIServer pid=1) INFO 11-30 02:41:33 [entry.py:140] Starting vLLM server on http://", Reading("serve")),
        ("(APIServer pid=1) INFO 11-30 02:41:33 [launcher.py:195] Route: /load, Methods: GET", None),
    ],
)
def test_a_line_tells_its_phase(line: str, expected: Reading | None) -> None:
    assert startlog.read(line) == expected


def test_lines_that_come_by_the_clock_are_no_progress() -> None:
    notice = "INFO 05-15 16:03:36 [shm_broadcast.py:878] No available shared memory broadcast block found in 60 s"
    assert not startlog.is_progress(notice)
    assert not startlog.is_progress('INFO:     127.0.0.1:58280 - "GET /health HTTP/1.1" 200 OK')
    assert not startlog.is_progress("  ")
    assert startlog.is_progress("INFO 11-30 02:39:29 [default_loader.py:501] Loading weights took 0.44 seconds")


def test_the_error_that_came_first_is_told_without_its_consequences() -> None:
    assert startlog.first_error(CRASH_LOG.splitlines()) == (
        '  File "/vllm/v1/core/kv_cache_utils.py", line 77, in check',
        "    raise ValueError(",
        "ValueError: No available memory for the cache blocks.",
    )


def test_the_parsers_complaint_is_the_error() -> None:
    lines = ["usage: vllm [-h] ...", "vllm: error: unrecognized arguments: --swap-space 16"]
    assert startlog.first_error(lines) == ("vllm: error: unrecognized arguments: --swap-space 16",)


def test_a_line_of_another_process_does_not_end_a_traceback() -> None:
    lines = CRASH_LOG.splitlines()
    lines.insert(3, "(APIServer pid=1) INFO 11-30 02:39:40 [launcher.py:254] waiting")
    assert startlog.first_error(lines)[-1] == "ValueError: No available memory for the cache blocks."


@pytest.mark.parametrize("case", cases("healthy"))
def test_a_healthy_start_has_no_error(case: dict[str, Any]) -> None:
    assert startlog.first_error(lines_of(case)) == ()


@pytest.mark.parametrize("case", cases("failure"))
def test_what_was_seen_in_the_field_is_not_a_consequence(case: dict[str, Any]) -> None:
    error = startlog.first_error(lines_of(case))
    roots = [line for line in error if not startlog.is_consequence(line)]
    # A worker that the kernel killed leaves no line of its own: there the consequence is all there is.
    assert roots or not error or case["expect"]["cause"] == "host-oom-killed"
