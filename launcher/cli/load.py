"""Commands that load a running service: soak, bench, compare."""

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from launcher.cli.base import JsonOption, ProfileOption, err, out, print_json
from launcher.cli.measure import API_KEY_VARIABLE, Service, service_named, service_started
from launcher.errors import CheckFailed, UsageError

if TYPE_CHECKING:
    from launcher.measure.bench import Client, LoadName
    from launcher.measure.bench import Settings as BenchSettings
    from launcher.measure.load_sample import Source
    from launcher.measure.load_verdict import Thresholds
    from launcher.measure.soak_record import Record, Settings
    from launcher.measure.target import Target

app = typer.Typer()

NameArgument = Annotated[
    str | None, typer.Argument(metavar="[PROFILE]", help="Profile whose service is loaded; default: the one that runs.")
]
UrlOption = Annotated[str | None, typer.Option("--url", help="Another OpenAI-compatible service than a profile's.")]
ModelOption = Annotated[
    str | None, typer.Option("--model", "-m", help="Served model, with --url; default: the first that it lists.")
]
KeyOption = Annotated[
    Path | None, typer.Option("--api-key-file", help=f"API key for --url; default: ${API_KEY_VARIABLE}.")
]
OutOption = Annotated[
    Path | None, typer.Option("--out", help="Folder of the reports; default: in the service's folder.")
]
ThresholdOption = Annotated[
    list[str] | None,
    typer.Option("--threshold", metavar="NAME=VALUE", help="Another bound of the verdict; may be given several times."),
]
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


@app.command()
def soak(
    name: NameArgument = None,
    profile: ProfileOption = None,
    url: UrlOption = None,
    model: ModelOption = None,
    api_key_file: KeyOption = None,
    duration: Annotated[str, typer.Option("--duration", help="Time under load: 90s, 10m, 72h.")] = "10m",
    concurrency: Annotated[
        int, typer.Option("--concurrency", min=1, max=256, help="Requests under way at a time.")
    ] = 16,
    context: Annotated[
        int | None, typer.Option("--context", min=256, help="Tokens that the longest requests are measured by.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Another one asks other texts.")] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a soak that was interrupted.")] = False,
    new: Annotated[bool, typer.Option("--new", help="Begin anew although one was interrupted.")] = False,
    folder: OutOption = None,
    threshold: ThresholdOption = None,
    as_json: JsonOption = False,
) -> None:
    """Keep a service under a mixed load: 30 % short, 50 % medium, 20 % long, half of them an agent's turns.

    Ctrl-C keeps what was measured; --resume goes on. Writes soak.json and soak.html. Ends with 1 where a check fails.
    """
    from launcher.ask import Connection
    from launcher.measure import soak_record
    from launcher.measure.load_verdict import Thresholds, changed
    from launcher.measure.soak import REQUEST_TIMEOUT_S
    from launcher.measure.target import target_of

    thresholds = changed(Thresholds(), threshold or [])
    duration_s = _seconds(duration)
    service = _service(url, model, api_key_file, name or profile)
    into = _folder(folder, service, "soak")
    state_file = into / "state.json"
    record = _former(soak_record.load(state_file) if not new else None, service, resume, state_file)
    with Connection(service.url, api_key=service.api_key, timeout_s=REQUEST_TIMEOUT_S) as connection:
        target = target_of(connection, service.model)
        record = record or soak_record.Record(_soak_settings(service, target, duration_s, concurrency, context, seed))
        try:
            _run_soak(record, target, service, state_file, as_json)
        except KeyboardInterrupt:
            _write_soak(record, thresholds, into)
            err.print(
                f"\nInterrupted after {record.elapsed_s:.0f} s; --resume goes on. {into / 'soak.html'}", markup=False
            )
            raise
    document = _write_soak(record, thresholds, into)
    _show(document, into / "soak.html", as_json)


