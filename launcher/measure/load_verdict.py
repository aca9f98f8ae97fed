"""From what a load test measured to an answer: each check against its threshold. Pure."""

from dataclasses import dataclass, fields, replace

from launcher.errors import UsageError
from launcher.measure.soak_record import Record
from launcher.measure.verdict import Check

GIB = 2**30
MIB = 2**20
CARD_SHARE = 22 / 24
"""Of a card's memory that may be in use: 22 GB of a 24 GB card."""
STEADY_AFTER_S = 600.0
"""A shorter run says nothing about growth."""


@dataclass(frozen=True)
class Thresholds:
    """What a service must keep to under load."""

    first_token_s: float = 0.5
    """Median of short requests."""
    p99_first_token_s: float = 10.0
    """Of all requests, the long ones too."""
    p99_gap_s: float = 0.5
    """Between two pieces of one reply."""
    tokens_a_second: float = 30.0
    """Of all replies together."""
    memory_growth_mib: float = 256.0
    """On a GPU, and of the API server."""
    error_rate: float = 0.001
    right_calls: float = 0.9995
    gpu_gib: float | None = None
    """Memory in use on each GPU; None: 22/24 of the card."""


def changed(thresholds: Thresholds, texts: list[str]) -> Thresholds:
    """Return the thresholds with those that `NAME=VALUE` texts set.

    Raises:
        UsageError: no such threshold, or no number.
    """
    names = [field.name for field in fields(Thresholds)]
    for text in texts:
        name, _, value = text.partition("=")
        if name not in names:
            raise UsageError(f"--threshold {text}: write NAME=VALUE; names are {', '.join(names)}")
        try:
            thresholds = replace(thresholds, **{name: float(value)})
        except ValueError as error:
            raise UsageError(f"--threshold {text}: {value!r} is no number") from error
    return thresholds


def soak_checks(record: Record, thresholds: Thresholds) -> tuple[Check, ...]:
    """Return every check of a soak with its answer."""
    return (
        at_most("first token", record.quantile("first_token short", 0.5), thresholds.first_token_s, "median, short"),
        at_most("first token, p99", record.quantile("first_token", 0.99), thresholds.p99_first_token_s, "all requests"),
        at_most("between tokens, p99", record.quantile("gap", 0.99), thresholds.p99_gap_s, "two pieces of a reply"),
        throughput(tokens_a_second(record), thresholds.tokens_a_second, record.settings.concurrency),
        gpu_memory(gpu_peak_bytes(record), gpu_bound(record.settings.gpu_bound_bytes, thresholds)),
        _growth(record, thresholds.memory_growth_mib),
        _interruption(record),
        errors(record.errors.total(), record.errors.total() + record.replies, thresholds.error_rate),
        _calls(record, thresholds.right_calls),
    )


def at_most(name: str, value: float | None, threshold: float, of: str) -> Check:
    """Check a time against its bound."""
    if value is None:
        return Check(name, False, None, threshold, "nothing was measured")
    return Check(name, value <= threshold, value, threshold, f"{seconds(value)} ({of}), at most {seconds(threshold)}")


def throughput(value: float | None, threshold: float, concurrency: int) -> Check:
    """Check how many tokens come a second, of all streams together."""
    if value is None:
        return Check("tokens a second", False, None, threshold, "nothing was measured")
    said = f"{value:.1f} with {concurrency} requests at a time, at least {threshold:g}"
    return Check("tokens a second", value >= threshold, value, threshold, said)


def gpu_memory(peak_bytes: float | None, bound_bytes: float | None) -> Check:
    """Check the most memory that was in use on one GPU."""
    name = "GPU memory"
    if peak_bytes is None or bound_bytes is None:
        return Check(name, None, None, None, "no GPU of the service could be read on this machine")
    said = f"{peak_bytes / GIB:.2f} GiB at most, bound {bound_bytes / GIB:.2f} GiB"
    return Check(name, peak_bytes <= bound_bytes, peak_bytes / GIB, bound_bytes / GIB, said)


def errors(failed: int, total: int, threshold: float) -> Check:
    """Check the share of requests without a reply."""
    if total == 0:
        return Check("errors", False, None, threshold, "no request was made")
    said = f"{failed:,} of {total:,} requests got no whole reply"
    return Check("errors", failed / total <= threshold, failed / total, threshold, said)


def seconds(value: float) -> str:
    """Return a time for people."""
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.2f} s"


def tokens_a_second(record: Record) -> float | None:
    """Return the tokens of all replies by the time under load."""
    return record.sums["reply_tokens"] / record.elapsed_s if record.elapsed_s and record.replies else None


def gpu_peak_bytes(record: Record) -> float | None:
    """Return the most memory that was in use on one GPU."""
    return max((value for name, value in record.peaks.items() if name.startswith("gpu ")), default=None)


def gpu_bound(planned: int | None, thresholds: Thresholds) -> float | None:
    return thresholds.gpu_gib * GIB if thresholds.gpu_gib is not None else planned


def _growth(record: Record, threshold_mib: float) -> Check:
    """Compare the end of the run with what it had settled to after its first fifth."""
    name = "memory growth"
    if record.elapsed_s < STEADY_AFTER_S:
        return Check(name, None, None, threshold_mib, f"not asked of less than {STEADY_AFTER_S / 60:.0f} minutes")
    gauges = [gauge for gauge in record.peaks if gauge == "resident_bytes" or gauge.startswith("gpu ")]
    grown = [found for gauge in gauges if (found := _grown_bytes(record, gauge)) is not None]
    if not grown:
        return Check(name, None, None, threshold_mib, "neither the GPU nor the server tells its memory")
    value = max(grown) / MIB
    return Check(name, value <= threshold_mib, value, threshold_mib, f"{value:+.0f} MiB, at most {threshold_mib:g} MiB")


def _grown_bytes(record: Record, gauge: str) -> float | None:
    means = [mean for _, mean in record.timeline.series(lambda bucket: bucket.mean(gauge)) if mean is not None]
    fifth = len(means) // 5
    if fifth == 0:
        return None
    settled, last = means[fifth : 2 * fifth], means[-fifth:]
    return sum(last) / len(last) - sum(settled) / len(settled)


def _interruption(record: Record) -> Check:
    outage_s = record.outage_s
    if record.down_since_s is not None:
        outage_s += record.elapsed_s - record.down_since_s
    said = f"{record.restarts} restarts, {outage_s:.0f} s without an answer"
    is_whole = record.restarts == 0 and outage_s == 0 and record.down_since_s is None
    return Check("no interruption", is_whole, outage_s, 0.0, said)


def _calls(record: Record, threshold: float) -> Check:
    share = record.right("calls")
    if share.total == 0:
        reason = record.settings.no_tools_reason or "no agent's turn has ended yet"
        return Check("tool calls", None if record.settings.no_tools_reason else False, None, threshold, reason)
    said = f"{share.right:,} of {share.total:,} agent turns are right"
    return Check("tool calls", share.rate >= threshold, share.rate, threshold, said)
