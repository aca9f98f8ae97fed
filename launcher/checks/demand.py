"""What a start asks of a machine, and what the rules look at; frozen data."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from launcher.host.devices import Device
from launcher.host.facts import HostFacts
from launcher.host.modelfiles import IncompleteFile
from launcher.plan import GpuMode, Runtime
from launcher.problems import Problem

Capability = tuple[int, int]
Version = Annotated[str, Field(pattern=r"^\d+(\.\d+)*$")]
Gib = Annotated[float, Field(ge=0)]


class Demand(BaseModel):
    """What a start asks of a machine; None means that the start does not ask it, or that it is not known."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    profile: str
    runtime: Runtime = "docker"
    needs_gpu: bool = True
    tensor_parallel_size: Annotated[int, Field(ge=1)] = 1
    """GPUs of one server."""
    gpus_asked: tuple[int | str, ...] = ()
    """GPUs that the user named, by NVML index or UUID; empty: the best ones are chosen."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Share of the card's total memory that vLLM takes."""
    compute_capability: Capability | None = None
    """The one that the profile is made for."""
    min_compute_capability: Capability | None = None
    """Below it the model does not run."""
    min_gpu_gib: Gib | None = None
    """Smallest total memory of each GPU, as NVML counts it (a 24 GB card has 24.0)."""
    image_cuda: Version | None = None
    """CUDA version of the image."""
    min_driver: Version | None = None
    image_unpacked_gib: Gib | None = None
    image_is_here: bool = False
    model_gib: Gib | None = None
    """Size of the checkpoint."""
    model_is_here: bool = False
    model_dir: Path | None = None
    """For messages."""
    incomplete_files: tuple[IncompleteFile, ...] = ()
    """From `launcher.host.modelfiles.incomplete_files`, for a model that nothing will fetch."""
    cpu_kv_cache_gib: Gib | None = None
    """KV pool of a CPU engine."""
    port: Annotated[int, Field(ge=1, le=65535)] | None = None


class CheckResult(BaseModel):
    """The answer: the worst severity, every problem, and the GPUs that the start would use."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    verdict: Literal["ok", "warn", "refuse"]
    problems: tuple[Problem, ...]
    selected: tuple[str, ...]
    """UUIDs, in the order of the ranks of tensor parallelism."""
    gpu_mode: GpuMode


@dataclass(frozen=True)
class Case:
    """What every rule sees."""

    facts: HostFacts
    demand: Demand
    available: tuple[Device, ...]
    selected: tuple[Device, ...]
    gpu_mode: GpuMode
