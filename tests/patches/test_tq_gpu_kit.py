"""The kit of the GPU proof (tests/gpu) without a GPU: its cases, rule and results file, and what it asks vLLM for."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import math
import multiprocessing
import os
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

GPU = Path(__file__).resolve().parents[1] / "gpu"
sys.path.insert(0, str(GPU))

import spec_attention  # noqa: E402
import spec_cases  # noqa: E402
import spec_compare  # noqa: E402
import spec_decode  # noqa: E402
import spec_engine  # noqa: E402
import spec_model  # noqa: E402
from spec_cases import Case  # noqa: E402
from spec_compare import Generated, compare  # noqa: E402


def test_every_pair_of_settings_is_run() -> None:
    assert spec_cases.uncovered_pairs(spec_cases.PAIRWISE) == set()
    for left_out in spec_cases.PAIRWISE:
        assert spec_cases.uncovered_pairs(set(spec_cases.PAIRWISE) - {left_out})


def test_every_case_runs_once_and_behind_its_reference() -> None:
    order = spec_cases.in_order()
    assert len({case.id for case in order}) == len(order)
    assert {*spec_cases.PAIRWISE, *spec_cases.DEFAULTS, *spec_cases.STOCK, *spec_cases.CONTROL} <= set(order)
    for case in order:
        assert order.index(case.reference) <= order.index(case)
        assert case.reference.method is None
        assert case.reference.reference == case.reference


def test_the_load_has_the_prompts_that_faults_need() -> None:
    load = spec_model.load()
    single, batch = ([len(tokens) for tokens, _ in stream] for stream in (load.single, load.batch))
    for lengths in (single, batch):
        assert 1 + spec_model.DRAFTS in lengths
        assert max(lengths) > spec_model.MAX_BATCHED_TOKENS
        assert max(lengths) + 96 <= spec_model.MAX_MODEL_LEN
    assert len(batch) > spec_engine.MAX_SEQS
    assert len({count for _, count in load.batch}) > 1
    assert spec_model.load() == load


def test_near_ties_are_judged_by_the_references_margin_at_the_first_difference() -> None:
    reference = Generated((5, 6, 7, 8), (1.0, 0.01, 0.3, 0.01))
    assert compare(reference, Generated((5, 6, 7, 8))).verdict == "equal"
    assert compare(reference, Generated((5, 9, 1, 1))) == spec_compare.Difference("near-tie", 1, 4, 0.01)
    assert compare(reference, Generated((5, 6, 9, 8))) == spec_compare.Difference("wrong", 2, 4, 0.3)
    assert compare(reference, Generated((5, 6, 7))).verdict == "wrong"
    assert compare(Generated((5,), (0.05,)), Generated((6,))).verdict == "wrong"  # the bound itself is no near tie
    with pytest.raises(ValueError, match="0 margins for 1 tokens"):
        compare(Generated((5,)), Generated((5,)))


def test_a_run_without_one_of_the_streams_is_refused() -> None:
    with pytest.raises(ValueError, match="streams"):
        spec_compare.compare_streams({"single": [Generated((1,), (1.0,))]}, {})


def record(tokens: tuple[int, ...], case: Case) -> spec_engine.Record:
    margins = (1.0,) * len(tokens) if case.method is None else ()
    streams: dict[str, tuple[Generated, ...]] = {"single": (Generated(tokens, margins),)}
    return spec_engine.Record(
        streams=streams,
        acceptance_length=None if case.method is None else 1.5,
        accepted_per_position=(),
        graph_replays=dict.fromkeys(spec_engine.graphs_needed(case), 7),
        attention={},
        builders=(),
        cudagraph_mode=str(case.graph),
        async_scheduling=case.scheduling == "async",
        model_runner_v2=True,
        block_size=16,
        fix="applied",
        boot_s=1.0,
        run_s=1.0,
    )


def right(case: Case, directory: Path) -> Any:
    return record((1, 2, 3), case)


def wrong(case: Case, directory: Path) -> Any:
    """vLLM's own backend and one fixed case go wrong."""
    faulty = case in spec_cases.STOCK or case == spec_cases.PAIRWISE[0]
    return record((1, 9, 9) if faulty else (1, 2, 3), case)


def stock_wrong(case: Case, directory: Path) -> Any:
    return record((1, 9, 9) if case in spec_cases.STOCK else (1, 2, 3), case)


