"""Attention over packed KV in microseconds, as a table: attention_speed.json."""

from collections.abc import Mapping
from typing import Any

HEADER = (
    "| KV cache | batch x context | rows | vLLM | Graft | faster | floor of its bytes | FlashAttention 2, bf16 KV |",
    "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
)


def markdown(report: Mapping[str, Any]) -> str:
    """Return one row for each shape, the sentence that says what they are, and what missed its target."""
    rate = report["copy_bytes_per_s"]
    flash = {(entry["shape"], entry["queries"]): entry["flash_us"] for entry in report["flash"]}
    rows = []
    for entry in report["times"]:
        key = entry["shape"], entry["queries"]
        cells = (
            entry["preset"],
            entry["shape"].replace("x", " x "),
            str(entry["queries"]),
            f"{entry['stock_us']:,.0f}",
            f"{entry['graft_us']:,.0f}",
            f"{entry['stock_us'] / entry['graft_us']:.1f} times",
            f"{entry['packed_bytes'] / rate * 1e6:,.0f}",
            f"{flash[key]:,.0f}" if key in flash else "",
        )
        rows.append(f"| {' | '.join(cells)} |")
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    said = (
        "Microseconds of one attention call of Qwen3.6-27B (24 query heads, 4 KV heads of 256) on one "
        f"{report['device']} ({versions}), in CUDA graphs with a cold L2 cache; the floor is its packed bytes at the "
        f"measured copy bandwidth of {rate / 1e12:.2f} TB/s; 1 row is a decode, more a verification."
    )
    missed = [
        f"- Missed: {verdict['target']}: {verdict['found']:g}, where {verdict['allowed']:g} was aimed at."
        for verdict in report["verdicts"]
        if not verdict["met"]
    ]
    return "\n".join([said, "", *HEADER, *rows, *(["", *missed] if missed else [])])
