"""The planner as a whole: worked examples, verdicts, the waterfall, and properties that must hold everywhere."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from vllm_graft.attention.kernels.workspace import WORKSPACE_BYTES

from launcher.fit.budget import capture_sizes, outside_terms, runtime_terms
from launcher.fit.geometry import Geometry
from launcher.fit.kv import KV_DTYPES
from launcher.fit.planner import FitReport, fit, fit_pool
from launcher.fit.refusals import FitRefused, refusals
from launcher.fit.request import GIB, Calibration, FitRequest, Settings
from launcher.fit.weights import weights_from_sizes

Ask = Callable[..., FitRequest]


@pytest.mark.parametrize(
    ("dtype", "blocks", "longest"),
    [("fp8", 39, 36_800), ("turboquant_k8v4", 39, 48_576), ("turboquant_3bit_nc", 39, 94_944)],
)
def test_text_only_on_one_24_gb_card(ask_27b: Ask, dtype: str, blocks: int, longest: int) -> None:
    report = fit(ask_27b(kv_cache_dtype=dtype))
    assert report.available_bytes / GIB == pytest.approx(2.05, abs=0.01)
    assert (report.num_blocks, report.largest_context_tokens) == (blocks, longest)


@pytest.mark.parametrize(("dtype", "advisable"), [("fp8", 20_800), ("turboquant_k8v4", 27_456)])
def test_the_advisable_context_of_one_24_gb_card_keeps_half_a_gib(ask_27b: Ask, dtype: str, advisable: int) -> None:
    report = fit(ask_27b(kv_cache_dtype=dtype))
    assert report.advisable_context_tokens == advisable
    assert report.context_tokens == advisable
    assert report.verdict.value == "LIKELY"


def test_32k_in_fp8_on_one_24_gb_card_is_admitted_and_not_advised(ask_27b: Ask) -> None:
    verdict = fit(ask_27b(max_model_len=32768)).verdict
    assert verdict.value == "NO"
    assert verdict.margin_bytes / GIB == pytest.approx(0.13, abs=0.01)
    assert "LIKELY from 0.50" in verdict.decided_by


@pytest.mark.parametrize("dtype", ["fp8", "turboquant_k8v4", "turboquant_3bit_nc"])
def test_vision_on_one_24_gb_card_does_not_start(ask_27b: Ask, dtype: str) -> None:
    report = fit(ask_27b(kv_cache_dtype=dtype, language_model_only=False))
    assert report.available_bytes / GIB == pytest.approx(0.74, abs=0.01)
    assert [blocker.cause for blocker in report.blockers] == ["no-kv-cache-memory"]
    assert (report.largest_context_tokens, report.advisable_context_tokens, report.context_tokens) == (0, 0, 0)
    assert report.verdict.value == "NO"


@pytest.mark.parametrize(
    ("dtype", "longest"), [("fp8", 88_000), ("turboquant_k8v4", 116_160), ("turboquant_3bit_nc", 227_040)]
)
def test_more_utilization_on_one_24_gb_card(ask_27b: Ask, dtype: str, longest: int) -> None:
    report = fit(ask_27b(kv_cache_dtype=dtype, gpu_memory_utilization=0.92))
    assert report.available_bytes / GIB == pytest.approx(3.70, abs=0.01)
    assert report.largest_context_tokens == longest


@pytest.mark.parametrize("dtype", ["auto", "fp8", "turboquant_k8v4", "turboquant_3bit_nc"])
def test_two_24_gb_cards_hold_256k_even_in_bf16(ask_27b: Ask, dtype: str) -> None:
    request = ask_27b(cards=2, kv_cache_dtype=dtype, gpu_memory_utilization=0.88, language_model_only=False)
    report = fit(request)
    # Published as 10.43 with its own +-0.5; the terms add up to 10.46.
    assert report.available_bytes / GIB == pytest.approx(10.43, abs=0.05)
    assert report.largest_context_tokens == 262_144
    assert report.verdict.value == "FITS"


def test_256k_on_two_24_gb_cards_is_reported_as_vllm_would(ask_27b: Ask) -> None:
    """Tokens and concurrency of the published 402 blocks."""
    layout = fit(ask_27b(cards=2)).layout
    assert (layout.reported_tokens(402, 262_144), round(layout.concurrency(402, 262_144), 2)) == (588_725, 2.25)


@pytest.mark.parametrize(
    ("dtype", "backend", "longest"),
    [
        ("fp8", "auto", 246_400),
        ("fp8", "triton", 251_200),
        ("turboquant_k8v4", "auto", 262_144),
        ("turboquant_k8v4", "triton", 262_144),
    ],
)
def test_vision_on_one_32_gb_card(ask_27b: Ask, dtype: str, backend: str, longest: int) -> None:
    request = ask_27b(
        31.36,
        (12, 0),
        kv_cache_dtype=dtype,
        gpu_memory_utilization=0.93,
        max_num_batched_tokens=8192,
        language_model_only=False,
        gdn_prefill_backend=backend,
    )
    report = fit(request)
    assert report.available_bytes / GIB == pytest.approx(9.02, abs=0.02)
    assert report.num_blocks == 173
    assert report.largest_context_tokens == longest


def test_turboquant_workspace_fails_the_physical_check_on_one_32_gb_card(ask_27b: Ask) -> None:
    request = ask_27b(
        31.36,
        (12, 0),
        kv_cache_dtype="turboquant_k8v4",
        gpu_memory_utilization=0.93,
        max_num_batched_tokens=8192,
        language_model_only=False,
        max_model_len=262_144,
    )
    report = fit(request)
    assert report.physical_slack_bytes < 0
    assert report.verdict.value == "LIKELY"
    assert "short of a reserve" in report.verdict.decided_by
    workspace = next(term for term in report.waterfall if term.key == "turboquant_workspace")
    assert workspace.size_bytes / GIB == pytest.approx(2.0, abs=0.02)
    assert fit(request.with_settings(replace(request.settings, kv_cache_dtype="fp8"))).physical_slack_bytes > 0


def test_a_fixed_pool_leaves_no_band(ask_27b: Ask) -> None:
    request = ask_27b(max_model_len=36_800)
    needed = fit(request).layout.needed_bytes(36_800)
    exact = fit(request.with_settings(replace(request.settings, kv_cache_memory_bytes=needed)))
    assert exact.verdict.value == "FITS"
    assert exact.available_error_bytes == 0
    short = fit(request.with_settings(replace(request.settings, kv_cache_memory_bytes=needed - 1)))
    assert short.verdict.value == "NO"


def test_weights_that_do_not_fit_while_loading_are_a_blocker(ask_27b: Ask) -> None:
    report = fit(ask_27b(16.0, gpu_memory_utilization=0.95))
    assert report.blockers[0].cause == "weights-do-not-fit"
    assert report.load_peak_bytes / GIB == pytest.approx(16.83 + 4.74, abs=0.01)
    assert (report.largest_context_tokens, report.verdict.value) == (0, "NO")


def test_a_busy_card_is_a_blocker_that_names_the_utilization(ask_27b: Ask) -> None:
    report = fit(ask_27b(free_gib=19.0))
    busy = next(blocker for blocker in report.blockers if blocker.cause == "gpu-memory-busy")
    assert "0.80" in busy.remedy


def test_a_fixed_pool_on_a_busy_card_is_still_refused(ask_27b: Ask) -> None:
    report = fit(ask_27b(31.36, (12, 0), free_gib=26.0, kv_cache_memory_bytes=2 * GIB, max_model_len=32_768))
    assert [blocker.cause for blocker in report.blockers] == ["gpu-memory-busy"]


def test_the_default_of_256_sequences_runs_out_while_graphs_are_profiled(ask_27b: Ask) -> None:
    causes = [blocker.cause for blocker in fit(ask_27b(max_num_seqs=256, cudagraph_mode="FULL_AND_PIECEWISE")).blockers]
    assert causes == ["cudagraph-capture-oom", "max-num-seqs-too-high"]


def test_calibration_moves_the_fitted_part_only(ask_27b: Ask) -> None:
    request = ask_27b(max_model_len=20_800)
    known = replace(request, calibration=Calibration(-GIB // 4, GIB // 8, 3, "test"))
    before, after = fit(request), fit(known)
    assert after.available_bytes == before.available_bytes - GIB // 4
    assert after.available_error_bytes < before.available_error_bytes
    assert after.layout == before.layout
    assert sum(term.size_bytes for term in after.waterfall) == request.card.total_bytes


def test_other_settings_drop_the_calibration(ask_27b: Ask) -> None:
    request = replace(ask_27b(), calibration=Calibration(0, 0, 1, "test"))
    assert request.with_settings(replace(request.settings, max_num_batched_tokens=2048)).calibration is None
    assert request.with_settings(request.settings).calibration is not None


def test_a_dense_model_is_planned_too(dense: Geometry, ask_27b: Ask) -> None:
    weights = weights_from_sizes(dense, 270_000_000, "listed")
    request = replace(
        ask_27b(), geometry=dense, weights=weights, settings=Settings("auto", 2048, 4, 0.5, cudagraph_mode="NONE")
    )
    report = fit(request)
    assert (report.largest_context_tokens, report.verdict.value) == (8192, "FITS")
    assert {part.part for part in weights.parts} == {"linear", "embeddings"}


def test_a_cpu_pool_needs_no_card(dense: Geometry) -> None:
    pool = fit_pool(dense, Settings("auto", 2048, 4, 0.5), GIB, None, "0.32.0")
    assert pool.layout.block_tokens == 32
    assert pool.largest_context_tokens == 8192
    assert pool.num_blocks == GIB // (30 * 32 * 3 * 64 * 2 * 2)


def test_json_is_plain_and_names_units(ask_27b: Ask) -> None:
    document = json.loads(json.dumps(fit(ask_27b()).to_json()))
    assert document["kv"]["block_tokens"] == 1600
    assert sum(term["size_bytes"] for term in document["waterfall"]) == document["card"]["total_bytes"]
    assert document["verdict"]["value"] == "LIKELY"


def test_capture_sizes_are_vllms_defaults() -> None:
    assert capture_sizes(1, 0) == (1, 2)
    assert capture_sizes(2, 3) == (1, 2, 4, 8, 16)
    assert capture_sizes(3, 0) == (1, 2, 3, 4)
    assert len(capture_sizes(256, 0)) == 51
    assert capture_sizes(256, 0)[-1] == 512


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"kv_cache_dtype": "turboquant_4bit"}, "kv-cache-dtype"),
        ({"capability": (8, 6), "kv_cache_dtype": "fp8"}, "fp8-kv-needs-capability-8.9"),
        ({"capability": (8, 6), "kv_cache_dtype": "fp8_per_token_head"}, "fp8-kv-needs-capability-8.9"),
        ({"capability": (8, 6), "kv_cache_dtype": "turboquant_k8v4"}, "turboquant-k8v4-needs-the-fix"),
        ({"cards": 3}, "tensor-parallel-heads"),
        ({"max_model_len": 300_000}, "context-above-model"),
    ],
)
def test_an_impossible_combination_is_refused_by_rule(ask_27b: Ask, changes: dict[str, object], rule: str) -> None:
    with pytest.raises(FitRefused, match=rule) as refused:
        fit(ask_27b(**changes))
    assert [one.rule for one in refused.value.refusals] == [rule]


@pytest.mark.parametrize("dtype", ["fp8_e5m2", "turboquant_4bit_nc", "int8_per_token_head", "auto"])
def test_compute_capability_8_6_takes_what_needs_no_fp8_hardware(ask_27b: Ask, dtype: str) -> None:
    assert refusals(ask_27b(capability=(8, 6), kv_cache_dtype=dtype)) == ()


def test_k8v4_needs_no_fp8_hardware_with_the_fix(ask_27b: Ask) -> None:
    request = ask_27b(capability=(8, 6), kv_cache_dtype="turboquant_k8v4")
    assert refusals(replace(request, settings=replace(request.settings, turboquant_fix=True))) == ()


def test_with_the_fix_turboquant_takes_one_workspace_whatever_the_context_and_inside_the_budget(ask_27b: Ask) -> None:
    request = ask_27b(kv_cache_dtype="turboquant_k8v4")
    fixed = replace(request, settings=replace(request.settings, turboquant_fix=True))
    layout = fit(request).layout
    inside = {term.key: term.size_bytes for term in runtime_terms(fixed, layout)}
    assert inside["turboquant_workspace"] == WORKSPACE_BYTES < 64 * 2**20
    assert "turboquant_workspace" not in {term.key for term in runtime_terms(request, layout)}
    for context in (8192, 262_144):
        stock, ours = (
            {term.key: term.size_bytes for term in outside_terms(asked, layout, context)} for asked in (request, fixed)
        )
        assert stock["turboquant_workspace"] > 2 * 2 * 4 * (context - 1) * 256 * 2
        assert "turboquant_workspace" not in ours
        assert ours["allocator_slack"] < stock["allocator_slack"]


@pytest.mark.parametrize("dtype", ["turboquant_4bit_nc", "turboquant_k3v4_nc", "turboquant_3bit_nc"])
def test_rotated_presets_need_a_head_size_that_is_a_power_of_two(ask_27b: Ask, dtype: str) -> None:
    request = ask_27b(kv_cache_dtype=dtype)
    odd = replace(request, geometry=replace(request.geometry, head_dim=192))
    assert [one.rule for one in refusals(odd)] == ["rotated-preset-head-size"]
    assert refusals(replace(odd, settings=replace(odd.settings, kv_cache_dtype="turboquant_k8v4"))) == ()


def test_turboquant_on_a_dense_model_and_mtp_without_a_head_are_refused_together(dense: Geometry, ask_27b: Ask) -> None:
    request = replace(ask_27b(kv_cache_dtype="turboquant_k8v4"), geometry=dense)
    assert [one.rule for one in refusals(request)] == ["turboquant-boundary-layers", "mtp-head"]


def test_more_ranks_than_cards_are_refused(ask_27b: Ask) -> None:
    request = ask_27b()
    several = replace(request, settings=replace(request.settings, tensor_parallel_size=2))
    assert [one.rule for one in refusals(several)] == ["tensor-parallel-cards"]


REQUESTS = st.fixed_dictionaries(
    {
        "total_gib": st.sampled_from([15.7, 23.52, 23.56, 31.36, 47.0]),
        "capability": st.sampled_from([(8, 9), (9, 0), (12, 0)]),
        "cards": st.sampled_from([1, 2, 4]),
        "free_gib": st.sampled_from([None, 14.0, 22.9, 31.0]),
        "kv_cache_dtype": st.sampled_from(sorted(KV_DTYPES)),
        "max_num_batched_tokens": st.integers(256, 16384),
        "max_num_seqs": st.integers(1, 8),
        "gpu_memory_utilization": st.integers(50, 98).map(lambda n: n / 100),
        "num_speculative_tokens": st.integers(0, 5),
        "prefix_caching": st.booleans(),
        "language_model_only": st.booleans(),
        "cudagraph_mode": st.sampled_from(["NONE", "PIECEWISE", "FULL_AND_PIECEWISE"]),
    }
)
PROPERTY = settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True
)


def _fits(report: FitReport, length: int) -> FitReport:
    return fit(report.request.with_settings(replace(report.request.settings, max_model_len=length)))


@PROPERTY
@given(changes=REQUESTS)
def test_the_waterfall_sums_to_the_card(ask_27b: Ask, changes: dict[str, object]) -> None:
    report = fit(ask_27b(**changes))
    assert sum(term.size_bytes for term in report.waterfall) == report.request.card.total_bytes
    assert [term.key for term in report.waterfall].count("head_room") == 1
    assert all(term.size_bytes >= 0 for term in report.waterfall if term.key != "head_room")


@PROPERTY
@given(changes=REQUESTS)
def test_the_largest_context_is_admitted_and_the_next_token_is_not(ask_27b: Ask, changes: dict[str, object]) -> None:
    report = fit(ask_27b(**changes))
    longest, layout = report.largest_context_tokens, report.layout
    assume(longest)
    assert not report.blockers
    assert layout.needed_bytes(longest) <= report.available_bytes
    if longest < report.request.geometry.max_position_embeddings:
        assert layout.needed_bytes(longest + 1) > report.available_bytes


@PROPERTY
@given(changes=REQUESTS)
def test_the_advisable_context_is_likely_and_the_next_token_is_not(ask_27b: Ask, changes: dict[str, object]) -> None:
    report = fit(ask_27b(**changes))
    advisable = report.advisable_context_tokens
    assert advisable <= report.largest_context_tokens
    assume(advisable)
    assert _fits(report, advisable).verdict.value in ("FITS", "LIKELY")
    if advisable < report.largest_context_tokens:
        assert _fits(report, advisable + 1).verdict.value == "NO"


@PROPERTY
@given(changes=REQUESTS, lengths=st.tuples(st.integers(1, 262_144), st.integers(1, 262_144)))
def test_a_longer_context_is_never_judged_better(
    ask_27b: Ask, changes: dict[str, object], lengths: tuple[int, int]
) -> None:
    report = fit(ask_27b(**changes))
    order = {"NO": 0, "LIKELY": 1, "FITS": 2}
    short, long = (_fits(report, length) for length in sorted(lengths))
    assert order[long.verdict.value] <= order[short.verdict.value]
    assert long.concurrency <= short.concurrency


@PROPERTY
@given(changes=REQUESTS, more=st.integers(1, 20))
def test_more_utilization_never_admits_less(ask_27b: Ask, changes: dict[str, object], more: int) -> None:
    low = fit(ask_27b(**{**changes, "free_gib": None}))
    utilization = low.request.settings.gpu_memory_utilization + more / 100
    assume(utilization < 1)
    high = fit(low.request.with_settings(replace(low.request.settings, gpu_memory_utilization=utilization)))
    assert high.available_bytes >= low.available_bytes
    assert high.largest_context_tokens >= low.largest_context_tokens


@PROPERTY
@given(changes=REQUESTS)
def test_twice_the_cards_never_admit_less(ask_27b: Ask, changes: dict[str, object]) -> None:
    cards = changes["cards"]
    assert isinstance(cards, int)
    assume(cards < 4)
    fewer = fit(ask_27b(**{**changes, "free_gib": None}))
    more = fit(ask_27b(**{**changes, "free_gib": None, "cards": 2 * cards}))
    assert more.largest_context_tokens >= fewer.largest_context_tokens


def test_planning_needs_neither_rich_nor_pydantic_and_is_quick() -> None:
    code = (
        "import sys, time; start = time.perf_counter(); import launcher.fit.planner, launcher.fit.advice, "
        "launcher.fit.report, launcher.fit.check; seconds = time.perf_counter() - start; "
        "heavy = [m for m in ('rich', 'pydantic', 'torch', 'numpy') if m in sys.modules]; print(seconds, heavy)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    seconds, heavy = done.stdout.strip().split(" ", 1)
    assert heavy == "[]"
    assert float(seconds) < 0.4
