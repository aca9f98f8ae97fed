"""From a plan to the files of its service: the same plan and the same surroundings give the same bytes. Pure."""

import hashlib
import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from launcher.composefile import (
    BindOptions,
    Build,
    ComposeFile,
    Dependency,
    Deploy,
    GpuRequest,
    Healthcheck,
    Logging,
    Mount,
    Port,
    Reservations,
    Resources,
    SecretFile,
    Service,
    Volume,
)
from launcher.gateway import services as gateway
from launcher.monitoring import files as monitoring_files
from launcher.monitoring import services as monitoring
from launcher.plan import Image, Plan, argv_of
from launcher.state import CHECKOUT
from launcher.templates import template
from launcher.watching import services as watching

USER = "2000:0"
"""The user that the vllm/vllm-openai image prepares."""
SERVICE = "vllm"
NEXT = "-next"
"""Ends the profile's name of a candidate that is tried beside its service."""
CONTAINER_PORT = 8000
CACHE = "/cache"
CACHES = {
    "HOME": CACHE,
    "HF_HOME": f"{CACHE}/huggingface",
    "VLLM_CACHE_ROOT": f"{CACHE}/vllm",
    "TRITON_CACHE_DIR": f"{CACHE}/triton",
    "TORCHINDUCTOR_CACHE_DIR": f"{CACHE}/inductor",
    "FLASHINFER_WORKSPACE_BASE": f"{CACHE}/flashinfer",
    "NUMBA_CACHE_DIR": f"{CACHE}/numba",
}
"""Everything that the server writes besides /tmp."""
ENTRYPOINT_FILE = "/run/graft/entrypoint.sh"
ENTRYPOINT = ("/bin/sh", ENTRYPOINT_FILE)
FACTS_FILE = "/run/graft/facts.json"
REPORTS_DIR = "/run/graft-reports"
SECRETS = {"api_key": "VLLM_API_KEY"}
"""Files of the secrets folder, and the variables that the entrypoint exports from them.

The hub's token is not among them: the server runs offline and has no use for it.
"""
START_INTERVAL_API = (1, 44)
"""Docker Engine API that first knows a health check's start_interval."""
SHM_SIZE = "8gb"
"""Ceiling of /dev/shm, where NCCL's segments and vLLM's 160 MiB broadcast buffer lie: Docker's 64 MiB are too few."""


@dataclass(frozen=True)
class Surroundings:
    """What the files need beside the plan: where things lie, and what this container engine can do."""

    root: Path
    """Folder that the files are written to."""
    model_dir: Path
    image: str
    """Tag of the image that is built."""
    wheel: str
    """File name of the vllm-graft wheel in the folder `image`."""
    secrets: tuple[str, ...] = ()
    """Names of `SECRETS` whose files are in the folder `secrets`."""
    engine: Literal["docker", "podman"] = "docker"
    engine_api: str | None = None
    """API version of the Docker Engine, such as "1.44"; None: unknown, only what every engine knows is used."""
    has_webhook: bool = False
    """The address of a webhook is in the folder `secrets`."""
    images: Mapping[str, str] = field(default_factory=dict)
    """Reference of the image of each service beside vLLM, by the service's name (`services` of images/pins.yaml)."""


def project_name(profile: str) -> str:
    """Return the Compose project, and the server's container, of a profile."""
    return f"graft-{profile.replace('.', '-')}"


def run(plan: Plan, around: Surroundings | None = None) -> dict[str, str]:
    """Return the text of every file by its path relative to the service's folder.

    Args:
        around: needed for the Docker runtime only.
    """
    files = {
        "plan.json": plan.model_dump_json(indent=2) + "\n",
        "facts.json": json.dumps(plan.facts, indent=2, sort_keys=True) + "\n",
    }
    if plan.runtime == "host":
        return {**files, **monitoring_files.files(plan.profile, monitoring.host_jobs(plan))}
    if plan.image is None or around is None:
        raise ValueError("a plan for Docker has an image, and its files name the folders around them")
    heading = f"Rendered by graft from the profile {plan.profile}: change that one, this file is written again."
    return {
        "compose.yaml": compose_file(plan, around).to_yaml(heading),
        "entrypoint.sh": entrypoint(plan, heading),
        "image/Dockerfile": dockerfile(plan.image, around.wheel),
        "image/manifest.py": manifest_script(),
        **(gateway.files(plan.gateway, heading, f"http://{SERVICE}:{CONTAINER_PORT}") if plan.gateway else {}),
        **(watching.files(plan, plan.watch, _watched(plan, around), ENTRYPOINT) if plan.watch else {}),
        **files,
        **monitoring_texts(plan),
    }


