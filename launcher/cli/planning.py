"""Commands that start nothing: plan, explain, render, profiles, models, fit, check, fixes, diagnose, schema."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from launcher import prepare
from launcher.cli.base import (
    AdviseOption,
    CardOption,
    FolderOption,
    JsonOption,
    ModelOption,
    ProfileArgument,
    ProfileOption,
    RuntimeOption,
    chosen,
    out,
    print_json,
)
from launcher.errors import CheckFailed, Refused, UsageError
from launcher.planner import Planned
from launcher.prepare import Options
from launcher.watching.choices import SMALLER

if TYPE_CHECKING:
    from vllm_graft.patch import Patch

    from launcher.fit.advice import TargetAdvice
    from launcher.fit.report import ModelRow
    from launcher.host.facts import HostFacts
    from launcher.profile import Profile

app = typer.Typer()

FactsOption = Annotated[Path | None, typer.Option("--facts", help="Facts from this file, not from the machine.")]


@app.command()
def plan(
    name: ProfileArgument = None,
    profile: ProfileOption = None,
    model: ModelOption = None,
    profiles: FolderOption = None,
    runtime: RuntimeOption = None,
    card: CardOption = None,
    advise: AdviseOption = False,
    svg: Annotated[Path | None, typer.Option("--svg", help="Draw the memory waterfall into this file.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Say what fits before anything is downloaded: memory, context, verdict, and what would have to change."""
    from launcher import survey

    options = Options(name or profile, model, profiles, runtime, card, advise)
    made = _made(options)
    if svg is not None:
        _draw(made, svg)
    show_plan(made, as_json, survey.alternatives_of(made, options))


