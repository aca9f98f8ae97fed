"""The commands of `python -m vllm_graft`: detect, status, prove, fingerprint."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vllm_graft import __version__
from vllm_graft.facts import GraftError, Settings, read_run_facts, vllm_version
from vllm_graft.fixes import FIXES
from vllm_graft.patch import Outcome
from vllm_graft.records import RecordError

OK, CHECK_FAILED, USAGE, NOT_APPLIED = 0, 1, 2, 5


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; exit code 0 done, 1 a check failed, 2 usage, 5 a fix is not applied that should be."""
    options = _parser().parse_args(arguments)
    # vLLM logs to standard output, where the answer goes.
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    command: Callable[[argparse.Namespace], int] = options.command
    try:
        return command(options)
    except (GraftError, RecordError, OSError, ValueError) as error:
        print(f"vllm_graft {options.name}: {error}", file=sys.stderr)
        return USAGE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m vllm_graft", description="Guarded fixes for vLLM.")
    parser.add_argument("--version", action="version", version=f"vllm_graft {__version__}")
    commands = parser.add_subparsers(dest="name", required=True)
    detect = _command(commands, "detect", _detect, "show what this machine, model and installation are")
    detect.add_argument("--config", type=Path, metavar="PATH", help="a model's config.json, or the directory with it")
    status = _command(commands, "status", _status, "show what became of each fix in each process")
    source = status.add_mutually_exclusive_group()
    source.add_argument("--reports", type=Path, metavar="DIR", help="directory of the reports (default: GRAFT_REPORTS)")
    source.add_argument("--log", metavar="FILE", help="a log with the reports in it; - is standard input")
    _command(commands, "prove", _prove, "apply and undo every fix that the installed vLLM should get")
    fingerprint = _command(commands, "fingerprint", _fingerprint, "show the fingerprint of vLLM's sources, all as one")
    fingerprint.add_argument("paths", nargs="+", metavar="module[:attribute.path]")
    return parser


def _command(commands: Any, name: str, run: Callable[[argparse.Namespace], int], help_text: str) -> Any:
    parser = commands.add_parser(name, help=help_text, description=help_text)
    parser.add_argument("--json", action="store_true", help="answer as JSON")
    parser.set_defaults(command=run)
    return parser


def _detect(options: argparse.Namespace) -> int:
    from vllm_graft.detect import detect

    settings = Settings.read(os.environ, [patch.id for patch in FIXES])
    run = read_run_facts(settings.facts) if settings.facts else None
    found = detect(FIXES, run, options.config)
    if options.json:
        _print_json(asdict(found))
        return OK
    for gpu in found.hardware.gpus:
        capability = "compute capability {}.{}".format(*gpu.capability)
        print(f"GPU {gpu.index}: {gpu.name}, {capability}, {gpu.total_bytes / 2**30:.2f} GiB, {gpu.uuid}")
    if not found.hardware.gpus:
        print(f"GPU: {found.hardware.unknown or 'none is visible'}")
    for cast in found.fp8.casts:
        print(f"FP8 {cast.format}: {'works' if cast.works else cast.reason}")
    if found.fp8.reason:
        print(f"FP8: not probed: {found.fp8.reason}")
    if found.model is not None:
        facts = asdict(found.model)
        architectures = ", ".join(facts.pop("architectures"))
        print(f"model: {architectures}: " + ", ".join(f"{name} {_known(value)}" for name, value in facts.items()))
    print("versions: " + ", ".join(f"{each.name} {each.version or 'absent'}" for each in found.versions))
    for fix in found.fixes:
        print(f"fix {fix.id}: {fix.refusal or 'wanted'}")
    return OK


def _known(value: int | None) -> str:
    return "unknown" if value is None else str(value)


def _status(options: argparse.Namespace) -> int:
    from vllm_graft.report import is_trouble, parse_lines, read_directory

    directory = options.reports or os.environ.get("GRAFT_REPORTS")
    if options.log is not None:
        log = sys.stdin.buffer.read() if options.log == "-" else Path(options.log).read_bytes()
        reports = parse_lines(log.decode(errors="replace"))
    elif directory:
        reports = read_directory(Path(directory))
    else:
        raise ValueError("nowhere to look: give --reports DIR or --log FILE, or set GRAFT_REPORTS")
    if options.json:
        _print_json([asdict(report) for report in reports])
    for report in () if options.json else reports:
        roles = ", ".join(report.roles)
        print(f"{report.process} (pid {report.pid}; {roles}; vLLM {report.vllm}; run {report.run_id})")
        for fix in report.fixes:
            print(f"  {fix.id}: {fix.outcome}{' (required)' if fix.required else ''}: {fix.reason}")
        if report.error:
            print(f"  error: {report.error}")
    if not reports:
        print("no report was found: vllm_graft did not run in any process", file=sys.stderr)
        return CHECK_FAILED
    if any(report.error for report in reports):
        return NOT_APPLIED
    return CHECK_FAILED if any(is_trouble(fix) for report in reports for fix in report.fixes) else OK


def _prove(options: argparse.Namespace) -> int:
    from vllm_graft.prove import prove

    vllm = vllm_version()
    if vllm is None:
        print("vllm_graft prove: vLLM is not installed for this Python; run it with the engine's", file=sys.stderr)
        return CHECK_FAILED
    proofs = prove(FIXES, vllm)
    if options.json:
        _print_json({"vllm": vllm, "graft": __version__, "fixes": [asdict(proof) for proof in proofs]})
    else:
        for proof in proofs:
            print(f"{proof.id}: {proof.outcome}: {proof.reason}")
        proven = sum(proof.outcome is Outcome.APPLIED for proof in proofs)
        print(f"vLLM {vllm}: {proven} of {len(proofs)} fixes proven")
    return OK if all(proof.holds for proof in proofs) else NOT_APPLIED


def _fingerprint(options: argparse.Namespace) -> int:
    from vllm_graft.engine import Engine, Unresolved
    from vllm_graft.fingerprint import fingerprint

    try:
        found = fingerprint(Engine().stock(path) for path in options.paths)
    except Unresolved as error:
        print(f"vllm_graft fingerprint: {error}", file=sys.stderr)
        return CHECK_FAILED
    vllm = vllm_version()
    if options.json:
        _print_json({"vllm": vllm, "paths": options.paths, "fingerprint": found})
    else:
        print(f"{found}  vLLM {vllm}  {' '.join(options.paths)}")
    return OK


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2))


if __name__ == "__main__":
    raise SystemExit(main())
