"""Rules about GPUs, their driver and their way into a container; each returns the problems that it finds."""

from collections.abc import Iterator, Sequence

from launcher.checks.demand import Case
from launcher.host.devices import Device, find, index_pairs
from launcher.problems import Cause, Problem

# What a desktop takes and gives back from one minute to the next; below it a start that fits now may not in a moment.
TIGHT_MARGIN_MIB = 512
# Engine 25.0 is the first that hands CDI devices to containers.
CDI_API = (1, 44)
# Peer access works, or NVML does not know.
_NO_NEWS = ("OK", "U", None)


def refuse(cause: Cause, message: str, remedy: str) -> Problem:
    """Return a problem that stands in the way of the start."""
    return Problem(cause=cause, severity="refuse", message=message, remedy=remedy)


def warn(cause: Cause, message: str, remedy: str) -> Problem:
    """Return a problem that is told and does not stand in the way."""
    return Problem(cause=cause, severity="warn", message=message, remedy=remedy)


def gib(mib: float) -> str:
    """Return a size for messages, in the two decimals that vLLM prints."""
    return f"{mib / 1024:.2f} GiB"


def version(text: str) -> tuple[int, ...]:
    """Return the leading numbers of a version, for comparison: 580.126.09 -> (580, 126, 9)."""
    numbers: list[int] = []
    for part in text.split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)


def driver_is_there(case: Case) -> Iterator[Problem]:
    """NVML answers, and it is the driver's own."""
    error = case.facts.nvml.error
    if error is None:
        return
    if "mismatch" in error.lower():
        yield refuse(
            "driver-library-mismatch",
            f"NVML: {error} The driver in the kernel is not the one whose libraries are installed: it was updated "
            "and the old one is still loaded.",
            "Reboot, so that the kernel loads the new driver.",
        )
    elif case.facts.proc.is_wsl:
        yield refuse(
            "wsl-gpu-missing",
            f"NVML: {error}. WSL shows no NVIDIA GPU to Linux ({case.facts.proc.kernel}).",
            "Install the NVIDIA driver in Windows (none in Linux), run `wsl --update`, and check with `wsl -l -v` that "
            "this distribution has version 2.",
        )
    else:
        yield refuse(
            "nvidia-driver-missing",
            f"NVML: {error}. Without it no GPU can be used: the NVIDIA driver is not installed, not loaded or not "
            "accessible.",
            f"Install the NVIDIA driver{f' {case.demand.min_driver} or newer' if case.demand.min_driver else ''} and "
            "reboot; PROFILE=cpu runs without a GPU.",
        )


def driver_is_new_enough(case: Case) -> Iterator[Problem]:
    """The driver can run the image's CUDA: same major version or newer, and the release that the image asks for."""
    driver, cuda = case.facts.nvml.driver, case.facts.nvml.cuda_driver
    min_driver, image_cuda = case.demand.min_driver, case.demand.image_cuda
    is_old = driver is not None and min_driver is not None and version(driver) < version(min_driver)
    # Within a major version an older driver runs newer CUDA (minor version compatibility).
    is_other = cuda is not None and image_cuda is not None and version(cuda)[:1] < version(image_cuda)[:1]
    if not is_old and not is_other:
        return
    where = "in Windows" if case.facts.proc.is_wsl else "here"
    wanted = f"NVIDIA driver {min_driver} or newer" if min_driver else f"an NVIDIA driver for CUDA {image_cuda}"
    yield refuse(
        "driver-too-old",
        f"driver {driver or 'unknown'} runs CUDA up to {cuda or 'unknown'}; the image has CUDA "
        f"{image_cuda or 'unknown'} and needs driver {min_driver or 'unknown'} or newer.",
        f"Install {wanted} {where}, then reboot.",
    )


