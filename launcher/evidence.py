"""What a diagnosis is made from: the server's log, the kernel's log, and what the launcher knows besides them.

A case file (the format of `tests/data/failures/`) and a plain log both become an `Evidence`; so do a plan and the facts
of this machine. `None` means unknown, which is never the same as absent or broken.
"""

import re
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field, ValidationError, field_validator

from launcher import yamltext
from launcher.errors import UsageError
from launcher.host.facts import HostFacts
from launcher.logtext import LogText
from launcher.observed import Known, MemoryHolder, ModelFileState, Observed
from launcher.plan import Plan


class ContainerState(Known):
    """Docker's State of the server's container, or the same of a local process."""

    status: str | None = None
    exit_code: int | None = None
    oom_killed: bool | None = None
    restart_count: int | None = None
    health: str | None = None


class GpuState(Known):
    """A GPU as NVML reports it; `error` set means that NVML could not read it."""

    index: int | None = None
    name: str | None = None
    compute_capability: str | None = None
    total_mib: int | None = None
    free_mib: int | None = None
    error: str | None = None


class PortListener(Known):
    """Who listens on a TCP port."""

    port: int
    process: str | None = None
    pid: int | None = None
    container: str | None = None


class VllmArgs(Known):
    """Arguments that the server was started with."""

    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    gpu_memory_utilization: float | None = None
    kv_cache_dtype: str | None = None
    speculative_config: Any = None

    @field_validator("max_model_len", mode="before")
    @classmethod
    def _length(cls, value: Any) -> Any:
        return None if value == "auto" else value


class Context(Observed):
    """What the launcher knows besides the log."""

    profile: str | None = None
    runtime: str | None = None
    engine: str | None = None
    """The container engine and its version, where it is not Docker's."""
    image: str | None = None
    image_cuda: str | None = None
    image_min_driver: str | None = None
    gpus: tuple[GpuState, ...] = ()
    driver: str | None = None
    cuda_driver: str | None = None
    """Newest CUDA version that the driver runs."""
    nvml_error: str | None = None
    wsl: bool | None = None
    wsl_version: int | None = None
    host_memory_gib: float | None = None
    docker_root: str | None = None
    docker_root_free_gib: float | None = None
    models_free_gib: float | None = None
    container: ContainerState | None = None
    container_env: dict[str, str] = Field(default_factory=dict)
    cache_key: str | None = None
    """What the mounted compile cache was made with."""
    cache_owner: str | None = None
    port: int | None = None
    listeners: tuple[PortListener, ...] = ()
    vllm_args: VllmArgs = VllmArgs()
    extra_args: tuple[str, ...] = ()
    third_party_patches: str | None = None

    @property
    def is_healthy(self) -> bool:
        """The container runs, answers, and has not been started again."""
        state = self.container
        return state is not None and state.status == "running" and state.health == "healthy" and not state.restart_count

    @property
    def is_on_cpu(self) -> bool:
        return self.runtime == "host" and not self.gpus

    @property
    def lost_gpus(self) -> tuple[GpuState, ...]:
        """GPUs that NVML calls lost."""
        return tuple(gpu for gpu in self.gpus if "lost" in (gpu.error or "").lower())

    @property
    def has_working_gpus(self) -> bool:
        """NVML was asked and every GPU answered; False where that is not known."""
        return bool(self.gpus) and self.nvml_error is None and all(gpu.error is None for gpu in self.gpus)

    @property
    def best_gpu(self) -> GpuState | None:
        """The GPU of the highest compute capability."""
        known = [gpu for gpu in self.gpus if gpu.compute_capability]
        return max(known, key=lambda gpu: _version(gpu.compute_capability or "0"), default=None)

    @property
    def orphan(self) -> MemoryHolder | None:
        """A process of vLLM whose parent has died, if one is known."""
        return next((p for p in self.host_processes if p.ppid == 1 and (p.name or "").startswith("VLLM::")), None)

    @property
    def short_files(self) -> tuple[ModelFileState, ...]:
        """Files of the checkpoint that are shorter than they should be."""
        return tuple(
            f for f in self.model_files if f.size is not None and f.expected is not None and f.size < f.expected
        )

    def children_of(self, pid: int) -> tuple[MemoryHolder, ...]:
        return tuple(process for process in self.host_processes if process.ppid == pid)

    def holders_of(self, gpu: str) -> tuple[MemoryHolder, ...]:
        """Processes with memory on the GPU of that index; on any GPU where none is known to be on that one.

        CUDA counts the GPUs that it may see, NVML all of them: the index is a hint.
        """
        holders = tuple(process for process in self.host_processes if process.used_mib)
        return tuple(process for process in holders if str(process.gpu) == gpu) or holders

    def listener_on(self, port: str | int | None) -> PortListener | None:
        return next((listener for listener in self.listeners if str(listener.port) == str(port)), None)


