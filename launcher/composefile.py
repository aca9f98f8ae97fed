"""The part of the Compose Specification that is rendered: a typed document, dumped as YAML."""

from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field


class Part(BaseModel):
    """Base of the document's parts; None and empty values are left out of the file."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class BindOptions(Part):
    create_host_path: bool
    """False: a missing path is an error, not an empty folder owned by root."""


class Mount(Part):
    type: Literal["bind", "volume"]
    source: str
    target: str
    read_only: bool | None = None
    bind: BindOptions | None = None


class Port(Part):
    target: int
    published: str
    host_ip: str
    protocol: Literal["tcp"] = "tcp"


class Healthcheck(Part):
    test: tuple[str, ...]
    interval: str
    timeout: str
    retries: int
    start_period: str
    start_interval: str | None = None


class GpuRequest(Part):
    driver: Literal["nvidia"] = "nvidia"
    device_ids: tuple[str, ...] | None = None
    count: int | None = None
    capabilities: tuple[Literal["gpu"], ...] = ("gpu",)


class Reservations(Part):
    devices: tuple[GpuRequest, ...]


class Resources(Part):
    reservations: Reservations


class Deploy(Part):
    resources: Resources


class Build(Part):
    context: str


class Dependency(Part):
    condition: Literal["service_completed_successfully", "service_started"]


class Logging(Part):
    driver: Literal["json-file"] = "json-file"
    options: dict[str, str]


class Service(Part):
    """One service; the order of the fields is the order in the file."""

    image: str
    pull_policy: Literal["never"] | None = None
    build: Build | None = None
    container_name: str | None = None
    profiles: tuple[str, ...] = ()
    """Compose profiles; a service with some starts only when one of them is asked for."""
    depends_on: dict[str, Dependency] = Field(default_factory=dict)
    entrypoint: tuple[str, ...] = ()
    """Empty: the image's own."""
    command: tuple[str, ...] | None = None
    environment: dict[str, str] = Field(default_factory=dict)
    secrets: tuple[str, ...] = ()
    user: str
    init: bool | None = None
    read_only: bool = True
    cap_drop: tuple[str, ...] = ("ALL",)
    cap_add: tuple[str, ...] = ()
    security_opt: tuple[str, ...] = ("no-new-privileges:true",)
    pid: str | None = None
    """`service:NAME`: the processes of that service are seen, and may be signalled by its user."""
    network_mode: Literal["none"] | None = None
    networks: tuple[str, ...] = ()
    """Empty: the project's default network."""
    ports: tuple[Port, ...] = ()
    volumes: tuple[Mount, ...] = ()
    tmpfs: tuple[str, ...] = ()
    shm_size: str | None = None
    mem_limit: str | None = None
    devices: tuple[str, ...] = ()
    deploy: Deploy | None = None
    healthcheck: Healthcheck | None = None
    restart: str
    stop_signal: str | None = None
    stop_grace_period: str | None = None
    logging: Logging | None = None
    labels: dict[str, str] = Field(default_factory=dict)


class Volume(Part):
    name: str


class Network(Part):
    internal: bool = False
    """Whether it has no way out."""


class SecretFile(Part):
    file: str


class ComposeFile(Part):
    """A whole compose.yaml."""

    name: str
    services: dict[str, Service]
    networks: dict[str, Network] = Field(default_factory=dict)
    volumes: dict[str, Volume] = Field(default_factory=dict)
    secrets: dict[str, SecretFile] = Field(default_factory=dict)

    def to_yaml(self, heading: str) -> str:
        """Return the file's text: the heading as a comment, then the document in the order of its fields."""
        document = _for_compose(self.model_dump(mode="json"))
        return f"# {heading}\n" + yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=120)


def _for_compose(value: Any) -> Any:
    """Leave out what is not set, and write `$` so that Compose does not take it for one of its variables."""
    if isinstance(value, dict):
        return {key: _for_compose(item) for key, item in value.items() if item not in (None, [], {})}
    if isinstance(value, list):
        return [_for_compose(item) for item in value]
    return value.replace("$", "$$") if isinstance(value, str) else value
