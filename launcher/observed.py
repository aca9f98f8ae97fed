"""What a look at a service and at this machine shows, besides the plan and the facts that a plan is made from.

`None` means unknown, which is never the same as absent or broken.
"""

from pydantic import BaseModel, ConfigDict, Field


class Known(BaseModel):
    """Base of what is known; facts that no rule asks for are left out."""

    model_config = ConfigDict(frozen=True, extra="ignore", populate_by_name=True, coerce_numbers_to_str=True)


class MemoryHolder(Known):
    """A process of this machine that is a server of vLLM or holds GPU memory."""

    pid: int
    name: str | None = None
    gpu: int | None = None
    used_mib: int | None = None
    ppid: int | None = None


class OtherContainer(Known):
    """A container that is not the server's."""

    name: str
    status: str | None = None


class Download(Known):
    """How far the download of the model's files is."""

    bytes_done: int | None = None
    bytes_total: int | None = None
    seconds_without_bytes: float = 0.0


class HealthCheck(Known):
    """The health check in force, seconds."""

    interval_s: float
    retries: int
    start_period_s: float = 0.0

    @property
    def gives_up_after_s(self) -> float:
        """Seconds from the start of the container until it is called unhealthy."""
        return self.start_period_s + self.interval_s * self.retries


class ModelFileState(Known):
    """A file of the checkpoint: its size and the size that it should have, bytes."""

    name: str
    size: int | None = None
    expected: int | None = None


class Metrics(Known):
    """Counters of the server's /metrics."""

    requests_running: float | None = Field(default=None, validation_alias="vllm:num_requests_running")
    generation_tokens_300s: float | None = Field(
        default=None, validation_alias="vllm:generation_tokens_total_delta_300s"
    )
    """Tokens generated in the last 300 s."""


class Observed(Known):
    """Everything that a look shows."""

    kernel_module_version: str | None = None
    """Version of the NVIDIA driver that the kernel has loaded."""
    library_version: str | None = None
    """Version of the NVIDIA driver's libraries that are installed."""
    toolkit_installed: bool | None = None
    host_processes: tuple[MemoryHolder, ...] = ()
    other_containers: tuple[OtherContainer, ...] = ()
    """Containers besides the service's that have been given a GPU."""
    shm_size_mib: float | None = None
    image_unpacked_gib: float | None = None
    model_bytes_gib: float | None = None
    model_files: tuple[ModelFileState, ...] = ()
    model_files_expected: int | None = None
    download: Download | None = None
    hf_token: str | None = None
    """`present`, `absent` or None; never the token."""
    mounts: tuple[str, ...] = ()
    """Folders of the container that come from outside."""
    container_user: str | None = None
    healthcheck: HealthCheck | None = None
    metrics: Metrics | None = None
    seconds_since_last_stats_line: float | None = None
