"""What vLLM reports about its memory, compared with the prediction, and kept for the next start."""

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from launcher.fit.budget import Term
from launcher.fit.geometry import FitError
from launcher.fit.kv import KvLayout
from launcher.fit.planner import FitReport
from launcher.fit.request import GIB, Calibration, Settings

SCHEMA = 1
BOOTS_PER_CONFIGURATION = 10
HALF_UNIT_BYTES = round(0.005 * GIB)
"""Logs print GiB with two decimals."""
_NUMBER = r"(-?\d+(?:\.\d+)?)"
_COUNT = r"([\d,]+)"


class CalibrationError(FitError):
    """A calibration file that cannot be read; the message says what to do with it."""


@dataclass(frozen=True, slots=True)
class LoggedBoot:
    """What one start of vLLM printed; None where it did not. GiB have two decimals."""

    vllm_version: str | None = None
    available_gib: float | None = None
    fixed_pool_gib: float | None = None
    kv_cache_tokens: int | None = None
    max_model_len: int | None = None
    max_concurrency: float | None = None
    block_tokens: int | None = None
    gdn_prefill_kernel: str | None = None
    model_loading_gib: float | None = None
    graphs_actual_gib: float | None = None
    graphs_estimated_gib: float | None = None
    free_gib: float | None = None
    total_gib: float | None = None
    requested_gib: float | None = None
    consumed_gib: float | None = None
    peak_activation_gib: float | None = None
    needed_gib: float | None = None
    """Of a refused context."""
    estimated_max_model_len: int | None = None
    """vLLM's own proposal when it refuses a context."""


_LINES: tuple[tuple[str, tuple[str, ...]], ...] = (
    (r"(?:vLLM (?:API )?server version |Initializing a V1 LLM engine \(v)(\d+\.\d+\.\d+[^\s,)]*)", ("vllm_version",)),
    (rf"reserved {_NUMBER} GiB memory for KV Cache as specified by kv_cache_memory_bytes", ("fixed_pool_gib",)),
    (rf"(?:Explicitly|Auto) set \({_NUMBER}/{_NUMBER}\) GiB for KV cache", ("available_gib", "total_gib")),
    (rf"KV cache size: {_COUNT} tokens", ("kv_cache_tokens",)),
    (rf"Maximum concurrency for {_COUNT} tokens per request: {_NUMBER}x", ("max_model_len", "max_concurrency")),
    (rf"Setting attention block size to {_COUNT} tokens", ("block_tokens",)),
    (r"Using (FlashInfer|Triton/FLA|CuteDSL|CPU) GDN prefill kernel", ("gdn_prefill_kernel",)),
    (rf"Model loading took {_NUMBER} GiB", ("model_loading_gib",)),
    (
        rf"CUDA graph pool memory: {_NUMBER} GiB \(actual\), {_NUMBER} GiB \(estimated\)",
        ("graphs_actual_gib", "graphs_estimated_gib"),
    ),
    (
        rf"Free memory on device[^(]*\({_NUMBER}/{_NUMBER} GiB\) on startup\. Desired GPU memory utilization is "
        rf"\([\d.]+, {_NUMBER} GiB\)\. Actual usage is {_NUMBER} GiB for consumed memory[^,]*, "
        rf"{_NUMBER} GiB for peak activation",
        ("free_gib", "total_gib", "requested_gib", "consumed_gib", "peak_activation_gib"),
    ),
    (
        rf"max seq len \({_COUNT}\), \({_NUMBER} GiB KV cache is needed, which is larger than the available KV cache "
        rf"memory \({_NUMBER} GiB\)",
        ("max_model_len", "needed_gib", "available_gib"),
    ),
    (rf"the estimated maximum model length is {_COUNT}\.", ("estimated_max_model_len",)),
)
_AVAILABLE = rf"Available KV cache memory: {_NUMBER} GiB"
_KINDS = {field.name: str(field.type) for field in fields(LoggedBoot)}


def parse_boot_log(text: str) -> LoggedBoot:
    """Read the memory lines of a vLLM log (0.32.0 and 0.33.0, GPU and CPU); the last start in it counts."""
    values: dict[str, Any] = {}
    for pattern, names in _LINES:
        matches = list(re.finditer(pattern, text))
        if matches:
            values.update({name: _value(name, raw) for name, raw in zip(names, matches[-1].groups(), strict=True)})
    pools = [float(match[1]) for match in re.finditer(_AVAILABLE, text)]
    if pools and values.get("needed_gib") is None:
        # Ranks print one line each when they differ; the smallest pool decides.
        values["available_gib"] = min(pools)
    return LoggedBoot(**values)


