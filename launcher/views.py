"""What commands show people: rich renderables made from results. Prints nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from launcher.match import Match
from launcher.plan import Flag, Plan
from launcher.problems import Problem

if TYPE_CHECKING:
    from vllm_graft.patch import Patch

    from launcher.diagnose import Diagnosis
    from launcher.fit.advice import TargetAdvice
    from launcher.operate.service_state import ServiceStatus
    from launcher.planner import Planned

_MARK = {True: "[green]yes[/]", False: "[red]no[/]", None: "[yellow]unknown[/]"}
_SEVERITY = {"refuse": "[bold red]refused[/]", "warn": "[yellow]warning[/]"}


def profiles_table(matches: Sequence[Match]) -> Table:
    """Return which profiles this machine can run, and why not."""
    table = _table("Profiles", "profile", "what it is", "here", "why", "model")
    for one in matches:
        table.add_row(
            one.profile.name,
            one.profile.title,
            _MARK[one.compatible],
            escape("; ".join(one.reasons)),
            one.profile.model,
        )
    return table


def problems_text(problems: Sequence[Problem]) -> Text:
    """Return all problems with their remedies; refusals first."""
    lines = []
    for problem in sorted(problems, key=lambda one: one.severity != "refuse"):
        lines.append(f"{_SEVERITY[problem.severity]} {problem.cause}: {escape(problem.message)}")
        lines.append(f"  [dim]->[/] {escape(problem.remedy)}")
    return Text.from_markup("\n".join(lines))


def flags_table(flags: Sequence[Flag], plan: Plan) -> Table:
    """Return every flag with value, reason and source."""
    table = _table(f"vllm serve, {plan.profile} with {plan.model} on vLLM {plan.vllm}", "flag", "value", "why", "from")
    for flag in flags:
        table.add_row(flag.name, escape(flag.value or ""), escape(flag.reason), escape(flag.source))
    return table


def choices_table(title: str, choices: Sequence[Flag]) -> Table:
    """Return values of a part of the plan with reason and source."""
    table = _table(title, "key", "value", "why", "from")
    for choice in choices:
        table.add_row(choice.name, escape(choice.value or ""), escape(choice.reason), escape(choice.source))
    return table


def environment_table(plan: Plan) -> Table:
    """Return the server's environment."""
    table = _table("Environment", "variable", "value", "why")
    for variable in plan.environment:
        table.add_row(variable.name, escape(variable.value), escape(variable.reason))
    return table


def plan_view(planned: Planned, reach: Sequence[TargetAdvice]) -> Group:
    """Return the memory plan: the verdict, the waterfall, the advice, and what reaches a longer context."""
    from launcher.fit.report import advice_text, alternatives_table, verdict_text, waterfall_table

    plan, memory = planned.plan, planned.memory
    heading = f"[bold]{plan.profile}[/]: {plan.model} on vLLM {plan.vllm}"
    parts: list[Any] = [Text.from_markup(heading)]
    if memory is not None and memory.report is not None:
        parts += [Text.from_markup(verdict_text(memory.report)), waterfall_table(memory.report)]
        parts += [Text(f"KV pool: {memory.kv_pool_reason}.")]
        if memory.advice is not None:
            parts.append(Text.from_markup(advice_text(memory.advice, plan.profile)))
        if reach:
            parts.append(alternatives_table(reach))
    elif plan.max_model_len:
        parts.append(Text(f"Context: {plan.max_model_len} tokens."))
    fixes = ", ".join(plan.required_fixes) or "none is needed"
    parts.append(Text(f"Required fixes: {fixes}."))
    if plan.degraded is not None:
        parts.append(Text(f"Should memory end the engine twice: {plan.degraded.summary}."))
    if plan.problems:
        parts.append(problems_text(plan.problems))
    return Group(*parts)


def fixes_table(fixes: Sequence[Patch], versions: Sequence[str]) -> Table:
    """Return the fixes with the vLLM versions that get each."""
    from vllm_graft.decide import affects

    table = _table("Fixes", "id", "what it does", "when", *(f"vLLM {version}" for version in versions), "until")
    for fix in fixes:
        applied = ["yes" if affects(fix, version) else "not affected" for version in versions]
        table.add_row(fix.id, fix.title, escape(str(fix.when)), *applied, escape(fix.remove_when))
    return table


def fixes_markdown(fixes: Sequence[Patch], versions: Sequence[str]) -> str:
    """Return the table of fixes as README carries it."""
    from vllm_graft.decide import affects

    rows = [
        ("fix", "what users see without it", "when", *(f"vLLM {version}" for version in versions), "until"),
        ("---",) * (4 + len(versions)),
    ]
    rows += [
        (
            f"`{fix.id}`",
            fix.symptom,
            str(fix.when),
            *("yes" if affects(fix, version) else "not affected" for version in versions),
            fix.remove_when,
        )
        for fix in fixes
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def profiles_markdown(plans: Sequence[Planned]) -> str:
    """Return the table of profiles as README carries it; computed for the card that each profile names."""
    rows = [("profile", "for", "model", "KV cache", "context", "requests", "verdict"), ("---",) * 7]
    for planned in plans:
        plan, profile = planned.plan, planned.inputs.profile
        report = planned.memory.report if planned.memory else None
        context = f"{plan.max_model_len:,}" if plan.max_model_len else "what fits"
        if report is not None and report.verdict.value == "NO":
            context = "none"
        requests = next(flag.value for flag in plan.flags if flag.name == "--max-num-seqs")
        verdict = report.verdict.value if report else "-"
        kv = profile.serve.kv_cache_dtype
        row = (f"`{plan.profile}`", profile.title, f"`{plan.model}`", f"`{kv}`", context, str(requests), verdict)
        rows.append(row)
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def diagnosis_text(diagnosis: Diagnosis) -> Text:
    """Return one cause, one remedy and the lines that show it."""
    lines = [f"[bold red]{diagnosis.cause}[/]: {escape(diagnosis.message)}", f"  [dim]->[/] {escape(diagnosis.remedy)}"]
    lines += [f"  [dim]|[/] {escape(line)}" for line in diagnosis.excerpt]
    helps = "can help" if diagnosis.restart_helps else "does not help"
    lines.append(f"Starting again unchanged {helps}.")
    return Text.from_markup("\n".join(lines))


def operating_lines(status: ServiceStatus, now_s: float) -> list[str]:
    """Return what keeper and watchdog say of a service, one sentence a line; nothing where all is as it should be."""
    lines = []
    if status.is_degraded:
        lines.append(
            f"Degraded: {status.reason or 'smaller settings are in force'}. `graft up` returns to the planned ones."
        )
    elif status.phase in ("restarting", "stopped"):
        lines.append(f"{status.phase.capitalize()}: {status.reason}.")
    if status.remedy and status.phase == "stopped":
        lines.append(f"-> {status.remedy}")
    if status.next_start_s is not None and status.next_start_s > now_s:
        lines.append(f"The engine is started again in {status.next_start_s - now_s:.0f} s.")
    if status.restarts:
        lines.append(f"Started again {status.restarts} time(s) since `graft up`.")
    return lines


def unknown_failure_text(last_words: Sequence[str]) -> Text:
    """Return that something failed for a cause that no rule knows, and the last words."""
    from launcher.diagnose import UNKNOWN_CAUSE

    lines = [f"[bold red]{UNKNOWN_CAUSE}[/]", *(f"  [dim]|[/] {escape(line)}" for line in last_words)]
    return Text.from_markup("\n".join(lines))


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table
