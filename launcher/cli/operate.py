"""Commands that keep a service serving, and say what is wrong: doctor, report, watch, systemd."""

import getpass
import os
import sys
import time
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from launcher.cli.base import (
    FolderOption,
    JsonOption,
    ModelOption,
    ProfileArgument,
    ProfileOption,
    RuntimeOption,
    chosen,
    err,
    out,
    print_json,
)
from launcher.errors import CheckFailed, UsageError
from launcher.operate.events import line_of
from launcher.prepare import Options
from launcher.state import ServiceState

if TYPE_CHECKING:
    from launcher.doctor.facts import Finding
    from launcher.operate.events import Event

app = typer.Typer()

_VERDICTS = {"ok": "[green]ok[/]", "warn": "[yellow]warn[/]", "fail": "[bold red]fail[/]", "unknown": "[dim]unknown[/]"}


@app.command()
def doctor(
    name: ProfileArgument = None,
    profile: ProfileOption = None,
    model: ModelOption = None,
    profiles: FolderOption = None,
    runtime: RuntimeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check this machine and the service: each check is ok, warn, fail or unknown, with one remedy."""
    from launcher import doctor as doctors

    options = Options(name or profile, model, profiles, runtime)
    examined = doctors.examined(options)
    if as_json:
        print_json({"profile": examined.profile, "verdict": examined.verdict, "checks": examined.findings})
    else:
        for note in examined.notes:
            err.print(note, style="dim", markup=False)
        _say_findings(examined.findings)
    failed = [finding.check for finding in examined.findings if finding.verdict == "fail"]
    if failed:
        raise CheckFailed(f"{examined.profile}: {', '.join(dict.fromkeys(failed))}")


@app.command()
def report(
    name: ProfileArgument = None,
    profile: ProfileOption = None,
    profiles: FolderOption = None,
    to: Annotated[Path | None, typer.Option("--out", "-o", help="The file; `-` prints it.")] = None,
) -> None:
    """Write one file to paste into an issue: versions, checks, plan, fixes, log; without secrets and names."""
    from launcher import issue_report

    made = issue_report.make(Options(name or profile, None, profiles))
    if to == Path("-"):
        out.print(made.text, markup=False, soft_wrap=True)
        return
    path = to or Path(f"graft-report-{made.profile}.md")
    try:
        path.write_text(made.text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--out {path}: cannot be written: {error.strerror}") from error
    out.print(f"{path}: read it once before you paste it; secrets, names and addresses are taken out.", markup=False)


@app.command()
def watch(
    name: ProfileArgument = None,
    profile: ProfileOption = None,
    last: Annotated[int, typer.Option("--last", min=0, help="Events from before that are shown first.")] = 10,
    once: Annotated[bool, typer.Option("--once", help="Show what there is, and end.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Follow what keeper and watchdog do: starts, ends, strikes, smaller settings; until interrupted or stopped."""
    from launcher.cli.service import running_name
    from launcher.views import operating_lines
    from launcher.watching import follow

    watched = name or profile or running_name(None)
    state = ServiceState.of(watched)
    status = follow.status_of(state)
    if not as_json:
        said = operating_lines(status, time.time()) or ["As planned."]
        out.print(f"{watched}: {status.phase}. {' '.join(said)}", markup=False)
    for one in follow.last_events(state, last):
        _say_event(one, as_json)
    for one in () if once else follow.events_from_now(state):
        _say_event(one, as_json)


@app.command()
def systemd(
    name: ProfileArgument = None,
    profile: ProfileOption = None,
    profiles: FolderOption = None,
    system: Annotated[bool, typer.Option("--system", help="A unit of the system, not of your own systemd.")] = False,
) -> None:
    """Print a systemd unit that starts the service with the machine."""
    from launcher.systemd import unit_of

    chosen_name = chosen(Options(name or profile, None, profiles)).name
    program = Path(sys.executable).with_name("graft")
    unit = unit_of(chosen_name, str(program), os.environ, getpass.getuser() if system else None)
    out.print(unit, end="", markup=False, soft_wrap=True)
    file = f"graft-{chosen_name}.service"
    folder = "/etc/systemd/system" if system else "~/.config/systemd/user"
    ctl = "sudo systemctl" if system else "systemctl --user"
    note = f"Save it as {folder}/{file}, then: {ctl} daemon-reload && {ctl} enable --now {file}"
    err.print(note if system else f"{note}; `loginctl enable-linger` lets it run without a login", markup=False)


def _say_event(one: "Event", as_json: bool) -> None:
    if as_json:
        out.file.write(f"{line_of(one)}\n")
        out.file.flush()
        return
    cause = f" ({one.cause})" if one.cause else ""
    out.print(f"{one.at}  {one.kind:<18} {one.message}{cause}", markup=False)
    if one.remedy:
        out.print(f"{'':<22}-> {one.remedy}", markup=False)


def _say_findings(findings: "tuple[Finding, ...]") -> None:
    width = max(len(finding.check) for finding in findings)
    for key, group in groupby(findings, key=lambda one: (one.verdict, one.message)):
        alike = tuple(group)
        mark = _VERDICTS[key[0]]
        # One reason, such as a driver that is missing, often stands behind a row of checks.
        check = alike[0].check if len(alike) == 1 else f"{len(alike)} checks"
        out.print(f"{mark}{' ' * (8 - len(key[0]))}{check:<{width}}  {escape(key[1])}")
        if len(alike) > 1:
            out.print(f"        {', '.join(one.check for one in alike)}", markup=False)
        if alike[0].remedy:
            out.print(f"        -> {alike[0].remedy}", markup=False)
