"""Look at a service and at this machine: everything that a diagnosis can be made from. Prints nothing."""

import os
import re
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime, timedelta, tzinfo
from pathlib import Path
from typing import Any

from launcher.evidence import ContainerState, Evidence, context_of
from launcher.fit.geometry import FitError
from launcher.fit.weights import weights_from_folder
from launcher.host import kernel
from launcher.host.facts import HostFacts
from launcher.host.modelfiles import incomplete_files
from launcher.images.pins import load_pins
from launcher.observed import (
    Download,
    HealthCheck,
    MemoryHolder,
    Metrics,
    ModelFileState,
    Observed,
    OtherContainer,
)
from launcher.operate.events import PREFIX
from launcher.operate.service_state import ServiceStatus, StateFile
from launcher.plan import Plan
from launcher.prepare import models_dir
from launcher.runtime import RunState
from launcher.state import ServiceState
from launcher.weights.events import Origin
from launcher.weights.hub_token import stored_token

STALLED_S = 300
"""What the rule for a hanging engine asks about."""
_STATS_LINE = re.compile(r"INFO (\d\d-\d\d \d\d:\d\d:\d\d) \[[^\]]*\] Engine \d+: Avg prompt throughput")
_ENGINE_STARTED = re.compile(rf'{re.escape(PREFIX)}\{{.*"kind": "engine-started"')
_MIB = 1 << 20


def evidence_of(
    plan: Plan, state: ServiceState, facts: HostFacts, log: Sequence[str], run: RunState | None, since_s: float | None
) -> Evidence:
    """Return what a diagnosis of a service is made from.

    Args:
        run: what its runtime says; None where it was not started.
        since_s: when it was started, seconds since the epoch: the kernel's messages before that are not its own.
    """
    container = None if run is None else ContainerState.model_validate(asdict(run))
    document = None if plan.runtime == "host" else _document(state)
    context = context_of(plan, facts, container, look(plan, state, facts, log, document))
    return Evidence(log="\n".join(log), context=context, kernel_log=_kernel_log(plan, document, since_s))


def _document(state: ServiceState) -> Mapping[str, Any] | None:
    from launcher.runtime import compose

    return compose.container_of(state.root.name)


def _kernel_log(plan: Plan, document: Mapping[str, Any] | None, since_s: float | None) -> str | None:
    if plan.runtime == "host":
        return kernel.log_of(None, since_s)
    # Of a container that is gone nobody knows which messages were its own.
    return kernel.log(since_s) if document is None else kernel.log_of(str(document["Id"]), since_s)


def last_run(log: Sequence[str]) -> Sequence[str]:
    """Return what a log holds of the engine's last run: errors of an earlier one are not why this one fails."""
    starts = [number for number, line in enumerate(log) if _ENGINE_STARTED.search(line)]
    return log[starts[-1] :] if starts else log


def look(
    plan: Plan,
    state: ServiceState,
    facts: HostFacts,
    log: Sequence[str] = (),
    document: Mapping[str, Any] | None = None,
) -> Observed:
    """Return what a look at the service and at this machine shows; what cannot be read is left out.

    Args:
        document: Docker's description of the server's container; None where there is none.
    """
    now = datetime.now(UTC)
    found: dict[str, Any] = {
        "kernel_module_version": kernel.module_version(),
        "library_version": kernel.library_version(),
        "toolkit_installed": shutil.which("nvidia-ctk") is not None,
        "host_processes": holders(facts),
        "image_unpacked_gib": None if plan.image is None else load_pins().of(plan.vllm).unpacked_gib,
        "hf_token": "present" if stored_token(state.secrets_dir) else "absent",
        "metrics": metrics_of(StateFile(state.operate_dir).read(), now.timestamp()),
        **_model(plan),
    }
    if plan.runtime == "host":
        found |= {"shm_size_mib": shm_size_mib(), "container_user": f"{os.getuid()}:{os.getgid()}"}
        found["seconds_since_last_stats_line"] = seconds_since_stats(log, now, datetime.now().astimezone().tzinfo)
    else:
        found |= _container(document)
        found["seconds_since_last_stats_line"] = seconds_since_stats(log, now, UTC)
    return Observed.model_validate({name: value for name, value in found.items() if value is not None})


def metrics_of(status: ServiceStatus, now_s: float) -> Metrics | None:
    """Return the counters as the watchdog saw them; None where no watchdog has looked of late."""
    if status.looked_s is None or status.progress_s is None or now_s - status.looked_s > STALLED_S:
        return None
    stalled = now_s - status.progress_s >= STALLED_S
    return Metrics(requests_running=status.requests_running, generation_tokens_300s=0.0 if stalled else None)


def seconds_since_stats(log: Sequence[str], now: datetime, zone: tzinfo | None) -> float | None:
    """Return the age of the last line of throughput; vLLM writes it without a year, in its own time zone."""
    found = next((match for line in reversed(log) if (match := _STATS_LINE.search(line))), None)
    if found is None:
        return None
    local = now.astimezone(zone)
    at = datetime.strptime(f"{local.year}-{found[1]}", "%Y-%m-%d %H:%M:%S").replace(tzinfo=zone)
    if at > local + timedelta(days=1):
        at = at.replace(year=at.year - 1)
    return max(0.0, (local - at).total_seconds())