@dataclass(frozen=True)
class Evidence:
    """Everything that a diagnosis is made from."""

    log: str = ""
    context: Context = field(default_factory=Context)
    kernel_log: str | None = None
    """None where the launcher may not read it."""

    @cached_property
    def text(self) -> LogText:
        return LogText(self.log)

    @cached_property
    def kernel_text(self) -> LogText:
        return LogText(self.kernel_log or "")


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text))


def evidence_from_file(path: Path) -> Evidence:
    """Read a plain log, or a case file: YAML with `log`, `context` and, where it was readable, `kernel_log`.

    Raises:
        UsageError: the file cannot be read, or is a case file with a wrong value; the message names it.
    """
    try:
        text = path.read_bytes().decode("utf-8", errors="replace")
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}; give a log or a case file") from error
    if path.suffix not in (".yaml", ".yml"):
        return Evidence(log=text)
    try:
        document = yamltext.parse(text)
    except yaml.YAMLError as error:
        raise UsageError(f"{path}: not YAML: {' '.join(str(error).split())}; name a plain log .log or .txt") from error
    if not isinstance(document, dict) or not isinstance(document.get("log"), str):
        raise UsageError(f"{path}: log: missing; a case file holds the log as text under this key")
    kernel_log = document.get("kernel_log")
    if kernel_log is not None and not isinstance(kernel_log, str):
        raise UsageError(f"{path}: kernel_log: got {type(kernel_log).__name__}; write it as text")
    return Evidence(document["log"], _context(document.get("context"), path), kernel_log)


def _context(document: object, path: Path) -> Context:
    try:
        return Context.model_validate({} if document is None else document)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in ("context", *first["loc"]))
        raise UsageError(f"{path}: {where}: got {first['input']!r}; {first['msg']}") from error


def context_of(
    plan: Plan | None,
    facts: HostFacts | None,
    container: ContainerState | None = None,
    observed: Observed | None = None,
) -> Context:
    """Return what the plan, the facts of this machine and a look at the service say, for its diagnosis."""
    looked_at = {} if observed is None else observed.model_dump(exclude_unset=True)
    return Context.model_validate({"container": container, **_planned(plan), **_found(plan, facts), **looked_at})


def _planned(plan: Plan | None) -> dict[str, Any]:
    if plan is None:
        return {}
    names = VllmArgs.model_fields
    values = {flag.name.removeprefix("--").replace("-", "_"): flag.value for flag in plan.flags}
    planned: dict[str, Any] = {
        "profile": plan.profile,
        "runtime": plan.runtime,
        "port": plan.port,
        "container_env": {variable.name: variable.value for variable in plan.environment},
        "vllm_args": {name: value for name, value in values.items() if name in names},
    }
    if plan.image is not None:
        planned |= {
            "image": plan.image.base,
            "image_cuda": plan.image.cuda,
            "image_min_driver": plan.image.min_driver,
        }
    return planned


def _found(plan: Plan | None, facts: HostFacts | None) -> dict[str, Any]:
    if facts is None:
        return {}
    found: dict[str, Any] = {
        "docker_root": facts.docker.root_dir,
        "docker_root_free_gib": facts.docker.root_free_gib,
        "models_free_gib": facts.disk.models_free_gib,
        "host_memory_gib": facts.proc.mem_total_gib,
        "engine": facts.docker.flavor and f"{facts.docker.flavor} {facts.docker.engine or ''}".strip(),
        "wsl": None if facts.proc.kernel is None else facts.proc.is_wsl,
        "listeners": [{"port": port, **listener.model_dump()} for port, listener in facts.ports.items()],
    }
    # A server on the CPU does not fail for what is wrong with a GPU that it does not use.
    return found if plan is not None and not plan.gpus else found | _found_by_nvml(plan, facts)


def _found_by_nvml(plan: Plan | None, facts: HostFacts) -> dict[str, Any]:
    served = {gpu.uuid for gpu in plan.gpus} if plan is not None else None
    gpus = [gpu for gpu in facts.nvml.gpus if served is None or gpu.uuid is None or gpu.uuid in served]
    return {
        "driver": facts.nvml.driver,
        "cuda_driver": facts.nvml.cuda_driver,
        "nvml_error": facts.nvml.error,
        "gpus": [
            {
                "index": gpu.index,
                "name": gpu.name,
                "compute_capability": None
                if gpu.compute_capability is None
                else "{}.{}".format(*gpu.compute_capability),
                "total_mib": gpu.total_mib,
                "free_mib": gpu.free_mib,
                "error": gpu.error,
            }
            for gpu in gpus
        ],
        "host_processes": [
            {"pid": process.pid, "name": process.name, "gpu": gpu.index, "used_mib": process.used_mib}
            for gpu in gpus
            for process in gpu.processes
        ],
    }
