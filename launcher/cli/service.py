"""Commands that act on a service: up, down, logs, status, ask, and the engine's environments."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from launcher.cli.base import (
    AdviseOption,
    FolderOption,
    ForceOption,
    JsonOption,
    ModelOption,
    ProfileOption,
    RuntimeOption,
    UnpinnedOption,
    chosen,
    err,
    out,
    print_json,
)
from launcher.cli.planning import show_plan
from launcher.errors import CheckFailed, UsageError
from launcher.prepare import Options, api_key, host_facts, planned
from launcher.state import ServiceState

if TYPE_CHECKING:
    from launcher import service
    from launcher.cli.live import Live
    from launcher.plan import Plan
    from launcher.planner import Planned

# What starts services is imported by the commands that do: the others answer in a few tenths of a second.
app = typer.Typer()
engine_app = typer.Typer(no_args_is_help=True, help="The environments that hold vLLM.")
app.add_typer(engine_app, name="engine")

FOLLOW_INTERVAL_S = 0.3


@app.command()
def up(
    profile: ProfileOption = None,
    model: ModelOption = None,
    profiles: FolderOption = None,
    runtime: RuntimeOption = None,
    advise: AdviseOption = False,
    force: ForceOption = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Plan, check, and start nothing.")] = False,
    locked: Annotated[
        bool, typer.Option("--locked", help="Start what lock.json says, byte for byte, or nothing.")
    ] = False,
    unpinned: UnpinnedOption = False,
    monitoring: Annotated[
        bool, typer.Option("--monitoring", help="Start Prometheus and Grafana beside it, on 127.0.0.1.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Start the service and follow it to its first right answer."""
    from launcher import release, service
    from launcher.cli.live import Live
    from launcher.monitoring.start import refuse_host

    options = Options(profile, model, profiles, runtime, None, advise)
    one = chosen(options)
    if dry_run:
        made = planned(options, one, host_facts(one))
        show_plan(made, as_json)
        service.refuse(made.plan, force)
        return
    running = service.find(one.name)
    if monitoring:
        refuse_host(running.plan.runtime if running else runtime or one.runtime, ServiceState.of(one.name))
    if running is not None and running.is_degraded:
        err.print(f"{one.name}: runs with the smaller settings; it is started again with the planned ones.")
        service.down(one.name)
    elif running is not None and running.state.is_alive:
        if locked:
            release.refuse_unlocked_running(ServiceState.of(one.name))
        _say_already_up(options, running, as_json)
        if monitoring:
            _start_monitoring(running.plan, unpinned, as_json)
        return
    live = Live(err if as_json else out)
    try:
        with live:
            started = service.up(
                options,
                one,
                live,
                force=force,
                on_plan=lambda made: _say_plan(made, live),
                locked=locked,
                unpinned=unpinned,
            )
    except service.FailedStart as failure:
        say_failure(failure)
        raise
    except KeyboardInterrupt:
        err.print(f"\nInterrupted. What was started goes on; `make down PROFILE={one.name}` stops it.")
        raise
    _say_started(started, as_json)
    if monitoring:
        _start_monitoring(started.plan, unpinned, as_json)


@app.command()
def down(profile: ProfileOption = None, model: ModelOption = None, as_json: JsonOption = False) -> None:
    """Stop the service; without PROFILE, every service that was started here."""
    from launcher import service

    names = (profile,) if profile else service.started_profiles()
    stopped = [name for name in names if service.down(name)]
    if as_json:
        print_json({"stopped": stopped})
        return
    for name in stopped:
        out.print(f"{name}: stopped.")
    if not stopped:
        out.print(f"{profile}: not running." if profile else "Nothing is running.")


@app.command()
def logs(
    profile: ProfileOption = None,
    model: ModelOption = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until interrupted.")] = False,
) -> None:
    """Print the service's log."""
    from launcher import service

    one = service.service_of(running_name(profile))
    if not follow:
        for line in one.log():
            out.print(line, markup=False)
        return
    while True:
        # The state first: what was written before the end is then printed.
        is_alive = one.state().is_alive
        for line in one.new_log_lines():
            out.print(line, markup=False)
        if not is_alive:
            return
        time.sleep(FOLLOW_INTERVAL_S)


