"""What the launcher knows about this machine: frozen values, probed or given by `--facts FILE`.

The JSON shape is the one that `graft check --facts FILE` reads and `graft check --json` writes.
`None` means unknown, which is never the same as absent or broken.
"""

from pydantic import BaseModel, ConfigDict, Field


class Fact(BaseModel):
    """Base of all facts."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class GpuProcess(Fact):
    """A process that holds memory on a GPU, as NVML lists it."""

    pid: int
    name: str | None = None
    used_mib: int | None = None


class MigDevice(Fact):
    """A MIG slice: its own memory counts, not the parent's."""

    uuid: str
    profile: str | None = None
    total_mib: int | None = None
    free_mib: int | None = None


class Gpu(Fact):
    """One GPU as NVML reports it; `error` set means that NVML could not read it."""

    index: int
    uuid: str | None = None
    name: str | None = None
    pci_bus_id: str | None = None
    compute_capability: tuple[int, int] | None = None
    total_mib: int | None = None
    free_mib: int | None = None
    display_active: bool | None = None
    mig_mode: bool | None = None
    mig_devices: tuple[MigDevice, ...] = ()
    utilization_percent: int | None = None
    ecc_errors_uncorrected: int | None = None
    processes: tuple[GpuProcess, ...] = ()
    error: str | None = None


class Nvml(Fact):
    """The NVML library's answers; `error` set means that it could not be used at all."""

    error: str | None = None
    driver: str | None = None
    cuda_driver: str | None = None
    p2p: dict[str, str] = Field(default_factory=dict)
    gpus: tuple[Gpu, ...] = ()


class Docker(Fact):
    """The Docker Engine; `error` set means that no engine answered."""

    error: str | None = None
    engine: str | None = None
    api: str | None = None
    compose: str | None = None
    runtimes: tuple[str, ...] = ()
    cdi_spec_dirs: tuple[str, ...] = ()
    cdi_devices: tuple[str, ...] = ()
    root_dir: str | None = None
    root_free_gib: float | None = None


class Proc(Fact):
    """Kernel and memory."""

    kernel: str | None = None
    mem_total_gib: float | None = None
    mem_available_gib: float | None = None
    swap_total_gib: float | None = None
    cpu_count: int | None = None
    locale: str | None = None


class Disk(Fact):
    """Free space where models and state go."""

    models_free_gib: float | None = None
    state_free_gib: float | None = None


class Listener(Fact):
    """Who listens on a TCP port."""

    process: str | None = None
    pid: int | None = None
    container: str | None = None


class HostFacts(Fact):
    """Everything the plan may ask about this machine."""

    nvml: Nvml = Nvml()
    docker: Docker = Docker()
    proc: Proc = Proc()
    disk: Disk = Disk()
    ports: dict[str, Listener] = Field(default_factory=dict)