def holders(facts: HostFacts) -> tuple[MemoryHolder, ...]:
    """Return the processes that hold GPU memory and all of vLLM's, with their parents.

    The process of an engine that died holds none itself: its workers do.
    """
    import psutil

    on_gpus = {process.pid: (gpu.index, process) for gpu in facts.nvml.gpus for process in gpu.processes}
    found: dict[int, MemoryHolder] = {
        pid: MemoryHolder(pid=pid, name=process.name, gpu=index, used_mib=process.used_mib)
        for pid, (index, process) in on_gpus.items()
    }
    for process in psutil.process_iter(("name", "cmdline", "ppid")):
        title = next(iter(process.info["cmdline"] or ()), process.info["name"]) or ""
        if process.pid in found:
            found[process.pid] = found[process.pid].model_copy(update={"ppid": process.info["ppid"]})
        elif title.startswith("VLLM::"):
            found[process.pid] = MemoryHolder(pid=process.pid, name=title, ppid=process.info["ppid"], used_mib=0)
    return tuple(found.values())


def shm_size_mib(folder: Path = Path("/dev/shm")) -> float | None:
    """Return the size of this machine's shared memory file system."""
    try:
        return round(shutil.disk_usage(folder).total / _MIB, 1)
    except OSError:
        return None


def _model(plan: Plan) -> dict[str, Any]:
    folder = models_dir() / plan.model
    download = download_of(models_dir(), plan.model)
    if not folder.is_dir():
        return {"download": download}
    origin = Origin.read(folder)
    files = tuple(
        ModelFileState(name=file.path, size=_size(folder / file.path), expected=file.size_bytes)
        for file in (origin.files if origin else ())
    )
    found: dict[str, Any] = {"model_files": files, "model_files_expected": len(files) or None, "download": download}
    if not incomplete_files(folder):
        try:
            found["model_bytes_gib"] = round(weights_from_folder(folder).total_bytes / 2**30, 2)
        except FitError:
            return found
    return found


def download_of(models: Path, model: str) -> Download | None:
    """Return how far a download of the model is that some process of this user works on; None where there is none."""
    files = [path for path in models.glob(f".{model}.*.partial/*") if path.is_file()]
    if not files or not _is_open(files[0].parent):
        return None
    newest_s = max(path.stat().st_mtime for path in files)
    return Download(
        bytes_done=sum(path.stat().st_size for path in files), seconds_without_bytes=max(0.0, time.time() - newest_s)
    )


def _is_open(folder: Path) -> bool:
    import psutil

    prefix = f"{folder.resolve()}{os.sep}"
    for process in psutil.process_iter():
        try:
            if any(file.path.startswith(prefix) for file in process.open_files()):
                return True
        except psutil.Error:
            continue
    return False


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


def _container(document: Mapping[str, Any] | None) -> dict[str, Any]:
    from launcher.runtime import compose

    own = () if document is None else (str(document["Id"]),)
    others = {"other_containers": other_containers(compose.running_containers(), own)}
    return others if document is None else others | container_facts(document)


def container_facts(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return what Docker's description of a container says about it."""
    config, host = document.get("Config") or {}, document.get("HostConfig") or {}
    check = config.get("Healthcheck") or {}
    shm_bytes = host.get("ShmSize")
    return {
        "shm_size_mib": round(shm_bytes / _MIB, 1) if shm_bytes else None,
        "container_user": config.get("User") or None,
        "mounts": tuple(mount["Destination"] for mount in document.get("Mounts") or ()),
        "healthcheck": HealthCheck(
            interval_s=check.get("Interval", 30e9) / 1e9,
            retries=check.get("Retries", 3) or 3,
            start_period_s=check.get("StartPeriod", 0) / 1e9,
        )
        if check
        else None,
    }


def other_containers(documents: Sequence[Mapping[str, Any]], own: Sequence[str]) -> tuple[OtherContainer, ...]:
    """Return the containers that have been given a GPU, without the service's own."""
    return tuple(
        OtherContainer(name=str(document["Name"]).removeprefix("/"), status=document["State"]["Status"])
        for document in documents
        if document["Id"] not in own and _has_gpu(document.get("HostConfig") or {})
    )


def _has_gpu(host: Mapping[str, Any]) -> bool:
    requests = host.get("DeviceRequests") or ()
    devices = (str(device.get("PathOnHost", "")) for device in host.get("Devices") or ())
    return (
        host.get("Runtime") == "nvidia"
        or any(
            "gpu" in capability for one in requests for group in one.get("Capabilities") or () for capability in group
        )
        or any(str(name).startswith("nvidia.com/gpu") for one in requests for name in one.get("DeviceIDs") or ())
        or any(device.startswith("/dev/nvidia") for device in devices)
    )
