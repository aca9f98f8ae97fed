"""Attention over packed KV in microseconds, as a table: attention_speed.json."""

from collections.abc import Mapping, Sequence
from typing import Any

from tests.launcher.result_tables import parts

HEADER = (
    "| KV cache | batch x context | rows | vLLM | Graft | faster | floor of its bytes | FlashAttention 2, bf16 KV |",
    "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
)
COMPACT_PRESETS = ("turboquant_k8v4", "turboquant_4bit_nc")
COMPACT_SHAPES = ("1x8192", "1x32768", "1x262144", "8x32768")


def markdown(report: Mapping[str, Any], *, compact: bool = False) -> str:
    """Return one row for each shape, the sentence that says what they are, and what missed its target.

    A compact table has a few shapes of the two presets that are proved in the engine, and the number of missed targets.
    """
    rate = report["copy_bytes_per_s"]
    flash = {(entry["shape"], entry["queries"]): entry["flash_us"] for entry in report["flash"]}
    rows = []
    for entry in report["times"]:
        if compact and not (entry["preset"] in COMPACT_PRESETS and entry["shape"] in COMPACT_SHAPES):
            continue
        key = entry["shape"], entry["queries"]
        cells = (
            entry["preset"],
            entry["shape"].replace("x", " x "),
            str(entry["queries"]),
            f"{entry['stock_us']:,.0f}",
            f"{entry['graft_us']:,.0f}",
            f"{entry['stock_us'] / entry['graft_us']:.1f} times",
            f"{entry['packed_bytes'] / rate * 1e6:,.0f}",
            f"{flash[key]:,.0f}" if key in flash else "-",
        )
        rows.append(f"| {' | '.join(cells)} |")
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    said = (
        "Microseconds of one attention call of Qwen3.6-27B (24 query heads, 4 KV heads of 256) on one "
        f"{report['device']} ({versions}), in CUDA graphs with a cold L2 cache; the floor is its packed bytes at the "
        f"measured copy bandwidth of {rate / 1e12:.2f} TB/s; 1 row is a decode, more a verification."
    )
    return parts(said, "\n".join((*HEADER, *rows)), _missed(report["verdicts"], compact=compact))


def _missed(verdicts: Sequence[Mapping[str, Any]], *, compact: bool) -> str:
    missed = [verdict for verdict in verdicts if not verdict["met"]]
    if compact and missed:
        return f"{len(missed)} of {len(verdicts)} targets missed: `tests/gpu/README.md` lists them."
    return "\n".join(
        f"- Missed: {verdict['target']}: {verdict['found']:g}, where {verdict['allowed']:g} was aimed at."
        for verdict in missed
    )