@app.command()
def status(profile: ProfileOption = None, model: ModelOption = None, as_json: JsonOption = False) -> None:
    """Say what runs, whether it is healthy, and which fixes are in."""
    from launcher import service

    names = (profile,) if profile else service.started_profiles()
    found = [service.status(name) for name in names]
    if as_json:
        print_json([_status_json(one) for one in found if one is not None])
    elif not any(found):
        out.print(f"{profile}: not running." if profile else "Nothing is running.")
    for one in found:
        if one is not None and not as_json:
            _say_status(one)
    bad = [one.plan.profile for one in found if one is not None and not one.is_good]
    if bad or (profile and not any(found)):
        raise CheckFailed(f"not well: {', '.join(bad) or profile}; see `make logs`")


@app.command()
def ask(
    question: Annotated[str, typer.Argument(help="What to ask.")],
    profile: ProfileOption = None,
    model: ModelOption = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="Longest answer, in tokens.")] = 512,
    as_json: JsonOption = False,
) -> None:
    """Ask the running model one question."""
    from launcher import service
    from launcher.ask import ask as ask_server

    if not question.strip():
        raise UsageError('nothing was asked; write make ask Q="What is the capital of France?"')
    name = running_name(profile)
    running = service.find(name)
    if running is None:
        raise UsageError(f"{name}: not started; `make up PROFILE={name}` starts it")

    has_begun = False

    def show(text: str) -> None:
        nonlocal has_begun
        # Blank lines that stand between a thought, or none, and the reply are not the reply's.
        text = text if has_begun else text.lstrip()
        has_begun = has_begun or bool(text)
        out.print(text, end="", markup=False, soft_wrap=True)

    answer = ask_server(
        running.base_url,
        question,
        model=running.plan.served_name,
        api_key=api_key(ServiceState.of(name).secrets_dir),
        max_tokens=max_tokens,
        on_text=None if as_json else show,
    )
    if as_json:
        print_json(answer)
    elif has_begun:
        out.print()
    else:
        hint = "; --max-tokens allows more" if answer.finish_reason == "length" else ""
        out.print(f"No text: it ended ({answer.finish_reason}) after {answer.completion_tokens} tokens{hint}.")


@engine_app.command()
def install(
    name: Annotated[str, typer.Argument(help="engine: vLLM for CPUs; vllm-0.33: vLLM 0.33.0's Python for tests.")],
) -> None:
    """Install an environment, or what is missing of it."""
    from launcher import bring, engine_env
    from launcher.cli.live import Live

    if name not in engine_env.ENVIRONMENTS:
        raise UsageError(f"{name}: no such environment; there are {', '.join(engine_env.ENVIRONMENTS)}")
    with Live(out) as live:
        bring.install(engine_env.ENVIRONMENTS[name], live)


def running_name(profile: str | None) -> str:
    """Return the profile named, else the one that runs.

    Raises:
        UsageError: none is named, and not one runs.
    """
    from launcher import service

    if profile:
        return profile
    names = service.started_profiles()
    if len(names) != 1:
        which = (
            f"several run ({', '.join(names)}); name one with PROFILE=" if names else "nothing runs; `make up` first"
        )
        raise UsageError(which)
    return names[0]


def _say_plan(made: "Planned", live: "Live") -> None:
    plan = made.plan
    live.note(f"{plan.model} with {plan.max_model_len or 'automatic'} tokens of context on vLLM {plan.vllm}.")
    for problem in plan.problems:
        live.note(f"{problem.severity}: {problem.cause}: {problem.message} -> {problem.remedy}")


def _start_monitoring(plan: "Plan", unpinned: bool, as_json: bool) -> None:
    from launcher.cli.live import Live
    from launcher.monitoring.start import start

    with Live(err if as_json else out) as live:
        started = start(plan, ServiceState.of(plan.profile), live, unpinned=unpinned)
    say = err if as_json else out
    say.print(
        f"[bold green]MONITORING[/] {started.grafana_url} (user admin, password in {_short(started.password_file)})"
    )
    say.print(f"     Prometheus and its alerts: {started.prometheus_url}/alerts", markup=False)


