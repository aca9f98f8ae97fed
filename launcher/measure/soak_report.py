"""The two reports of a soak: figures with a verdict as JSON, and a page with plots. Pure."""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from launcher.measure import html_report
from launcher.measure.html_report import Chart, Mark, Page, Table
from launcher.measure.load_mix import SIZES
from launcher.measure.load_stats import Bucket
from launcher.measure.load_verdict import GIB, Thresholds, gpu_peak_bytes, soak_checks, tokens_a_second
from launcher.measure.soak_record import Record
from launcher.measure.verdict import passed

SCHEMA = 1
EVENTS_SHOWN = 100
MARKED = ("restart", "outage", "resumed", "step")
"""Kinds of events that the plots show."""
TROUBLE = ("restart", "outage")
TIMES = {
    "first_token": "first token",
    "first_token short": "first token, short requests",
    "first_token medium": "first token, medium requests",
    "first_token long": "first token, long requests",
    "gap": "between two pieces of a reply",
    "request": "whole request",
}


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


Value = Callable[[Bucket], float | None]


def _charts(record: Record) -> list[Chart]:
    ms = html_report.milliseconds
    written = {"of ended replies": _rate(record, "reply_tokens"), "of the server": _rate(record, "generated_tokens")}
    ended = {"replies": _rate(record, "replies"), "errors": _rate(record, "errors")}
    return [
        _chart(record, "Tokens a second", written),
        _chart(record, "Requests a second", ended),
        _chart(record, "First token", _percentiles("first_token"), y=ms),
        _chart(record, "Between two pieces of a reply", _percentiles("gap"), y=ms),
        *server_charts(record),
    ]


def server_charts(record: Record) -> list[Chart]:
    """Return what the server and its GPUs said of themselves over time."""
    percent, gib = html_report.percent, html_report.gib
    used = {"largest": _largest("kv_usage"), "mean": _mean("kv_usage")}
    accepted = {"of drafted tokens": _part("accepted_tokens", "drafted_tokens")}
    found = {"found": _part("prefix_hits", "prefix_queries")}
    gpus = {f"GPU {number}": _in_gib(_largest(name)) for number, name in enumerate(_gpus(record))}
    return [
        _chart(record, "KV cache in use", used, y=percent, highest=1.0),
        _chart(record, "Requests in the server", {"running": _mean("running"), "waiting": _mean("waiting")}),
        _chart(record, "Accepted drafts", accepted, y=percent, highest=1.0),
        _chart(record, "Prompt tokens found in the prefix cache", found, y=percent, highest=1.0),
        _chart(record, "GPU memory", gpus, y=gib),
        _chart(record, "Memory of the API server", {"resident": _in_gib(_mean("resident_bytes"))}, y=gib),
    ]


def _chart(record: Record, title: str, values: dict[str, Value], **more: Any) -> Chart:
    lines = {name: record.timeline.series(value) for name, value in values.items()}
    marks = [Mark(event.at_s, event.said, event.kind in TROUBLE) for event in record.events if event.kind in MARKED]
    return Chart(title, lines, x=html_report.clock, marks=marks, **more)


def _rate(record: Record, name: str) -> Value:
    """A second, in each bucket; nothing where it was never counted."""
    width_s, is_counted = record.timeline.width_s, any(name in bucket.sums for bucket in record.timeline.buckets)
    return lambda bucket: bucket.sums.get(name, 0.0) / width_s if is_counted else None


def _percentiles(name: str) -> dict[str, Value]:
    def quantile(share: float) -> Value:
        return lambda bucket: bucket.spreads[name].quantile(share) if name in bucket.spreads else None

    return {"median": quantile(0.5), "95 %": quantile(0.95)}


def _part(part: str, whole: str) -> Value:
    return lambda bucket: _share(bucket.sums.get(part, 0.0), bucket.sums.get(whole, 0.0))


def _mean(name: str) -> Value:
    return lambda bucket: bucket.mean(name)


def _in_gib(value: Value) -> Value:
    def scaled(bucket: Bucket) -> float | None:
        found = value(bucket)
        return None if found is None else found / GIB

    return scaled


def _largest(name: str) -> Value:
    return lambda bucket: bucket.largest(name)


def _gpus(record: Record) -> list[str]:
    return [name for name in record.peaks if name.startswith("gpu ")]


def _tables(record: Record) -> list[Table]:
    times = [
        [shown, f"{found.count:,}", *(_time(found.quantile(at)) for at in (0.5, 0.95, 0.99)), _time(found.largest)]
        for name, shown in TIMES.items()
        if (found := record.spreads.get(name)) is not None
    ]
    asked = sum(record.asked[size] for size in SIZES) or 1
    sizes = [
        [size, f"{record.asked[size]:,}", html_report.percent(record.asked[size] / asked), f"{record.done[size]:,}"]
        for size in SIZES
    ]
    return [
        Table("Times", ("what", "count", "median", "95 %", "99 %", "longest"), times),
        Table("Requests by size", ("size", "begun", "share", "replies"), sizes),
        events_table(record),
        Table("Wrong replies (the first)", ("what was wrong",), [[text] for text in record.wrong]),
    ]


def events_table(record: Record) -> Table:
    """Return what happened when; of very many events the first."""
    rows = [[html_report.clock(event.at_s), event.kind, event.said] for event in record.events[:EVENTS_SHOWN]]
    return Table("Events", ("at", "kind", "what"), rows)


def _time(value: float | None) -> str:
    return "-" if value is None else html_report.milliseconds(value)


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None
