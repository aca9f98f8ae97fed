"""The GPUs as NVML reports them; the only module that imports pynvml (when called: it is not needed to start up)."""

import ctypes
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import combinations
from pathlib import Path
from typing import Any, TypeVar

from launcher.host.facts import Gpu, GpuClocks, GpuProcess, HeldBackBy, MigDevice, Nvml

_T = TypeVar("_T")

_LIBRARY = "libnvidia-ml.so.1"
# Driver folders that the loader's cache may leave out: WSL mounts its own, NixOS has no cache at all.
DRIVER_DIRS = (Path("/usr/lib/wsl/lib"), Path("/run/opengl-driver/lib"))
PROC_GPUS = Path("/proc/driver/nvidia/gpus")

_MIB = 1024 * 1024
# nvmlGpuP2PCapsIndex_t NVML_P2P_CAPS_INDEX_READ; pynvml's constant of that name is a tuple by mistake.
_P2P_READ = 0
# nvmlGpuP2PStatus_t in order, by the short names of `nvidia-smi topo -p2p`.
_P2P_STATUS = ("OK", "CNS", "GNS", "TNS", "DR", "NS", "U")

# nvmlClocksEventReason*: https://docs.nvidia.com/deploy/nvml-api/group__nvmlClocksEventReasons.html
_HELD_BACK_BY: dict[int, HeldBackBy] = {
    0x01: "idle",
    0x02: "clocks set by the user",
    0x04: "power limit",
    0x08: "hardware slowdown",
    0x10: "sync boost",
    0x20: "heat (software)",
    0x40: "heat (hardware)",
    0x80: "power brake",
    0x100: "display clocks",
}


