"""What became of the fixes in each process: one JSON line in the log, which counts, and a file, which is a copy."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from vllm_graft.patch import Outcome, Patch, Process
from vllm_graft.records import RecordError, from_json, to_json

PREFIX = "GRAFT-REPORT "
_ORDER = tuple(Process)
_STANDARD_ERROR = 2


@dataclass(frozen=True)
class FixReport:
    """One fix in one process; `fingerprint` is that of the target found, None when it was not looked at."""

    id: str
    outcome: Outcome
    reason: str
    required: bool
    fingerprint: str | None


@dataclass(frozen=True)
class ProcessReport:
    """All fixes in one process; `run_id` is None without a facts file, `error` is why the process ends, if it does."""

    schema: Literal[1]
    run_id: str | None
    pid: int
    process: str
    roles: tuple[Process, ...]
    graft: str
    vllm: str
    fixes: tuple[FixReport, ...]
    error: str | None


def ordered_roles(roles: Collection[Process]) -> tuple[Process, ...]:
    """The roles in one fixed order, so that equal reports are equal text."""
    return tuple(role for role in _ORDER if role in roles)


def to_line(report: ProcessReport) -> str:
    """The report as its log line, without the line break."""
    return PREFIX + to_json(report)


def parse_lines(text: str) -> list[ProcessReport]:
    """The reports in a log, in order; what stands before the prefix and behind the JSON in a line is ignored.

    A line that was cut off is not a report: its process counts as one that has not reported.
    """
    reports = []
    for line in text.splitlines():
        _, found, rest = line.partition(PREFIX)
        if not found:
            continue
        try:
            _, end = json.JSONDecoder().raw_decode(rest)
            reports.append(from_json(ProcessReport, rest[:end]))
        except (ValueError, RecordError):
            continue
    return reports


def read_directory(directory: Path) -> list[ProcessReport]:
    """The reports that the processes wrote as files.

    Raises:
        RecordError: a file is not a report.
        OSError: the directory cannot be read.

    """
    reports = []
    for path in sorted(directory.glob("graft-*.json")):
        try:
            reports.append(from_json(ProcessReport, path.read_text(encoding="utf-8")))
        except RecordError as error:
            raise RecordError(f"{path}: {error}") from error
    return reports


def write_file(report: ProcessReport, directory: Path) -> Path:
    """Write the report as `graft-PID.json`, whole or not at all.

    Raises:
        OSError: the directory cannot be made or written to.

    """
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"graft-{report.pid}.json"
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=directory, delete=False) as file:
        temporary = Path(file.name)
        try:
            file.write(to_json(report, indent=2) + "\n")
            file.flush()
            temporary.chmod(0o644)
            temporary.replace(path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
    return path


def write_lines(lines: Sequence[str]) -> None:
    """Write to standard error past Python's streams and logging.

    vLLM's API server calls plugins before it configures logging, and its users may log nothing, to a file, or as JSON.
    """
    rest = "".join(f"{line}\n" for line in lines).encode()
    # A server may run without a log; who needs the report counts a process without one as missing.
    with contextlib.suppress(OSError):
        while rest:
            rest = rest[os.write(_STANDARD_ERROR, rest) :]


def summary(report: ProcessReport) -> str:
    """The line for people: how many fixes are in, which, and what else deserves a look."""
    applied = [fix.id for fix in report.fixes if fix.outcome is Outcome.APPLIED]
    parts = [f"patches applied: {len(applied)}" + (f" ({', '.join(applied)})" if applied else "")]
    parts += [f"{fix.id}: {fix.outcome} ({fix.reason})" for fix in report.fixes if is_trouble(fix)]
    return f"vllm_graft ({report.process} pid={report.pid}): {report.error or '; '.join(parts)}"


def is_trouble(fix: FixReport) -> bool:
    """Whether the fix was wanted and is not in."""
    return fix.outcome in (Outcome.PENDING, Outcome.DRIFTED, Outcome.FAILED)


def expected_processes(tensor_parallel_size: int, *, cpu: bool) -> tuple[frozenset[Process], ...]:
    """The processes that a server on one host starts, each with its roles.

    One GPU has core and worker in one process; on a CPU vLLM starts a worker beside the core even so
    (`vllm/platforms/cpu.py`, for OpenMP's sake).
    """
    api, core, worker = (frozenset({role}) for role in (Process.API_SERVER, Process.ENGINE_CORE, Process.WORKER))
    if tensor_parallel_size > 1:
        return (api, core) + (worker,) * tensor_parallel_size
    return (api, core | worker) + (worker,) * cpu


def problems(
    reports: Iterable[ProcessReport],
    *,
    fixes: Sequence[Patch],
    required: Collection[str],
    run_id: str | None,
    expected: Sequence[frozenset[Process]],
) -> list[str]:
    """What stands against calling a start good, one sentence each: missing processes, errors, required fixes that are
    not applied where they belong, processes that disagree.

    Of several reports of one process id the last counts; reports of other runs and of the model inspection do not.
    """
    mine = [report for report in reports if report.run_id == run_id or (report.run_id is None and report.error)]
    latest = {report.pid: report for report in mine}
    servers = [report for report in latest.values() if Process.MODEL_INSPECTION not in report.roles]
    found = [f"{report.process} (pid {report.pid}): {report.error}" for report in servers if report.error]
    found += _missing(servers, expected) + _version_disagreements(servers)
    for patch in fixes:
        concerned = [report for report in servers if not report.error and set(patch.processes) & set(report.roles)]
        if patch.id in required:
            found += [problem for report in concerned if (problem := _not_applied(patch.id, report))]
        found += _disagreements(patch.id, concerned)
    return found


def _missing(reports: Sequence[ProcessReport], expected: Sequence[frozenset[Process]]) -> list[str]:
    found = []
    for roles in dict.fromkeys(expected):
        wanted, seen = expected.count(roles), sum(roles == frozenset(report.roles) for report in reports)
        if seen < wanted:
            names = " and ".join(ordered_roles(roles))
            found.append(f"{names}: {seen} of {wanted} processes reported; the plugin vllm_graft did not run there")
    return found


def _version_disagreements(reports: Sequence[ProcessReport]) -> list[str]:
    versions = sorted({f"vLLM {report.vllm} with vllm_graft {report.graft}" for report in reports})
    return [f"processes disagree on versions: {'; '.join(versions)}"] if len(versions) > 1 else []


def _not_applied(name: str, report: ProcessReport) -> str:
    for fix in report.fixes:
        if fix.id == name:
            applied = fix.outcome is Outcome.APPLIED
            return "" if applied else f"{name}: {fix.outcome} in {report.process} (pid {report.pid}): {fix.reason}"
    return f"{name}: not known to {report.process} (pid {report.pid}), which runs vllm_graft {report.graft}"


def _disagreements(name: str, reports: Sequence[ProcessReport]) -> list[str]:
    pids: dict[tuple[Outcome, str | None], list[str]] = {}
    for report in reports:
        for fix in report.fixes:
            if fix.id == name:
                pids.setdefault((fix.outcome, fix.fingerprint), []).append(str(report.pid))
    if len(pids) < 2:
        return []
    each = "; ".join(f"{outcome} in pid {', '.join(found)}" for (outcome, _), found in pids.items())
    return [f"{name}: processes disagree: {each}"]