def _say_started(started: "service.Started", as_json: bool) -> None:
    from launcher import service

    plan = started.plan
    if as_json:
        print_json(
            {
                "profile": plan.profile,
                "model": plan.served_name,
                "url": started.base_url,
                "answer": started.answer,
                "elapsed_s": round(started.elapsed_s, 2),
                "fixes_applied": started.reports.applied,
                "fixes_not_in": started.reports.trouble,
                "curl": service.curl(plan, started.base_url),
                "memory": started.comparison,
            }
        )
        return
    out.print(f"     {started.answer.text.strip()}", markup=False)
    out.print(f"     Fixes applied: {', '.join(started.reports.applied) or 'none is needed'}.")
    for fix in started.reports.trouble:
        out.print(f"     Optional fix not in: {fix.id}: {fix.outcome}: {fix.reason}", markup=False)
    if started.comparison is not None:
        from launcher.fit.report import comparison_table

        out.print(comparison_table(started.comparison))
    _say_ready(plan.served_name, started.base_url, service.curl(plan, started.base_url))


def _say_already_up(options: Options, running: "service.Running", as_json: bool) -> None:
    from launcher import service

    plan = running.plan
    if not running.is_healthy:
        raise CheckFailed(
            f"{plan.profile}: already started and not healthy; `make logs PROFILE={plan.profile}` shows why, "
            f"`make down PROFILE={plan.profile}` stops it"
        )
    if options.model and options.model != plan.model:
        raise UsageError(f"{plan.profile}: runs {plan.model}; `make down PROFILE={plan.profile}` first")
    if as_json:
        print_json({"profile": plan.profile, "model": plan.served_name, "url": running.base_url, "already_up": True})
        return
    out.print(f"{plan.profile}: already up and healthy.")
    _say_ready(plan.served_name, running.base_url, service.curl(plan, running.base_url))


def _say_ready(model: str, base_url: str, curl: str) -> None:
    out.print(f"[bold green]READY[/] {model} at {base_url}/v1")
    out.print(curl, markup=False, soft_wrap=True)


def say_failure(failure: "service.FailedStart") -> None:
    """Say why a start failed, and where its log is."""
    from launcher import service

    diagnosis = service.diagnose_failure(failure)
    if diagnosis is not None:
        from launcher.views import diagnosis_text

        err.print(diagnosis_text(diagnosis))
    if failure.log_file is not None:
        err.print(f"Stopped. The whole log: {_short(failure.log_file)}", markup=False)


def _say_status(one: "service.Status") -> None:
    from launcher.views import diagnosis_text, operating_lines, unknown_failure_text

    mark = "[green]healthy[/]" if one.is_good else "[red]not healthy[/]"
    out.print(f"{one.plan.profile}: {mark}, {one.state.status}, {one.plan.served_name} at {one.base_url}")
    for problem in one.fix_problems:
        out.print(f"  {problem}", markup=False)
    out.print(f"  Fixes applied: {', '.join(one.applied) or 'none'}.")
    for line in operating_lines(one.operating, time.time()):
        out.print(f"  {line}", markup=False)
    if one.evidence is not None and one.has_failed:
        from launcher.diagnose import last_words

        words = last_words(one.evidence)
        out.print(diagnosis_text(one.diagnosis) if one.diagnosis is not None else unknown_failure_text(words))


def _status_json(one: "service.Status") -> dict[str, Any]:
    return {
        "profile": one.plan.profile,
        "model": one.plan.served_name,
        "url": one.base_url,
        "healthy": one.is_healthy,
        "state": one.state,
        "run_id": one.plan.run_id,
        "fixes_applied": one.applied,
        "fix_problems": one.fix_problems,
        "operating": one.operating,
        "diagnosis": one.diagnosis,
    }


def _short(path: Path) -> Any:
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path