@app.command()
def explain(
    name: ProfileArgument = None,
    profile: ProfileOption = None,
    model: ModelOption = None,
    profiles: FolderOption = None,
    runtime: RuntimeOption = None,
    card: CardOption = None,
    advise: AdviseOption = False,
    flag: Annotated[str | None, typer.Option("--flag", help="Only this flag of vllm serve.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Print every flag of `vllm serve`, and every value beside it, with its reason and where it comes from."""
    made = _made(Options(name or profile, model, profiles, runtime, card, advise)).plan
    flags = [one for one in made.flags if flag is None or one.name == f"--{flag.lstrip('-')}"]
    if not flags:
        known = ", ".join(one.name for one in made.flags)
        raise UsageError(f"--flag {flag}: the plan does not set it; it sets {known}")
    if as_json:
        whole = {
            "environment": made.environment,
            "gateway": made.gateway.choices if made.gateway else (),
            "watch": made.watch.choices if made.watch else (),
            "degraded": made.degraded,
        }
        print_json({"flags": flags, **(whole if flag is None else dict.fromkeys(whole, ()))})
        return
    from launcher.views import choices_table, environment_table, flags_table

    out.print(flags_table(flags, made))
    if flag is None and made.environment:
        out.print(environment_table(made))
    if flag is None and made.gateway is not None:
        out.print(choices_table("Gateway", made.gateway.choices))
    if flag is None and made.watch is not None:
        out.print(choices_table("Watch", made.watch.choices))
    if flag is None and made.degraded is not None:
        changed = [one for one in made.degraded.flags if one.source == SMALLER]
        out.print(choices_table("Smaller settings, after the engine ended twice for lack of memory", changed))


@app.command()
def render(
    name: ProfileArgument = None,
    profile: ProfileOption = None,
    model: ModelOption = None,
    profiles: FolderOption = None,
    runtime: RuntimeOption = None,
    advise: AdviseOption = False,
    as_json: JsonOption = False,
) -> None:
    """Write the compose file and all that goes with it, and show it; start nothing."""
    from launcher import service

    made = _made(Options(name or profile, model, profiles, runtime, None, advise))
    files = service.render(made)
    if as_json:
        print_json({str(path): len(content) for path, content in files.items()})
        return
    for path, content in files.items():
        if path.name in ("compose.yaml", "entrypoint.sh", "Dockerfile"):
            out.print(f"[bold]{path}[/]")
            out.print(content.decode(), markup=False, soft_wrap=True)
    others = [path for path in files if path.name not in ("compose.yaml", "entrypoint.sh", "Dockerfile")]
    out.print(f"Also written: {', '.join(str(path) for path in others)}", markup=False)
    compose_file = next((path for path in files if path.name == "compose.yaml"), None)
    if compose_file is not None:
        out.print(f"By hand: docker compose -f {compose_file} up", markup=False)


@app.command(name="profiles")
def list_profiles(profiles: FolderOption = None, facts: FactsOption = None, as_json: JsonOption = False) -> None:
    """List the profiles, which of them this machine can run, and why not the others."""
    found = prepare.matches(Options(profiles_dir=profiles), _facts(facts))
    if as_json:
        print_json(
            [
                {
                    "profile": one.profile.name,
                    "title": one.profile.title,
                    "compatible": one.compatible,
                    "reasons": one.reasons,
                    "gpus": one.gpus,
                    "model": one.profile.model,
                }
                for one in found
            ]
        )
        return
    from launcher.views import profiles_table

    out.print(profiles_table(found))


@app.command(name="models")
def list_models(
    profile: ProfileOption = None,
    profiles: FolderOption = None,
    card: CardOption = None,
    as_json: JsonOption = False,
) -> None:
    """List which known models fit which card at what context, best first."""
    from launcher import survey
    from launcher.fit.report import models_table, ranked_models

    options = Options(profile, None, profiles, None, card)
    named = profile or card
    asked = [prepare.chosen_profile(options)[0]] if named else list(prepare.shipped_and_own(options))
    if named and asked[0].gpu is None:
        raise UsageError(f"{profile}: has no GPU that a model could fit; name a GPU profile, or --card 24GiB")
    tables = [
        (f"{_cards(one, card or one.gpu.card)} with the settings of {one.name}", survey.model_rows(options, one))
        for one in asked
        if one.gpu is not None
    ]
    if as_json:
        print_json(
            [{"card": title, "models": [_model_json(row) for row in ranked_models(rows)]} for title, rows in tables]
        )
        return
    for title, rows in tables:
        out.print(models_table(rows, title))


@app.command()
def fit(
    path: Annotated[Path | None, typer.Argument(help="A model's folder, or its config.json.")] = None,
    card: CardOption = None,
    profile: ProfileOption = None,
    profiles: FolderOption = None,
    check: Annotated[
        Path | None, typer.Option("--check", help="Recorded boots, in the shape of tests/data/kv_logs.json.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Say what fits of any model, or check the arithmetic against recorded boots."""
    if check is not None:
        _check_boots(check, as_json)
        return
    if path is None:
        raise UsageError("nothing to fit; give a model's folder or its config.json, or --check BOOTS.json")
    from launcher import survey

    options = Options(profile, None, profiles, None, card)
    found = survey.fit_folder(path, options)
    if as_json:
        print_json({"profile": found.profile, "note": found.note, **found.report.to_json()})
        return
    from launcher.fit.report import verdict_text, waterfall_table

    out.print(f"{path} with the settings of {found.profile}", markup=False)
    if found.note:
        out.print(f"{found.note}.", markup=False)
    out.print(verdict_text(found.report))
    out.print(waterfall_table(found.report))


@app.command()
def check(
    name: ProfileArgument = None,
    profile: ProfileOption = None,
    model: ModelOption = None,
    profiles: FolderOption = None,
    runtime: RuntimeOption = None,
    facts: FactsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check this machine, or facts from a file, against a profile's demand; all problems are shown together."""
    from launcher import survey

    result, machine = survey.checked(Options(name or profile, model, profiles, runtime), facts)
    if as_json:
        print_json(
            {
                "verdict": result.verdict,
                "causes": [problem.cause for problem in result.problems],
                "selected_uuids": result.selected,
                "gpu_mode": result.gpu_mode,
                "problems": result.problems,
                "facts": machine,
            }
        )
    else:
        from launcher.views import problems_text

        if result.problems:
            out.print(problems_text(result.problems))
        out.print(f"Verdict: {result.verdict}." + (f" GPUs: {', '.join(result.selected)}." if result.selected else ""))
    if result.verdict == "refuse":
        raise Refused("; ".join(problem.cause for problem in result.problems if problem.severity == "refuse"))


@app.command()
def fixes(as_json: JsonOption = False) -> None:
    """List the fixes for vLLM: what each is for, when it is wanted, and which versions get it."""
    from vllm_graft.fixes import FIXES

    from launcher import survey
    from launcher.views import fixes_table

    versions = survey.pinned_versions()
    if as_json:
        print_json([_fix_json(one, versions) for one in FIXES])
    else:
        out.print(fixes_table(FIXES, versions))


@app.command()
def diagnose(
    file: Annotated[Path, typer.Argument(help="A log of the server, or a case file.")], as_json: JsonOption = False
) -> None:
    """Name the one cause that a log shows, and the one remedy; exit code 1 when it shows a failure."""
    from launcher.diagnose import UNKNOWN_CAUSE, last_words, shows_failure
    from launcher.diagnose import diagnose as find_cause
    from launcher.evidence import evidence_from_file
    from launcher.views import diagnosis_text, unknown_failure_text

    evidence = evidence_from_file(file)
    found = find_cause(evidence)
    failed = found is not None or shows_failure(evidence)
    words = last_words(evidence)
    if as_json:
        nothing = {"cause": None, "remedy": None, "restart_helps": None}
        unknown = {"message": UNKNOWN_CAUSE, "excerpt": words} if failed else {}
        print_json(found if found is not None else nothing | unknown)
    elif found is not None:
        out.print(diagnosis_text(found))
    elif failed:
        out.print(unknown_failure_text(words))
    else:
        out.print("No failure.")
    if failed:
        raise CheckFailed(found.cause if found is not None else "unknown cause")


@app.command()
def schema(kind: Annotated[Literal["profile", "model"], typer.Argument(help="profile or model")]) -> None:
    """Print the JSON Schema of profile or model files, for editors."""
    from launcher.profile import json_schema

    print_json(json_schema(kind))


def show_plan(made: Planned, as_json: bool, alternatives: "Sequence[TargetAdvice]" = ()) -> None:
    """Print a plan, and what would have to change for a longer context."""
    if as_json:
        advice = made.memory.advice if made.memory else None
        print_json(
            {
                **made.plan.model_dump(mode="json"),
                "advice": None
                if advice is None
                else {"safe": advice.safe, "findings": advice.findings, "changes": advice.changes},
                "alternatives": alternatives,
            }
        )
        return
    from launcher.views import plan_view

    out.print(plan_view(made, alternatives))


def _made(options: Options) -> Planned:
    one = chosen(options)
    if options.card and one.gpu is None:
        raise UsageError(f"--card {options.card}: profile {one.name} uses no GPU; name a GPU profile")
    return prepare.planned(options, one, None if options.card else prepare.host_facts(one))


def _facts(file: Path | None) -> "HostFacts":
    from launcher.checks import facts_from_file

    return prepare.gpu_facts() if file is None else facts_from_file(file)[0]


def _draw(made: Planned, path: Path) -> None:
    from launcher.fit.report import waterfall_svg

    if made.memory is None or made.memory.report is None:
        raise UsageError(f"--svg {path}: there is no memory plan to draw for {made.plan.profile}")
    report = made.memory.report
    on = _cards(made.inputs.profile, report.request.card.source.split(":")[0])
    title = f"{made.plan.model}, {report.context_tokens:,} tokens, with the settings of {made.plan.profile} on {on}"
    try:
        path.write_text(waterfall_svg(report, title), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--svg {path}: cannot be written: {error.strerror}") from error


def _cards(profile: "Profile", card: str) -> str:
    count = profile.serve.tensor_parallel_size
    return card if count == 1 else f"{count} x {card}"


def _check_boots(path: Path, as_json: bool) -> None:
    from launcher.fit.check import check_boots
    from launcher.fit.report import check_table

    report = check_boots(prepare.read_config(path), str(path))
    if as_json:
        print_json(report.to_json())
    else:
        out.print(check_table(report))
    if not report.ok:
        raise CheckFailed(f"{path}: a boot marked exact is not reproduced")


def _model_json(row: "ModelRow") -> dict[str, Any]:
    report = row.report
    return {
        "model": row.model,
        "title": row.title,
        "verdict": row.verdict,
        "advisable_context_tokens": report.advisable_context_tokens if report else 0,
        "reason": row.reason or (report.verdict.decided_by if report else ""),
    }


def _fix_json(fix: "Patch", versions: tuple[str, ...]) -> dict[str, Any]:
    from vllm_graft.decide import affects

    return {
        "id": fix.id,
        "title": fix.title,
        "symptom": fix.symptom,
        "when": str(fix.when),
        "processes": [str(process) for process in fix.processes],
        "affects": fix.affects,
        "versions": {version: affects(fix, version) for version in versions},
        "upstream": fix.upstream,
        "remove_when": fix.remove_when,
        "proof": fix.proof,
    }
