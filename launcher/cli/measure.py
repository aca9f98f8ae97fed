"""Commands that measure a running service: verify."""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from launcher.cli.base import JsonOption, ProfileOption, err, out, print_json
from launcher.errors import CheckFailed, UsageError

if TYPE_CHECKING:
    from launcher.ask import ServedModel
    from launcher.cli.live import Live
    from launcher.measure.target import Target
    from launcher.measure.verify import Settings, VerifyReport
    from launcher.plan import Plan

app = typer.Typer()

API_KEY_VARIABLE = "GRAFT_API_KEY"
_SEEDS = 1_000_000


@dataclass(frozen=True)
class Service:
    """A service that is measured; `plan` is None for one that was not started here."""

    url: str
    model: str | None
    api_key: str | None
    plan: "Plan | None"


@app.command()
def verify(
    name: Annotated[
        str | None,
        typer.Argument(metavar="[PROFILE]", help="Profile whose service is verified; default: the one that runs."),
    ] = None,
    profile: ProfileOption = None,
    url: Annotated[
        str | None, typer.Option("--url", help="Another OpenAI-compatible service than a profile's.")
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="Served model, with --url; default: the first that it lists.")
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option("--api-key-file", help=f"API key for --url; default: ${API_KEY_VARIABLE}.")
    ] = None,
    against: Annotated[
        str | None,
        typer.Option("--against", metavar="URL", help="The same model without speculation: replies must be equal."),
    ] = None,
    against_key_file: Annotated[
        Path | None, typer.Option("--against-api-key-file", help="API key of the service named with --against.")
    ] = None,
    restart: Annotated[
        bool,
        typer.Option(
            "--restart-without-speculation",
            help="Start the service without speculation for a while: replies must be equal. Clients wait meanwhile.",
        ),
    ] = False,
    context: Annotated[
        int | None, typer.Option("--context", min=256, help="Tokens that the needles climb to; default: the plan's.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A few requests: less than 20 s on a card.")] = False,
    replies: Annotated[
        int | None, typer.Option("--replies", min=1, help="Replies of the tool-call suite; more of them show more.")
    ] = None,
    concurrency: Annotated[int, typer.Option("--concurrency", min=1, help="Requests under way at a time.")] = 4,
    seed: Annotated[int | None, typer.Option("--seed", help="Ask what a former run asked; default: anew.")] = None,
    folder: Annotated[Path | None, typer.Option("--out", help="Write verify.json and needles.svg there.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Verify a running service: tool calls, prefix cache, long context; each reply has one right answer.

    Wrong replies are listed with their raw text. Ends with 1 where a check fails.
    """
    from launcher.ask import Connection
    from launcher.cli.live import Live
    from launcher.measure.target import target_of
    from launcher.measure.verify import verify as measure

    if url is None and (model or api_key_file):
        raise UsageError("--model and --api-key-file go with --url; a profile's service has its own")
    if folder is not None:
        _make(folder)
    if restart and (url or against):
        raise UsageError("--restart-without-speculation is for a profile's service, and instead of --against")
    service = service_named(url, model, api_key_file) if url else service_started(name or profile)
    live = Live(err if as_json else out)
    with Connection(service.url, api_key=service.api_key) as connection:
        target = target_of(connection, service.model)
        if service.plan is not None:
            # What stands before it may not say so.
            target.served = replace(target.served, owner="vllm")
        settings = _settings(service, target.served, quick, context, replies, concurrency, seed)
        other = service_named(against, target.served.name, against_key_file) if against else None
        reference = _reference(service, other, target.served.name, restart, live)
        with live:
            report = measure(target, settings, live, no_tools=_no_tools(service), reference=reference)
    _show(report, folder, as_json)
    if not report.passed:
        failed = [check.name for check in report.checks if check.passed is False]
        raise CheckFailed(f"{report.url}: {', '.join(failed) or 'nothing could be checked'}")


def service_started(profile: str | None) -> Service:
    """Return the service of a profile, or the one that runs.

    Raises:
        UsageError: it is not started.
    """
    from launcher import service
    from launcher.cli.service import running_name
    from launcher.prepare import api_key
    from launcher.state import ServiceState

    name = running_name(profile)
    running = service.find(name)
    if running is None:
        raise UsageError(f"{name}: not started; `make up PROFILE={name}` starts it, --url names another service")
    plan = running.plan
    return Service(running.base_url, plan.served_name, api_key(ServiceState.of(name).secrets_dir), plan)


def service_named(url: str, model: str | None, api_key_file: Path | None) -> Service:
    """Return a service that is named by its URL; its key comes from a file or from the environment.

    Raises:
        UsageError: no URL, or no such file.
    """
    if not url.startswith(("http://", "https://")):
        raise UsageError(f"{url}: is no URL; write http://HOST:PORT")
    if api_key_file is None:
        return Service(url, model, os.environ.get(API_KEY_VARIABLE), None)
    try:
        return Service(url, model, api_key_file.read_text(encoding="utf-8").strip(), None)
    except OSError as error:
        raise UsageError(f"{api_key_file}: {error.strerror}; name the file that holds the API key") from error


def _settings(
    service: Service,
    served: "ServedModel",
    quick: bool,
    context: int | None,
    replies: int | None,
    concurrency: int,
    seed: int | None,
) -> "Settings":
    import random

    from launcher.measure import verify

    planned = service.plan.max_model_len if service.plan else None
    context_tokens = context or planned or served.max_model_len
    if context_tokens is None:
        raise UsageError(f"{service.url} does not tell its context; name it with --context")
    if served.max_model_len is not None and context_tokens > served.max_model_len:
        raise UsageError(f"--context {context_tokens}: {service.url} serves at most {served.max_model_len} tokens")
    drawn = random.SystemRandom().randrange(_SEEDS) if seed is None else seed
    settings = verify.quick(drawn, context_tokens) if quick else verify.Settings(drawn, context_tokens)
    return replace(
        settings,
        recall_tokens=service.plan.recall_tokens if service.plan else None,
        right_replies=service.plan.right_replies if service.plan else None,
        concurrency=concurrency,
        tool_replies=replies or settings.tool_replies,
    )


def _reference(
    service: Service, other: Service | None, model: str, restart: bool, live: "Live"
) -> "Callable[[], AbstractContextManager[Target]] | None":
    from launcher.ask import Connection
    from launcher.measure.target import target_of

    @contextmanager
    def another() -> "Iterator[Target]":
        assert other is not None
        with Connection(other.url, api_key=other.api_key) as connection:
            yield target_of(connection, model)

    @contextmanager
    def in_its_place() -> "Iterator[Target]":
        from launcher.measure.second_start import without_speculation

        assert service.plan is not None
        with (
            without_speculation(service.plan, live) as url,
            Connection(url, api_key=service.api_key) as connection,
        ):
            yield target_of(connection, model)

    return in_its_place if restart else another if other else None


def _no_tools(service: Service) -> str | None:
    plan = service.plan
    if plan is None or plan.can_call_tools:
        return None
    return f"{plan.model} cannot call tools: its model file names no tool_call_parser"


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out {folder}: {error.strerror}") from error


def _show(report: "VerifyReport", folder: Path | None, as_json: bool) -> None:
    import json
    from dataclasses import asdict

    from launcher.measure.heatmap import heatmap_svg
    from launcher.measure.verdict import Skipped
    from launcher.measure.views import report_view

    if as_json:
        print_json(report)
    else:
        out.print(report_view(report))
    if folder is None:
        return
    text = json.dumps(asdict(report), indent=1, ensure_ascii=False)
    (folder / "verify.json").write_text(f"{text}\n", encoding="utf-8")
    if not isinstance(report.needles, Skipped):
        svg = heatmap_svg(report.needles, f"Needles, {report.model}")
        (folder / "needles.svg").write_text(svg, encoding="utf-8")
    err.print(f"Written: {folder}", markup=False)
