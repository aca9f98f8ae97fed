"""Move a service to another vLLM release and back: proven beside the old one where memory allows, then switched."""

import shutil
import socket
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from launcher import bring, choice, ready, release, service
from launcher.ask import Answer
from launcher.bring import Reporter
from launcher.errors import GraftError, Refused, StartFailed, UsageError
from launcher.gateway.choices import has_gateway
from launcher.gateway.services import IMAGE as EDGE_IMAGE
from launcher.images import build, lock
from launcher.images.base import ensure_digest
from launcher.images.pins import load_pins
from launcher.plan import Plan
from launcher.planner import Planned
from launcher.prepare import Options, host_facts, models_dir, planned
from launcher.problems import Cause, Problem
from launcher.profile import Profile, load_profile, user_folder
from launcher.release import Release
from launcher.render import NEXT, SECRETS
from launcher.runtime.compose import ComposeService
from launcher.service import Running, Started
from launcher.service_files import store_secret
from launcher.state import ServiceState

FREED_BY_A_STOP: frozenset[Cause] = frozenset(
    ("gpu-memory-busy", "gpu-memory-tight", "host-memory-low", "port-in-use", "wsl-host-memory")
)
"""What stands against a second server beside the old one, and not against one in its place."""


Result = TypeVar("Result")


@dataclass(frozen=True)
class Upgraded:
    """A switch that was made."""

    before: str
    """The vLLM release that served until then."""
    started: Started
    was_beside: bool
    """Whether the new server gave a right answer while the old one still served."""


@dataclass(frozen=True)
class RolledBack:
    """The former start, serving again."""

    plan: Plan
    base_url: str
    answer: Answer
    elapsed_s: float


def target_of(profile: Profile, to: str | None) -> Profile:
    """Return the profile with the release to move to: the one named, else the current pin.

    Raises:
        UsageError: that release is not pinned.
    """
    pins = load_pins()
    return profile.model_copy(update={"vllm": pins.of(to or pins.current.vllm).vllm})


def upgrade(
    options: Options, profile: Profile, report: Reporter, *, to: str | None, force: bool, unpinned: bool
) -> Upgraded | None:
    """Move a running service to another release; None where it runs just that already.

    Raises:
        UsageError: it does not run, or the release is not pinned.
        Refused: the plan or the machine says no; the old server serves on.
        FailedStart: the new server failed; the old one serves on, or again.
    """
    old = _running(profile.name)
    target, state = target_of(profile, to), ServiceState.of(profile.name)
    options = replace(options, model=options.model or old.plan.model, runtime=old.plan.runtime)
    report.phase("check")
    ensure_digest(load_pins().of(target.vllm), unpinned=unpinned)
    if has_gateway(target, old.plan.runtime):
        ensure_digest(load_pins().services[EDGE_IMAGE], unpinned=unpinned)
    bring.fetch(options, target, report)
    former, expected = release.current(state), planned(options, target, host_facts(target)).plan
    if former is not None and former.lock.id == service.lock_of(expected, report).id:
        return None
    with _Next(options, target, state) as candidate:
        made = candidate.plan(force)
        is_beside = not _against_a_second(made)
        candidate.build(made, report)
        if is_beside:
            report.note(f"vLLM {target.vllm} is tried beside the running {old.plan.vllm}.")
            service.start(made, None, report)
        else:
            report.note(f"No room for a second server: vLLM {old.plan.vllm} is stopped first.")
    started = _switch(old, state, lambda: _started(options, target, report, force=force), report)
    release.keep(state, service.lock_of(started.plan, report))
    _remember(options, profile.name, target.vllm)
    return Upgraded(old.plan.vllm, started, is_beside)


def rollback(options: Options, profile_name: str, report: Reporter) -> RolledBack:
    """Start the previous release again, from the files and the image that it ran with; needs no network.

    Raises:
        UsageError: there was none before, or it ran without Docker.
        Refused: its image or its model is not here any more.
        FailedStart: it failed; the newer one serves again where it did before.
    """
    state = ServiceState.of(profile_name)
    before = release.previous(state)
    if before is None:
        raise UsageError(f"{profile_name}: nothing to go back to: {release.previous_lock_file(state)} is not there")
    _refuse_missing(before)
    start, old = _Restart(state, before, report), service.find(profile_name)
    rolled_back = _switch(old, state, start, report)
    release.swap(state)
    _remember(options, profile_name, rolled_back.plan.vllm)
    return rolled_back


def _running(profile_name: str) -> Running:
    running = service.find(profile_name)
    if running is None or not running.is_healthy:
        raise UsageError(
            f"{profile_name}: not running and healthy, so there is nothing to upgrade; "
            f"`make up PROFILE={profile_name}` starts it, and a profile's `vllm:` says with which release"
        )
    if running.plan.runtime == "host":
        raise UsageError(
            f"{profile_name}: runs without Docker, in the one environment that holds vLLM {running.plan.vllm}: two "
            "releases cannot lie beside each other there. Upgrade and rollback are for the docker runtime"
        )
    return running