def cards_are_readable(case: Case) -> Iterator[Problem]:
    """No card that the start needs has fallen off the bus."""
    spare = len(case.selected) >= case.demand.tensor_parallel_size
    for gpu in case.facts.nvml.gpus:
        if gpu.error is None:
            continue
        where = f"GPU {gpu.index} at {gpu.pci_bus_id or 'an unknown PCI address'}"
        yield (warn if spare else refuse)(
            "gpu-lost",
            f"{where}: {gpu.error}. The driver cannot reach the card{'; it is left out' if spare else ''}.",
            "Power off and start again (a plain reboot may not bring the card back); if it returns, look for Xid lines "
            "in `dmesg`, then at power cables, riser and slot.",
        )


def enough_cards(case: Case) -> Iterator[Problem]:
    """There are as many GPUs as ranks, and those that the user named are there."""
    if case.facts.nvml.error is not None:
        return
    asked, count = case.demand.gpus_asked, case.demand.tensor_parallel_size
    missing = [str(one) for one in asked if find(case.available, one) is None]
    lost = sum(gpu.error is not None for gpu in case.facts.nvml.gpus)
    if missing and not lost:
        there = ", ".join(f"{device.gpu_index} = {device.uuid}" for device in case.available) or "none"
        yield refuse("gpu-not-visible", f"no such GPU: {', '.join(missing)}; there are: {there}.", "Name one of these.")
    # Cards that are lost, or cut into no slices, are problems of their own.
    unusable = lost + sum(bool(gpu.mig_mode) and not gpu.mig_devices for gpu in case.facts.nvml.gpus)
    if not missing and len(case.selected) + unusable < count:
        yield refuse(
            "gpu-too-few",
            f"profile {case.demand.profile} needs {count} GPU(s); {len(case.selected)} of them "
            f"{'is' if len(case.selected) == 1 else 'are'} there.",
            "Choose a profile with fewer GPUs; `graft profiles` lists those that match this machine.",
        )
    elif asked and not missing and len(asked) != count:
        yield refuse(
            "gpu-too-few",
            f"{len(asked)} GPU(s) named, and profile {case.demand.profile} uses {count}.",
            f"Name {count}.",
        )


def compute_capability_suffices(case: Case) -> Iterator[Problem]:
    """Each card runs the model's kernels, and is the kind that the profile is made for."""
    lowest, made_for = case.demand.min_compute_capability, case.demand.compute_capability
    for device in case.selected:
        own = device.compute_capability
        if own is None:
            continue
        if lowest is not None and own < lowest:
            yield refuse(
                "compute-capability-too-low",
                f"{device.title} has compute capability {_dotted(own)}; {_dotted(lowest)} is needed.",
                "Use another card, or a model whose quantization runs on this one.",
            )
        elif made_for is not None and own != made_for:
            # A newer card runs what an older one does; a lower one may lack the hardware, such as FP8 below 8.9.
            yield (refuse if own < made_for else warn)(
                "wrong-gpu-selected",
                f"{device.title} has compute capability {_dotted(own)}; profile {case.demand.profile} is made for "
                f"{_dotted(made_for)}.",
                "Choose the profile of this card; `graft profiles` lists those that match.",
            )


def memory_is_large_enough(case: Case) -> Iterator[Problem]:
    """Each card, or slice, has the memory that the profile is made for."""
    for device in case.selected:
        if _is_too_small(case, device):
            assert device.total_mib is not None
            yield refuse(
                "gpu-memory-too-small",
                f"{device.title} has {gib(device.total_mib)} ({device.total_mib} MiB); profile {case.demand.profile} "
                f"needs {case.demand.min_gpu_gib or 0:.2f} GiB.",
                "Choose a smaller model or a profile for this card; `graft profiles` lists those that match.",
            )


