"""README's tables of what was measured on a GPU, from the files in tests/gpu/results."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tests.launcher.result_tables import about, parts, table

RESULTS = Path(__file__).parents[1] / "gpu" / "results"
DRAFTS = {"mtp": "MTP", "ngram": "n-gram"}
ALONE, TOGETHER = ("single", "again"), ("batch", "two-users")


def proof_markdown() -> str:
    """Return where and when it was measured, and the verdict of each case with speculation."""
    results = _read("spec_decode.json")
    cases = [case for case in results["cases"].values() if case.get("differences")]
    ordered = sorted(cases, key=lambda case: (_order(case), case["kv_cache_dtype"], case["method"], case["graph"]))
    head = ("attention", "KV cache", "drafts", "CUDA graphs", "scheduling", "prefix caching")
    counts = ("wrong, one at a time", "wrong, together", "near ties", "tokens a step")
    rows = [(*_settings(case), *_counts(case)) for case in ordered]
    rule = f"A near tie is a first difference where the two best tokens are less than {results['epsilon']} nats apart."
    return parts(f"{about(results['host'])} {rule}", table((*head, *counts), rows))


def attention_markdown() -> str:
    """Return the largest error of one layer's attention over verified tokens, and what the fix costs there."""
    results = _read("spec_attention.json")
    rows = []
    for dtype, found in sorted(results["results"].items()):
        for name, title in (("stock", "vLLM's own"), ("fixed", "with the fix")):
            errors = [found[name][case]["largest"] for case in ("graph", "rejected-drafts", "beside-a-prompt", "eager")]
            rows.append((title, f"`{dtype}`", *(f"{error:.3g}" for error in errors), f"{found[f'{name}_ms']:.3f}"))
    head = ("attention", "KV cache", "in a FULL graph", "after rejected drafts", "beside a new prompt", "eager", "ms")
    return parts(about(results["host"]), table(head, rows))


def _read(name: str) -> Mapping[str, Any]:
    document: Mapping[str, Any] = json.loads((RESULTS / name).read_text(encoding="utf-8"))
    return document


def _order(case: Mapping[str, Any]) -> int:
    return 2 if case["kv_cache_dtype"] == "auto" else ("fixed", "stock").index(case["backend"])


def _settings(case: Mapping[str, Any]) -> tuple[str, ...]:
    is_control = case["kv_cache_dtype"] == "auto"
    own = "control, vLLM's own" if is_control else "vLLM's own"
    return (
        "with the fix" if case["backend"] == "fixed" else own,
        "bfloat16" if is_control else f"`{case['kv_cache_dtype']}`",
        DRAFTS[case["method"]],
        case["graph"],
        case["scheduling"],
        case["prefix_caching"],
    )


def _verdicts(case: Mapping[str, Any], streams: Iterable[str]) -> list[str]:
    return [one["verdict"] for stream in streams for one in case["differences"].get(stream, ())]


def _counts(case: Mapping[str, Any]) -> tuple[str, ...]:
    alone, together = _verdicts(case, ALONE), _verdicts(case, TOGETHER)
    return (
        f"{alone.count('wrong')} of {len(alone)}",
        f"{together.count('wrong')} of {len(together)}",
        str((alone + together).count("near-tie")),
        f"{case['acceptance_length']:.2f}",
    )