def read(driver_dirs: Sequence[Path] = DRIVER_DIRS, proc_gpus: Path = PROC_GPUS) -> Nvml:
    """Return what NVML says; an unusable library or driver is an answer (`Nvml.error`), never an exception."""
    import pynvml

    _preload(driver_dirs)
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return Nvml(error=str(error))
    try:
        return _read(pynvml, proc_gpus)
    except pynvml.NVMLError as error:
        return Nvml(error=str(error))
    finally:
        with suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def clocks(driver_dirs: Sequence[Path] = DRIVER_DIRS) -> tuple[GpuClocks, ...]:
    """Return how fast each GPU runs at this moment and what holds it back; empty where NVML cannot be used."""
    import pynvml

    _preload(driver_dirs)
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    try:
        handles = (_handle(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount()))
        return tuple(_clocks(pynvml, handle) for handle in handles if not isinstance(handle, pynvml.NVMLError))
    except pynvml.NVMLError:
        return ()
    finally:
        with suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def _clocks(nvml: Any, handle: Any) -> GpuClocks:
    # The older name of the call: every driver has it.
    reasons = _ask(nvml, nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle)
    power_mw = _ask(nvml, nvml.nvmlDeviceGetPowerUsage, handle)
    limit_mw = _ask(nvml, nvml.nvmlDeviceGetEnforcedPowerLimit, handle)
    return GpuClocks(
        uuid=nvml.nvmlDeviceGetUUID(handle),
        sm_mhz=_ask(nvml, nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM),
        max_sm_mhz=_ask(nvml, nvml.nvmlDeviceGetMaxClockInfo, handle, nvml.NVML_CLOCK_SM),
        temperature_c=_ask(nvml, nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
        power_w=None if power_mw is None else power_mw / 1000,
        power_limit_w=None if limit_mw is None else limit_mw / 1000,
        held_back_by=None if reasons is None else tuple(name for bit, name in _HELD_BACK_BY.items() if reasons & bit),
    )


def _preload(driver_dirs: Sequence[Path]) -> None:
    """Load the library by its path, after which the loader finds it by its name."""
    for path in (folder / _LIBRARY for folder in driver_dirs):
        if path.is_file():
            try:
                ctypes.CDLL(str(path))
            except OSError:
                # The load by name that follows reports what is wrong.
                continue


def _read(nvml: Any, proc_gpus: Path) -> Nvml:
    count = nvml.nvmlDeviceGetCount()
    handles = [_handle(nvml, index) for index in range(count)]
    bus_ids = _kernel_bus_ids(proc_gpus)
    gpus = tuple(
        # NVML numbers the GPUs by bus id, so where the counts agree a card that it cannot open still has its address.
        _gpu(nvml, index, handle, bus_ids[index] if len(bus_ids) == count else None)
        for index, handle in enumerate(handles)
    )
    cuda = _ask(nvml, nvml.nvmlSystemGetCudaDriverVersion_v2)
    return Nvml(
        driver=_ask(nvml, nvml.nvmlSystemGetDriverVersion),
        cuda_driver=None if cuda is None else f"{cuda // 1000}.{cuda % 1000 // 10}",
        p2p=_p2p(nvml, {gpu.index: handles[gpu.index] for gpu in gpus if gpu.error is None}),
        gpus=gpus,
    )


def _handle(nvml: Any, index: int) -> Any:
    """Return the device handle, or the NVMLError that stands in its way."""
    try:
        return nvml.nvmlDeviceGetHandleByIndex(index)
    except nvml.NVMLError as error:
        return error


def _gpu(nvml: Any, index: int, handle: Any, kernel_bus_id: str | None) -> Gpu:
    if isinstance(handle, nvml.NVMLError):
        return Gpu(index=index, pci_bus_id=kernel_bus_id, error=str(handle))
    bus_id = kernel_bus_id
    try:
        pci = _ask(nvml, nvml.nvmlDeviceGetPciInfo_v3, handle)
        bus_id = kernel_bus_id if pci is None else _text(pci.busId)
        return _readable_gpu(nvml, index, handle, bus_id)
    except nvml.NVMLError as error:
        return Gpu(index=index, pci_bus_id=bus_id, error=str(error))


def _readable_gpu(nvml: Any, index: int, handle: Any, bus_id: str | None) -> Gpu:
    # Version 1 of the memory call: every driver has it, and total and free are those of version 2, which differs
    # only in counting the driver's reserve apart from `used`. `free` leaves the reserve out in both.
    memory = _ask(nvml, nvml.nvmlDeviceGetMemoryInfo, handle)
    mig = _ask(nvml, nvml.nvmlDeviceGetMigMode, handle)
    display = _ask(nvml, nvml.nvmlDeviceGetDisplayActive, handle)
    utilization = _ask(nvml, nvml.nvmlDeviceGetUtilizationRates, handle)
    return Gpu(
        index=index,
        uuid=nvml.nvmlDeviceGetUUID(handle),
        name=_ask(nvml, nvml.nvmlDeviceGetName, handle),
        pci_bus_id=bus_id,
        compute_capability=_ask(nvml, nvml.nvmlDeviceGetCudaComputeCapability, handle),
        total_mib=None if memory is None else memory.total // _MIB,
        free_mib=None if memory is None else memory.free // _MIB,
        display_active=None if display is None else bool(display),
        mig_mode=None if mig is None else bool(mig[0]),
        mig_devices=_mig_devices(nvml, handle) if mig is not None and mig[0] else (),
        utilization_percent=None if utilization is None else utilization.gpu,
        ecc_errors_uncorrected=_ask(
            nvml,
            nvml.nvmlDeviceGetTotalEccErrors,
            handle,
            nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
            nvml.NVML_VOLATILE_ECC,
        ),
        processes=_processes(nvml, handle),
    )


def _mig_devices(nvml: Any, handle: Any) -> tuple[MigDevice, ...]:
    slots = _ask(nvml, nvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0
    found = (_ask(nvml, nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, slot) for slot in range(slots))
    return tuple(_mig_device(nvml, device) for device in found if device is not None)


def _mig_device(nvml: Any, device: Any) -> MigDevice:
    memory = _ask(nvml, nvml.nvmlDeviceGetMemoryInfo, device)
    name = _ask(nvml, nvml.nvmlDeviceGetName, device)
    profile = re.search(r"MIG (\S+)$", name or "")
    return MigDevice(
        uuid=nvml.nvmlDeviceGetUUID(device),
        profile=profile[1] if profile else None,
        total_mib=None if memory is None else memory.total // _MIB,
        free_mib=None if memory is None else memory.free // _MIB,
    )


def _processes(nvml: Any, handle: Any) -> tuple[GpuProcess, ...]:
    """Return the processes that hold memory, the largest first; one that computes and draws is listed once."""
    used_mib: dict[int, int | None] = {}
    for listed in (nvml.nvmlDeviceGetComputeRunningProcesses_v3, nvml.nvmlDeviceGetGraphicsRunningProcesses_v3):
        for process in _ask(nvml, listed, handle) or ():
            used = None if process.usedGpuMemory is None else process.usedGpuMemory // _MIB
            known = used_mib.get(process.pid)
            used_mib[process.pid] = used if known is None else max(known, used or 0)
    ordered = sorted(used_mib.items(), key=lambda item: (-(item[1] or 0), item[0]))
    return tuple(
        GpuProcess(pid=pid, name=_ask(nvml, nvml.nvmlSystemGetProcessName, pid), used_mib=used) for pid, used in ordered
    )


def _p2p(nvml: Any, handles: dict[int, Any]) -> dict[str, str]:
    """Return the read access of each pair; a pair that NVML says nothing about is left out."""
    found: dict[str, str] = {}
    for one, two in combinations(sorted(handles), 2):
        status: int | None = _ask(nvml, nvml.nvmlDeviceGetP2PStatus, handles[one], handles[two], _P2P_READ)
        if status is not None and status < len(_P2P_STATUS):
            found[f"{one}-{two}"] = _P2P_STATUS[status]
    return found


def _ask(nvml: Any, query: Callable[..., _T], *arguments: Any) -> _T | None:
    """Return the answer, or None where the card or the driver does not offer it.

    Raises:
        NVMLError: the card is lost or must be reset; then no other question has an answer either.
    """
    try:
        return query(*arguments)
    except (nvml.NVMLError_GpuIsLost, nvml.NVMLError_ResetRequired):
        raise
    except (nvml.NVMLError, UnicodeDecodeError):
        return None


def _kernel_bus_ids(proc_gpus: Path) -> list[str]:
    """Return the bus ids of the driver's GPUs in NVML's form (eight digits of PCI domain), sorted."""
    if not proc_gpus.is_dir():
        return []
    names = sorted(entry.name.upper() for entry in proc_gpus.iterdir())
    return [name.rjust(len("00000000:00:00.0"), "0") for name in names]


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value