def entrypoint(plan: Plan, heading: str) -> str:
    """Return the script that reads the secrets and becomes `vllm serve`; its argument chooses the smaller settings."""
    serve = ("vllm", "serve", f"/models/{plan.model}", "--host", "0.0.0.0", "--port", str(CONTAINER_PORT))
    flags = {"normal": plan.flags, **({"degraded": plan.degraded.flags} if plan.degraded and plan.watch else {})}
    commands = {
        mode: {
            "line": f"graft: exec {shlex.join((*serve, *argv_of(ones)))}",
            "flags": [(flag.name,) if flag.value is None else (flag.name, flag.value) for flag in ones],
        }
        for mode, ones in flags.items()
    }
    return template("compose/entrypoint.sh.j2").render(heading=heading, secrets=SECRETS, serve=serve, commands=commands)


def dockerfile(image: Image, wheel: str) -> str:
    """Return the Dockerfile that adds the wheel to the pinned base and proves its fixes."""
    return template("images/Dockerfile.j2").render(image=image, wheel=wheel, user=USER)


def manifest_script() -> str:
    """Return the script that writes the manifest inside the image build."""
    return (CHECKOUT / "images" / "manifest.py").read_text(encoding="utf-8")


def compose_file(plan: Plan, around: Surroundings) -> ComposeFile:
    """Return the Compose document of a plan for Docker."""
    name = project_name(plan.profile)
    webhook = (watching.WEBHOOK,) if around.has_webhook and plan.watch else ()
    secrets = (*around.secrets, monitoring.PASSWORD, *webhook)
    services = {
        **_services(plan, around, name),
        **monitoring.services(plan, around.images, monitoring_texts(plan), around.engine),
    }
    return ComposeFile(
        name=name,
        services=gateway.connected(services) if plan.gateway else services,
        networks=gateway.NETWORKS if plan.gateway else {},
        volumes={
            "cache": Volume(name=f"{name.removesuffix(NEXT)}-cache-{cache_key(plan, around)}"),
            **monitoring.volumes(name),
        },
        secrets={secret: SecretFile(file=f"./secrets/{secret}") for secret in secrets},
    )


def monitoring_texts(plan: Plan) -> dict[str, str]:
    """Return the files of Prometheus and Grafana for a plan for Docker."""
    return monitoring_files.files(plan.profile, monitoring.jobs(plan, service_names(plan)))


def service_names(plan: Plan) -> tuple[str, ...]:
    """Return the services that serve, as they are called in the project."""
    return (SERVICE, gateway.RELAY, gateway.EDGE) if plan.gateway else (SERVICE,)


def _services(plan: Plan, around: Surroundings, name: str) -> dict[str, Service]:
    services = {"cache": _cache_service(around), SERVICE: _server(plan, around, name)}
    if plan.watch is not None:
        services[watching.NAME] = watching.service(_watched(plan, around))
    if plan.gateway is None:
        return services
    within = gateway.Within(around.image, around.images, around.secrets, USER, around.engine)
    return {**services, **gateway.services(plan, plan.gateway, within)}


def _watched(plan: Plan, around: Surroundings) -> watching.Within:
    out = (gateway.OUTSIDE,) if around.has_webhook else ()
    return watching.Within(
        image=around.image,
        user=USER,
        engine=around.engine,
        engine_service=SERVICE,
        engine_port=CONTAINER_PORT,
        secrets=around.secrets,
        has_webhook=around.has_webhook,
        networks=(gateway.INSIDE, *out) if plan.gateway else (),
    )


