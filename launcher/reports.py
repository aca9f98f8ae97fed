"""Collect the fix reports of a start: required fixes are in wherever they belong, and the processes agree."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from vllm_graft.fixes import FIXES
from vllm_graft.patch import Outcome, Patch, Process
from vllm_graft.report import FixReport, ProcessReport, is_trouble, parse_lines
from vllm_graft.report import problems as report_problems

from launcher.errors import FixNotApplied
from launcher.plan import Plan
from launcher.runtime import Service

SETTLE_S = 5.0
"""A process that serves has reported long before; only the way of its line through the runtime takes time."""
POLL_INTERVAL_S = 0.2


@dataclass(frozen=True)
class Collected:
    """What the reports of a good start say."""

    applied: tuple[str, ...]
    """Fixes that are in, wherever they belong."""
    trouble: tuple[FixReport, ...]
    """Optional fixes that were wanted and are not in."""


def collect(service: Service, plan: Plan, fixes: Sequence[Patch] = FIXES) -> Collected:
    """Return the reports of the running server.

    Raises:
        FixNotApplied: a process did not report, a required fix is not applied somewhere, or processes disagree.
    """
    deadline_s = time.monotonic() + SETTLE_S
    while True:
        reports = read(service)
        found = problems(reports, plan, fixes)
        if not found or time.monotonic() > deadline_s:
            break
        time.sleep(POLL_INTERVAL_S)
    if found:
        raise FixNotApplied("\n".join(found))
    trouble = {entry.id: entry for entry in _entries(reports, plan) if is_trouble(entry)}
    return Collected(applied(reports, plan), tuple(trouble.values()))


def refusal(log: str, plan: Plan) -> FixNotApplied | None:
    """Return the error of a start that vllm_graft itself ended, from the log that it left; None where it did not."""
    # Without its facts file a process knows no run id.
    mine = [report for report in parse_lines(log) if report.run_id in (plan.run_id, None)]
    said = dict.fromkeys(f"{report.process}: {report.error}" for report in mine if report.error)
    return FixNotApplied("\n".join(said)) if said else None


def read(service: Service) -> list[ProcessReport]:
    """Return the reports in the server's log."""
    return parsed(service.log())


def parsed(log: Iterable[str]) -> list[ProcessReport]:
    """Return the reports in the lines of a log."""
    return parse_lines("\n".join(log))


def applied(reports: Sequence[ProcessReport], plan: Plan) -> tuple[str, ...]:
    """Return the fixes that are in, wherever they belong."""
    return tuple(dict.fromkeys(one.id for one in _entries(reports, plan) if one.outcome is Outcome.APPLIED))


def problems(reports: Sequence[ProcessReport], plan: Plan, fixes: Sequence[Patch] = FIXES) -> list[str]:
    """Return what stands against calling a start good, one sentence each."""
    return report_problems(
        reports,
        fixes=fixes,
        required=plan.required_fixes,
        run_id=plan.run_id,
        expected=[frozenset(map(Process, roles)) for roles in plan.processes],
    )


def _entries(reports: Sequence[ProcessReport], plan: Plan) -> list[FixReport]:
    mine = (report for report in reports if report.run_id == plan.run_id)
    return [entry for report in mine if Process.MODEL_INSPECTION not in report.roles for entry in report.fixes]
