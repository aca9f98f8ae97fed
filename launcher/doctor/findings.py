"""From the doctor's facts to its findings: each check says ok, warn, fail or unknown, with one remedy. Pure."""

from collections.abc import Iterable, Iterator, Sequence

from launcher.checks import gpu_mode, machine_rules, select
from launcher.checks.demand import Case, Demand
from launcher.doctor.facts import DoctorFacts, Finding, Unknown, Verdict
from launcher.doctor.host_checks import host_findings, no_card
from launcher.host.devices import devices

MAX_CLOCK_SKEW_S = 300
"""Beyond it certificates and tokens are refused."""
MIN_PIDS = 512
"""Threads count too: an engine of two ranks was seen with some 300."""
MIN_SHM_MIB = 256
"""vLLM's broadcast buffer takes 160 MiB, NCCL's segments some MiB a rank."""
_SLOWED = {
    "hardware slowdown": "the card slows itself down for heat or power",
    "heat (software)": "the driver slows it down for heat",
    "heat (hardware)": "the card slows itself down for heat",
    "power brake": "the power supply asks it to slow down",
}


def examine(facts: DoctorFacts, demand: Demand) -> tuple[Finding, ...]:
    """Return every finding, the service's own state first."""
    chosen = select(facts.host, demand)
    case = Case(facts.host, demand, devices(facts.host.nvml), chosen, gpu_mode(facts.host.docker, demand))
    runs = facts.running is not None and facts.running.is_alive
    groups: tuple[Iterable[Finding], ...] = (
        _service(facts, demand),
        _versions(facts),
        host_findings(case, runs),
        _clocks(facts, case) if demand.needs_gpu else (),
        _container_gpus(facts, case) if demand.needs_gpu and demand.runtime == "docker" else (),
        _copies(facts, demand) if demand.tensor_parallel_size > 1 else (),
        _shm(facts, demand),
        _limits(facts, demand),
        _wsl(facts),
        _hub(facts, demand),
    )
    return tuple(finding for group in groups for finding in group)


def _service(facts: DoctorFacts, demand: Demand) -> Iterator[Finding]:
    running, check = facts.running, "service"
    if running is None:
        yield Finding(check, "unknown", f"{demand.profile} is not started")
        return
    if running.diagnosis is not None:
        found = running.diagnosis
        yield Finding(check, "fail", f"{found.cause}: {found.message}", found.remedy)
    elif running.last_words:
        said = f"failed for an unknown cause: {running.last_words[-1]}"
        yield Finding(check, "fail", said, "`graft report` writes a file to paste into an issue.")
    elif not running.is_healthy:
        verdict: Verdict = "warn" if running.is_alive else "fail"
        remedy = f"See `graft logs --profile {demand.profile}`."
        yield Finding(check, verdict, f"{running.status}, and does not answer", remedy)
    else:
        yield Finding(check, "ok", f"{running.status}, healthy")
    for problem in running.fix_problems if running.is_alive else ():
        yield Finding("fixes", "fail", problem, "`graft up` starts only a server in which every required fix is in.")
    for sentence in running.operating:
        yield Finding("operation", "warn", sentence)


def _versions(facts: DoctorFacts) -> Iterator[Finding]:
    yield Finding("versions", "ok", f"graft {facts.graft}, Python {facts.python}, kernel {facts.host.proc.kernel}")


def _clocks(facts: DoctorFacts, case: Case) -> Iterator[Finding]:
    chosen = {device.uuid for device in case.selected}
    seen = [one for one in facts.clocks if one.uuid in chosen]
    if not seen:
        yield Finding("clocks", "unknown", no_card(case) or "NVML does not report them")
    for one in seen:
        slowed = [text for name, text in _SLOWED.items() if name in (one.held_back_by or ())]
        numbers = ", ".join(
            text
            for text, value in (
                (f"{one.sm_mhz} of {one.max_sm_mhz} MHz", one.sm_mhz),
                (f"{one.temperature_c} C", one.temperature_c),
                (f"{one.power_w or 0:.0f} of {one.power_limit_w or 0:.0f} W", one.power_w),
            )
            if value is not None
        )
        if one.held_back_by is None:
            yield Finding("clocks", "unknown", f"{one.uuid}: {numbers or 'nothing'}; why they are low is not reported")
        elif slowed:
            yield Finding(
                "clocks",
                "warn",
                f"{one.uuid}: {numbers}: {'; '.join(dict.fromkeys(slowed))}",
                "Improve cooling, check the power cables, or lower the power limit (`sudo nvidia-smi -pl WATTS`).",
            )
        else:
            held = ", ".join(one.held_back_by) or "nothing"
            yield Finding("clocks", "ok", f"{one.uuid}: {numbers}; held back by {held}")


def _container_gpus(facts: DoctorFacts, case: Case) -> Iterator[Finding]:
    check, found = "GPU inside the container", facts.container_gpus
    if isinstance(found, Unknown):
        yield Finding(check, "unknown", found.reason)
        return
    missing = [device.uuid for device in case.selected if device.uuid not in found]
    if missing:
        yield Finding(
            check,
            "fail",
            f"{', '.join(missing)} not seen there; it sees {', '.join(found) or 'none'}",
            "Start the service again (`graft down`, `graft up`); after a reload of systemd containers lose their GPUs "
            "where the NVIDIA runtime manages devices behind systemd's back: use CDI.",
        )
    else:
        yield Finding(check, "ok", ", ".join(found))


