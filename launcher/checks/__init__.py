"""The check before a start; pure: facts of a machine and the demand of a start give a verdict and all problems."""

from collections.abc import Callable, Iterable

from launcher.checks import gpu_rules, machine_rules
from launcher.checks.demand import Case, CheckResult, Demand
from launcher.checks.facts_file import facts_from_file
from launcher.host.devices import Device, best, devices, find
from launcher.host.facts import Docker, HostFacts
from launcher.plan import GpuMode
from launcher.problems import Problem

__all__ = ["CheckResult", "Demand", "check", "facts_from_file", "gpu_mode", "select"]

Rule = Callable[[Case], Iterable[Problem]]

GPU_RULES: tuple[Rule, ...] = (
    gpu_rules.driver_is_there,
    gpu_rules.driver_is_new_enough,
    gpu_rules.cards_are_readable,
    gpu_rules.enough_cards,
    gpu_rules.compute_capability_suffices,
    gpu_rules.memory_is_large_enough,
    gpu_rules.memory_is_free,
    gpu_rules.memory_is_known,
    gpu_rules.mig_is_usable,
    gpu_rules.cards_are_alike,
    gpu_rules.peers_reach_each_other,
    gpu_rules.ecc_counts_no_errors,
    gpu_rules.container_gets_the_gpu,
)
DOCKER_RULES: tuple[Rule, ...] = (machine_rules.docker_answers,)
MACHINE_RULES: tuple[Rule, ...] = (
    machine_rules.packages_are_there,
    machine_rules.disk_suffices,
    machine_rules.memory_holds_the_cpu_engine,
    machine_rules.memory_passes_the_checkpoint,
    machine_rules.port_is_free,
    machine_rules.model_files_are_whole,
)


def check(facts: HostFacts, demand: Demand) -> CheckResult:
    """Return every problem that the start would meet on this machine, not the first one only."""
    chosen = select(facts, demand)
    case = Case(facts, demand, devices(facts.nvml), chosen, gpu_mode(facts.docker, demand))
    rules = (
        *(GPU_RULES if demand.needs_gpu else ()),
        *(DOCKER_RULES if demand.runtime == "docker" else ()),
        *MACHINE_RULES,
    )
    problems = tuple(problem for rule in rules for problem in rule(case))
    severities = {problem.severity for problem in problems}
    return CheckResult(
        verdict="refuse" if "refuse" in severities else "warn" if "warn" in severities else "ok",
        problems=problems,
        selected=tuple(device.uuid for device in chosen),
        gpu_mode=case.gpu_mode,
    )


def select(facts: HostFacts, demand: Demand) -> tuple[Device, ...]:
    """Return the GPUs that the start would use: those named, else the best of this machine; may be too few."""
    available = devices(facts.nvml)
    if not demand.needs_gpu:
        return ()
    if demand.gpus_asked:
        named = (find(available, one) for one in demand.gpus_asked)
        return tuple(dict.fromkeys(device for device in named if device is not None))
    return best(available, demand.tensor_parallel_size, lambda device: _rank(device, demand))


def gpu_mode(docker: Docker, demand: Demand) -> GpuMode:
    """Return how a container gets its GPUs: the nvidia runtime where Docker has it, else CDI where it has devices.

    Podman knows CDI only.
    """
    if demand.runtime != "docker" or not demand.needs_gpu:
        return "none"
    if docker.flavor == "podman":
        return "cdi"
    has_cdi = bool(docker.cdi_spec_dirs) and any(name.startswith("nvidia.com/gpu=") for name in docker.cdi_devices)
    return "cdi" if has_cdi and "nvidia" not in docker.runtimes else "nvidia"


def _rank(device: Device, demand: Demand) -> tuple[float, ...]:
    """Order the cards: what the start cannot do without first, then the newest architecture, then free memory."""
    own = device.compute_capability or (0, 0)
    requested = device.requested_mib(demand.gpu_memory_utilization) if demand.gpu_memory_utilization else None
    return (
        demand.min_compute_capability is None or own >= demand.min_compute_capability,
        demand.compute_capability is None or own == demand.compute_capability,
        device.total_mib is None or device.total_mib >= (demand.min_gpu_gib or 0) * 1024,
        requested is None or device.free_mib is None or device.free_mib >= requested,
        *own,
        device.free_mib or 0,
    )
