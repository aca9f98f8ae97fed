"""Commands that keep a service serving, and say what is wrong: doctor, report."""

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
    err,
    out,
    print_json,
)
from launcher.errors import CheckFailed, UsageError
from launcher.prepare import Options

if TYPE_CHECKING:
    from launcher.doctor.facts import Finding

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
