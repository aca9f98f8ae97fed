"""Bring what a start needs: the engine, the model's files, the image. Prints nothing."""

from collections.abc import Sequence
from typing import Protocol

from launcher import engine_env
from launcher.gateway.services import IMAGE as EDGE_IMAGE
from launcher.images.pins import load_pins
from launcher.plan import Plan
from launcher.prepare import Options, chosen_model, models_dir
from launcher.profile import Profile
from launcher.state import ServiceState
from launcher.weights.events import FetchEvent, FileProgress
from launcher.weights.fetch import ensure_model
from launcher.weights.hub_token import stored_token


class Reporter(Protocol):
    """Where the progress of a verb goes."""

    def phase(self, name: str) -> None:
        """Say that a phase begins."""

    def progress(self, done: float, total: float, unit: str, detail: str = "") -> None:
        """Say how far the phase is, in `unit`: bytes, packages, shards."""

    def files(self, files: Sequence[FileProgress]) -> None:
        """Say how far each file is that is under way."""

    def note(self, text: str) -> None:
        """Say something that stays on the screen."""

    def line(self, text: str) -> None:
        """Pass on a line of the server's log, or of a build's output."""


def install(env: engine_env.EngineEnv, report: Reporter) -> None:
    """Install what is missing of an environment, and say beforehand how much that downloads."""
    report.phase("install")
    if not engine_env.is_installed(env):
        size_mb = engine_env.download_bytes(env) / 1e6
        report.note(f"vLLM's environment goes into {env.folder.name}: up to {size_mb:.0f} MB to download.")
    engine_env.ensure(env, lambda event: _tell_install(event, report))


def fetch(options: Options, profile: Profile, report: Reporter) -> engine_env.EngineEnv | None:
    """Bring the engine and the model's files; return the engine's environment of the host runtime."""
    runtime = options.runtime or profile.runtime
    model = chosen_model(options, profile)
    may_convert = model.package is not None and not (models_dir() / model.name).exists()
    engine = engine_env.ENGINE if runtime == "host" or may_convert else None
    if engine is not None:
        install(engine, report)
    report.phase("model")
    token = stored_token(ServiceState.of(profile.name).secrets_dir)
    ensure_model(model, models_dir(), lambda event: tell_fetch(event, report), token=token)
    return engine


def _tell_install(event: engine_env.InstallEvent, report: Reporter) -> None:
    if event.done_bytes is not None and event.total_bytes:
        report.progress(event.done_bytes, event.total_bytes, "bytes", event.detail)
    elif event.done is not None and event.total:
        report.progress(event.done, event.total, "packages", event.detail)


def tell_fetch(event: FetchEvent, report: Reporter) -> None:
    """Pass on how far the files of a model are."""
    report.files(event.files)
    if event.note:
        report.note(event.note)
    if event.done_bytes is not None and event.total_bytes:
        report.progress(event.done_bytes, event.total_bytes, "bytes", event.detail)


def bring_image(plan: Plan, state: ServiceState, report: Reporter) -> None:
    """Pull and build the image of a plan whose files are written, unless Docker has it.

    Raises:
        StartFailed: the base cannot be pulled, or the build failed.
    """
    from launcher.images import build

    assert plan.image is not None
    reference = build.tag(plan.image, build.build_wheel())
    # An image that is there needs its base no more.
    if not build.is_current(reference, plan.image.base):
        report.phase("pull")
        build.pull(plan.image.base, lambda at: report.progress(at.done_bytes, at.total_bytes, "bytes"))
        report.phase("build")
        build.rebuild(state.compose_file, report.line)
    if plan.gateway is not None:
        edge = load_pins().services[EDGE_IMAGE].reference
        if not build.is_there(build.kept_name(edge)):
            report.phase("pull")
        build.keep(edge, lambda at: report.progress(at.done_bytes, at.total_bytes, "bytes"))
