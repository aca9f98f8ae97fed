"""The two reports of a bench: figures with a verdict as JSON, and a page with plots. Pure."""

from dataclasses import asdict
from typing import Any

from launcher.measure import html_report
from launcher.measure.bench import Result, Settings
from launcher.measure.html_report import Chart, Page, Table
from launcher.measure.load_verdict import Thresholds, at_most, errors, gpu_bound, gpu_memory, gpu_peak_bytes, throughput
from launcher.measure.soak_record import Record
from launcher.measure.soak_report import events_table, server_charts
from launcher.measure.verdict import Check, passed

SCHEMA = 1
COLUMNS = {
    "tokens_a_second": "tokens/s",
    "requests_a_second": "requests/s",
    "first_token_p50_s": "first token, median",
    "first_token_p95_s": "95 %",
    "first_token_p99_s": "99 %",
    "gap_p50_s": "between pieces, median",
    "gap_p99_s": "99 %",
    "acceptance": "drafts accepted",
    "failed": "failed",
}
"""Figures of the table, by their names there."""


def checks(results: tuple[Result, ...], record: Record, thresholds: Thresholds) -> tuple[Check, ...]:
    """Return every check of a bench with its answer."""
    by_name = {result.step.name: result.figures for result in results}
    single, batch = by_name.get("single"), by_name.get("batch16")
    asked = []
    if single is not None:
        asked.append(
            at_most("first token", single["first_token_p50_s"], thresholds.first_token_s, "median, one stream")
        )
        asked.append(at_most("between tokens, p99", single["gap_p99_s"], thresholds.p99_gap_s, "one stream"))
    if batch is not None:
        first = at_most("first token, p99", batch["first_token_p99_s"], thresholds.p99_first_token_s, "16 at a time")
        asked += [first, throughput(batch["tokens_a_second"], thresholds.tokens_a_second, 16)]
    failed = sum(int(result.figures["failed"] or 0) for result in results)
    total = failed + sum(int(result.figures["replies"] or 0) for result in results)
    is_whole = record.restarts == 0
    return (
        *asked,
        gpu_memory(gpu_peak_bytes(record), gpu_bound(record.settings.gpu_bound_bytes, thresholds)),
        Check("no interruption", is_whole, float(record.restarts), 0.0, f"{record.restarts} restarts"),
        errors(failed, total, thresholds.error_rate),
    )


def as_json(settings: Settings, results: tuple[Result, ...], record: Record, thresholds: Thresholds) -> dict[str, Any]:
    """Return the verdict and the figures that it rests on."""
    found = checks(results, record, thresholds)
    return {
        "schema": SCHEMA,
        "kind": "bench",
        "passed": passed(found),
        "checks": [asdict(check) for check in found],
        "thresholds": asdict(thresholds),
        "settings": asdict(settings),
        "figures": {
            **{f"{one.step.name}: {name}": value for one in results for name, value in one.figures.items()},
            "kv_usage_peak": record.peaks.get("kv_usage"),
            "gpu_peak_bytes": gpu_peak_bytes(record),
        },
        "steps": [{**asdict(one.step), "began_s": one.began_s, "client": one.raw} for one in results],
    }


def page(settings: Settings, results: tuple[Result, ...], record: Record, thresholds: Thresholds) -> Page:
    """Return the page of a bench."""
    found = checks(results, record, thresholds)
    return Page(
        title=f"Bench of {settings.model}",
        facts={
            "Service": f"{settings.url} ({settings.profile or 'not started by this launcher'})",
            "Load": f"{settings.input_tokens:,} tokens in and {settings.output_tokens:,} out a request, random texts",
            "Client": f"vllm bench serve {settings.vllm}",
        },
        passed=passed(found),
        checks=found,
        charts=[*_sweep_charts(results), *server_charts(record)],
        tables=[_table(results), events_table(record)],
    )


def _sweep_charts(results: tuple[Result, ...]) -> list[Chart]:
    swept = [one for one in results if one.step.rate is not None]

    def chart(title: str, names: dict[str, str], **more: Any) -> Chart:
        lines = {
            shown: [(round(one.step.rate or 0.0, 4), one.figures[name]) for one in swept]
            for shown, name in names.items()
        }
        return Chart(f"{title}, by requests sent a second", lines, has_points=True, **more)

    ms = html_report.milliseconds
    return [
        chart("First token", {"median": "first_token_p50_s", "95 %": "first_token_p95_s"}, y=ms),
        chart("Between two pieces of a reply", {"median": "gap_p50_s", "95 %": "gap_p95_s"}, y=ms),
        chart("Tokens a second", {"written": "tokens_a_second"}),
        chart("Whole request", {"median": "request_p50_s", "95 %": "request_p95_s"}, y=ms),
    ]


def _table(results: tuple[Result, ...]) -> Table:
    rows = [[_step(one), *(_cell(name, one.figures[name]) for name in COLUMNS)] for one in results]
    return Table("Runs", ("load", *COLUMNS.values()), rows)


def _step(result: Result) -> str:
    step = result.step
    how = f"{step.rate:.3g} requests/s" if step.rate else f"{step.concurrency} at a time"
    return f"{step.name}: {how}, {step.requests}"


def _cell(name: str, value: float | None) -> str:
    if value is None:
        return "-"
    if name.endswith("_s"):
        return html_report.milliseconds(value)
    return html_report.percent(value) if name == "acceptance" else f"{value:,.4g}"
