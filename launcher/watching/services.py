"""The keeper's and the watchdog's part of a Compose project: files, a service, how the engine starts. Pure."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from launcher.composefile import BindOptions, Dependency, Logging, Mount, Service
from launcher.evidence import context_of
from launcher.operate.budget import Budget
from launcher.operate.keeper import KeeperSettings
from launcher.operate.service_state import Mode
from launcher.operate.watchdog import WatchdogSettings
from launcher.operate.watchdog_state import WatchSettings
from launcher.plan import Plan, Watch

NAME = "watchdog"
WEBHOOK = "webhook_url"
"""File of the secrets folder with a webhook's address; the watchdog alone reads it."""
PROGRAM = "/opt/graft/operate.pyz"
SHARED = "operate/shared"
IN_CONTAINER = "/run/graft-operate"
KEEP_NAME, WATCH_NAME = "keep.json", "watch.json"
KEEP_FILE, WATCH_FILE = f"/run/graft/{KEEP_NAME}", f"/run/graft/{WATCH_NAME}"
LINGER_S = 12.0
"""What telling a webhook may take, with a second attempt."""


@dataclass(frozen=True)
class Within:
    """What the watchdog takes from the project that it is in."""

    image: str
    user: str
    engine: Literal["docker", "podman"]
    engine_service: str
    engine_port: int
    secrets: tuple[str, ...]
    """vLLM's own key, where it has one."""
    has_webhook: bool
    networks: tuple[str, ...]
    """Those with a way to the engine and, for a webhook, out; empty: the project's default network."""


def keeper_settings(
    plan: Plan, watch: Watch, folder: Path, commands: dict[Mode, tuple[str, ...]], **more: object
) -> KeeperSettings:
    """Return what a keeper is told, in a container or on the host.

    Args:
        more: further fields, such as the watchdog that it starts.
    """
    kept = {mode: command for mode, command in commands.items() if mode == "normal" or plan.degraded is not None}
    known = context_of(plan, None).model_dump(mode="json", exclude_unset=True, exclude_none=True)
    values = {
        "service": plan.profile,
        "folder": folder,
        "commands": kept,
        "budget": Budget(restarts=watch.restarts, within_s=watch.within_s),
        "gpus": tuple(gpu.uuid for gpu in plan.gpus) if plan.gpu_mode != "none" or plan.gpus else None,
        "context": known,
        **more,
    }
    return KeeperSettings.model_validate(values)


def watchdog_settings(
    plan: Plan, watch: Watch, folder: Path, base_url: str, api_key_file: Path | None, webhook_file: Path | None
) -> WatchdogSettings:
    """Return what a watchdog is told, in a container or on the host."""
    return WatchdogSettings(
        service=plan.profile,
        folder=folder,
        base_url=base_url,
        served_name=plan.served_name,
        api_key_file=api_key_file,
        webhook_file=webhook_file,
        watch=WatchSettings(every_s=watch.every_s, strikes=watch.strikes, idle_probe_s=watch.idle_probe_s),
    )


def files(plan: Plan, watch: Watch, within: Within, entrypoint: tuple[str, ...]) -> dict[str, str]:
    """Return the settings of both by their path in the service's folder.

    Args:
        entrypoint: starts the engine; with one argument more, `degraded`, with the smaller settings.
    """
    folder = Path(IN_CONTAINER)
    keep = keeper_settings(
        plan,
        watch,
        folder,
        {"normal": entrypoint, "degraded": (*entrypoint, "degraded")},
        health_url=f"http://127.0.0.1:{within.engine_port}/health",
        linger_s=LINGER_S if within.has_webhook else 0.0,
    )
    dog = watchdog_settings(
        plan,
        watch,
        folder,
        f"http://{within.engine_service}:{within.engine_port}",
        Path("/run/secrets/api_key") if "api_key" in within.secrets else None,
        Path(f"/run/secrets/{WEBHOOK}") if within.has_webhook else None,
    )
    return {KEEP_NAME: keep.model_dump_json(indent=2) + "\n", WATCH_NAME: dog.model_dump_json(indent=2) + "\n"}


def kept_entrypoint() -> tuple[str, ...]:
    """Return what starts the keeper in the engine's container; -I: the environment does not change what it imports."""
    return ("python3", "-I", PROGRAM, "keep", KEEP_FILE)


def kept_mounts() -> tuple[Mount, ...]:
    """Return what the keeper needs in the engine's container."""
    return (_bind(f"./{KEEP_NAME}", KEEP_FILE), _shared())


def service(within: Within) -> Service:
    """Return the watchdog's service: no Docker socket, but the engine's processes and its user."""
    confined = ("no-new-privileges:true", *(("label=disable",) if within.engine == "podman" else ()))
    return Service(
        image=within.image,
        pull_policy="never",
        depends_on={within.engine_service: Dependency(condition="service_started")},
        entrypoint=("python3", "-I", PROGRAM, "watch", WATCH_FILE),
        # The image asks for all GPUs where NVIDIA's runtime is Docker's default one; the watchdog has no use for any.
        environment={"NVIDIA_VISIBLE_DEVICES": "void"},
        secrets=(*within.secrets, *((WEBHOOK,) if within.has_webhook else ())),
        user=within.user,
        pid=f"service:{within.engine_service}",
        security_opt=confined,
        networks=within.networks,
        volumes=(_bind(f"./{WATCH_NAME}", WATCH_FILE), _shared()),
        mem_limit="256m",
        restart="on-failure",
        stop_grace_period="10s",
        logging=Logging(options={"max-size": "10m", "max-file": "2"}) if within.engine == "docker" else None,
    )


def _bind(source: str, target: str) -> Mount:
    return Mount(type="bind", source=source, target=target, read_only=True, bind=BindOptions(create_host_path=False))


def _shared() -> Mount:
    return Mount(type="bind", source=f"./{SHARED}", target=IN_CONTAINER, bind=BindOptions(create_host_path=False))
