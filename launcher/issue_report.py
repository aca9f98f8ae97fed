"""One file to paste into an issue: what runs, on what, what was checked and what was said; private values taken out."""

import getpass
import json
import os
import re
import socket
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from launcher import doctor, service
from launcher.diagnose import diagnose, last_words
from launcher.doctor import Examined
from launcher.doctor.facts import Finding
from launcher.evidence import Evidence
from launcher.operate.service_state import StateFile
from launcher.plan import Plan
from launcher.prepare import Options, models_dir
from launcher.redact import redact
from launcher.reports import parsed
from launcher.state import CHECKOUT, ServiceState, state_root

LOG_LINES = 300
EVENTS = 50
_TOKEN_VARIABLES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "VLLM_API_KEY", "OPENAI_API_KEY")
_CREDENTIAL = re.compile(r"[\w+/=.~-]{16,}")


@dataclass(frozen=True)
class Made:
    """A report."""

    profile: str
    text: str


@dataclass(frozen=True)
class Private:
    """What must not be in a report, besides what has the shape of a secret."""

    secrets: tuple[str, ...]
    users: tuple[str, ...]
    hosts: tuple[str, ...]
    folders: tuple[str, ...]


@dataclass(frozen=True)
class Parts:
    """What a report is made from."""

    examined: Examined
    plan: Plan
    """That of the service where one was started, else the one that a start would have."""
    log: tuple[str, ...] = ()
    compose_file: str = ""
    state: dict[str, Any] | None = None
    """What the runtime, keeper and watchdog say; None: not started."""
    events: tuple[str, ...] = ()


def make(options: Options) -> Made:
    """Look at a profile's service and at this machine, and return the report.

    Raises:
        UsageError: the profile is wrong, or its folder is.
    """
    examined = doctor.examined(options)
    state = ServiceState.of(examined.profile)
    parts = _parts(examined, state)
    return Made(examined.profile, text_of(parts, private(state)))


def text_of(parts: Parts, hidden: Private) -> str:
    """Return a report's text, private values taken out."""
    text = "\n".join(_lines(parts))
    return redact(text, hidden.secrets, users=hidden.users, hosts=hidden.hosts, folders=hidden.folders)


def private(state: ServiceState) -> Private:
    """Return what is private on this machine and about a service."""
    environment = (os.environ.get(name, "") for name in _TOKEN_VARIABLES)
    hub_token = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface")) / "token"
    files = (*(state.secrets_dir.glob("*") if state.secrets_dir.is_dir() else ()), hub_token)
    stored = (secret for path in files if path.is_file() for secret in secrets_in(_text(path)))
    user = getpass.getuser()
    return Private(
        secrets=tuple(secret for secret in (*environment, *stored) if secret),
        users=tuple(dict.fromkeys((user, Path.home().name))),
        hosts=tuple(dict.fromkeys((socket.gethostname(), os.uname().nodename))),
        folders=tuple(map(str, (CHECKOUT, state_root(), models_dir(), Path.home(), Path.cwd()))),
    )


def secrets_in(text: str) -> tuple[str, ...]:
    """Return the credentials that a secret's file holds: the whole of it, or the words of a list that look like one.

    A key in PEM form has a shape of its own.
    """
    if "-----BEGIN" in text:
        return ()
    words = text.split()
    if len(words) == 1 and "://" in text:
        # The address of a webhook: host and path are words that a report may hold, what tells it from others is secret.
        return tuple(part for part in re.split(r"[/?&=#]", words[0].partition("://")[2])[1:] if re.search(r"\d", part))
    if len(words) <= 1:
        return tuple(words)
    return tuple(word for word in _CREDENTIAL.findall(text) if re.search(r"\d", word))


def _parts(examined: Examined, state: ServiceState) -> Parts:
    plan = service.read_plan(state)
    if plan is None:
        return Parts(examined, examined.made.plan, log=_failed_log(state))
    running = service.status(plan.profile, examined.facts.host)
    started = None if running is None else service.service_of(plan.profile)
    log = tuple(started.log()) if started is not None else ()
    operating = StateFile(state.operate_dir).read()
    return Parts(
        examined,
        plan,
        log=log or _failed_log(state),
        compose_file=_text(state.compose_file) if state.compose_file.is_file() else "",
        state=None
        if running is None
        else {
            "runtime": plan.runtime,
            "state": asdict(running.state),
            "healthy": running.is_healthy,
            "fix_problems": running.fix_problems,
            "operating": operating.model_dump(),
        },
        events=tuple(_text(state.operate_dir / "events.jsonl").splitlines()[-EVENTS:]),
    )


def _failed_log(state: ServiceState) -> tuple[str, ...]:
    """Return the log of the last start that failed."""
    saved = sorted(state.logs_dir.glob("failed-*.log")) if state.logs_dir.is_dir() else []
    return tuple(_text(saved[-1]).splitlines()) if saved else ()


def _lines(parts: Parts) -> Iterator[str]:
    examined, plan = parts.examined, parts.plan
    yield f"# Graft report: {plan.profile}, {plan.model} on vLLM {plan.vllm}, runtime {plan.runtime}"
    yield from _section("Checks", (_finding(finding) for finding in examined.findings))
    yield from _section("Diagnosis", _diagnosis(parts))
    yield from _section("Service", () if parts.state is None else (json.dumps(parts.state, indent=2, default=str),))
    yield from _section("Events", parts.events)
    yield from _section("Plan", _plan(plan))
    yield from _section("Fixes", _fixes(parts))
    yield from _section("compose.yaml", parts.compose_file.splitlines())
    yield from _section(f"Log, the last {LOG_LINES} lines", parts.log[-LOG_LINES:])


def _section(title: str, lines: Iterable[str]) -> Iterator[str]:
    content = tuple(lines)
    yield f"\n## {title}\n"
    # Longer than any fence that a log may hold.
    yield from ("``````", *content, "``````") if content else ("none",)


def _finding(finding: Finding) -> str:
    remedy = f" -> {finding.remedy}" if finding.remedy else ""
    return f"{finding.verdict:>7}  {finding.check}: {finding.message}{remedy}"


def _diagnosis(parts: Parts) -> Iterator[str]:
    running = parts.examined.facts.running
    found = running.diagnosis if running is not None else None
    evidence = Evidence("\n".join(parts.log))
    found = found or (diagnose(evidence) if running is None else None)
    if found is not None:
        yield f"{found.cause} (rule {found.rule}): {found.message}"
        yield f"-> {found.remedy}"
        yield from found.excerpt
    elif parts.log and (running is None or not running.is_healthy):
        yield from last_words(evidence)


def _plan(plan: Plan) -> Iterator[str]:
    yield from (f"{flag.name} {flag.value or ''}".rstrip() + f"    # {flag.source}" for flag in plan.flags)
    yield from (f"{variable.name}={variable.value}" for variable in plan.environment)
    base = plan.image.base if plan.image else "none"
    yield f"context {plan.max_model_len}, ranks {plan.tensor_parallel_size}, base image {base}"
    yield from (f"{problem.severity}: {problem.cause}: {problem.message}" for problem in plan.problems)


def _fixes(parts: Parts) -> Iterator[str]:
    yield f"required: {', '.join(parts.plan.required_fixes) or 'none'}"
    for report in parsed(parts.log):
        for fix in report.fixes:
            yield f"{report.process} (vLLM {report.vllm}): {fix.id}: {fix.outcome}: {fix.reason}"


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
