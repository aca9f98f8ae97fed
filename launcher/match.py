"""Which profiles suit this machine, and which one is taken when none is named; pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from launcher.host.devices import Device, best, devices, find
from launcher.host.facts import HostFacts, Nvml
from launcher.profile import GpuSetup, Profile

# Without these there is no NVIDIA GPU to speak of; any other NVML error is a GPU that cannot be reached.
_NO_GPU_ERRORS = ("NVML Shared Library Not Found", "Driver Not Loaded")

# Difference in compute capability (8.6 and 8.9: 3), whether the number of GPUs differs, MiB of memory; in this order.
Distance = tuple[int, int, int]


@dataclass(frozen=True)
class Match:
    """How one profile suits this machine."""

    profile: Profile
    compatible: bool | None
    """None: not known, because NVML does not report the memory; --force starts it."""
    reasons: tuple[str, ...]
    """What fits, or everything that does not."""
    gpus: tuple[str, ...]
    """UUIDs of the GPUs that it would use; empty where it is not compatible or needs none."""
    distance: Distance = (0, 0, 0)
    """How far this machine is from it; all zero where it suits."""


@dataclass(frozen=True)
class Choice:
    """The profile taken when none was named; `profile` is None when none suits, and `closest` is then the nearest."""

    profile: Profile | None
    why: str
    closest: Match | None = None


def match(profiles: Sequence[Profile], facts: HostFacts) -> tuple[Match, ...]:
    """Return how each profile suits this machine, in the order given: whether, why, and with which GPUs."""
    return tuple(_match(profile, facts.nvml) for profile in profiles)


def choose(matches: Sequence[Match], facts: HostFacts) -> Choice:
    """Choose the profile to start when none was named: most of the GPUs, or the CPU where there is none."""
    gpu_matches = [one for one in matches if one.profile.gpu is not None]
    if not devices(facts.nvml):
        return _without_gpu(matches, facts.nvml)
    certain = sorted((one for one in gpu_matches if one.compatible), key=_preference)
    unknown = sorted((one for one in gpu_matches if one.compatible is None), key=_preference)
    if certain or unknown:
        first, *others = certain or unknown
        return Choice(first.profile, _why(first, others))
    closest = min(gpu_matches, key=lambda one: (one.distance, *_preference(one)), default=None)
    if closest is None:
        return Choice(None, "there is no profile for a GPU; add one, or start with PROFILE=cpu")
    return Choice(
        None,
        f"no profile suits {_described(devices(facts.nvml))}; the closest is {closest.profile.name}: "
        f"{'; '.join(closest.reasons)}. Write a profile that extends it, or start with PROFILE=cpu.",
        closest,
    )


def _match(profile: Profile, nvml: Nvml) -> Match:
    setup = profile.gpu
    if setup is None:
        return Match(profile, True, ("needs no GPU",), ())
    available = devices(nvml)
    if not available:
        return Match(profile, False, (_no_gpu_reason(nvml),), (), distance=(0, setup.count, 0))
    chosen = _named(setup, available) if setup.uuids else best(available, setup.count, lambda one: _rank(one, setup))
    reasons, distance = _differences(setup, chosen)
    if reasons:
        return Match(profile, False, reasons, (), distance)
    uuids = tuple(one.uuid for one in chosen)
    if any(one.total_mib is None or one.compute_capability is None for one in chosen):
        return Match(
            profile, None, ("NVML does not report what it is matched by: unknown, starts with --force",), uuids
        )
    return Match(profile, True, (f"{_described(chosen)}",), uuids)


def _differences(setup: GpuSetup, chosen: Sequence[Device]) -> tuple[tuple[str, ...], Distance]:
    fitting = [one for one in chosen if _has_capability(one, setup) and _has_memory(one, setup)]
    if fitting or not chosen:
        # Some are right, so what is wrong is their number.
        reasons = _number_reasons(setup, fitting)
        return reasons, (0, len(reasons), 0)
    wrong = [one for one in chosen if not _has_capability(one, setup)]
    small = [one for one in chosen if (one.total_mib or setup.min_memory_mib) < setup.min_memory_mib]
    large = [one for one in chosen if (one.total_mib or 0) > setup.max_memory_mib]
    found = (
        (wrong, f"compute capability {_capabilities(wrong)}; it is made for {setup.compute_capability}"),
        (small, f"{_sizes(small)} of memory; at least {setup.min_memory_mib} MiB needed"),
        (large, f"{_sizes(large)} of memory; its numbers are made for at most {setup.max_memory_mib} MiB"),
    )
    number_reasons = _number_reasons(setup, chosen)
    reasons = (*(text for ones, text in found if ones), *number_reasons)
    return reasons, (_capability_gap(setup, wrong), len(number_reasons), _memory_gap_mib(setup, small, large))


def _capability_gap(setup: GpuSetup, wrong: Sequence[Device]) -> int:
    major, minor = setup.capability
    own = [one.compute_capability for one in wrong if one.compute_capability is not None]
    return max((abs(10 * (one[0] - major) + one[1] - minor) for one in own), default=0)


def _memory_gap_mib(setup: GpuSetup, small: Sequence[Device], large: Sequence[Device]) -> int:
    missing = (setup.min_memory_mib - one.total_mib for one in small if one.total_mib is not None)
    excess = (one.total_mib - setup.max_memory_mib for one in large if one.total_mib is not None)
    return max((*missing, *excess), default=0)


def _has_capability(device: Device, setup: GpuSetup) -> bool:
    return device.compute_capability in (setup.capability, None)


def _has_memory(device: Device, setup: GpuSetup) -> bool:
    return device.total_mib is None or setup.min_memory_mib <= device.total_mib <= setup.max_memory_mib


def _named(setup: GpuSetup, available: Sequence[Device]) -> tuple[Device, ...]:
    found = (find(available, uuid) for uuid in setup.uuids)
    return tuple(device for device in found if device is not None)


def _number_reasons(setup: GpuSetup, fitting: Sequence[Device]) -> tuple[str, ...]:
    missing = [uuid for uuid in setup.uuids if uuid not in {one.uuid for one in fitting}]
    if missing:
        return (f"its GPU {', '.join(missing)} is not there, or is of another kind",)
    if len(fitting) < setup.count:
        return (f"{len(fitting)} GPU(s) of the kind; it needs {setup.count}",)
    if setup.count > 1 and any(one.is_mig for one in fitting):
        return ("MIG slices cannot work together",)
    return ()


def _rank(device: Device, setup: GpuSetup) -> tuple[float, ...]:
    return (
        _has_capability(device, setup),
        _has_memory(device, setup),
        device.free_mib or 0,
    )


def _without_gpu(matches: Sequence[Match], nvml: Nvml) -> Choice:
    reason = _no_gpu_reason(nvml)
    has_unreadable_gpu = (nvml.error is not None and nvml.error not in _NO_GPU_ERRORS) or bool(nvml.gpus)
    if has_unreadable_gpu:
        return Choice(None, f"{reason}: repair that (`graft check` says how), or start with PROFILE=cpu")
    cpu = next((one.profile for one in matches if one.profile.gpu is None), None)
    return Choice(cpu, reason if cpu else f"{reason}, and there is no profile that does without")


def _why(first: Match, others: Sequence[Match]) -> str:
    also = f"; also suitable: {', '.join(one.profile.name for one in others)}" if others else ""
    return f"{first.profile.name} suits this machine: {'; '.join(first.reasons)}{also}"


def _preference(one: Match) -> tuple[object, ...]:
    """The GPUs named first, then most GPUs, the newest architecture, the memory range that fits most closely."""
    setup = one.profile.gpu
    assert setup is not None
    major, minor = setup.capability
    width_mib = setup.max_memory_mib - setup.min_memory_mib
    return (not setup.uuids, -setup.count, -major, -minor, width_mib, one.profile.name)


def _no_gpu_reason(nvml: Nvml) -> str:
    if nvml.error is not None:
        return f"no usable NVIDIA GPU (NVML: {nvml.error})"
    broken = [f"GPU {gpu.index}: {gpu.error}" for gpu in nvml.gpus if gpu.error is not None]
    if broken:
        return f"no usable NVIDIA GPU ({'; '.join(broken)})"
    return "no usable NVIDIA GPU (MIG mode without an instance)" if nvml.gpus else "no NVIDIA GPU"


def _capabilities(chosen: Sequence[Device]) -> str:
    known = [one.compute_capability for one in chosen if one.compute_capability is not None]
    return ", ".join(dict.fromkeys(f"{major}.{minor}" for major, minor in known))


def _sizes(chosen: Sequence[Device]) -> str:
    return ", ".join(dict.fromkeys(f"{one.total_mib} MiB" for one in chosen))


def _described(chosen: Sequence[Device]) -> str:
    """Name the devices with what profiles are matched by, equal ones once: `2 x NVIDIA GeForce RTX 3090 (8.6, ...)`."""
    names = [f"{one.name or 'GPU'} ({_capabilities([one]) or 'unknown'}, {_memory(one)})" for one in chosen]
    counted = ((names.count(name), name) for name in dict.fromkeys(names))
    return ", ".join(f"{count} x {name}" if count > 1 else name for count, name in counted)


def _memory(device: Device) -> str:
    return "memory unknown" if device.total_mib is None else f"{device.total_mib} MiB"
