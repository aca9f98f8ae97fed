"""README's table of what speculation on a TurboQuant cache does to tool calls, from tests/gpu/results/headline.json."""

from collections.abc import Mapping
from typing import Any

from launcher.measure.verdict import percent

_COLUMNS = (
    "attention",
    "KV cache",
    "keys kept",
    "tool calls right, one at a time",
    "eight at once",
    "needles found",
    "tokens a step",
)


def markdown(document: Mapping[str, Any]) -> str:
    """Return the table, the control last and each fixed case beside vLLM's own."""
    host = document["host"]
    about = f"{host['gpu']} (compute capability {host['compute_capability']}), vLLM {host['vllm']}, {host['date']}."
    rows = [_COLUMNS, ("---",) * len(_COLUMNS), *(_row(one) for one in sorted(document["cases"].values(), key=_order))]
    return "\n".join([about, "", *(f"| {' | '.join(row)} |" for row in rows)])


def share(counted: Mapping[str, int]) -> str:
    """Return a share, and of how many."""
    return f"{percent(counted['right'] / counted['total'])} of {counted['total']}"


def _row(entry: Mapping[str, Any]) -> tuple[str, ...]:
    quantized = entry["kv_cache_dtype"] != "auto"
    one, eight = entry["batches"]["1"], entry["batches"]["8"]
    needles = {part: one["needles"][part] + eight["needles"][part] for part in ("right", "total")}
    return (
        "with the fixes" if entry["graft"] else "vLLM's own" if quantized else "control, vLLM's own",
        f"`{entry['kv_cache_dtype']}`" if quantized else "bfloat16",
        "-" if not quantized else "as on an RTX 3090" if entry["older_card"] else "as on this card",
        share(one["tools"]),
        share(eight["tools"]),
        share(needles),
        f"{one['tokens_a_step']:.2f}" if one["tokens_a_step"] else "-",
    )


def _order(entry: Mapping[str, Any]) -> tuple[bool, bool, bool]:
    return entry["kv_cache_dtype"] == "auto", entry["older_card"], entry["graft"]
