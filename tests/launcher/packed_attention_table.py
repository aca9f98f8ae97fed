"""Attention over packed KV as tables: attention_speed.json in microseconds, and why in attention_counters.json."""

from collections.abc import Mapping, Sequence
from typing import Any

from tests.launcher.result_tables import about, parts, table

_COLUMNS = (
    "KV cache",
    "batch x context",
    "rows",
    "vLLM",
    "Graft",
    "faster",
    "floor of its bytes",
    "FlashAttention 2, bf16 KV",
)
COMPACT_PRESETS = ("turboquant_k8v4", "turboquant_4bit_nc")
COMPACT_SHAPES = ("1x8192", "1x32768", "1x262144", "8x32768")


def markdown(report: Mapping[str, Any], *, compact: bool = False) -> str:
    """Return one row for each shape, the sentence that says what they are, and what missed its target.

    A compact table has a few shapes of the two presets that are proved in the engine, and the number of missed targets.
    """
    rate = report["copy_bytes_per_s"]
    flash = {(entry["shape"], entry["queries"]): entry["flash_us"] for entry in report["flash"]}
    presets = list(dict.fromkeys(entry["preset"] for entry in report["times"]))
    rows = []
    for entry in sorted(report["times"], key=lambda entry: (presets.index(entry["preset"]), *_sizes(entry))):
        if compact and not (entry["preset"] in COMPACT_PRESETS and entry["shape"] in COMPACT_SHAPES):
            continue
        key = entry["shape"], entry["queries"]
        floor = entry["packed_bytes"] / rate * 1e6
        requests, length, queries = _sizes(entry)
        cells = (
            f"`{entry['preset']}`",
            f"{requests} x {_context(length)}",
            str(queries),
            f"{entry['stock_us']:,.0f}",
            f"{entry['graft_us']:,.0f}",
            f"{entry['stock_us'] / entry['graft_us']:.1f} times",
            f"{floor:,.0f}" if floor >= 1 else "< 1",
            f"{flash[key]:,.0f}" if key in flash else "-",
        )
        rows.append(cells)
    said = (
        f"{about({'gpu': report['device'], **report['versions']})} Microseconds of one attention call of Qwen3.6-27B "
        "(24 query heads, 4 KV heads of 256), in CUDA graphs with a cold L2 cache; 1 row is a decode, 4 are a "
        "verification of three drafts. The floor is the time that the packed bytes take at the measured copy bandwidth "
        f"of {rate / 1e12:.2f} TB/s. FlashAttention 2 does not split the context of several rows over the card."
    )
    return parts(said, table(_COLUMNS, rows, names=2), _missed(report["verdicts"], compact=compact))


def _sizes(entry: Mapping[str, Any]) -> tuple[int, int, int]:
    requests, length = (int(size) for size in entry["shape"].split("x"))
    return requests, length, int(entry["queries"])


def _context(length: int) -> str:
    return f"{length // 1024}K" if length % 1024 == 0 else str(length)


def _missed(verdicts: Sequence[Mapping[str, Any]], *, compact: bool) -> str:
    missed = [verdict for verdict in verdicts if not verdict["met"]]
    if compact and missed:
        return f"{len(missed)} of {len(verdicts)} targets missed: `tests/gpu/README.md` lists them."
    return "\n".join(
        f"- Missed: {verdict['target']}: {verdict['found']:.4g}, where {verdict['allowed']:g} was aimed at."
        for verdict in missed
    )


_COUNTERS = (
    "kernel",
    "us",
    "DRAM, %",
    "L2 cache, %",
    "computing, %",
    "registers a thread",
    "warps a multiprocessor",
    "cycles an instruction",
)
_SCHEDULERS = 4
"""Of a multiprocessor."""


def counters_markdown(document: Mapping[str, Any]) -> str:
    """Return what Nsight Compute counted of each kernel at one shape; cycles are those of a scheduler."""
    requests, length = document["shape"].split("x")
    rows = [
        (
            f"`{name}`",
            f"{found['Duration (us)']:.0f}",
            *(f"{found[f'{part} Throughput (%)']:.0f}" for part in ("DRAM", "L2 Cache", "Compute (SM)")),
            f"{found['Registers Per Thread (register/thread)']:.0f}",
            f"{_SCHEDULERS * found['Active Warps Per Scheduler (warp)']:.1f}",
            f"{1 / found['Issued Warp Per Scheduler']:.1f}",
        )
        for name, found in document["kernels"].items()
    ]
    said = (
        f"{about({'gpu': document['card'], **document})} {document['tool']}; {requests} x {_context(int(length))}; "
        "throughputs are shares of what the unit can do."
    )
    return parts(said, table(_COUNTERS, rows, names=1))
