"""The script that boots emulated cards, as far as it runs without a GPU; and its committed results."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from launcher.fit.budget import PHYSICAL_RESERVE_BYTES
from launcher.fit.geometry import Geometry, geometry_from_config
from launcher.fit.request import GIB

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "tests/gpu/results/fit_boots.json"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fit_boots", ROOT / "tests/gpu/fit_boots.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["fit_boots"] = module
    spec.loader.exec_module(module)
    return module


def measured(script: ModuleType, case: Any) -> dict[str, Any]:
    """What a boot as predicted would return."""
    report = script.prediction(case)
    layout, context = report.layout, report.context_tokens
    return {
        "outcome": "booted",
        "available_bytes": report.available_bytes,
        "num_blocks": report.num_blocks,
        "block_tokens": layout.block_tokens,
        "kv_cache_tokens": layout.reported_tokens(report.num_blocks, context),
        "max_model_len": context,
        "admission": {
            "blocks_with_needed": layout.request_blocks(context) + 1,
            "one_byte_less": "To serve at least one request with the model's max seq len",
        },
        "prefill": {"outcome": "answered"},
        "device_used_bytes": 20 * GIB,
    }


def test_the_script_has_the_published_geometry(script: ModuleType, geometry_27b: Geometry, tmp_path: Path) -> None:
    script.write_config(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    written = geometry_from_config(config, geometry_27b.source)
    for name in Geometry.__slots__:
        if name not in ("architecture", "has_vision"):
            assert getattr(written, name) == getattr(geometry_27b, name), name


def test_the_dummy_checkpoint_has_the_size_of_the_real_one(script: ModuleType) -> None:
    """The real text-only checkpoint with MTP is 16.87 GiB once loaded, its MTP head 0.79."""
    sizes = {part.part: part.size_bytes / GIB for part in script.checkpoint().parts}
    assert sizes["mtp"] == pytest.approx(0.79, abs=0.01)
    assert sum(sizes.values()) == pytest.approx(16.87, abs=0.45)


def test_the_cases_cover_what_was_asked(script: ModuleType) -> None:
    cases = script.CASES
    assert len({case.id for case in cases}) == len(cases) >= 6
    assert {case.card_gib for case in cases} == {23.52, 31.36}
    assert {bool(case.num_speculative_tokens) for case in cases} == {True, False}
    assert {case.prefix_caching for case in cases} == {True, False}
    assert len({case.kv_cache_dtype for case in cases}) >= 5


def test_every_case_is_planned_to_start(script: ModuleType) -> None:
    for case in script.CASES:
        report = script.prediction(case)
        assert report.verdict.value != "NO", case.id
        assert report.layout.rules.gdn_prefill_checkpoint_blocks == 0
        arguments = script.engine_arguments(case, report.context_tokens, 0.15)
        assert arguments["max_model_len"] == report.context_tokens
        assert ("speculative_config" in arguments) == bool(case.num_speculative_tokens)


def test_a_boot_as_predicted_agrees_and_a_wrong_block_does_not(script: ModuleType) -> None:
    case = script.CASES[0]
    good = script.compared(case, measured(script, case), "INFO Available KV cache memory: 2.52 GiB\n")
    assert script.agrees({"cases": {case.id: good}})
    assert good["log_lines"] == ["INFO Available KV cache memory: 2.52 GiB"]
    wrong = measured(script, case) | {"num_blocks": script.prediction(case).num_blocks - 1}
    assert not script.agrees({"cases": {case.id: script.compared(case, wrong, "")}})
    assert "NOT EXACT" in script.summary(script.compared(case, wrong, ""))


def test_results_are_kept_and_only_what_has_not_booted_is_run_again(script: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "results" / "fit_boots.json"
    document = script.load_results(path)
    first, second = script.CASES[:2]
    document["cases"][first.id] = script.compared(first, measured(script, first), "")
    document["cases"][second.id] = script.compared(second, {"outcome": "failed", "error": "x"}, "")
    script.save_results(path, document)
    again = script.load_results(path)
    assert next(case.id for case in script.pending(again, [])) == second.id
    assert [case.id for case in script.pending(again, [first.id])] == []
    path.write_text('{"schema": 0}', encoding="utf-8")
    with pytest.raises(SystemExit, match="schema 0"):
        script.load_results(path)


def test_a_worker_that_ends_without_a_result_is_recorded(script: ModuleType, tmp_path: Path) -> None:
    """Without vLLM the worker fails at its import, which is what the record must say."""
    process, log = script.start(script.CASES[0], tmp_path)
    outcome, text = script.finish(process, log)
    assert outcome["outcome"] == "failed"
    assert "without a result" in outcome["error"]
    assert "ModuleNotFoundError" in text


@pytest.mark.skipif(not RESULTS.is_file(), reason="the GPU script has not been run yet")
def test_the_committed_results_are_exact_where_they_must_be(script: ModuleType) -> None:
    document = script.load_results(RESULTS)
    booted = [entry for entry in document["cases"].values() if entry["reported"]["outcome"] == "booted"]
    assert len(booted) >= 6
    assert script.agrees(document)
    for name, entry in document["cases"].items():
        case = next(case for case in script.CASES if case.id == name)
        layout = script.prediction(case).layout
        reported = entry["reported"]
        assert layout.num_blocks(reported["available_bytes"]) == reported["num_blocks"], name


@pytest.mark.skipif(not RESULTS.is_file(), reason="the GPU script has not been run yet")
def test_what_a_prompt_took_is_covered_by_the_plan_its_reserve_and_its_error(script: ModuleType) -> None:
    """What the card held at its peak, against all terms, the allocator's slack among them."""
    document = script.load_results(RESULTS)
    for name, entry in document["cases"].items():
        report = script.prediction(next(case for case in script.CASES if case.id == name))
        terms = {term.key: term for term in report.waterfall}
        counted = report.request.card.total_bytes - terms["head_room"].size_bytes
        peak = entry["reported"]["device_used_bytes"]
        assert peak <= counted + PHYSICAL_RESERVE_BYTES + terms["head_room"].error_bytes, name
        assert counted <= peak + terms["head_room"].error_bytes, name
        assert peak <= report.request.card.total_bytes, name


def test_no_boot_names_the_larger_gpu_or_the_block_rules_as_its_cause(script: ModuleType) -> None:
    document = script.load_results(RESULTS)
    causes = [entry["comparison"]["cause"] for entry in document["cases"].values()]
    assert not {cause.split(":")[0] for cause in causes if cause} & {"card total", "block rules"}
    for entry in document["cases"].values():
        assert script.compared_again(entry) == entry
