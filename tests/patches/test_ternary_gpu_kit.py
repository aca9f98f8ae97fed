"""The measurements of ternary weights, with stand-ins for what needs a GPU: what is repeated, shown and judged."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

import pytest

if "triton" not in sys.modules:
    os.environ.setdefault("TRITON_INTERPRET", "1")
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
torch = pytest.importorskip("torch", reason="needs an environment with vLLM; the launcher's has none")
pytest.importorskip("triton", reason="needs Triton; the launcher's environment has none")
GPU = Path(__file__).parents[1] / "gpu"
sys.path.insert(0, str(GPU))
import ternary_bench as bench  # noqa: E402
import ternary_engine as engine  # noqa: E402
import ternary_speed as speed  # noqa: E402
from vllm_graft.quantization.ternary import kernels  # noqa: E402

from tests.launcher.ternary_tables import speed_markdown  # noqa: E402


class Pool:
    """In a pool's place, without processes."""

    def __init__(self, processes: int) -> None:
        self.processes = processes

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *parts: object) -> None:
        pass

    def apply(self, function: Any) -> Any:
        return function()

    def imap_unordered(self, function: Any, items: Any) -> Any:
        return map(function, items)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Stand-ins that note what they are asked for; the configuration of two strips is the fastest."""
    asked: list[str] = []

    def ternary_us(packed: Any, m: int, config: Any) -> float:
        asked.append(f"{m} {bench.name(config)}")
        return 4.0 if getattr(config, "strips", 1) == 2 else 8.0

    for name, stand_in in {
        "weights": lambda shape, group: [None] * 50,
        "ternary_us": ternary_us,
        "dense_us": lambda shape, m: 40.0,
        "marlin_us": lambda shape, m: 16.0,
        "error": lambda *parts, **named: 1e-4,
        "copy_us": lambda shape: 3.0,
        "launch_us": lambda: 1.5,
    }.items():
        monkeypatch.setattr(bench, name, stand_in)
    monkeypatch.setattr(speed, "copy_bytes_per_s", lambda: 4e12)
    monkeypatch.setattr(speed, "_compile", lambda product: "")
    monkeypatch.setattr(speed, "_card", lambda: kernels.Card(227 << 10, 132))
    monkeypatch.setattr(multiprocessing, "get_context", lambda kind: type("Context", (), {"Pool": Pool}))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    return asked


def test_a_figure_is_measured_once_and_shown_beside_what_it_is_compared_with(
    measured: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = tmp_path / "speed.json"
    assert speed.main(["--tune", "--results", str(results)]) == 0
    shown = capsys.readouterr().out
    assert "a GPU: copy 4.00 TB/s, empty kernel 1.50 us; 0 wrong of 36 products" in shown
    line = next(line for line in shown.splitlines() if line.startswith("   1 4096x4096:"))
    assert "4.00 us 26% of copy, 10.00 x bf16, 4.00 x Marlin int4, gemv" in line
    assert "r2" in line
    assert "chosen gemv w4 r1 t2 s3 8.0 us" in line
    count = len(measured)
    assert count > 300
    assert speed.main(["--tune", "--results", str(results)]) == 0
    assert len(measured) == count
    order = list(dict.fromkeys(entry.partition(" ")[0] for entry in measured))
    assert order[:9] == ["1", "4", "8", "2048", "32", "64", "128", "256", "512"]
    assert {entry.partition(" ")[2] for entry in measured if entry.startswith("4 ")} >= {
        bench.name(config) for config in speed.FEW_TOKENS
    }


def test_products_whose_kernel_is_another_now_are_timed_and_checked_again(measured: list[str], tmp_path: Path) -> None:
    results = tmp_path / "speed.json"
    assert speed.main(["--results", str(results)]) == 0
    before = json.loads(results.read_text(encoding="utf-8"))
    measured.clear()
    assert speed.main(["--results", str(results), "--again", "2", "256"]) == 0
    assert {entry.partition(" ")[0] for entry in measured} == {"2", "256"}
    after = json.loads(results.read_text(encoding="utf-8"))
    assert {part: set(after[part]) for part in ("us", "correct")} == {
        part: set(before[part]) for part in ("us", "correct")
    }


def test_without_tuning_only_what_would_be_chosen_is_measured(measured: list[str], tmp_path: Path) -> None:
    results = tmp_path / "speed.json"
    assert speed.main(["--results", str(results)]) == 0
    assert "| 1 | 4096 x 4096 | 8.00 | 3.00 | 40.00 |" in speed_markdown(
        json.loads(results.read_text(encoding="utf-8"))
    )
    assert {entry for entry in measured if entry.startswith("1 ")} == {
        "1 gemv w4 r1 t2 s3",
        "1 gemv w4 r1 t2 s4",
        "1 gemv w2 r1 t2 s4",
    }


def test_a_wrong_product_and_a_spent_budget_show_in_the_status(
    measured: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert speed.main(["--results", str(tmp_path / "speed.json"), "--budget-s", "0"]) == 3
    monkeypatch.setattr(bench, "error", lambda *parts, **named: float("nan"))
    assert speed.main(["--results", str(tmp_path / "wrong.json")]) == 1
    found = json.loads((tmp_path / "wrong.json").read_text())["correct"].values()
    assert not any(one["right"] for one in found)


def entry(size: float, rate: float) -> dict[str, Any]:
    return {
        "weight_bytes": size,
        "decode_tokens_per_s": {"1": rate, "8": 8 * rate, "16": 16 * rate},
        "prefill_tokens_per_s": 100.0,
    }


def test_the_engines_cases_are_judged_by_the_targets() -> None:
    cases: dict[str, Any] = {"bf16": entry(13e9, 50), "marlin-int4": entry(4e9, 100), "ternary": entry(2.1e9, 200)}
    cases |= {"int4": entry(4e9, 100), "ternary-g128": entry(2.2e9, 190)}
    results = {"host": {}, "cases": cases}
    assert engine.status(results) == engine.status(results, ["kl"]) == 3
    assert engine.status(results, ["bf16"]) == 0
    cases["kl"] = {"largest_kl": 0.001, "mean_kl": 0.0001}
    assert engine.status(results) == 0
    assert "ternary over marlin-int4: 2.00 at 1, 2.00 at 8, 2.00 at 16" in engine.table(results)
    cases["kl"]["largest_kl"] = 0.012
    assert engine.status(results) == 1
    cases["kl"]["largest_kl"] = 0.001
    cases["ternary"]["weight_bytes"] = 2.3e9
    assert engine.status(results) == 1


def test_a_case_that_breaks_is_an_error_with_the_end_of_its_log(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(engine, "WORK", tmp_path)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert engine.in_own_process("bf16")["error"].startswith("ended with 1")
