"""After a start the memory that vLLM reports is compared with the plan, and the boot is kept for the next one."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from launcher import service
from launcher.fit import calibration
from launcher.fit.request import GIB
from launcher.memory import MemoryInputs
from launcher.planner import Planned
from launcher.prepare import calibration_file
from launcher.profile import load_profile
from launcher.runtime import RunState, Work
from tests.launcher.test_planner import machine, planned


@dataclass(frozen=True)
class Finished:
    """A server of which only the log is asked."""

    lines: tuple[str, ...]
    base_url: str = "http://127.0.0.1:1"

    def state(self) -> RunState:
        return RunState("running")

    def new_log_lines(self) -> tuple[str, ...]:
        return ()

    def log(self) -> Iterator[str]:
        yield from self.lines

    def work(self) -> Work | None:
        return None

    def stop(self) -> None:
        raise AssertionError("nothing is to be stopped")


@pytest.fixture(autouse=True)
def empty_state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GRAFT_STATE", str(tmp_path))


def plan_again() -> Planned:
    boots = calibration.load(calibration_file())
    return planned(load_profile("rtx4090"), facts=machine(), memory=MemoryInputs(boots=boots))


def boot_log(made: Planned, pool_gib: float, pool_line: str) -> Finished:
    """The lines of vLLM 0.33.0 (v1/worker/gpu_worker.py, v1/core/kv_cache_utils.py) for a pool of this size."""
    assert made.memory is not None
    assert made.memory.report is not None
    layout, length = made.memory.report.layout, made.plan.max_model_len
    assert length is not None
    blocks = layout.num_blocks(round(pool_gib * GIB))
    tokens, concurrency = layout.reported_tokens(blocks, length), layout.concurrency(blocks, length)
    return Finished(
        (
            "(EngineCore pid=7) INFO [core.py:140] Initializing a V1 LLM engine (v0.33.0) with config: model='/model'",
            f"INFO [interface.py:1109] Setting attention block size to {layout.block_tokens} tokens to ensure that",
            "INFO [model_runner.py:428] Model loading took 17.20 GiB memory and 41.200000 seconds",
            pool_line,
            f"INFO [kv_cache_utils.py:1147] GPU KV cache size: {tokens:,} tokens, Maximum concurrency for {length:,} "
            f"tokens per request: {concurrency:.2f}x",
        )
    )


def test_a_profiling_start_is_compared_and_kept_and_the_next_one_fixes_the_pool() -> None:
    first = plan_again()
    log = boot_log(first, 1.62, "INFO [gpu_worker.py:772] Available KV cache memory: 1.62 GiB")
    found = service._record(first, log)
    assert found is not None
    assert found.rules_agree
    assert found.block_deviation < -1
    assert found.cause is not None
    assert found.cause.startswith("weights: predicted 16.87 GiB, reported 17.20")
    (boot,) = calibration.load(calibration_file())
    assert boot.available_bytes == round(1.62 * GIB)
    again = plan_again()
    assert again.memory is not None
    assert again.memory.kv_cache_memory_bytes is not None
    assert again.memory.kv_cache_memory_bytes <= boot.available_bytes


def test_a_start_with_a_fixed_pool_is_compared_exactly_and_not_kept() -> None:
    """Such a start profiles nothing, so it says nothing about what would have been left."""
    first = plan_again()
    service._record(first, boot_log(first, 1.62, "INFO [gpu_worker.py:772] Available KV cache memory: 1.62 GiB"))
    again = plan_again()
    assert again.memory is not None
    assert again.memory.kv_cache_memory_bytes is not None
    pool_gib = again.memory.kv_cache_memory_bytes / GIB
    line = (
        f"INFO [gpu_worker.py:662] Initial free memory 23.10 GiB, reserved {pool_gib:.2f} GiB memory for KV Cache as "
        "specified by kv_cache_memory_bytes config and skipped memory profiling."
    )
    found = service._record(again, boot_log(again, pool_gib, line))
    assert found is not None
    assert (found.block_deviation, found.cause, found.rules_agree) == (0, None, True)
    assert len(calibration.load(calibration_file())) == 1


def test_a_cpu_start_has_nothing_to_compare() -> None:
    made = planned(load_profile("cpu"))
    assert service._record(made, Finished(("INFO Application startup complete.",))) is None
    assert not calibration_file().exists()