@app.command()
def bench(
    name: NameArgument = None,
    profile: ProfileOption = None,
    url: UrlOption = None,
    model: ModelOption = None,
    api_key_file: KeyOption = None,
    load: Annotated[
        list[str] | None,
        typer.Option("--load", help="single, batch16 or sweep; may be given several times; default: all."),
    ] = None,
    input_tokens: Annotated[int, typer.Option("--input-tokens", min=1, help="Prompt of each request.")] = 512,
    output_tokens: Annotated[int, typer.Option("--output-tokens", min=2, help="Reply of each request.")] = 128,
    requests: Annotated[
        int, typer.Option("--requests", min=1, help="Of the single stream; batch16 asks four times.")
    ] = 16,
    tokenizer: Annotated[
        Path | None, typer.Option("--tokenizer", help="Folder of the model's files, with --url.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Another one asks other texts.")] = 0,
    folder: OutOption = None,
    threshold: ThresholdOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure a service: one stream, sixteen at a time, and a sweep of request rates.

    The client is `vllm bench serve` of the service's image or environment. Writes bench.json and bench.html. Ends with
    1 where a check fails.
    """
    from launcher.ask import Connection
    from launcher.cli.live import Live
    from launcher.measure import bench as benches
    from launcher.measure import bench_report, html_report
    from launcher.measure.load_sample import first_that_answers
    from launcher.measure.load_verdict import Thresholds, changed
    from launcher.measure.soak_record import Record
    from launcher.measure.target import target_of

    thresholds = changed(Thresholds(), threshold or [])
    service = _service(url, model, api_key_file, name or profile)
    client, vllm = _client(service, tokenizer)
    with Connection(service.url, api_key=service.api_key) as connection:
        target = target_of(connection, service.model)
    settings = benches.Settings(
        url=service.url,
        model=target.served.name,
        profile=service.plan.profile if service.plan else None,
        vllm=vllm,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        requests=requests,
        loads=_loads(load),
        seed=seed,
    )
    _refuse_too_long(settings, (service.plan and service.plan.max_model_len) or target.served.max_model_len)
    record = Record(
        _record_settings(service, target.served.name, 0.0, benches.BATCH, input_tokens + output_tokens, seed)
    )
    into = _folder(folder, service, "bench")
    live = Live(err if as_json else out)
    with live:
        results = benches.run(
            settings,
            client,
            service.api_key,
            record,
            first_that_answers(_sources(service)),
            lambda step: live.phase(f"bench: {step.name}"),
            live.line,
        )
    document = bench_report.as_json(settings, results, record, thresholds)
    (into / "bench.json").write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    page = bench_report.page(settings, results, record, thresholds)
    (into / "bench.html").write_text(html_report.html(page), encoding="utf-8")
    _show(document, into / "bench.html", as_json)


@app.command()
def compare(
    first: Annotated[Path, typer.Argument(metavar="A.json", help="bench.json or soak.json to compare with.")],
    second: Annotated[Path, typer.Argument(metavar="B.json", help="Report of the same kind and load.")],
    force: Annotated[bool, typer.Option("--force", help="Compare although the loads differ.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Compare two reports of `bench`, or two of `soak`: each figure of B as a ratio of A's."""
    from launcher.measure import compare as comparison
    from launcher.measure.load_views import comparison_view

    one, other = (comparison.check(_read_json(path), str(path)) for path in (first, second))
    unlike = comparison.differences(one, other)
    if unlike and not force:
        lines = "\n".join(f"  {line}" for line in unlike)
        raise UsageError(f"{first} and {second} are not alike; --force compares them all the same:\n{lines}")
    ratios = comparison.ratios(one, other)
    if as_json:
        print_json({"unlike": unlike, "ratios": ratios})
    else:
        out.print(comparison_view(ratios, unlike))


def _client(service: Service, tokenizer: Path | None) -> "tuple[Client, str]":
    """Return what runs the client, and its vLLM release."""
    from launcher.engine_env import ENGINE, is_installed
    from launcher.measure.bench import ContainerClient, HostClient
    from launcher.prepare import models_dir
    from launcher.profile import load_profile

    plan = service.plan
    files = models_dir() / plan.model if plan else tokenizer
    if files is None:
        raise UsageError("--url needs --tokenizer FOLDER: the model's files, by whose tokens the load is made")
    if not (files / "config.json").is_file():
        raise UsageError(f"{files}: no model is there; name its folder with --tokenizer, or run `graft fetch`")
    if plan is not None and plan.runtime == "docker":
        return ContainerClient(_image(plan.profile), files.resolve()), plan.vllm
    if not is_installed(ENGINE):
        raise UsageError(
            f"{ENGINE.folder.name} holds the client and is not installed; run `graft engine install engine`"
        )
    return HostClient(ENGINE.vllm, files.resolve()), load_profile("cpu").vllm


def _image(profile: str) -> str:
    import yaml

    from launcher import render
    from launcher.state import ServiceState

    file = ServiceState.of(profile).compose_file
    return str(yaml.safe_load(file.read_text(encoding="utf-8"))["services"][render.SERVICE]["image"])


def _loads(names: list[str] | None) -> "tuple[LoadName, ...]":
    from launcher.measure.bench import LOADS

    unknown = [name for name in names or () if name not in LOADS]
    if unknown:
        raise UsageError(f"--load {unknown[0]}: no such load; there are {', '.join(LOADS)}")
    return tuple(load for load in LOADS if not names or load in names)


def _refuse_too_long(settings: "BenchSettings", context_tokens: int | None) -> None:
    # The chat template adds tokens of its own.
    total = settings.input_tokens + settings.output_tokens + 64
    if context_tokens is not None and total > context_tokens:
        raise UsageError(
            f"--input-tokens {settings.input_tokens} and --output-tokens {settings.output_tokens}: {settings.url} "
            f"serves {context_tokens} tokens; write smaller ones"
        )


def _read_json(path: Path) -> object:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(f"{path}: not JSON: {error}") from error


def _run_soak(record: "Record", target: "Target", service: Service, state_file: Path, as_json: bool) -> None:
    from launcher.cli.live import Live
    from launcher.measure.load_sample import first_that_answers
    from launcher.measure.load_views import soak_line
    from launcher.measure.soak import Soak

    source = first_that_answers(_sources(service))
    if source is None:
        err.print(
            "The server's /metrics cannot be read: KV use, acceptance and restarts are not reported.", style="dim"
        )
    live = Live(err if as_json else out)
    with live:
        live.phase("soak")
        Soak(record, target, source, state_file).run(
            lambda at: live.progress(round(at.elapsed_s), round(at.settings.duration_s), "s", soak_line(at))
        )


def _sources(service: Service) -> "tuple[Source, ...]":
    from launcher import render
    from launcher.measure.load_sample import ContainerSource, HttpSource

    plan = service.plan
    inside = (ContainerSource(render.project_name(plan.profile)),) if plan and plan.runtime == "docker" else ()
    return (HttpSource(service.url), *inside)


def _former(record: "Record | None", service: Service, resume: bool, path: Path) -> "Record | None":
    """Return the interrupted soak to go on with; None to begin."""
    if record is None or record.is_finished:
        if resume:
            raise UsageError(f"{path}: no interrupted soak is there; leave --resume out to begin one")
        return None
    at = f"{record.elapsed_s:.0f} of {record.settings.duration_s:.0f} s"
    if not resume:
        raise UsageError(f"{path}: a soak was interrupted at {at}; --resume goes on with it, --new begins anew")
    if record.settings.url != service.url:
        raise UsageError(f"{path}: the soak was of {record.settings.url}, this is {service.url}; --new begins anew")
    record.resume()
    return record


def _soak_settings(
    service: Service, target: "Target", duration_s: float, concurrency: int, context: int | None, seed: int
) -> "Settings":
    from dataclasses import replace

    from launcher.measure.soak import refusal_of_tools

    plan = service.plan
    tokens = context or (plan.max_model_len if plan else None) or target.served.max_model_len
    if tokens is None:
        raise UsageError(f"{service.url} does not tell its context; name it with --context")
    if plan is not None:
        refused = None if plan.can_call_tools else f"{plan.model} cannot call tools: no tool_call_parser is set"
    else:
        refused = refusal_of_tools(target)
    settings = _record_settings(service, target.served.name, duration_s, concurrency, tokens, seed)
    return replace(settings, has_tools=refused is None, no_tools_reason=refused)


def _record_settings(
    service: Service, model: str, duration_s: float, concurrency: int, tokens: int, seed: int
) -> "Settings":
    from launcher.measure.load_verdict import CARD_SHARE
    from launcher.measure.soak_record import Settings

    plan = service.plan
    totals = [gpu.total_mib for gpu in plan.gpus if gpu.total_mib] if plan else []
    return Settings(
        url=service.url,
        model=model,
        profile=plan.profile if plan else None,
        duration_s=duration_s,
        concurrency=concurrency,
        context_tokens=tokens,
        has_tools=False,
        no_tools_reason=None,
        seed=seed,
        gpu_uuids=tuple(gpu.uuid for gpu in plan.gpus) if plan else (),
        gpu_bound_bytes=int(min(totals) * 2**20 * CARD_SHARE) if totals else None,
    )


def _write_soak(record: "Record", thresholds: "Thresholds", into: Path) -> dict[str, object]:
    from launcher.measure import html_report, soak_report

    document = soak_report.as_json(record, thresholds)
    (into / "soak.json").write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    (into / "soak.html").write_text(html_report.html(soak_report.page(record, thresholds)), encoding="utf-8")
    return document


def _show(document: dict[str, object], page: Path, as_json: bool) -> None:
    from launcher.measure.load_views import document_view

    if as_json:
        print_json(document)
    else:
        out.print(document_view(document))
    err.print(f"Report: {page}", markup=False)
    if not document["passed"]:
        failed = [check["name"] for check in document["checks"] if check["passed"] is False]  # type: ignore[attr-defined]
        raise CheckFailed(f"{', '.join(failed) or 'nothing could be checked'}")


def _service(url: str | None, model: str | None, api_key_file: Path | None, profile: str | None) -> Service:
    if url is None and (model or api_key_file):
        raise UsageError("--model and --api-key-file go with --url; a profile's service has its own")
    return service_named(url, model, api_key_file) if url else service_started(profile)


def _folder(folder: Path | None, service: Service, kind: str) -> Path:
    from launcher.state import ServiceState, state_root

    if folder is None:
        name = re.sub(r"[^A-Za-z0-9.-]+", "-", service.url.partition("://")[2])
        base = ServiceState.of(service.plan.profile).root if service.plan else state_root() / "elsewhere" / name
        folder = base / kind
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out {folder}: {error.strerror}") from error
    return folder


def _seconds(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text)
    if match is None or float(match[1]) == 0:
        raise UsageError(f"--duration {text}: write a number and a unit, such as 90s, 10m or 72h")
    return float(match[1]) * _UNITS[match[2]]