def memory_is_free(case: Case) -> Iterator[Problem]:
    """vLLM's own rule: the free memory is at least utilization x total, or it does not start."""
    utilization = case.demand.gpu_memory_utilization
    for device in case.selected:
        requested = None if utilization is None else device.requested_mib(utilization)
        if requested is None or device.free_mib is None or device.usable_mib is None or _is_too_small(case, device):
            continue
        margin = device.free_mib - requested
        numbers = (
            f"{device.title}: {gib(device.free_mib)} free, and vLLM asks {gib(requested)} "
            f"({utilization} x {gib(device.usable_mib)})"
        )
        if margin < 0:
            yield refuse("gpu-memory-busy", f"{numbers}. {_holders(device)}", _free_up(device))
        elif margin < TIGHT_MARGIN_MIB:
            yield warn(
                "gpu-memory-tight",
                f"{numbers}: {gib(margin)} to spare. {_holders(device)}",
                f"Close what else uses the card, or lower serve.gpu_memory_utilization{_that_fits(device)}.",
            )


def memory_is_known(case: Case) -> Iterator[Problem]:
    """A card whose memory NVML does not report is unknown, and nothing worse."""
    for device in case.selected:
        if device.total_mib is None or device.free_mib is None:
            yield warn(
                "gpu-memory-unknown",
                f"{device.title}: its memory is not reported by NVML (usual where GPU and CPU share it), so whether "
                "the plan fits is unknown.",
                "Nothing needs repair; the start goes on, with --force where the plan would need the size.",
            )


def mig_is_usable(case: Case) -> Iterator[Problem]:
    """A GPU in MIG mode is used by its slices, one server on one slice."""
    for gpu in case.facts.nvml.gpus:
        if gpu.mig_mode and not gpu.mig_devices:
            yield (warn if len(case.selected) >= case.demand.tensor_parallel_size else refuse)(
                "mig-device",
                f"GPU {gpu.index} ({gpu.uuid}) is in MIG mode and has no instance, so nothing can run on it.",
                "Create an instance (`sudo nvidia-smi mig -cgi PROFILE -C`), or switch MIG off "
                "(`sudo nvidia-smi -mig 0`).",
            )
    slices = [device for device in case.selected if device.is_mig]
    if slices and case.demand.tensor_parallel_size > 1:
        yield refuse(
            "mig-device",
            f"tensor parallelism over MIG slices ({', '.join(device.uuid for device in slices)}): they have no way to "
            "each other.",
            "Use one slice with a profile for one GPU, or switch MIG off (`sudo nvidia-smi -mig 0`).",
        )


def cards_are_alike(case: Case) -> Iterator[Problem]:
    """Different cards in one machine: say which is used; different cards in one server: say what it costs."""
    kinds = {(device.compute_capability, device.total_mib) for device in case.selected}
    if len(kinds) > 1:
        yield warn(
            "mixed-gpus",
            f"one server on different GPUs: {_listed(case.selected)}. The smallest memory and the slowest card count.",
            "Give it alike cards where there are some.",
        )
        return
    others = [device for device in case.available if (device.compute_capability, device.total_mib) not in kinds]
    # Who names the cards knows which they are.
    if case.selected and others and not case.demand.gpus_asked:
        yield warn(
            "mixed-gpus",
            f"different GPUs in this machine: {_listed(case.selected)} is used, not {_listed(others)}. "
            "CUDA and NVML number them differently, so it is passed by its UUID.",
            "To use another one, name its UUID under gpu.uuids in a profile of your own.",
        )


def peers_reach_each_other(case: Case) -> Iterator[Problem]:
    """Ranks copy from card to card, or through host memory where there is no peer access."""
    # Who names the cards has chosen the pair, and it works without; it is news where the choice was made here.
    if case.demand.gpus_asked:
        return
    between = (f"{min(pair)}-{max(pair)}" for pair in index_pairs(case.selected))
    statuses = {pair: case.facts.nvml.p2p.get(pair) for pair in between}
    without = [f"{pair} ({status})" for pair, status in statuses.items() if status not in _NO_NEWS]
    if without:
        yield warn(
            "no-p2p",
            f"GPU pair {', '.join(without)}: no peer access (P2P); all-reduce goes through host memory and is slower.",
            "Usual for GeForce cards, nothing to repair; the server gets --disable-custom-all-reduce.",
        )


