"""The tables of TurboQuant's speed say what the result files hold."""

from __future__ import annotations

from typing import Any

from tests.launcher.turboquant_speed import end_to_end_markdown, prefill_markdown

HOST = {"gpu": "a card", "vllm": "0.33.0", "torch": "2.14.0", "triton": "3.8.0", "date": "2026-11-30"}


def row(backend: str, ms: float, mib: int) -> dict[str, Any]:
    shape = {"preset": "turboquant_k8v4", "cached": 8192, "new": 512, "backend": backend, "error": 2.04e-3}
    return {**shape, "ms": ms, "workspace_bytes": mib * 2**20, "transient_bytes": 2**20}


def test_a_prefill_is_compared_with_vllms_own() -> None:
    text = prefill_markdown({"host": HOST, "rows": [row("stock", 2.0, 40), row("fixed", 1.5, 62)]})
    assert "| `turboquant_k8v4` | 8,192 | 512 | 1.50 | 2.00 | 0.75 | 63 | 41 | 0.0020 | 0.0020 |" in text


def test_an_engine_shows_its_steps_and_what_it_compiled_and_a_broken_case_is_named() -> None:
    case = {
        "backend": "stock",
        "kv_cache_dtype": "auto",
        "mtp": True,
        "answers": [{"context": 8192, "step_ms": 4.5, "first_token_s": 0.203}],
        "peak_allocated_bytes": 3 * 2**30,
        "compiled_while_serving": {"kernel": 2},
    }
    text = end_to_end_markdown({"host": HOST, "layers": 16, "cases": {"a": case, "b": {"error": "died"}}})
    assert "| vLLM's own | bfloat16 | MTP | 4.50 | 0.20 | 3.00 | `kernel` |" in text
    assert text.endswith("\n\nWithout a result: `b`.")
    assert text.count("\n") == 6
