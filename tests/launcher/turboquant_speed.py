"""The tables about TurboQuant's speed in tests/gpu/README.md, from the results of prefill_speed and end_to_end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.launcher.result_tables import about, broken, parts, table, whole

MIB = 2**20
BACKENDS = {"fixed": "with the fix", "stock": "vLLM's own", "safe": "vLLM's own, safe mode"}


def prefill_markdown(results: Mapping[str, Any]) -> str:
    """A chunk behind its cached prefix: times, memory and errors of both backends."""
    stock = {_shape(row): row for row in results["rows"] if row["backend"] == "stock"}
    presets = list(dict.fromkeys(row["preset"] for row in results["rows"]))
    fixed = [row for row in results["rows"] if row["backend"] == "fixed"]
    rows = []
    for row in sorted(fixed, key=lambda row: (presets.index(row["preset"]), row["cached"], row["new"])):
        theirs = stock[_shape(row)]
        rows.append(
            (
                f"`{row['preset']}`",
                f"{row['cached']:,}",
                f"{row['new']:,}",
                f"{row['ms']:.2f}",
                f"{theirs['ms']:.2f}",
                f"{row['ms'] / theirs['ms']:.2f}",
                f"{_mib(row):,.0f}",
                f"{_mib(theirs):,.0f}",
                f"{row['error']:.4f}",
                f"{theirs['error']:.4f}",
            )
        )
    head = ("KV cache", "cached", "new", "ms", "vLLM's ms", "ratio", "MiB", "vLLM's MiB", "error", "vLLM's error")
    return parts(about(results["host"]), table(head, rows))


def end_to_end_markdown(results: Mapping[str, Any]) -> str:
    """Decoding behind long contexts: the time of a step and to the first token, and the peak of each engine."""
    done = whole(results["cases"])
    contexts = sorted({answer["context"] for case in done.values() for answer in case["answers"]})
    rows = []
    for case in sorted(done.values(), key=lambda case: (not case["mtp"], case["kv_cache_dtype"], case["backend"])):
        answers = {answer["context"]: answer for answer in case["answers"]}
        rows.append(
            (
                BACKENDS[case["backend"]],
                "bfloat16" if case["kv_cache_dtype"] == "auto" else f"`{case['kv_cache_dtype']}`",
                "MTP" if case["mtp"] else "none",
                *(f"{answers[context]['step_ms']:.2f}" for context in contexts),
                *(f"{answers[context]['first_token_s']:.2f}" for context in contexts),
                f"{case['peak_allocated_bytes'] / 2**30:.2f}",
                ", ".join(f"`{name}`" for name in sorted(case["compiled_while_serving"])) or "none",
            )
        )
    sizes = [f"{context // 1024}K" for context in contexts]
    head = (
        "attention",
        "KV cache",
        "drafts",
        *(f"ms a step, {size}" for size in sizes),
        *(f"s to the first token, {size}" for size in sizes),
        "peak GiB",
        "compiled while serving",
    )
    said = f"{about(results['host'])} {results['layers']} layers."
    return parts(said, table(head, rows), broken(results["cases"]))


def _shape(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return row["preset"], row["cached"], row["new"]


def _mib(row: Mapping[str, Any]) -> float:
    return float((row["workspace_bytes"] + row["transient_bytes"]) / MIB)
