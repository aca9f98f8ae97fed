"""What the launcher knows about this machine: frozen values, probed or given by `--facts FILE`.

The JSON shape is the one that `graft check --facts FILE` reads and `graft check --json` writes.
`None` means unknown, which is never the same as absent or broken.
"""

from typing import Literal

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


HeldBackBy = Literal[
    "idle",
    "clocks set by the user",
    "power limit",
    "hardware slowdown",
    "sync boost",
    "heat (software)",
    "heat (hardware)",
    "power brake",
    "display clocks",
]


class GpuClocks(Fact):
    """How fast a GPU runs at one moment."""

    uuid: str
    sm_mhz: int | None = None
    max_sm_mhz: int | None = None
    temperature_c: int | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    held_back_by: tuple[HeldBackBy, ...] | None = None
    """Why the clocks are below their maximum; None where the card does not tell."""


class Nvml(Fact):
    """The NVML library's answers; `error` set means that it could not be used at all."""

    error: str | None = None
    driver: str | None = None
    cuda_driver: str | None = None
    p2p: dict[str, str] = Field(default_factory=dict)
    """Peer access by NVML index pair, such as "0-1": OK, or nvidia-smi's short name of what stands in the way."""
    gpus: tuple[Gpu, ...] = ()


class Docker(Fact):
    """The Docker Engine, or Podman's Docker-compatible service; `error` set means that none answered."""

    error: str | None = None
    flavor: Literal["docker", "podman"] | None = None
    engine: str | None = None
    api: str | None = None
    compose: str | None = None
    compose_error: str | None = None
    """Why `docker compose` does not run; None where it does or was not asked."""
    runtimes: tuple[str, ...] = ()
    nvidia_hook: bool | None = None
    """`nvidia-container-runtime-hook` is on this machine: Compose's GPU request works without the nvidia runtime."""
    cdi_spec_dirs: tuple[str, ...] = ()
    """Empty: the engine does not offer CDI."""
    cdi_devices: tuple[str, ...] = ()
    root_dir: str | None = None
    """Where images are unpacked."""
    root_free_gib: float | None = None


class Proc(Fact):
    """Kernel and memory."""

    kernel: str | None = None
    mem_total_gib: float | None = None
    mem_available_gib: float | None = None
    swap_total_gib: float | None = None
    cpu_count: int | None = None
    locale: str | None = None

    @property
    def is_wsl(self) -> bool:
        """Windows Subsystem for Linux: Microsoft's kernels carry their name."""
        return "microsoft" in (self.kernel or "").lower()


class Disk(Fact):
    """Free space where models and state go."""

    models_free_gib: float | None = None
    state_free_gib: float | None = None
    models_share_docker_disk: bool | None = None
    """Models and images lie on one file system, so that their needs add up."""


class Packages(Fact):
    """System packages that the CPU engine needs."""

    libnuma: bool | None = None
    """The loader finds libnuma.so.1."""
    cxx_compiler: bool | None = None
    """The compiler that PyTorch's inductor would call is there: `$CXX`, else g++."""
    python: str | None = None
    """Version of the Python that the engine's environment is made from, such as "3.11"."""
    python_headers: bool | None = None
    """Python.h is there, which the code that inductor compiles includes."""


class Listener(Fact):
    """Who listens on a TCP port; all None where the system does not say."""

    process: str | None = None
    pid: int | None = None
    container: str | None = None


class HostFacts(Fact):
    """Everything the plan may ask about this machine."""

    nvml: Nvml = Nvml()
    docker: Docker = Docker()
    proc: Proc = Proc()
    disk: Disk = Disk()
    packages: Packages = Packages()
    ports: dict[str, Listener] = Field(default_factory=dict)
    """Ports in use among those that were asked about."""
