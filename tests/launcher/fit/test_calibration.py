"""Reading vLLM's own lines, comparing them with the prediction, and keeping boots for the next start."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.diagnose import diagnose
from launcher.evidence import Evidence
from launcher.fit.calibration import (
    BOOTS_PER_CONFIGURATION,
    BootRecord,
    CalibrationError,
    LoggedBoot,
    calibration,
    compare,
    configuration_key,
    load,
    parse_boot_log,
    pool_choice,
    record_boot,
    reported_blocks,
    store,
)
from launcher.fit.planner import FitReport, fit
from launcher.fit.request import GIB, FitRequest

Ask = Callable[..., FitRequest]

# Wording of vLLM 0.33.0 (v1/worker/gpu_worker.py, v1/core/kv_cache_utils.py, platforms/interface.py).
BOOT = """
(EngineCore pid=7) INFO 11-30 01:00:00 [core.py:140] Initializing a V1 LLM engine (v0.33.0) with config: model='/model',
(EngineCore pid=7) INFO [interface.py:1109] Setting attention block size to 1600 tokens to ensure that attention page size is >= mamba page size.
(EngineCore pid=7) INFO [qwen_gdn.py:300] Using Triton/FLA GDN prefill kernel (requested=triton, head_k_dim=128).
(EngineCore pid=7) INFO [model_runner.py:428] Model loading took 16.87 GiB memory and 41.200000 seconds
(EngineCore pid=7) INFO [gpu_worker.py:772] Available KV cache memory: 2.02 GiB
(EngineCore pid=7) INFO [kv_cache_utils.py:1147] GPU KV cache size: 28,228 tokens, Maximum concurrency for 20,800 tokens per request: 1.36x
(EngineCore pid=7) INFO [gpu_worker.py:1003] CUDA graph pool memory: 0.11 GiB (actual), 0.14 GiB (estimated), difference: 0.03 GiB (27.3%).
(EngineCore pid=7) INFO [gpu_worker.py:1043] Free memory on device (23.1/23.52 GiB) on startup. Desired GPU memory utilization is (0.85, 19.99 GiB). Actual usage is 17.2 GiB for consumed memory (weights + non-torch), 0.77 GiB for peak activation, and 0.11 GiB for CUDAGraph memory. Replace gpu_memory_utilization config with `--kv-cache-memory=2000000000` (1.86 GiB) to fit into requested memory, or `--kv-cache-memory=5000000000` (4.66 GiB) to fully utilize gpu memory. Current kv cache memory in use is 2.02 GiB.
"""  # noqa: E501
REFUSAL = """
INFO [gpu_worker.py:772] Available KV cache memory: 2.05 GiB
ValueError: To serve at least one request with the model's max seq len (65536), (2.91 GiB KV cache is needed, which is larger than the available KV cache memory (2.0 GiB). Based on the available memory, the estimated maximum model length is 36800. Try increasing `gpu_memory_utilization` (which also controls CPU memory on the CPU backend) or decreasing `max_model_len` when initializing the engine.
"""  # noqa: E501
CPU = """
INFO [core.py:134] Initializing a V1 LLM engine (v0.32.0+cpu) with config: model='/model'
INFO [cpu_worker.py:250] Explicitly set (1.0/23.42) GiB for KV cache on node 0.
INFO [kv_cache_utils.py:2327] CPU KV cache size: 48,528 tokens, Maximum concurrency for 8,192 tokens per request: 5.92x
"""


@pytest.fixture
def report(ask_27b: Ask) -> FitReport:
    return fit(ask_27b())


def test_a_boot_is_read_from_the_log() -> None:
    assert parse_boot_log(BOOT) == LoggedBoot(
        vllm_version="0.33.0",
        available_gib=2.02,
        kv_cache_tokens=28_228,
        max_model_len=20_800,
        max_concurrency=1.36,
        block_tokens=1600,
        gdn_prefill_kernel="Triton/FLA",
        model_loading_gib=16.87,
        graphs_actual_gib=0.11,
        graphs_estimated_gib=0.14,
        free_gib=23.1,
        total_gib=23.52,
        requested_gib=19.99,
        consumed_gib=17.2,
        peak_activation_gib=0.77,
    )


def test_a_refusal_is_read_with_the_context_that_vllm_proposes() -> None:
    logged = parse_boot_log(REFUSAL)
    assert (logged.needed_gib, logged.available_gib, logged.estimated_max_model_len) == (2.91, 2.0, 36_800)


def test_a_refusal_becomes_an_edit_of_the_setting() -> None:
    """A failed start prints the diagnosis of its log."""
    found = diagnose(Evidence(log=REFUSAL))
    assert found is not None
    assert found.cause == "kv-cache-too-small"
    assert "Set serve.max_model_len to 36800 or less" in found.remedy


def test_a_cpu_start_is_read_too() -> None:
    logged = parse_boot_log(CPU)
    assert (logged.vllm_version, logged.available_gib, logged.kv_cache_tokens) == ("0.32.0+cpu", 1.0, 48_528)


def test_the_smallest_pool_of_several_ranks_counts() -> None:
    lines = "Available KV cache memory: 9.84 GiB\nAvailable KV cache memory: 9.31 GiB\n"
    assert parse_boot_log(lines).available_gib == 9.31


def test_a_fixed_pool_and_an_empty_log_are_read() -> None:
    line = "Initial free memory 23.1 GiB, reserved 1.82 GiB memory for KV Cache as specified by kv_cache_memory_bytes"
    assert parse_boot_log(line) == LoggedBoot(fixed_pool_gib=1.82)
    assert parse_boot_log("") == LoggedBoot()


def test_blocks_come_from_the_printed_tokens(report: FitReport) -> None:
    for blocks in (17, 38, 39, 173, 1212):
        for length in (1600, 20_800, 262_144):
            tokens = report.layout.reported_tokens(blocks, length)
            logged = LoggedBoot(kv_cache_tokens=tokens, max_model_len=length)
            assert reported_blocks(report.layout, logged) == blocks
    assert reported_blocks(report.layout, LoggedBoot()) is None


def test_a_boot_as_predicted_has_no_cause(report: FitReport) -> None:
    comparison = compare(report, parse_boot_log(BOOT))
    assert (comparison.rules_agree, comparison.block_deviation, comparison.cause) == (True, -1, None)
    names = [figure.name for figure in comparison.figures]
    assert names[0] == "blocks"
    assert {"available KV memory", "weights", "activation peak", "CUDA graphs", "non-torch memory"} <= set(names)


def test_a_deviation_above_one_block_names_the_term_that_is_off(report: FitReport) -> None:
    heavy = BOOT.replace("loading took 16.87", "loading took 17.80").replace("memory: 2.02", "memory: 1.10")
    tokens = report.layout.reported_tokens(report.layout.num_blocks(round(1.10 * GIB)), 20_800)
    comparison = compare(report, parse_boot_log(heavy.replace("28,228", f"{tokens:,}")))
    assert comparison.block_deviation < -1
    assert comparison.cause is not None
    assert comparison.cause.startswith("weights: predicted 16.83 GiB, reported 17.80 (+0.97)")


def test_tokens_that_the_pool_cannot_give_point_at_the_block_rules(report: FitReport) -> None:
    comparison = compare(report, parse_boot_log(BOOT.replace("28,228", "31,000")))
    assert not comparison.rules_agree
    assert comparison.cause is not None
    assert "block rules" in comparison.cause
    other_block = compare(report, parse_boot_log(BOOT.replace("block size to 1600", "block size to 1664")))
    assert not other_block.rules_agree


def recorded(report: FitReport, at: str = "2026-11-30T00:00:00Z", gib: float = 2.02) -> BootRecord:
    logged = replace(parse_boot_log(BOOT), available_gib=gib)
    record = record_boot(report, logged, "GPU-1", "key", at)
    assert record is not None
    return record


def test_boots_are_kept_and_read_back(report: FitReport, tmp_path: Path) -> None:
    path = tmp_path / "state" / "calibration.json"
    assert load(path) == ()
    first, second = recorded(report), recorded(report, gib=1.9)
    store(path, first)
    store(path, second)
    assert load(path) == (first, second)
    assert [entry.name for entry in path.parent.iterdir()] == ["calibration.json"]


def test_the_newest_boots_of_a_configuration_are_kept(report: FitReport, tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    other = replace(recorded(report), configuration="other")
    store(path, other)
    for day in range(BOOTS_PER_CONFIGURATION + 3):
        store(path, recorded(report, at=f"2026-11-{day + 1:02d}T00:00:00Z"))
    boots = load(path)
    assert len(boots) == BOOTS_PER_CONFIGURATION + 1
    assert other in boots
    assert min(boot.recorded_at for boot in boots if boot.configuration == "key") == "2026-11-04T00:00:00Z"


@pytest.mark.parametrize("content", ["", "{", "[]", '{"schema": 1}', '{"schema": 1, "boots": [{}]}', '{"schema": 9}'])
def test_a_damaged_file_is_refused_and_left_alone(report: FitReport, tmp_path: Path, content: str) -> None:
    path = tmp_path / "calibration.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(CalibrationError, match=r"calibration\.json.*move the file away"):
        store(path, recorded(report))
    assert path.read_text(encoding="utf-8") == content


def test_the_correction_is_the_worst_boot_of_the_same_configuration(report: FitReport) -> None:
    boots = [recorded(report, gib=2.02), recorded(report, gib=1.80)]
    known = calibration(boots, "GPU-1", "key", 2 * GIB)
    assert known is not None
    assert known.boots == 2
    assert known.offset_bytes == pytest.approx(-0.20 * GIB, abs=2)
    assert known.spread_bytes == pytest.approx(0.22 * GIB, abs=2)
    assert calibration(boots, "GPU-2", "key", 2 * GIB) is None
    assert calibration(boots, "GPU-1", "other", 2 * GIB) is None


def test_a_calibrated_prediction_agrees_with_the_boot(report: FitReport) -> None:
    known = calibration([recorded(report)], "GPU-1", "key", report.available_bytes)
    again = fit(replace(report.request, calibration=known))
    assert again.available_bytes == round(2.02 * GIB)
    assert compare(again, parse_boot_log(BOOT)).block_deviation == 0


def test_a_refused_or_unprofiled_boot_is_not_recorded(report: FitReport) -> None:
    assert record_boot(report, parse_boot_log(REFUSAL), "GPU-1", "key", "now") is None
    assert record_boot(report, LoggedBoot(fixed_pool_gib=1.8), "GPU-1", "key", "now") is None


def test_the_key_ignores_context_and_pool_and_nothing_else(ask_27b: Ask) -> None:
    settings = ask_27b().settings
    key = configuration_key("org/model@1", "0.33.0", settings)
    assert key == configuration_key(
        "org/model@1", "0.33.0", replace(settings, max_model_len=1, kv_cache_memory_bytes=1)
    )
    assert key != configuration_key("org/model@2", "0.33.0", settings)
    assert key != configuration_key("org/model@1", "0.32.0", settings)
    assert key != configuration_key("org/model@1", "0.33.0", replace(settings, max_num_batched_tokens=2048))


def test_the_first_start_profiles_and_later_ones_fix_the_pool(report: FitReport) -> None:
    assert pool_choice(report, [], "GPU-1", "key").kv_cache_memory_bytes is None
    choice = pool_choice(report, [recorded(report)], "GPU-1", "key")
    assert choice.requests == 1
    assert choice.kv_cache_memory_bytes == (report.layout.request_blocks(20_800) + 1) * report.layout.bytes_per_block
    assert "null block" in choice.reason
    fixed = fit(
        report.request.with_settings(
            replace(report.request.settings, max_model_len=20_800, kv_cache_memory_bytes=choice.kv_cache_memory_bytes)
        )
    )
    assert fixed.verdict.value == "FITS"
    assert pool_choice(report, [recorded(report)], "GPU-2", "key").kv_cache_memory_bytes is None


def test_a_recorded_pool_that_is_too_small_is_profiled_again(report: FitReport) -> None:
    small = replace(recorded(report), num_blocks=20)
    choice = pool_choice(report, [small], "GPU-1", "key")
    assert choice.kv_cache_memory_bytes is None
    assert "20 blocks" in choice.reason


def test_the_file_names_its_schema(report: FitReport, tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    store(path, recorded(report))
    assert json.loads(path.read_text(encoding="utf-8"))["schema"] == 1
