"""The two reports of a soak: figures with a verdict as JSON, and a page with plots. Pure."""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from launcher.measure import html_report
from launcher.measure.html_report import Chart, Mark, Page, Table
from launcher.measure.load_mix import SIZES
from launcher.measure.load_stats import Bucket
from launcher.measure.load_verdict import Thresholds, gpu_peak_bytes, soak_checks, tokens_a_second
from launcher.measure.soak_record import Record
from launcher.measure.verdict import passed

SCHEMA = 1
EVENTS_SHOWN = 100


def as_json(record: Record, thresholds: Thresholds) -> dict[str, Any]:
    """Return the verdict and the figures that it rests on."""
    checks = soak_checks(record, thresholds)
    return {
        "schema": SCHEMA,
        "kind": "soak",
        "passed": passed(checks),
        "is_finished": record.is_finished,
        "checks": [asdict(check) for check in checks],
        "thresholds": asdict(thresholds),
        "settings": asdict(record.settings),
        "figures": figures(record),
        "spreads": {name: spread.summary() for name, spread in sorted(record.spreads.items())},
        "errors": dict(record.errors),
        "events": [asdict(event) for event in record.events],
        "wrong_replies": record.wrong,
    }


def figures(record: Record) -> dict[str, float | None]:
    """Return what can be compared between two soaks, by name with its unit."""
    calls, answers = record.right("calls"), record.right("answers")
    total = record.errors.total() + record.replies
    return {
        "elapsed_s": record.elapsed_s,
        "replies": record.replies,
        "replies_a_second": record.replies / record.elapsed_s if record.elapsed_s else None,
        "tokens_a_second": tokens_a_second(record),
        "first_token_short_p50_s": record.quantile("first_token short", 0.5),
        "first_token_p50_s": record.quantile("first_token", 0.5),
        "first_token_p95_s": record.quantile("first_token", 0.95),
        "first_token_p99_s": record.quantile("first_token", 0.99),
        "gap_p50_s": record.quantile("gap", 0.5),
        "gap_p95_s": record.quantile("gap", 0.95),
        "gap_p99_s": record.quantile("gap", 0.99),
        "acceptance": _share(record.sums["accepted_tokens"], record.sums["drafted_tokens"]),
        "prefix_hits": _share(record.sums["prefix_hits"], record.sums["prefix_queries"]),
        "kv_usage_peak": record.peaks.get("kv_usage"),
        "gpu_peak_bytes": gpu_peak_bytes(record),
        "error_rate": record.errors.total() / total if total else None,
        "turned_away": record.turned_away,
        "preemptions": record.sums["preemptions"],
        "restarts": record.restarts,
        "outage_s": record.outage_s,
        "right_calls": calls.rate if calls.total else None,
        "right_answers": answers.rate if answers.total else None,
    }


def page(record: Record, thresholds: Thresholds) -> Page:
    """Return the page of a soak."""
    checks = soak_checks(record, thresholds)
    return Page(
        title=f"Soak of {record.settings.model}",
        facts=_facts(record),
        passed=passed(checks),
        checks=checks,
        charts=_charts(record),
        tables=_tables(record),
    )


def _facts(record: Record) -> dict[str, str]:
    settings = record.settings
    time = f"{html_report.clock(record.elapsed_s)} of {html_report.clock(settings.duration_s)}"
    again = f", in {record.runs} runs" if record.runs > 1 else ""
    talk = "an agent with tools" if settings.has_tools else "a conversation without tools"
    return {
        "Service": f"{settings.url} ({settings.profile or 'not started by this launcher'})",
        "Under load": f"{time}{again}{'' if record.is_finished else ' (not finished)'}",
        "Load": f"{settings.concurrency} requests at a time, context of {settings.context_tokens:,} tokens; "
        f"30 % short, 50 % medium, 20 % long, half of them turns of {talk}",
        "Requests": f"{record.replies:,} replies, {record.errors.total():,} errors, {record.turned_away:,} turned away",
        "Tokens": f"{record.sums['prompt_tokens']:,} read, {record.sums['reply_tokens']:,} written",
    }


