"""The scripts that time TurboQuant on a GPU (tests/gpu), without one: their cases, results files and verdicts."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

GPU = Path(__file__).resolve().parents[1] / "gpu"
sys.path.insert(0, str(GPU))

import end_to_end  # noqa: E402
import prefill_speed  # noqa: E402
import spec_cases  # noqa: E402
import spec_decode  # noqa: E402
from end_to_end import CASES, Case, Record, Timed  # noqa: E402
from kept import Kept, OutOfTime  # noqa: E402
from prefill_speed import Row  # noqa: E402

ANSWER = Timed(8192, 0.5, 60, 64, 10.0, 106.7)
JIT = (
    "WARNING [jit_monitor.py:146] Triton kernel JIT compilation during inference: {kernel} (constexprs={{D=256}}). "
    "This causes a latency spike; consider extending warmup to cover this shape/config.\n"
)


def entry(case: Case) -> dict[str, Any]:
    fix = "applied: bound" if case.backend == "fixed" else "disabled: by GRAFT_DISABLE"
    record = Record((ANSWER,), 2**30, 2**31, 2**32, {"SpecDecodeImpl": 4}, fix, "FULL_DECODE_ONLY", {"x/1": 64}, 30.0)
    return {**asdict(record), "host": {"gpu": "a card"}, "total_s": 50.0}


def test_every_cache_is_timed_with_and_without_drafts_and_the_telling_cases_come_first() -> None:
    assert len({case.id for case in CASES}) == len(CASES) == 11
    assert [case.id for case in CASES[:3]] == [
        "fixed-turboquant_k8v4-mtp",
        "stock-turboquant_k8v4-mtp",
        "stock-auto-mtp",
    ]
    assert CASES[-1].id == "safe-turboquant_k8v4-mtp"
    for case in CASES:
        assert end_to_end.environment(case, Path("x"))["GRAFT_REQUIRE"] == (
            "tq-spec-decode" if case.backend == "fixed" else ""
        )
        assert ("speculative_config" in end_to_end.settings(case)) == case.mtp


def test_the_safe_mode_has_the_flags_of_a_plan_without_the_fix() -> None:
    (safe,) = (case for case in CASES if case.backend == "safe")
    settings = end_to_end.settings(safe)
    assert settings["compilation_config"] == {"cudagraph_mode": "PIECEWISE"}
    assert (settings["async_scheduling"], settings["max_num_seqs"]) == (False, 1)
    assert end_to_end.environment(safe, Path("x"))["GRAFT_DISABLE"] == "tq-spec-decode"
    piecewise = {**asdict(safe), **entry(safe), "graph_replays": {}, "compiled_while_serving": {}}
    assert end_to_end.problems({"cases": {safe.id: piecewise}}) == []


def test_the_model_has_the_layers_of_the_whole_one_and_its_share_of_attention() -> None:
    kinds = end_to_end.config()["layer_types"]
    assert len(kinds) == end_to_end.config()["num_hidden_layers"] == 16
    assert kinds.count("full_attention") == 4


def test_a_step_is_timed_behind_the_first_tokens_and_by_the_tokens_that_it_gave() -> None:
    stamps = [(10.0 + 0.01 * step, 2 * (step + 1)) for step in range(40)]
    found = end_to_end.timed(8192, 9.0, stamps)
    assert (found.first_token_s, found.steps, found.tokens) == (1.0, 36, 72)
    assert found.step_ms == pytest.approx(10.0)
    assert found.tokens_per_s == pytest.approx(200.0)


def test_kernels_compiled_while_serving_are_read_from_the_log() -> None:
    log = "INFO ready\n" + JIT.format(kernel="_attend") * 2 + JIT.format(kernel="fused_recurrent_kernel")
    assert end_to_end.compiled_while_serving(log) == {"_attend": 2, "fused_recurrent_kernel": 1}


def test_results_are_kept_case_by_case_and_gone_on_with(tmp_path: Path) -> None:
    results, asked = tmp_path / "r.json", []

    def execute(case: Case, _: Any, work: Path, limit_s: float) -> dict[str, Any]:
        asked.append(case.id)
        (work / case.id).mkdir(parents=True)
        log = JIT.format(kernel="_attend") if case.backend == "stock" else ""
        (work / case.id / "log").write_text(log)
        return entry(case)

    options = ["--results", str(results), "--work", str(tmp_path / "work")]
    assert end_to_end.main([*options, "--only", "k8v4-mtp"], execute) == 3
    assert asked == ["fixed-turboquant_k8v4-mtp", "stock-turboquant_k8v4-mtp", "safe-turboquant_k8v4-mtp"]
    assert end_to_end.main([*options, "--budget-s", "1"], execute) == 3
    assert len(asked) == 3
    assert end_to_end.main(options, execute) == 0
    assert len(asked) == len(CASES)
    kept = json.loads(results.read_text())
    assert kept["host"] == {"gpu": "a card"}
    assert kept["cases"]["stock-auto-plain"]["compiled_while_serving"] == {"_attend": 1}


def test_a_case_that_the_budget_cuts_is_left_to_be_run_and_not_broken(tmp_path: Path) -> None:
    asked = []

    def execute(case: Case, _: Any, work: Path, limit_s: float) -> dict[str, Any]:
        asked.append(limit_s)
        if len(asked) == 2:
            raise spec_decode.Cut
        (work / case.id).mkdir(parents=True)
        return entry(case)

    options = ["--results", str(tmp_path / "r.json"), "--work", str(tmp_path), "--budget-s", "170"]
    assert end_to_end.main(options, execute) == 3
    assert all(0 < limit_s <= 170 for limit_s in asked)
    assert list(json.loads((tmp_path / "r.json").read_text())["cases"]) == [CASES[0].id]


def test_a_run_past_its_limit_is_cut_and_its_process_ended(tmp_path: Path) -> None:
    case = spec_cases.in_order()[0]
    begun = time.monotonic()
    with pytest.raises(spec_decode.Cut):
        spec_decode.execute(case, lambda *_: time.sleep(60), tmp_path, 0.5)
    assert time.monotonic() - begun < 10


def test_timings_are_written_as_they_come_and_gone_on_with_on_the_same_card(tmp_path: Path) -> None:
    path, host = tmp_path / "r.json", {"gpu": "a card", "date": "2026-01-01"}

    def kept(host: dict[str, str], budget_s: float) -> Kept:
        return Kept(path, {"host": host}, ("rows",), lambda report: {"count": len(report["rows"])}, budget_s)

    with pytest.raises(OutOfTime):
        kept(host, 0).add("rows", {"shape": "a", "ms": 1.5})
    again = kept(host | {"date": "2026-01-02"}, 60)
    assert again.has("rows", shape="a")
    assert not again.has("rows", shape="b")
    again.add("rows", {"shape": "b", "ms": 2.5})
    assert json.loads(path.read_text()) == {
        "count": 2,
        "host": host,
        "rows": [{"shape": "a", "ms": 1.5}, {"shape": "b", "ms": 2.5}],
    }
    with pytest.raises(SystemExit, match="of another host"):
        kept(host | {"gpu": "another"}, 60)


def test_a_fixed_case_that_compiles_while_serving_or_broke_fails(tmp_path: Path) -> None:
    def execute(case: Case, _: Any, work: Path, limit_s: float) -> dict[str, Any]:
        if case.mtp:
            return {"error": "ended with 1: out of memory", "total_s": 9.0}
        (work / case.id).mkdir(parents=True)
        (work / case.id / "log").write_text(JIT.format(kernel="_attend"))
        return entry(case)

    options = ["--results", str(tmp_path / "r.json"), "--work", str(tmp_path), "--only", "fixed-turboquant_k8v4"]
    assert end_to_end.main(options, execute) == 1
    found = end_to_end.problems(json.loads((tmp_path / "r.json").read_text()))
    assert found == [
        "fixed-turboquant_k8v4-mtp: ended with 1: out of memory",
        "fixed-turboquant_k8v4-plain: compiled while serving: _attend",
    ]


def row(backend: str, **values: Any) -> Row:
    sizes = {"ms": 2.0, "workspace_bytes": 62 * 2**20, "transient_bytes": 2**20, "error": 2e-3}
    return Row("turboquant_k8v4", 8192, 512, backend, **{**sizes, **values})


@pytest.mark.parametrize(
    ("values", "broken"),
    [({}, None), ({"ms": 2.1}, "not slower"), ({"transient_bytes": 2**21}, "memory"), ({"error": 3e-3}, "error")],
)
def test_a_prefill_that_is_slower_larger_or_less_exact_is_seen(values: dict[str, Any], broken: str | None) -> None:
    held = prefill_speed.holds([row("stock"), row("fixed", **values)])
    assert [name for name, held_ in held.items() if not held_] == ([broken] if broken else [])


def test_both_backends_of_a_shape_are_measured_together_the_telling_shapes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[tuple[Any, ...]] = []
    place: list[str] = []

    @contextlib.contextmanager
    def fixed() -> Iterator[None]:
        place.append("fixed")
        yield
        place.pop()

    def measured(_: Any, bench: Any, backend: str, preset: str, cached: int, new: int, seed: int) -> Row:
        assert place == (["fixed"] if backend == "fixed" else [])
        done.append((preset, cached, new, backend))
        return Row(preset, cached, new, backend, 1.0, 1, 1, 1e-3)

    monkeypatch.setattr(prefill_speed, "fixed", fixed)
    monkeypatch.setattr(prefill_speed, "filled", lambda *_: None)
    monkeypatch.setattr(prefill_speed, "make", lambda *_: None)
    monkeypatch.setattr(prefill_speed, "measure", measured)

    def kept(budget_s: float) -> Kept:
        return Kept(tmp_path / "r.json", {}, ("rows",), lambda _: {}, budget_s)

    with pytest.raises(OutOfTime):
        prefill_speed.measure_all(None, kept(0))
    prefill_speed.measure_all(None, kept(60))
    assert done[:3] == [
        ("turboquant_k8v4", 262144, 2048, "stock"),
        ("turboquant_k8v4", 262144, 2048, "fixed"),
        ("turboquant_k8v4", 65536, 2048, "stock"),
    ]
    assert len(set(done)) == len(done) == 2 * 2 * 9