def cache_key(plan: Plan, around: Surroundings) -> str:
    """Return what a compile cache depends on, as 12 hex digits: image, compute capabilities, fixes switched off."""
    capabilities = sorted({gpu.compute_capability for gpu in plan.gpus if gpu.compute_capability})
    parts = [around.image, repr(capabilities), *sorted(plan.disabled_fixes)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


def _server(plan: Plan, around: Surroundings, name: str) -> Service:
    return Service(
        image=around.image,
        # No registry has it: it is built where it is missing.
        pull_policy="never",
        build=Build(context="./image"),
        container_name=name,
        depends_on={"cache": Dependency(condition="service_completed_successfully")},
        entrypoint=watching.kept_entrypoint() if plan.watch else ENTRYPOINT,
        environment=_environment(plan),
        secrets=around.secrets,
        user=USER,
        init=True,
        security_opt=_security_options(around),
        # Behind the gateway nothing outside of the project reaches it.
        ports=() if plan.gateway else (Port(target=CONTAINER_PORT, published=str(plan.port), host_ip=plan.host),),
        volumes=(
            _bind(_model_source(around), f"/models/{plan.model}"),
            _bind("./entrypoint.sh", ENTRYPOINT_FILE),
            _bind("./facts.json", FACTS_FILE),
            Mount(type="volume", source="cache", target=CACHE),
            *(watching.kept_mounts() if plan.watch else ()),
        ),
        # Compilers leave programs and libraries in /tmp and run them.
        tmpfs=("/tmp:exec,mode=1777", f"{REPORTS_DIR}:mode=1777,size=16m"),
        shm_size=SHM_SIZE,
        devices=_cdi_devices(plan) if plan.gpu_mode == "cdi" else (),
        deploy=_gpu_request(plan) if plan.gpu_mode == "nvidia" else None,
        healthcheck=_healthcheck(around),
        restart="on-failure:3",
        stop_grace_period="60s",
        logging=Logging(options={"max-size": "50m", "max-file": "3"}) if around.engine == "docker" else None,
        labels={"graft.profile": plan.profile, "graft.model": plan.model, "graft.run-id": plan.run_id},
    )


def _cache_service(around: Surroundings) -> Service:
    # A new volume belongs to root. CHOWN is the one capability that giving it away needs.
    return Service(
        image=around.image,
        pull_policy="never",
        entrypoint=("/bin/chown", USER, CACHE),
        user="0:0",
        cap_add=("CHOWN",),
        network_mode="none",
        volumes=(Mount(type="volume", source="cache", target=CACHE),),
        restart="no",
    )


def _security_options(around: Surroundings) -> tuple[str, ...]:
    # SELinux, which is on where Podman is at home, would keep the GPU's devices and the mounted folders away.
    return ("no-new-privileges:true", *(("label=disable",) if around.engine == "podman" else ()))


def _environment(plan: Plan) -> dict[str, str]:
    graft = {"GRAFT_FACTS": FACTS_FILE, "GRAFT_REPORTS": REPORTS_DIR}
    if plan.required_fixes:
        graft["GRAFT_REQUIRE"] = ",".join(plan.required_fixes)
    if plan.disabled_fixes:
        graft["GRAFT_DISABLE"] = ",".join(plan.disabled_fixes)
    return {**CACHES, **{variable.name: variable.value for variable in plan.environment}, **graft}


def _bind(source: str, target: str) -> Mount:
    return Mount(type="bind", source=source, target=target, read_only=True, bind=BindOptions(create_host_path=False))


def _model_source(around: Surroundings) -> str:
    # Relative where the state folder holds the model too: both can then be moved together.
    state = around.root.parent
    if around.model_dir.is_relative_to(state):
        return f"../{around.model_dir.relative_to(state).as_posix()}"
    return str(around.model_dir)


def _gpu_request(plan: Plan) -> Deploy:
    uuids = tuple(gpu.uuid for gpu in plan.gpus)
    # Planned on a machine without the cards: as many as the plan needs, since there is nothing to name yet.
    request = GpuRequest(device_ids=uuids) if uuids else GpuRequest(count=plan.tensor_parallel_size)
    return Deploy(resources=Resources(reservations=Reservations(devices=(request,))))


def _cdi_devices(plan: Plan) -> tuple[str, ...]:
    return tuple(f"nvidia.com/gpu={gpu.uuid}" for gpu in plan.gpus) or ("nvidia.com/gpu=all",)


def _healthcheck(around: Surroundings) -> Healthcheck:
    url = f"http://127.0.0.1:{CONTAINER_PORT}/health"
    has_start_interval = _knows_start_interval(around)
    return Healthcheck(
        test=("CMD", "curl", "--fail", "--silent", "--output", "/dev/null", "--max-time", "5", url),
        # Older engines wait this long for each look at a start, too.
        interval="30s" if has_start_interval else "10s",
        timeout="10s",
        retries=3,
        start_period="1800s",
        # Each look costs the container some 0.1 s of CPU: more of them would make a hanging server look busy.
        start_interval="5s" if has_start_interval else None,
    )


def _knows_start_interval(around: Surroundings) -> bool:
    if around.engine != "docker" or around.engine_api is None:
        return False
    return tuple(int(part) for part in around.engine_api.split(".")) >= START_INTERVAL_API