def _value(name: str, raw: str) -> str | int | float:
    kind = _KINDS[name]
    if kind.startswith("str"):
        return raw
    return int(raw.replace(",", "")) if kind.startswith("int") else float(raw)


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of a boot."""

    name: str
    unit: str
    predicted: float
    reported: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """A boot against its prediction."""

    figures: tuple[Figure, ...]
    rules_agree: bool
    """Whether the printed pool gives the printed tokens by the block rules; True when that was not printed."""
    block_deviation: int
    """Reported minus predicted blocks."""
    cause: str | None
    """The term that is off, when the deviation is above one block or the block rules disagree."""


def reported_blocks(layout: KvLayout, logged: LoggedBoot) -> int | None:
    """Return the blocks of a boot: from its tokens where they were printed, else from its pool; None without either."""
    pool = logged.fixed_pool_gib if logged.available_gib is None else logged.available_gib
    if logged.kv_cache_tokens is not None and logged.max_model_len is not None:
        per_request = layout.request_blocks(logged.max_model_len)
        # Tokens are floor(blocks / per_request * max_model_len): the count is within one of the inverse.
        near = logged.kv_cache_tokens * per_request // logged.max_model_len
        for count in range(max(0, near - 1), near + 3):
            if layout.reported_tokens(count, logged.max_model_len) == logged.kv_cache_tokens:
                return count
    return None if pool is None else layout.num_blocks(round(pool * GIB))


def compare(report: FitReport, logged: LoggedBoot) -> Comparison:
    """Compare a boot with the report that it was started by, block by block and term by term."""
    layout = report.layout
    blocks = reported_blocks(layout, logged)
    figures = list(_figures(report, logged))
    if blocks is None:
        return Comparison(tuple(figures), True, 0, None)
    figures.insert(0, Figure("blocks", "blocks", report.num_blocks, blocks))
    deviation = blocks - report.num_blocks
    agree = _rules_agree(layout, logged)
    cause = None
    if not agree:
        cause = (
            "block rules: the printed pool does not give the printed tokens; look at block size, GDN prefill kernel, "
            "speculative tokens and prefix caching"
        )
    elif abs(deviation) > 1:
        cause = _term_off(figures)
    return Comparison(tuple(figures), agree, deviation, cause)


def _rules_agree(layout: KvLayout, logged: LoggedBoot) -> bool:
    if logged.block_tokens is not None and logged.block_tokens != layout.block_tokens:
        return False
    pool = logged.fixed_pool_gib if logged.available_gib is None else logged.available_gib
    if pool is None or logged.kv_cache_tokens is None or logged.max_model_len is None:
        return True
    size = round(pool * GIB)
    counts = range(layout.num_blocks(size - HALF_UNIT_BYTES), layout.num_blocks(size + HALF_UNIT_BYTES) + 1)
    return any(layout.reported_tokens(count, logged.max_model_len) == logged.kv_cache_tokens for count in counts)


def _figures(report: FitReport, logged: LoggedBoot) -> list[Figure]:
    terms = {term.key: term for term in report.waterfall}
    weights = sum(term.size_bytes for key, term in terms.items() if key.startswith("weights."))
    pairs = [
        ("available KV memory", report.available_bytes, logged.available_gib),
        ("weights", weights, logged.model_loading_gib),
        ("activation peak", _sum(terms, "activations", "vision", "gdn_checkpoints"), _activations_gib(logged)),
        ("CUDA graphs", _sum(terms, "cuda_graphs"), logged.graphs_actual_gib),
        ("non-torch memory", _sum(terms, "non_torch"), _difference(logged.consumed_gib, logged.model_loading_gib)),
        ("card total", report.request.card.total_bytes, logged.total_gib),
    ]
    figures = [Figure(name, "GiB", size / GIB, reported) for name, size, reported in pairs if reported is not None]
    if logged.block_tokens is not None:
        figures.append(Figure("block size", "tokens", report.layout.block_tokens, logged.block_tokens))
    if logged.max_model_len and logged.kv_cache_tokens is not None and logged.max_concurrency is not None:
        length = logged.max_model_len
        tokens = report.layout.reported_tokens(report.num_blocks, length)
        figures.append(Figure("KV cache size", "tokens", tokens, logged.kv_cache_tokens))
        concurrency = report.layout.concurrency(report.num_blocks, length)
        figures.append(Figure("concurrency", "x", concurrency, logged.max_concurrency))
    return figures


def _activations_gib(logged: LoggedBoot) -> float | None:
    """What vLLM prints as peak activation contains its estimate of the graphs (v1/worker/gpu_worker.py:749-751)."""
    return _difference(logged.peak_activation_gib, logged.graphs_estimated_gib or 0.0)


def _difference(whole: float | None, part: float | None) -> float | None:
    return None if whole is None or part is None else whole - part


def _sum(terms: dict[str, Term], *keys: str) -> int:
    return sum(terms[key].size_bytes for key in keys if key in terms)


def _term_off(figures: Sequence[Figure]) -> str:
    causes = ("weights", "activation peak", "CUDA graphs", "non-torch memory", "card total")
    known = [figure for figure in figures if figure.name in causes]
    if not known:
        return "the log does not print the terms; start with the full log to see which one is off"
    worst = max(known, key=lambda figure: abs(figure.reported - figure.predicted))
    return (
        f"{worst.name}: predicted {worst.predicted:.2f} GiB, reported {worst.reported:.2f} "
        f"({worst.reported - worst.predicted:+.2f})"
    )


@dataclass(frozen=True, slots=True)
class BootRecord:
    """One boot in the calibration file."""

    machine: str
    """The GPUs: their UUIDs, or what identifies them."""
    configuration: str
    """`configuration_key` of the start."""
    recorded_at: str
    """UTC, ISO 8601."""
    vllm_version: str
    available_bytes: int
    num_blocks: int
    bytes_per_block: int
    logged: LoggedBoot


def configuration_key(model: str, vllm_version: str, settings: Settings) -> str:
    """Return a short key of everything that the pool's size depends on; the context and a fixed pool do not matter."""
    values = asdict(settings)
    for name in ("max_model_len", "kv_cache_memory_bytes"):
        values.pop(name)
    text = json.dumps([model, vllm_version, values], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def record_boot(
    report: FitReport, logged: LoggedBoot, machine: str, configuration: str, recorded_at: str
) -> BootRecord | None:
    """Make a record of a boot that profiled its memory; None when the log does not say what it found."""
    blocks = reported_blocks(report.layout, logged)
    if logged.available_gib is None or blocks is None or logged.needed_gib is not None:
        return None
    return BootRecord(
        machine,
        configuration,
        recorded_at,
        logged.vllm_version or report.request.vllm_version,
        round(logged.available_gib * GIB),
        blocks,
        report.layout.bytes_per_block,
        logged,
    )


def load(path: Path) -> tuple[BootRecord, ...]:
    """Read the calibration file; empty when there is none.

    Raises:
        CalibrationError: it is damaged or of another schema.
    """
    if not path.is_file():
        return ()
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if document["schema"] != SCHEMA:
            raise CalibrationError(
                f"{path}: schema {document['schema']}, this launcher reads {SCHEMA}; move the file away to start anew"
            )
        return tuple(BootRecord(**{**boot, "logged": LoggedBoot(**boot["logged"])}) for boot in document["boots"])
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, CalibrationError):
            raise
        raise CalibrationError(f"{path}: not readable ({error}); move the file away to start anew") from error


