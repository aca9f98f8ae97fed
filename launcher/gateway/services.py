"""The gateway's files and its two services in a Compose project: the edge, which clients reach, and the relay. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from launcher.composefile import BindOptions, Dependency, Logging, Mount, Network, Port, Service
from launcher.gateway import edge
from launcher.gateway.keys import KEYS_NAME, TLS_NAME
from launcher.operate.gateway.settings import Settings
from launcher.plan import Gateway, Plan
from launcher.watching import services as watching

EDGE, RELAY = "gateway", "relay"
IMAGE = "haproxy"
"""Name of the edge's image in images/pins.yaml."""
RELOAD_SIGNAL = "SIGUSR2"
EDGE_USER = "99:99"
"""The user that the haproxy image makes."""
FOLDER = "gateway"
CONFIGURATION = f"{FOLDER}/haproxy.cfg"
SETTINGS = f"{FOLDER}/relay.json"
IN_CONTAINER = "/run/graft/gateway"
SECRETS_IN_CONTAINER = "/run/graft/gateway-secrets"
EDGE_PORT, TLS_PORT, EDGE_METRICS_PORT = 8000, 8443, 8404
RELAY_PORT, RELAY_METRICS_PORT = 8001, 8002
INSIDE, OUTSIDE = "inside", "outside"
NETWORKS = {INSIDE: Network(internal=True), OUTSIDE: Network()}
"""The first has no way out and publishes nothing; only the edge is in both."""
MOST_BODIES_BYTES = 128 << 20


def files(gateway: Gateway, heading: str, upstream: str) -> dict[str, str]:
    """Return the gateway's files by their path in the service's folder; `upstream` is vLLM's address in the project."""
    described = edge.Edge(
        bind=f":{EDGE_PORT}",
        tls_bind=f":{TLS_PORT}" if gateway.tls_certificate else "",
        tls_file=f"{SECRETS_IN_CONTAINER}/{TLS_NAME}" if gateway.tls_certificate else "",
        relay=f"{RELAY}:{RELAY_PORT}",
        keys_file=f"{SECRETS_IN_CONTAINER}/{KEYS_NAME}",
        max_request_bytes=gateway.max_request_bytes,
        silence_timeout_s=gateway.silence_timeout_s,
        metrics_bind=f":{EDGE_METRICS_PORT}",
    )
    settings = Settings(
        upstream=upstream,
        host="0.0.0.0",
        port=RELAY_PORT,
        metrics_port=RELAY_METRICS_PORT,
        api_key_file=Path("/run/secrets/api_key"),
        state_dir=Path(watching.IN_CONTAINER),
        max_request_bytes=gateway.max_request_bytes,
        max_body_bytes=max(MOST_BODIES_BYTES, 2 * gateway.max_request_bytes),
        max_in_flight=gateway.max_in_flight,
        max_waiting=gateway.max_waiting,
        silence_timeout_s=gateway.silence_timeout_s,
    )
    return {CONFIGURATION: edge.configuration(described, heading), SETTINGS: settings.model_dump_json(indent=2) + "\n"}


@dataclass(frozen=True)
class Within:
    """What the services take from the project that they are in."""

    image: str
    """The service's own image, which has what the relay needs."""
    images: Mapping[str, str]
    """Reference of the image of each service beside vLLM."""
    secrets: tuple[str, ...]
    """vLLM's own key, where it has one."""
    user: str
    """Whom the relay runs as."""
    engine: Literal["docker", "podman"]


def services(plan: Plan, gateway: Gateway, within: Within) -> dict[str, Service]:
    """Return the two services by name."""
    # SELinux, where Podman is at home, would keep the mounted files away.
    confined = ("no-new-privileges:true", *(("label=disable",) if within.engine == "podman" else ()))
    logging = Logging(options={"max-size": "20m", "max-file": "3"}) if within.engine == "docker" else None
    common = {"security_opt": confined, "logging": logging, "restart": "on-failure"}
    made = {RELAY: _relay(within), EDGE: _edge(plan, gateway, within.images[IMAGE])}
    return {name: service.model_copy(update=common) for name, service in made.items()}


def connected(services: Mapping[str, Service]) -> dict[str, Service]:
    """Return a project's services with their networks: a way out has who publishes a port, and who says so itself."""
    return {
        name: service
        if service.networks or service.network_mode
        else service.model_copy(update={"networks": (INSIDE, OUTSIDE) if service.ports else (INSIDE,)})
        for name, service in services.items()
    }


def _relay(within: Within) -> Service:
    return Service(
        image=within.image,
        pull_policy="never",
        entrypoint=("python3", "-P", watching.PROGRAM, "gateway", f"{IN_CONTAINER}/{Path(SETTINGS).name}"),
        # The image asks for all GPUs where NVIDIA's runtime is Docker's default one; the relay has no use for any.
        environment={"PYTHONDONTWRITEBYTECODE": "1", "NVIDIA_VISIBLE_DEVICES": "void"},
        secrets=within.secrets,
        user=within.user,
        init=True,
        networks=(INSIDE,),
        volumes=(_bind(f"./{FOLDER}", IN_CONTAINER), _bind(f"./{watching.SHARED}", watching.IN_CONTAINER)),
        mem_limit="768m",
        restart="on-failure",
        stop_grace_period="10s",
    )


def _edge(plan: Plan, gateway: Gateway, image: str) -> Service:
    plain = Port(target=EDGE_PORT, published=str(plan.port), host_ip=gateway.plain_host(plan.host))
    tls = (Port(target=TLS_PORT, published=str(gateway.tls_port), host_ip=plan.host),)
    return Service(
        image=image,
        depends_on={RELAY: Dependency(condition="service_started")},
        entrypoint=("haproxy", "-W", "-db", "-f", f"{IN_CONTAINER}/{Path(CONFIGURATION).name}"),
        user=EDGE_USER,
        networks=(INSIDE, OUTSIDE),
        ports=(plain, *(tls if gateway.tls_certificate else ())),
        volumes=(_bind(f"./{FOLDER}", IN_CONTAINER), _bind(f"./secrets/{FOLDER}", SECRETS_IN_CONTAINER)),
        mem_limit="256m",
        restart="on-failure",
        # Takes no more connections, and ends with the last answer.
        stop_signal="SIGUSR1",
        stop_grace_period="10s",
    )


def _bind(source: str, target: str) -> Mount:
    return Mount(type="bind", source=source, target=target, read_only=True, bind=BindOptions(create_host_path=False))