def _copies(facts: DoctorFacts, demand: Demand) -> Iterator[Finding]:
    check, copies = "copies between cards", facts.copies
    if isinstance(copies, Unknown):
        yield Finding(check, "unknown", copies.reason)
        return
    wrong = [f"{one.source}->{one.target} ({one.wrong_elements} elements)" for one in copies if one.wrong_elements]
    if wrong:
        yield Finding(
            check,
            "fail",
            f"wrong data arrived: {', '.join(wrong)}",
            "Switch peer access off: remove a patched driver, or set NCCL_P2P_DISABLE=1; an IOMMU that is on in the "
            "BIOS causes it too.",
        )
    else:
        direct = sum(one.has_peer_access for one in copies)
        yield Finding(check, "ok", f"{len(copies)} directions compared, {direct} of them with peer access")


def _shm(facts: DoctorFacts, demand: Demand) -> Iterator[Finding]:
    check, shm = "/dev/shm", facts.shm
    if isinstance(shm, Unknown):
        yield Finding(check, "unknown", shm.reason)
    elif demand.tensor_parallel_size > 1 and shm.total_mib < MIN_SHM_MIB:
        yield Finding(
            check,
            "fail",
            f"{shm.total_mib:.0f} MiB; ranks talk through it and need {MIN_SHM_MIB} MiB or more",
            "Start it from the rendered compose file (shm_size: 8gb), or `sudo mount -o remount,size=8g /dev/shm`.",
        )
    elif shm.free_mib is not None and shm.free_mib < MIN_SHM_MIB and demand.tensor_parallel_size > 1:
        yield Finding(
            check,
            "warn",
            f"{shm.free_mib:.0f} of {shm.total_mib:.0f} MiB free",
            "Delete what ended programs left there (`ls -l /dev/shm`).",
        )
    else:
        yield Finding(check, "ok", f"{shm.total_mib:.0f} MiB")


def _limits(facts: DoctorFacts, demand: Demand) -> Iterator[Finding]:
    check, limits = "limits", facts.limits
    if isinstance(limits, Unknown):
        yield Finding(check, "unknown", limits.reason)
        return
    needed_gib = _needed_memory_gib(demand)
    found = []
    if limits.memory_gib is not None and needed_gib is not None and limits.memory_gib < needed_gib:
        found.append(
            Finding(
                check,
                "fail" if not demand.needs_gpu else "warn",
                f"memory is limited to {limits.memory_gib:.1f} GiB; the server takes about {needed_gib:.1f} GiB",
                "Raise the memory limit of the container, or of the slice that the launcher runs in.",
            )
        )
    if limits.pids is not None and limits.pids < MIN_PIDS:
        found.append(
            Finding(
                check,
                "warn",
                f"{limits.pids} processes and threads are allowed; an engine may start {MIN_PIDS}",
                "Raise pids_limit of the container, or TasksMax of the systemd unit.",
            )
        )
    if limits.cpus is not None and limits.cpus < 1 + demand.tensor_parallel_size:
        found.append(
            Finding(
                check,
                "warn",
                f"{limits.cpus:g} CPUs are allowed; API server and {demand.tensor_parallel_size} rank(s) want one each",
                "Raise the CPU limit: a starved scheduler keeps the GPU waiting.",
            )
        )
    told = {"memory": limits.memory_gib and f"{limits.memory_gib:.1f} GiB", "CPUs": limits.cpus, "pids": limits.pids}
    known = ", ".join(f"{name} {value}" for name, value in told.items() if value)
    yield from found or [Finding(check, "ok", known or "none is set")]


def _needed_memory_gib(demand: Demand) -> float | None:
    if demand.model_gib is None:
        return None
    if demand.needs_gpu:
        # Weights pass through the page cache, which the limit counts and the kernel takes back: a tight limit is slow.
        return demand.model_gib
    return demand.model_gib + (demand.cpu_kv_cache_gib or 0.0) + machine_rules.CPU_ENGINE_GIB


def _wsl(facts: DoctorFacts) -> Iterator[Finding]:
    kernel = facts.host.proc.kernel or ""
    if not facts.host.proc.is_wsl:
        return
    if "wsl2" in kernel.lower() or not kernel.startswith("4.4"):
        yield Finding("WSL", "ok", f"WSL 2 ({kernel})")
    else:
        yield Finding("WSL", "fail", f"WSL 1 ({kernel})", "`wsl --set-version DISTRIBUTION 2`, then `wsl --update`.")


def _hub(facts: DoctorFacts, demand: Demand) -> Iterator[Finding]:
    hub = facts.hub
    if hub is None:
        return
    if hub.error is None:
        yield Finding("model hub", "ok", f"{hub.endpoint} answers")
    elif demand.model_is_here:
        yield Finding("model hub", "ok", f"{hub.endpoint} does not answer ({hub.error}); not needed, the model is here")
    else:
        yield Finding(
            "model hub",
            "warn",
            f"{hub.endpoint} does not answer ({hub.error}), and the model is still to be fetched",
            "Connect this machine, set HF_ENDPOINT to a mirror, or bring the files: `graft fetch --from FOLDER`.",
        )
    skew_s = hub.clock_skew_s
    if skew_s is not None and abs(skew_s) > MAX_CLOCK_SKEW_S:
        yield Finding(
            "clock",
            "warn",
            f"this machine's clock is {abs(skew_s):.0f} s {'ahead of' if skew_s > 0 else 'behind'} the hub's",
            "Switch time synchronization on (`sudo timedatectl set-ntp true`); on WSL, `wsl --shutdown`.",
        )
    elif skew_s is not None:
        yield Finding("clock", "ok", f"{abs(skew_s):.0f} s off the hub's")


def worst(findings: Sequence[Finding]) -> Verdict:
    """Return the worst verdict; unknown is none that counts."""
    verdicts = {finding.verdict for finding in findings}
    return "fail" if "fail" in verdicts else "warn" if "warn" in verdicts else "ok"