def store(path: Path, record: BootRecord) -> None:
    """Add a boot to the calibration file, keeping the newest of each configuration; the file is replaced at once."""
    same = [boot for boot in load(path) if (boot.machine, boot.configuration) == (record.machine, record.configuration)]
    dropped = same[: max(0, len(same) + 1 - BOOTS_PER_CONFIGURATION)]
    boots = [boot for boot in load(path) if boot not in dropped] + [record]
    document = {"schema": SCHEMA, "boots": [asdict(boot) for boot in boots]}
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(document, file, indent=1)
            file.write("\n")
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def calibration(
    boots: Sequence[BootRecord], machine: str, configuration: str, predicted_bytes: int
) -> Calibration | None:
    """Return the correction for a configuration; `predicted_bytes` is what is predicted for it without one."""
    same = [boot for boot in boots if (boot.machine, boot.configuration) == (machine, configuration)]
    if not same:
        return None
    offsets = sorted(boot.available_bytes - predicted_bytes for boot in same)
    # The smallest pool seen is what a start can count on.
    return Calibration(offsets[0], offsets[-1] - offsets[0], len(same), f"last {same[-1].recorded_at}")


@dataclass(frozen=True, slots=True)
class PoolChoice:
    """How the KV pool of the next start is sized."""

    kv_cache_memory_bytes: int | None
    """None: vLLM profiles under the utilization."""
    requests: int
    """Requests of the full context that a fixed pool holds."""
    reason: str


def pool_choice(report: FitReport, boots: Sequence[BootRecord], machine: str, configuration: str) -> PoolChoice:
    """Fix the pool once a boot of the same configuration on the same GPUs is known, else let vLLM profile."""
    same = [boot for boot in boots if (boot.machine, boot.configuration) == (machine, configuration)]
    layout, context = report.layout, report.context_tokens
    same = [boot for boot in same if boot.bytes_per_block == layout.bytes_per_block]
    if not same:
        return PoolChoice(None, 0, "no boot of this configuration on these GPUs is recorded yet: vLLM profiles")
    if not context:
        return PoolChoice(None, 0, "no context fits: vLLM profiles and reports what it finds")
    blocks = min(boot.num_blocks for boot in same)
    requests = min((blocks - 1) // layout.request_blocks(context), report.request.settings.max_num_seqs)
    if requests < 1:
        reason = f"the smallest recorded pool of {blocks} blocks does not admit {context} tokens: vLLM profiles again"
        return PoolChoice(None, 0, reason)
    # One block more than the requests need: the null block is never handed out.
    size = (requests * layout.request_blocks(context) + 1) * layout.bytes_per_block
    reason = (
        f"{requests} x {layout.request_blocks(context)} blocks and the null block, of {blocks} that the smallest of "
        f"{len(same)} recorded boot(s) had: the same pool at every start"
    )
    return PoolChoice(size, requests, reason)