def _charts(record: Record) -> list[Chart]:
    line, width_s = record.timeline, record.timeline.width_s
    marks = [Mark(event.at_s, event.said) for event in record.events if event.kind in ("restart", "outage", "resumed")]

    def chart(title: str, values: dict[str, Callable[[Bucket], float | None]], **more: Any) -> Chart:
        lines = {name: line.series(value) for name, value in values.items()}
        return Chart(title, lines, x=html_report.clock, marks=marks, **more)

    def rate(name: str) -> Callable[[Bucket], float | None]:
        return lambda bucket: bucket.sums.get(name, 0.0) / width_s

    def spread(name: str, share: float) -> Callable[[Bucket], float | None]:
        return lambda bucket: bucket.spreads[name].quantile(share) if name in bucket.spreads else None

    def share(part: str, whole: str) -> Callable[[Bucket], float | None]:
        return lambda bucket: _share(bucket.sums.get(part, 0.0), bucket.sums.get(whole, 0.0))

    def mean(name: str) -> Callable[[Bucket], float | None]:
        return lambda bucket: bucket.mean(name)

    def largest(name: str) -> Callable[[Bucket], float | None]:
        return lambda bucket: bucket.largest(name)

    def percentiles(name: str) -> dict[str, Callable[[Bucket], float | None]]:
        return {"median": spread(name, 0.5), "95 %": spread(name, 0.95)}

    ms, percent, gib = html_report.milliseconds, html_report.percent, html_report.gib
    gpus = {f"GPU {number}": largest(name) for number, name in enumerate(_gpus(record))}
    found = {"found": share("prefix_hits", "prefix_queries")}
    accepted = {"of drafted tokens": share("accepted_tokens", "drafted_tokens")}
    return [
        chart("Tokens a second", {"of ended replies": rate("reply_tokens"), "of the server": rate("generated_tokens")}),
        chart("Requests a second", {"replies": rate("replies"), "errors": rate("errors")}),
        chart("First token", percentiles("first_token"), y=ms),
        chart("Between two pieces of a reply", percentiles("gap"), y=ms),
        chart("KV cache in use", {"largest": largest("kv_usage"), "mean": mean("kv_usage")}, y=percent, highest=1.0),
        chart("Requests in the server", {"running": mean("running"), "waiting": mean("waiting")}),
        chart("Accepted drafts", accepted, y=percent, highest=1.0),
        chart("Prompt tokens found in the prefix cache", found, y=percent, highest=1.0),
        chart("GPU memory", gpus, y=gib),
        chart("Memory of the API server", {"resident": mean("resident_bytes")}, y=gib),
    ]


def _gpus(record: Record) -> list[str]:
    return [name for name in record.peaks if name.startswith("gpu ")]


def _tables(record: Record) -> list[Table]:
    times = [
        [
            name,
            f"{spread.count:,}",
            *(_time(spread.quantile(share)) for share in (0.5, 0.95, 0.99)),
            _time(spread.largest),
        ]
        for name, spread in sorted(record.spreads.items())
    ]
    asked = sum(record.asked[size] for size in SIZES) or 1
    sizes = [
        [size, f"{record.asked[size]:,}", html_report.percent(record.asked[size] / asked), f"{record.done[size]:,}"]
        for size in SIZES
    ]
    events = [[html_report.clock(event.at_s), event.kind, event.said] for event in record.events[:EVENTS_SHOWN]]
    return [
        Table("Times", ("what", "count", "median", "95 %", "99 %", "longest"), times),
        Table("Requests by size", ("size", "begun", "share", "replies"), sizes),
        Table("Events", ("at", "kind", "what"), events),
        Table("Wrong replies (the first)", ("what was wrong",), [[text] for text in record.wrong]),
    ]


def _time(value: float | None) -> str:
    return "-" if value is None else html_report.milliseconds(value)


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None