def ecc_counts_no_errors(case: Case) -> Iterator[Problem]:
    """No memory error that ECC could not correct since the driver was loaded."""
    chosen = {device.gpu_index for device in case.selected}
    for gpu in case.facts.nvml.gpus:
        if gpu.index in chosen and gpu.ecc_errors_uncorrected:
            yield warn(
                "gpu-ecc-errors",
                f"GPU {gpu.index} ({gpu.uuid}): {gpu.ecc_errors_uncorrected} uncorrected ECC memory error(s) since the "
                "driver was loaded; answers may be wrong.",
                "Look for Xid 48, 63 or 64 in `dmesg`, reboot to retire the pages; replace the card if they come back.",
            )


def container_gets_the_gpu(case: Case) -> Iterator[Problem]:
    """Docker has the NVIDIA runtime, or CDI devices by the UUIDs of the cards."""
    docker = case.facts.docker
    if case.demand.runtime != "docker" or docker.engine is None:
        return
    cdi_gpus = [name for name in docker.cdi_devices if name.startswith("nvidia.com/gpu=")]
    if case.gpu_mode == "nvidia" and "nvidia" not in docker.runtimes and not docker.nvidia_hook:
        yield refuse(
            "nvidia-runtime-missing",
            f"Docker has no nvidia runtime (it has: {', '.join(docker.runtimes) or 'none'}) and no NVIDIA CDI device.",
            "Install the NVIDIA Container Toolkit (package nvidia-container-toolkit), then `sudo nvidia-ctk runtime "
            "configure --runtime=docker` and `sudo systemctl restart docker`.",
        )
    if case.gpu_mode != "cdi":
        return
    if docker.flavor != "podman" and docker.api is not None and version(docker.api) < CDI_API:
        yield refuse(
            "docker-too-old",
            f"Docker Engine {docker.engine} (API {docker.api}) does not hand out CDI devices; Engine 25 (API 1.44) "
            "and newer do.",
            "Update Docker Engine, or add the nvidia runtime: `sudo nvidia-ctk runtime configure --runtime=docker`.",
        )
    missing = [device.uuid for device in case.selected if f"nvidia.com/gpu={device.uuid}" not in cdi_gpus]
    if missing:
        yield refuse(
            "cdi-device-missing",
            f"no CDI device for {', '.join(missing)}; there are: {', '.join(cdi_gpus) or 'none'}.",
            "Write them by UUID: `sudo nvidia-ctk cdi generate --device-name-strategy=uuid "
            "--output=/etc/cdi/nvidia.yaml`.",
        )


def _is_too_small(case: Case, device: Device) -> bool:
    smallest = case.demand.min_gpu_gib
    return smallest is not None and device.total_mib is not None and device.total_mib < smallest * 1024


def _holders(device: Device) -> str:
    if not device.processes:
        # Containers' processes, and all of them on WSL, are not always listed.
        return "NVML lists no process that holds it (other users' and WSL's are not always listed)."
    named = (
        f"{process.name or 'process'} (pid {process.pid}"
        f"{f', {gib(process.used_mib)}' if process.used_mib is not None else ''})"
        for process in device.processes
    )
    return f"Held by {', '.join(named)}."


def _that_fits(device: Device) -> str:
    """Name the utilization that leaves the margin, where it is worth naming."""
    assert device.free_mib is not None
    assert device.usable_mib is not None
    hundredths = int(100 * (device.free_mib - TIGHT_MARGIN_MIB) / device.usable_mib)
    return f" to {hundredths / 100:.2f}" if hundredths >= 50 else ""


def _free_up(device: Device) -> str:
    first = device.processes[0] if device.processes else None
    ended = f"End {first.name or 'process'} (pid {first.pid})" if first else "Stop other servers (`docker ps`)"
    desktop = " or move the desktop to another card" if device.display_active else ""
    return f"{ended}{desktop}; or lower serve.gpu_memory_utilization{_that_fits(device)}."


def _listed(chosen: Sequence[Device]) -> str:
    return ", ".join(device.title for device in chosen)


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"
