"""The services of the Compose profile `monitoring`. Pure."""

from collections.abc import Collection, Mapping

from launcher.composefile import (
    BindOptions,
    Deploy,
    GpuRequest,
    Healthcheck,
    Logging,
    Mount,
    Port,
    Reservations,
    Resources,
    Service,
    Volume,
)
from launcher.monitoring import files
from launcher.monitoring.files import Job
from launcher.plan import Plan

PROFILE = "monitoring"
PASSWORD = "grafana_admin_password"
"""File of the secrets folder: what Grafana's `admin` logs in with."""
NOBODY = "65534:65534"
"""The user that Prometheus' and the exporter's image run as."""
GRAFANA_USER = "472:0"
GPU_EXPORTER_PORT = 9835
KEPT = ("--storage.tsdb.retention.time=15d", "--storage.tsdb.retention.size=2GB")
ENDPOINTS = {"vllm": "vllm:8000", "relay": "relay:8002", "gateway": "gateway:8404", "gpu-exporter": "gpu-exporter:9835"}
"""Where each service of the project shows its metrics; the job has the service's name."""
LOGGING = Logging(options={"max-size": "10m", "max-file": "2"})
GRAFANA_SETTINGS = {
    "GF_SECURITY_ADMIN_PASSWORD__FILE": f"/run/secrets/{PASSWORD}",
    "GF_AUTH_ANONYMOUS_ENABLED": "false",
    "GF_USERS_ALLOW_SIGN_UP": "false",
    "GF_SECURITY_COOKIE_SAMESITE": "strict",
    "GF_SECURITY_DISABLE_GRAVATAR": "true",
    "GF_ANALYTICS_REPORTING_ENABLED": "false",
    "GF_ANALYTICS_CHECK_FOR_UPDATES": "false",
    "GF_ANALYTICS_CHECK_FOR_PLUGIN_UPDATES": "false",
    "GF_NEWS_NEWS_FEED_ENABLED": "false",
    "GF_SNAPSHOTS_EXTERNAL_ENABLED": "false",
    # Grafana would fetch these from the internet at its start.
    "GF_PLUGINS_PREINSTALL_DISABLED": "true",
    "GF_PLUGINS_PLUGIN_ADMIN_ENABLED": "false",
    "GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH": f"{files.DASHBOARDS_IN_CONTAINER}/engine.json",
    "GF_LOG_MODE": "console",
    "GF_LOG_CONSOLE_FORMAT": "json",
}
"""No one comes in without the password, and nothing is asked of the internet."""


def has_gpu_exporter(plan: Plan) -> bool:
    """Whether there is a card to read."""
    return plan.gpu_mode != "none"


def jobs(plan: Plan, services: Collection[str]) -> tuple[Job, ...]:
    """Return what is scraped where these services run beside each other."""
    present = {*services, *(("gpu-exporter",) if has_gpu_exporter(plan) else ())}
    return tuple(Job(name, target) for name, target in ENDPOINTS.items() if name in present)


def host_jobs(plan: Plan) -> tuple[Job, ...]:
    """Return what a Prometheus on this machine scrapes where vLLM is a local process."""
    return (Job("vllm", f"127.0.0.1:{plan.port}"),)


def services(plan: Plan, images: Mapping[str, str], texts: Mapping[str, str], engine: str) -> dict[str, Service]:
    """Return the services by name.

    Args:
        images: reference of each service's image, by the service's name.
        texts: the files of `files.files`, which the containers read.
        engine: docker or podman.
    """
    # SELinux, where Podman is at home, would keep the mounted folders away.
    confined = ("no-new-privileges:true", *(("label=disable",) if engine == "podman" else ()))
    common = {"logging": LOGGING if engine == "docker" else None, "security_opt": confined}
    made = {"prometheus": _prometheus(plan, images, texts), "grafana": _grafana(plan, images, texts)}
    if has_gpu_exporter(plan):
        made["gpu-exporter"] = _gpu_exporter(plan, images)
    return {name: service.model_copy(update=common) for name, service in made.items()}


def volumes(project: str) -> dict[str, Volume]:
    """Return the volumes that keep what was measured, and who may look at it."""
    return {name: Volume(name=f"{project}-{name}") for name in ("prometheus", "grafana")}


def _prometheus(plan: Plan, images: Mapping[str, str], texts: Mapping[str, str]) -> Service:
    return Service(
        image=images["prometheus"],
        profiles=(PROFILE,),
        command=(
            "--config.file=/etc/prometheus/prometheus.yaml",
            "--storage.tsdb.path=/prometheus",
            *KEPT,
            "--log.format=json",
        ),
        user=NOBODY,
        ports=(_port(9090, plan.monitoring.prometheus_port),),
        volumes=(
            _bind(f"./{files.FOLDER}/prometheus", "/etc/prometheus"),
            Mount(type="volume", source="prometheus", target="/prometheus"),
        ),
        healthcheck=_healthcheck("promtool", "check", "healthy", "--url=http://127.0.0.1:9090"),
        restart="unless-stopped",
        labels={"graft.files": files.digest(texts, "prometheus")},
    )


def _grafana(plan: Plan, images: Mapping[str, str], texts: Mapping[str, str]) -> Service:
    return Service(
        image=images["grafana"],
        profiles=(PROFILE,),
        environment=GRAFANA_SETTINGS,
        secrets=(PASSWORD,),
        user=GRAFANA_USER,
        ports=(_port(3000, plan.monitoring.grafana_port),),
        volumes=(
            _bind(f"./{files.FOLDER}/grafana/provisioning", "/etc/grafana/provisioning"),
            _bind(f"./{files.FOLDER}/grafana/dashboards", files.DASHBOARDS_IN_CONTAINER),
            Mount(type="volume", source="grafana", target="/var/lib/grafana"),
        ),
        tmpfs=("/tmp:mode=1777,size=64m",),
        healthcheck=_healthcheck("wget", "-q", "-O", "/dev/null", "http://127.0.0.1:3000/api/health"),
        restart="unless-stopped",
        labels={"graft.files": files.digest(texts, "grafana")},
    )


def _gpu_exporter(plan: Plan, images: Mapping[str, str]) -> Service:
    uuids = tuple(gpu.uuid for gpu in plan.gpus)
    request = GpuRequest(device_ids=uuids) if uuids else GpuRequest(count=plan.tensor_parallel_size)
    return Service(
        image=images["gpu-exporter"],
        profiles=(PROFILE,),
        command=(f"--web.listen-address=:{GPU_EXPORTER_PORT}", "--collect.interval=5s", "--log.format=json"),
        environment={"NVIDIA_DRIVER_CAPABILITIES": "utility"},
        user=NOBODY,
        devices=(tuple(f"nvidia.com/gpu={uuid}" for uuid in uuids) or ("nvidia.com/gpu=all",))
        if plan.gpu_mode == "cdi"
        else (),
        deploy=Deploy(resources=Resources(reservations=Reservations(devices=(request,))))
        if plan.gpu_mode == "nvidia"
        else None,
        restart="unless-stopped",
    )


def _port(target: int, published: int) -> Port:
    return Port(target=target, published=str(published), host_ip="127.0.0.1")


def _bind(source: str, target: str) -> Mount:
    return Mount(type="bind", source=source, target=target, read_only=True, bind=BindOptions(create_host_path=False))


def _healthcheck(*argv: str) -> Healthcheck:
    return Healthcheck(test=("CMD", *argv), interval="30s", timeout="5s", retries=3, start_period="60s")
