"""What tool calls come to, as tables: headline.json and prefix_probe.json, and reference_model.json without fixes."""

from collections.abc import Mapping
from typing import Any

from launcher.measure.verdict import percent
from tests.launcher.result_tables import about, broken, parts, table, whole

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
    cases = document["cases"]
    rows = [_row(one) for one in sorted(whole(cases).values(), key=_order)]
    return parts(about(document["host"]), table(_COLUMNS, rows), broken(cases))


def share(counted: Mapping[str, int]) -> str:
    """Return how many are right, and of how many."""
    return f"{counted['right']:,} of {counted['total']:,}"


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


_PROBE_COLUMNS = (
    "prefix caching",
    "MTP",
    "prompt tokens from the cache",
    "wrong replies",
    "changed when repeated",
    "unlike the first row, near ties apart",
)


def probe_markdown(document: Mapping[str, Any]) -> str:
    """Return the table of the prefix-cache probe, and what came of the soak where there was one."""
    cases = whole(document["cases"])
    soak = cases.pop("soak", None)
    rows = [_probe_row(entry, document["against_reference"].get(name)) for name, entry in sorted(cases.items())]
    return parts(
        about(document["host"]),
        table(_PROBE_COLUMNS, rows),
        "" if soak is None else _soak_text(soak),
        broken(document["cases"]),
    )


def _probe_row(entry: Mapping[str, Any], against: Mapping[str, int] | None) -> tuple[str, ...]:
    total = entry["replies"]
    cached = entry["cached_share"]
    return (
        "on" if entry["prefix_caching"] else "off",
        "on" if entry["speculates"] else "off",
        percent(cached) if cached else "none",
        f"{len(entry['wrong'])} of {total}",
        str(len(entry["changed"])),
        "-" if against is None else f"{against['wrong']} of {sum(against.values())}",
    )


def _soak_text(entry: Mapping[str, Any]) -> str:
    soak = entry["soak"]
    totals, minutes = soak["totals"], len(soak["buckets"]) * soak["interval_s"] / 60
    return (
        f"Soak with both, {minutes:.0f} minutes of agents' conversations: {totals['asked']:,} replies, "
        f"{totals['wrong']} wrong, {totals['changed']} changed when repeated."
    )


_REFERENCE_COLUMNS = ("drafts", "right replies", "with the expected tokens", "accepted drafts")


def reference_markdown(document: Mapping[str, Any]) -> str:
    """Return the table of the reference model's score in vLLM as it is."""
    cases = document["cases"]
    ordered = sorted(whole(cases).values(), key=lambda entry: entry["speculates"])
    rows = [_reference_row(entry) for entry in ordered]
    return parts(about(document["host"]), table(_REFERENCE_COLUMNS, rows), broken(cases))


def _reference_row(entry: Mapping[str, Any]) -> tuple[str, ...]:
    right, accepted = entry["right"], entry["accepted_drafts"]
    return (
        "MTP" if entry["speculates"] else "none",
        share(right),
        f"{entry['same_tokens']:,}",
        "-" if accepted is None else percent(accepted),
    )
