"""The verbs of one service: up, down, status. They gather, start, follow and verify; they print nothing."""

import json
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from launcher import bring, circumstances, engine_env, ready, release, reports, startlog
from launcher.ask import Answer, is_healthy
from launcher.bring import Reporter
from launcher.canary import canary_of
from launcher.diagnose import Diagnosis, diagnose, shows_failure
from launcher.errors import GraftError, Refused, UsageError
from launcher.evidence import Evidence
from launcher.fit import calibration
from launcher.fit.calibration import Comparison
from launcher.gateway import install as gateway
from launcher.gateway.services import IMAGE as EDGE_IMAGE
from launcher.host.facts import HostFacts
from launcher.host.probe import probe
from launcher.images.pins import load_pins
from launcher.memory import machine_key
from launcher.operate.service_state import ServiceStatus, StateFile
from launcher.plan import Plan
from launcher.planner import Planned
from launcher.prepare import Options, api_key, calibration_file, host_facts, models_dir, planned
from launcher.problems import Problem
from launcher.profile import Profile
from launcher.ready import NotReady
from launcher.reports import Collected
from launcher.runtime import RunState, Service
from launcher.service_files import ensure_password, service_files, write
from launcher.state import ServiceState, state_root
from launcher.watching import folder

if TYPE_CHECKING:
    from launcher.images.lock import Lock


@dataclass(frozen=True)
class Started:
    """A service that gave a right answer."""

    plan: Plan
    base_url: str
    answer: Answer
    elapsed_s: float
    reports: Collected
    comparison: Comparison | None
    """Predicted against reported memory; None on a CPU."""


@dataclass(frozen=True)
class Running:
    """What is known about a service that was started before."""

    plan: Plan
    base_url: str
    state: RunState
    is_healthy: bool

    @property
    def is_degraded(self) -> bool:
        """It runs with the smaller settings."""
        operating = StateFile(ServiceState.of(self.plan.profile).operate_dir).read()
        return self.state.is_alive and operating.is_degraded


class FailedStart(GraftError):
    """A start that failed and was stopped: the error, the saved log, and what a diagnosis needs."""

    def __init__(self, error: GraftError, plan: Plan, log_file: Path | None, state: RunState | None) -> None:
        super().__init__(str(error))
        self.exit_code = error.exit_code  # type: ignore[misc]
        self.plan = plan
        self.log_file = log_file
        self.state = state
        self.problem: Problem | None = getattr(error, "problem", None)
        """Cause and remedy where the canary knows them."""


def find(profile_name: str) -> Running | None:
    """Return the service of a profile; None where none was started, or it was stopped.

    Raises:
        UsageError: the folder's plan is not readable.
    """
    plan, service = _planned_service(profile_name)
    if plan is None or service is None:
        return None
    found = service.state()
    if found.status == "absent":
        return None
    return Running(plan, service.base_url, found, found.status == "running" and is_healthy(service.base_url))


@dataclass(frozen=True)
class Status:
    """What `graft status` says about a service."""

    plan: Plan
    base_url: str
    state: RunState
    is_healthy: bool
    applied: tuple[str, ...]
    """Fixes that the server's processes reported as applied."""
    fix_problems: tuple[str, ...]
    """What stands against the fixes: processes that did not report, required fixes that are not in."""
    operating: ServiceStatus
    """What keeper and watchdog say."""
    evidence: Evidence | None
    """What was looked at, where something seems wrong."""
    diagnosis: Diagnosis | None
    """The cause, where something is wrong and a rule knows it."""

    @property
    def is_good(self) -> bool:
        return self.is_healthy and not self.fix_problems and self.diagnosis is None

    @property
    def has_failed(self) -> bool:
        """Something failed, whether or not a rule knows the cause, and is not about to be started again."""
        if self.diagnosis is None and self.operating.phase == "restarting":
            return False
        return self.diagnosis is not None or (self.evidence is not None and shows_failure(self.evidence))


def status(profile_name: str, facts: HostFacts | None = None) -> Status | None:
    """Return the state of a profile's service; None where none was started.

    Args:
        facts: of this machine; None: it is probed where something seems wrong.
    """
    running = find(profile_name)
    if running is None:
        return None
    service, state = service_of(profile_name), ServiceState.of(profile_name)
    log = tuple(service.log())
    found = reports.parsed(log)
    operating = StateFile(state.operate_dir).read()
    evidence = None
    if not running.is_healthy or _seems_to_hang(operating):
        evidence = evidence_of_service(running.plan, state, circumstances.last_run(log), running.state, facts)
    return Status(
        plan=running.plan,
        base_url=running.base_url,
        state=running.state,
        is_healthy=running.is_healthy,
        applied=reports.applied(found, running.plan),
        fix_problems=tuple(reports.problems(found, running.plan)),
        operating=operating,
        evidence=evidence,
        diagnosis=None if evidence is None else diagnose(evidence),
    )