def without_graphs(case: Case, directory: Path) -> Any:
    return dataclasses.replace(stock_wrong(case, directory), graph_replays={})


def refuses_forks(case: Case, directory: Path) -> Any:
    if multiprocessing.current_process().__class__.__name__ == "ForkProcess":
        raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")
    return right(case, directory)


def breaks(case: Case, directory: Path) -> Any:
    raise RuntimeError(f"no memory for {case.id}")


@pytest.fixture
def kit(tmp_path: Path) -> Any:
    """Run the kit's command with a stand-in engine: `kit(run, *arguments)` gives the status and the results file."""

    def run(engine: Any, *arguments: str) -> tuple[int, dict[str, Any]]:
        results = tmp_path / "results.json"
        status = spec_decode.main(["--results", str(results), "--work", str(tmp_path / "work"), *arguments], engine)
        return status, json.loads(results.read_text()) if results.exists() else {}

    return run


def test_results_are_kept_case_by_case_and_gone_on_with(kit: Any, capsys: pytest.CaptureFixture[str]) -> None:
    first = spec_cases.in_order()[0]
    status, results = kit(right, "--only", first.id)
    assert (status, list(results["cases"])) == (3, [first.id])
    status, results = kit(stock_wrong)
    assert status == 0
    assert set(results["cases"]) == {case.id for case in spec_cases.in_order()}
    assert results["uncovered_pairs"] == []
    assert results["host"]["date"]
    shown = capsys.readouterr().out
    assert f"[1/{len(results['cases']) - 1}]" in shown  # the first was not run again
    stock = spec_cases.STOCK[0]
    assert results["cases"][stock.id]["passes"] is False
    assert results["cases"][spec_cases.DEFAULTS[0].id]["passes"] is True


def by_twos(case: Case, directory: Path) -> Any:
    """Wait for a second case that runs at the same time."""
    (directory.parent / f"{os.getpid()}.here").touch()
    until = time.monotonic() + 20
    while len(list(directory.parent.glob("*.here"))) < 2:
        if time.monotonic() > until:
            raise RuntimeError("alone")
        time.sleep(0.02)
    return right(case, directory)


def test_cases_run_so_many_at_a_time(kit: Any) -> None:
    status, results = kit(by_twos, "--at-once", "2", "--only", "stock-auto-plain")
    assert status == 3
    assert [entry.get("error") for entry in results["cases"].values()] == [None, None]


def test_a_case_whose_fork_cuda_refuses_is_spawned(tmp_path: Path) -> None:
    case = spec_cases.in_order()[0]
    ((done, entry),) = spec_decode.outcomes([case], refuses_forks, tmp_path)
    assert done == case
    assert "error" not in entry


def test_a_wrong_fixed_case_fails_the_proof(kit: Any) -> None:
    status, results = kit(wrong)
    assert status == 1
    case = results["cases"][spec_cases.PAIRWISE[0].id]
    assert case["differences"]["single"] == [{"verdict": "wrong", "common": 1, "length": 3, "margin": 1.0}]


def test_a_case_whose_graphs_never_ran_fails_the_proof(kit: Any) -> None:
    status, results = kit(without_graphs)
    assert status == 1
    assert results["cases"][spec_cases.DEFAULTS[0].id]["graphs_not_replayed"] == [
        "ModelCudaGraphManager/4",
        "SpeculatorCudaGraphManager/1",
        "SpeculatorCudaGraphManager/4",
    ]


def test_a_case_that_broke_keeps_its_log_and_runs_again(kit: Any) -> None:
    first = spec_cases.in_order()[0]
    status, results = kit(breaks, "--only", first.id)
    assert status == 1
    assert f"no memory for {first.id}" in results["cases"][first.id]["error"]
    status, results = kit(right, "--only", first.id)
    assert "error" not in results["cases"][first.id]


def test_no_case_is_started_that_would_outlast_the_budget(kit: Any) -> None:
    assert kit(right, "--budget-s", "10") == (3, {})


def test_numbers_of_a_list_share_a_line_and_stay_what_they_are(tmp_path: Path) -> None:
    results = {"tokens": [1, 22], "margins": [0.5, 1e-05, -2.25], "none": [], "nested": [{"a": [3]}, "[ 4,\n 5 ]"]}
    spec_decode.write(tmp_path / "results.json", results)
    text = (tmp_path / "results.json").read_text()
    assert '"margins": [0.5, 1e-05, -2.25]' in text
    assert json.loads(text) == results


