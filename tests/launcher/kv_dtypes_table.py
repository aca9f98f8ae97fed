"""What a KV cache dtype costs on a text, as a table: reconcile_kv.json."""

from collections.abc import Mapping
from typing import Any

from launcher.reconcile.report import number
from tests.launcher.result_tables import about, parts, table

_COLUMNS = ("KV cache", "attention", "perplexity", "KL mean", "KL largest", "same first choice", "first to differ")
_REPLACED = "turboquant"
"""Presets whose attention the plugin replaces."""


def markdown(document: Mapping[str, Any]) -> str:
    """Return one row for each preset, as it is measured against bfloat16 in nats, and what was read."""
    presets, settings = document["presets"], document["settings"]
    base = next(iter(presets.values()))["perplexity_a"]
    said = (
        f"{about(document['host'])} `{document['host']['model']}` on `{document['text']}`: {settings['passages']} "
        f"passages of {settings['tokens']} tokens, the last {settings['decoded']} of each decoded one by one."
    )
    control = ("bfloat16", "vLLM's own", number(base), *["-"] * 4)
    return parts(said, table(_COLUMNS, [control, *(_row(name, found) for name, found in presets.items())]))


def _row(name: str, found: Mapping[str, Any]) -> tuple[str, ...]:
    dtype, *options = name.split("&")
    perplexity, base = found["perplexity_b"], found["perplexity_a"]
    first = found["first"]
    return (
        f"`{dtype}`",
        "with the fix" if dtype.startswith(_REPLACED) and "fixes=off" not in options else "vLLM's own",
        number(perplexity) if perplexity is None else f"{number(perplexity)} ({100 * (perplexity / base - 1):+.1f} %)",
        number(found["kl_mean"]),
        number(found["kl_max"]),
        f"{100 * found['top1_agreement']:.1f} %",
        f"`{first}`" if first else "none",
    )