class _Next:
    """The place of a candidate beside the service: a profile, a port and a folder of its own, gone at the end."""

    def __init__(self, options: Options, target: Profile, state: ServiceState) -> None:
        serve = target.serve.model_copy(update={"port": _free_port(), "host": "127.0.0.1"})
        self.profile = target.model_copy(update={"name": f"{target.name}{NEXT}", "serve": serve})
        self.state = ServiceState.of(self.profile.name)
        self._options = options
        self._service = state

    def __enter__(self) -> "_Next":
        for name in SECRETS:
            path = self._service.secrets_dir / name
            if path.is_file():
                store_secret(self.state, name, path.read_text(encoding="utf-8"))
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        service.down(self.profile.name)
        if isinstance(error, service.FailedStart) and error.log_file is not None:
            self._service.logs_dir.mkdir(parents=True, exist_ok=True)
            error.log_file = Path(shutil.copy(error.log_file, self._service.logs_dir / f"next-{error.log_file.name}"))
        shutil.rmtree(self.state.root, ignore_errors=True)

    def plan(self, force: bool) -> Planned:
        """Plan the candidate; what a stop of the old server would solve does not refuse it."""
        made = planned(self._options, self.profile, host_facts(self.profile))
        kept = tuple(problem for problem in made.plan.problems if problem.cause not in FREED_BY_A_STOP)
        service.refuse(made.plan.model_copy(update={"problems": kept}), force)
        return made

    def build(self, made: Planned, report: Reporter) -> None:
        """Have the image before anything is stopped."""
        service.render(made)
        bring.bring_image(made.plan, self.state, report)


def _against_a_second(made: Planned) -> tuple[Problem, ...]:
    return tuple(problem for problem in made.plan.problems if problem.cause in FREED_BY_A_STOP)


def _started(options: Options, target: Profile, report: Reporter, *, force: bool) -> Started:
    made = planned(options, target, host_facts(target))
    service.refuse(made.plan, force)
    return service.start(made, None, report)


def _switch(old: Running | None, state: ServiceState, start: Callable[[], Result], report: Reporter) -> Result:
    """Stop what runs and start another service in its place; where that fails the old one is put back."""
    files = release.rendered_files(state.root)
    service.down(state.root.name)
    try:
        return start()
    except (GraftError, KeyboardInterrupt) as error:
        service.down(state.root.name)
        release.restore(state, files)
        if old is not None:
            report.note(f"That failed; vLLM {old.plan.vllm} is started again.")
            _put_back(old.plan, state, report, error)
        raise


def _put_back(plan: Plan, state: ServiceState, report: Reporter, first: BaseException) -> None:
    try:
        back = ComposeService(state.compose_file, plan)
        back.start(report.line)
        service.follow(back, plan, state, report)
    except GraftError as error:
        raise StartFailed(f"{first}\nand the former service does not come back either: {error}") from error
    report.note(f"vLLM {plan.vllm} serves again, as before.")


@dataclass(frozen=True)
class _Restart:
    """Starts a kept release."""

    state: ServiceState
    release: Release
    report: Reporter

    def __call__(self) -> RolledBack:
        plan = self.release.plan
        release.restore(self.state, self.release.files)
        self.report.phase("start")
        restarted = ComposeService(self.state.compose_file, plan)
        try:
            restarted.start(self.report.line)
            answer, elapsed_s = service.follow(restarted, plan, self.state, self.report)
        except GraftError as error:
            log_file = ready.save_and_stop(restarted, self.state.logs_dir)
            raise service.FailedStart(error, plan, log_file, getattr(error, "state", None)) from error
        return RolledBack(plan, restarted.base_url, answer, elapsed_s)


def _refuse_missing(before: Release) -> None:
    if before.image is None:
        raise UsageError(f"{before.lock.profile}: ran without Docker before; rollback is for the docker runtime")
    if not build.is_there(before.image):
        raise Refused(
            f"{before.image}: the image of the previous start is not here any more; `graft upgrade --to "
            f"{before.lock.vllm}` builds it again"
        )
    model = lock.model_of(before.plan, models_dir() / before.plan.model)
    changed = lock.differences(before.lock, before.lock.model_copy(update={"model": model}))
    if changed:
        listed = "\n".join(f"  {one}" for one in changed)
        raise Refused(f"{before.plan.model}: its files are not those of the previous start:\n{listed}")


def _remember(options: Options, profile_name: str, vllm: str) -> None:
    own = load_profile(profile_name, user_folder(options.profiles_dir)).vllm
    choice.choose_vllm(ServiceState.of(profile_name), vllm, own)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