def test_results_of_another_schema_are_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_text('{"schema": 0}')
    with pytest.raises(SystemExit, match="schema 0, not 2"):
        spec_decode.main(["--results", str(path)], right)
    assert path.read_text() == '{"schema": 0}'


def test_the_plugin_is_a_distribution_that_vllm_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    spec_decode.install_plugin(tmp_path)
    (found,) = importlib.metadata.distributions(path=[str(tmp_path)])
    assert [(point.group, point.name, point.value) for point in found.entry_points] == [
        ("vllm.general_plugins", "graft", "vllm_graft:register")
    ]
    assert os.environ["PYTHONPATH"].split(os.pathsep)[0] == str(tmp_path)


def test_stock_runs_disable_the_fix_and_fixed_runs_require_it(tmp_path: Path) -> None:
    stock, fixed = spec_cases.STOCK[0], spec_cases.DEFAULTS[0]
    assert spec_engine.environment(stock, tmp_path)["GRAFT_DISABLE"] == spec_engine.FIX
    assert spec_engine.environment(fixed, tmp_path)["GRAFT_REQUIRE"] == spec_engine.FIX
    with pytest.raises(RuntimeError, match="attention runs"):
        spec_engine._check(fixed, Counter({"TurboQuantAttentionImpl": 4}), ["SpecDecodeMetadataBuilder"], "applied: ")
    with pytest.raises(RuntimeError, match="the fix is applied"):
        spec_engine._check(stock, Counter({"TurboQuantAttentionImpl": 4}), ["TurboQuantMetadataBuilder"], "applied: ")


def test_the_given_kv_pool_holds_as_many_requests_as_run() -> None:
    layers, heads, size = spec_model.ATTENTION_LAYERS + 1, 2, 256  # with that of MTP
    block = 544  # tokens in a block of bfloat16, the largest cache; a GDN state takes as much as a layer's block
    blocks = math.ceil(spec_model.MAX_MODEL_LEN / block) + 1 + spec_model.DRAFTS
    assert spec_engine.MAX_SEQS * blocks * block * layers * heads * size * 2 * 2 < spec_engine.POOL_BYTES


@pytest.mark.parametrize("case", spec_cases.in_order(), ids=lambda case: case.id)
def test_settings_say_what_the_case_says(case: Case) -> None:
    settings = spec_engine.settings(case)
    assert settings["kv_cache_dtype"] == case.kv_cache_dtype
    assert settings["async_scheduling"] is (case.scheduling == "async")
    assert settings["enable_prefix_caching"] is (case.prefix_caching == "on")
    assert settings.get("speculative_config", {}).get("method") == case.method
    eager = case.graph is spec_cases.Graph.EAGER
    assert settings.get("enforce_eager", False) is eager
    assert eager or settings["compilation_config"]["cudagraph_mode"] == case.graph


def test_the_attention_proof_needs_the_fix_right_and_the_faults_shown() -> None:
    right, off = spec_attention.Outcome(0.0, True), spec_attention.Outcome(1.0, False)

    def holds(stock: spec_attention.Outcome, fixed: spec_attention.Outcome) -> bool:
        return spec_attention.holds({"turboquant_k8v4": {"stock": {"graph": stock}, "fixed": {"graph": fixed}}}, bool)

    assert holds(off, right)
    assert not holds(off, off)
    assert not holds(right, right)
    assert not holds(off, spec_attention.Outcome(float("inf"), False))


def test_weights_come_from_names_and_only_live_tokens_can_be_generated() -> None:
    torch = pytest.importorskip("torch", reason="needs an environment with torch; the launcher's has none")
    head = spec_model.weight("lm_head.weight", (128, 16), torch)
    assert head[: spec_model.LIVE].abs().min() > 0
    assert head[spec_model.LIVE :].abs().max() == 0
    layer = "layers.0.self_attn.o_proj.weight"
    assert torch.equal(spec_model.weight(f"mtp.{layer}", (8, 8), torch), spec_model.weight(layer, (8, 8), torch))


def test_vllm_takes_the_settings(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="needs an environment with vLLM; the launcher's has none")
    arguments = pytest.importorskip("vllm.engine.arg_utils", reason="needs an environment with vLLM")
    known = {field.name for field in dataclasses.fields(arguments.EngineArgs)}
    for case in spec_cases.in_order():
        assert set(spec_engine.settings(case)) <= known
