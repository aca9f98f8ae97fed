"""The rules of the check before a start as the doctor's checks: what is said where they find nothing or cannot tell."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from launcher.checks import gpu_rules, machine_rules
from launcher.checks.demand import Case, Demand
from launcher.doctor.facts import Finding, Verdict
from launcher.problems import Problem

Rule = Callable[[Case], Iterable[Problem]]


@dataclass(frozen=True)
class _HostCheck:
    """A rule of the check before a start, as one of the doctor's checks."""

    name: str
    rule: Rule
    good: Callable[[Case], str]
    """What is said where the rule finds nothing."""
    unknown: Callable[[Case], str | None] = lambda case: None
    """Why the rule cannot tell; None where it can."""
    ends_with_start: bool = False
    """It asks for what a running server itself takes."""


def host_findings(case: Case, runs: bool) -> Iterator[Finding]:
    """Yield what the rules find on this machine.

    Args:
        runs: the service is running: what it takes itself is not missing.
    """
    for check in _host_checks(case.demand):
        yield from _asked(check, case, runs)


def _no_driver(case: Case) -> str | None:
    return None if case.facts.nvml.error is None else f"NVML does not answer ({case.facts.nvml.error})"


def no_card(case: Case) -> str | None:
    return _no_driver(case) or (None if case.selected else "no GPU is there to look at")


def _no_docker(case: Case) -> str | None:
    return None if case.facts.docker.engine is not None else "Docker does not answer"


def _titles(case: Case) -> str:
    return ", ".join(device.title for device in case.selected)


def _free(case: Case) -> str:
    return ", ".join(
        f"{gpu_rules.gib(device.free_mib)} of {gpu_rules.gib(device.total_mib)} free"
        for device in case.selected
        if device.free_mib is not None and device.total_mib is not None
    )


def _docker(case: Case) -> str:
    docker = case.facts.docker
    return f"{docker.flavor or 'docker'} {docker.engine}, API {docker.api}, Compose {docker.compose}"


def _disk(case: Case) -> str:
    disk, docker = case.facts.disk, case.facts.docker
    places = {"models": disk.models_free_gib, "state and caches": disk.state_free_gib, "images": docker.root_free_gib}
    return "; ".join(f"{free:.1f} GiB free for {name}" for name, free in places.items() if free is not None)


def _gpu_checks() -> tuple[_HostCheck, ...]:
    return (
        _HostCheck("driver", gpu_rules.driver_is_there, lambda case: f"driver {case.facts.nvml.driver}"),
        _HostCheck(
            "driver for the image's CUDA",
            gpu_rules.driver_is_new_enough,
            lambda case: f"runs CUDA {case.facts.nvml.cuda_driver}; the image has {case.demand.image_cuda or 'none'}",
            _no_driver,
        ),
        _HostCheck(
            "cards answer", gpu_rules.cards_are_readable, lambda case: f"{len(case.facts.nvml.gpus)}", _no_driver
        ),
        _HostCheck("number of cards", gpu_rules.enough_cards, _titles, _no_driver),
        _HostCheck("kind of card", gpu_rules.compute_capability_suffices, _titles, no_card),
        _HostCheck("size of the card", gpu_rules.memory_is_large_enough, _free, no_card),
        _HostCheck("free GPU memory", gpu_rules.memory_is_free, _free, no_card, ends_with_start=True),
        _HostCheck("GPU memory is reported", gpu_rules.memory_is_known, _free, no_card),
        _HostCheck("MIG", gpu_rules.mig_is_usable, lambda case: "nothing stands in the way", _no_driver),
        _HostCheck("alike cards", gpu_rules.cards_are_alike, _titles, no_card),
        _HostCheck("peer access", gpu_rules.peers_reach_each_other, lambda case: "as NVML says", no_card),
        _HostCheck("ECC errors", gpu_rules.ecc_counts_no_errors, lambda case: "none counted", no_card),
        _HostCheck(
            "way of the GPU into a container",
            gpu_rules.container_gets_the_gpu,
            lambda case: "not needed" if case.gpu_mode == "none" else f"by {case.gpu_mode}",
            lambda case: _no_docker(case) if case.demand.runtime == "docker" else None,
        ),
    )


def _host_checks(demand: Demand) -> Iterator[_HostCheck]:
    if demand.needs_gpu:
        yield from _gpu_checks()
    if demand.runtime == "docker":
        yield _HostCheck("Docker", machine_rules.docker_answers, _docker)
    elif not demand.needs_gpu:
        yield _HostCheck(
            "system packages", machine_rules.packages_are_there, lambda case: "libnuma, compiler and Python.h are there"
        )
    yield _HostCheck("disk", machine_rules.disk_suffices, _disk)
    memory_rule = (
        machine_rules.memory_passes_the_checkpoint if demand.needs_gpu else machine_rules.memory_holds_the_cpu_engine
    )
    yield _HostCheck(
        "host memory",
        memory_rule,
        lambda case: f"{case.facts.proc.mem_available_gib} of {case.facts.proc.mem_total_gib} GiB available",
        lambda case: "not reported" if case.facts.proc.mem_total_gib is None else None,
        ends_with_start=not demand.needs_gpu,
    )
    yield _HostCheck(
        "port", machine_rules.port_is_free, lambda case: f"{case.demand.port} is free", ends_with_start=True
    )
    yield _HostCheck(
        "model files",
        machine_rules.model_files_are_whole,
        lambda case: f"whole, in {case.demand.model_dir}",
        lambda case: None if case.demand.model_is_here or case.demand.incomplete_files else "not fetched yet",
    )


def _asked(check: _HostCheck, case: Case, runs: bool) -> Iterator[Finding]:
    if runs and check.ends_with_start:
        yield Finding(check.name, "ok", "taken by the running service itself")
        return
    reason = check.unknown(case)
    if reason is not None:
        yield Finding(check.name, "unknown", reason)
        return
    problems = tuple(check.rule(case))
    for problem in problems:
        verdict: Verdict = "fail" if problem.severity == "refuse" else "warn"
        yield Finding(check.name, verdict, f"{problem.cause}: {problem.message}", problem.remedy)
    if not problems:
        yield Finding(check.name, "ok", check.good(case))