def evidence_of_service(
    plan: Plan, state: ServiceState, log: Sequence[str], run: RunState | None, facts: HostFacts | None = None
) -> Evidence:
    """Return what a diagnosis of a service is made from."""
    facts = facts or probe([plan.port], models_dir(), state_root())
    # Rendered with each start.
    since_s = state.plan_file.stat().st_mtime if state.plan_file.is_file() else None
    return circumstances.evidence_of(plan, state, facts, log, run, since_s)


def _seems_to_hang(operating: ServiceStatus) -> bool:
    metrics = circumstances.metrics_of(operating, time.time())
    return metrics is not None and metrics.generation_tokens_300s == 0


def started_profiles() -> tuple[str, ...]:
    """Return the profiles that have a service, running or ended."""
    folders = sorted(state_root().glob("*/plan.json"))
    return tuple(path.parent.name for path in folders if find(path.parent.name) is not None)


def read_plan(state: ServiceState) -> Plan | None:
    """Return the plan in a service's folder; None before the first start.

    Raises:
        UsageError: it is not one of this launcher.
    """
    try:
        return Plan.model_validate_json(state.plan_file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise UsageError(
            f"{state.plan_file}: not a plan of this launcher; stop the service by hand and delete {state.root}"
        ) from error


def service_of(profile_name: str) -> Service:
    """Return the service of a profile.

    Raises:
        UsageError: it was not started.
    """
    _, service = _planned_service(profile_name)
    if service is None:
        raise UsageError(f"{profile_name}: not started; `make up PROFILE={profile_name}` starts it")
    return service


def render(made: Planned) -> dict[Path, bytes]:
    """Return the files of a plan by their paths, and write them into the service's folder."""
    plan = made.plan
    state = ServiceState.of(plan.profile)
    docker = made.inputs.facts.docker if made.inputs.facts else None
    if plan.gateway is not None:
        gateway.install(plan.gateway, state)
    folder.make(state)
    files = service_files(plan, state, models_dir() / plan.model, docker)
    write(state.root, files)
    if plan.runtime == "docker":
        ensure_password(state)
    return {state.root / name: content for name, content in files.items()}


def up(
    options: Options,
    profile: Profile,
    report: Reporter,
    *,
    force: bool,
    on_plan: Callable[[Planned], None],
    locked: bool = False,
    unpinned: bool = False,
) -> Started:
    """Start a service and follow it to its first right answer; what was started is then its lock.

    Args:
        on_plan: told the plan before anything is started.
        locked: start what the lock says, or nothing.
        unpinned: a base image on this machine that came from no registry will do.

    Raises:
        Refused: the plan or the machine says no, and `force` is not given; or it is not what is locked.
        FailedStart: it was started and failed; it is stopped and its log is saved.
    """
    state = ServiceState.of(profile.name)
    locked_base = release.locked_base(state) if locked else None
    made, engine = prepared(options, profile, report, force=force, unpinned=unpinned, locked_base=locked_base)
    now = lock_of(made.plan, report)
    if locked:
        release.refuse_unlocked(state, now)
    on_plan(made)
    started = start(made, engine, report)
    release.keep(state, now)
    return started


def prepared(
    options: Options,
    profile: Profile,
    report: Reporter,
    *,
    force: bool,
    unpinned: bool,
    locked_base: str | None = None,
) -> tuple[Planned, engine_env.EngineEnv | None]:
    """Bring what a start needs, and plan it; return the plan and the host runtime's environment.

    Args:
        unpinned: as for `up`.
        locked_base: base image of the lock that the start is held to.

    Raises:
        Refused: the plan or the machine says no, and `force` is not given; or the base's digest cannot be known.
    """
    report.phase("check")
    first = planned(options, profile, host_facts(profile)).plan
    refuse(first, force)
    if first.image is not None:
        from launcher.images.base import ensure_digest

        # Before the plan that counts: the digest is part of it.
        ensure_digest(load_pins().of(first.vllm), unpinned=unpinned, locked_base=locked_base)
        if first.gateway is not None:
            ensure_digest(load_pins().services[EDGE_IMAGE], unpinned=unpinned)
    engine = bring.fetch(options, profile, report)
    report.phase("plan")
    made = planned(options, profile, host_facts(profile))
    refuse(made.plan, force)
    return made, engine


def lock_of(plan: Plan, report: Reporter) -> "Lock":
    """Return the lock of a plan whose model is here; a file without a recorded hash is read for it."""
    from launcher.images import lock

    def tell(name: str, done_bytes: int, total_bytes: int) -> None:
        report.progress(done_bytes, total_bytes, "bytes", f"hash {name}")

    return lock.of(plan, models_dir() / plan.model, tell)


def refuse(plan: Plan, force: bool) -> None:
    """Stop here where the plan has a problem that --force would have to override.

    Raises:
        Refused: naming every such problem with its remedy.
    """
    if plan.refusals and not force:
        lines = [f"{problem.cause}: {problem.message}\n  -> {problem.remedy}" for problem in plan.refusals]
        raise Refused("\n".join([*lines, "--force starts all the same."]))


def down(profile_name: str) -> bool:
    """Stop a service; False when there was none."""
    _, service = _planned_service(profile_name)
    if service is None or service.state().status == "absent":
        return False
    service.stop()
    return True


def curl(plan: Plan, base_url: str) -> str:
    """Return a command that asks the server one question when it is pasted into a shell."""
    body = {
        "model": plan.served_name,
        "messages": [{"role": "user", "content": canary_of(plan).question}],
        "temperature": 0,
    }
    secret = ServiceState.of(plan.profile).secrets_dir / "api_key"
    key = f' -H "Authorization: Bearer $(cat {shlex.quote(str(secret))})"' if secret.is_file() else ""
    return (
        f"curl {base_url}/v1/chat/completions -H 'Content-Type: application/json'{key} "
        f"-d {shlex.quote(json.dumps(body))}"
    )


def diagnose_failure(failure: FailedStart) -> Diagnosis | None:
    """Return the one cause of a failed start; None where no rule knows it."""
    if failure.problem is not None:
        found = failure.problem
        return Diagnosis(
            cause=found.cause,
            rule="canary",
            message=found.message,
            remedy=found.remedy,
            excerpt=(),
            restart_helps=False,
        )
    log = failure.log_file.read_text(encoding="utf-8") if failure.log_file else str(failure)
    state = ServiceState.of(failure.plan.profile)
    return diagnose(evidence_of_service(failure.plan, state, log.splitlines(), failure.state))


def _planned_service(profile_name: str) -> tuple[Plan | None, Service | None]:
    """Return the plan in a service's folder and the service; None for what was not made, or was taken away."""
    state = ServiceState.of(profile_name)
    plan = read_plan(state)
    return plan, None if plan is None else _service_of(plan, state)


def _service_of(plan: Plan, state: ServiceState) -> Service | None:
    if plan.runtime == "host":
        from launcher.runtime import host

        return host.find(state)
    from launcher.runtime.compose import ComposeService

    return ComposeService(state.compose_file, plan)


def start(made: Planned, engine: engine_env.EngineEnv | None, report: Reporter) -> Started:
    """Render, start, follow and verify a planned service.

    Raises:
        FailedStart: it is stopped and its log is saved.
    """
    plan, state = made.plan, ServiceState.of(made.plan.profile)
    service: Service | None = None
    try:
        report.phase("render")
        render(made)
        service = _started(made, engine, state, report)
        answer, elapsed_s = follow(service, plan, state, report)
        collected = reports.collect(service, plan)
        return Started(plan, service.base_url, answer, elapsed_s, collected, _record(made, service))
    except GraftError as error:
        log_file = None if service is None else ready.save_and_stop(service, state.logs_dir)
        raise FailedStart(_cause(error, plan, log_file), plan, log_file, getattr(error, "state", None)) from error


def _cause(error: GraftError, plan: Plan, log_file: Path | None) -> GraftError:
    """Return what ended a start: a server that a required fix ended only looks like one that died."""
    if log_file is None or not isinstance(error, NotReady):
        return error
    return reports.refusal(log_file.read_text(encoding="utf-8"), plan) or error


def _started(made: Planned, engine: engine_env.EngineEnv | None, state: ServiceState, report: Reporter) -> Service:
    plan = made.plan
    if plan.runtime == "host":
        from launcher.runtime import host

        assert engine is not None
        return host.start(plan, models_dir() / plan.model, state, engine.vllm)
    from launcher.runtime.compose import ComposeService

    bring.bring_image(plan, state, report)
    service = ComposeService(state.compose_file, plan)
    service.start(report.line)
    return service


def follow(service: Service, plan: Plan, state: ServiceState, report: Reporter) -> tuple[Answer, float]:
    """Follow a start to its first right answer; return it and the seconds that it took.

    Raises:
        NotReady: the server ended, hangs, or answers wrongly.
    """
    canary = canary_of(plan)
    for event in ready.follow(service, plan.served_name, api_key=api_key(state.secrets_dir), canary=canary):
        match event:
            case ready.PhaseStarted():
                report.phase(event.phase)
            case ready.Progress():
                report.progress(event.done, event.total, "")
            case ready.LogLine():
                report.line(startlog.message(event.text))
            case ready.CanaryAsked():
                report.note(f"Asked: {event.question}")
            case ready.Ready():
                return event.answer, event.elapsed_s
    raise NotReady("the start was followed to no end")


def _record(made: Planned, service: Service) -> Comparison | None:
    """Compare what vLLM reports about its memory with the plan, and keep the boot for the next one."""
    memory = made.memory
    if memory is None or memory.report is None:
        return None
    logged = calibration.parse_boot_log("\n".join(service.log()))
    machine = machine_key(gpu.uuid for gpu in made.plan.gpus)
    key = calibration.configuration_key(made.plan.model, made.plan.vllm, memory.report.request.settings)
    now = datetime.now(UTC).isoformat(timespec="seconds")
    record = calibration.record_boot(memory.report, logged, machine, key, now)
    if record is not None:
        calibration.store(calibration_file(), record)
    return calibration.compare(memory.report, logged)
