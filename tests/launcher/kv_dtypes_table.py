"""What a KV cache dtype costs on a text, as a table: reconcile_kv.json."""

from collections.abc import Mapping
from typing import Any

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
    control = ("bfloat16", "vLLM's own", f"{base:.2f}", *["-"] * 4)
    return parts(said, table(_COLUMNS, [control, *(_row(name, found) for name, found in presets.items())]))


def _row(name: str, found: Mapping[str, Any]) -> tuple[str, ...]:
    dtype, *options = name.split("&")
    perplexity, base = found["perplexity_b"], found["perplexity_a"]
    first = found["first"]
    return (
        f"`{dtype}`",
        "with the fix" if dtype.startswith(_REPLACED) and "fixes=off" not in options else "vLLM's own",
        f"{perplexity:.2f} ({100 * (perplexity / base - 1):+.1f} %)",
        f"{found['kl_mean']:.2g}",
        f"{found['kl_max']:.2g}",
        f"{100 * found['top1_agreement']:.1f} %",
        f"`{first}`" if first else "none",
    )
