"""The devices that a server can be given: whole GPUs, and MIG slices in place of a GPU that is cut up; pure."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from launcher.fit.request import VISIBLE_SHARE
from launcher.host.facts import Gpu, GpuProcess, Nvml


@dataclass(frozen=True)
class Device:
    """A GPU or a MIG slice, with the memory that is its own."""

    gpu_index: int
    """NVML's index of the GPU that it is, or is a slice of."""
    uuid: str
    name: str | None
    compute_capability: tuple[int, int] | None
    total_mib: int | None
    free_mib: int | None
    display_active: bool | None
    processes: tuple[GpuProcess, ...]
    mig_profile: str | None = None
    is_mig: bool = False

    @property
    def usable_mib(self) -> float | None:
        """Total memory as CUDA, and so vLLM, counts it."""
        return None if self.total_mib is None else self.total_mib * VISIBLE_SHARE

    @property
    def title(self) -> str:
        """Name and UUID, for messages."""
        name = self.name or "GPU"
        return f"{name}{f' MIG {self.mig_profile}' if self.mig_profile else ''} ({self.uuid})"

    def requested_mib(self, utilization: float) -> float | None:
        """Return the memory that vLLM asks for: it refuses to start when less is free (v1/worker/utils.py)."""
        return None if self.usable_mib is None else self.usable_mib * utilization


def devices(nvml: Nvml) -> tuple[Device, ...]:
    """Return what can be given to a server, in NVML's order; cards that NVML cannot read are left out."""
    return tuple(device for gpu in nvml.gpus if gpu.error is None and gpu.uuid for device in _of(gpu))


def find(available: Sequence[Device], asked: int | str) -> Device | None:
    """Return the device that a user means by an NVML index or a UUID."""
    wanted = str(asked)
    return next(
        (
            device
            for device in available
            if device.uuid == wanted or (not device.is_mig and str(device.gpu_index) == wanted)
        ),
        None,
    )


def best(available: Sequence[Device], count: int, rank: Callable[[Device], tuple[float, ...]]) -> tuple[Device, ...]:
    """Return the `count` devices of highest rank in NVML's order, or all of them where there are fewer.

    A set ranks as its lowest member does; among sets of one rank, cards of one compute capability come first.
    """
    ordered = sorted(available, key=lambda device: (rank(device), -device.gpu_index), reverse=True)
    sets = [*_alike(ordered, count), tuple(ordered[:count])]
    chosen = max(sets, key=lambda devices: min(map(rank, devices), default=()))
    return tuple(device for device in available if device in chosen)


def index_pairs(chosen: Sequence[Device]) -> Iterator[tuple[int, int]]:
    """Yield NVML's indices of each pair of devices that are on different GPUs."""
    return ((one.gpu_index, two.gpu_index) for one, two in combinations(chosen, 2) if one.gpu_index != two.gpu_index)


def _alike(ordered: Sequence[Device], count: int) -> Iterator[tuple[Device, ...]]:
    for capability in dict.fromkeys(device.compute_capability for device in ordered):
        alike = tuple(device for device in ordered if device.compute_capability == capability)
        if len(alike) >= count:
            yield alike[:count]


def _of(gpu: Gpu) -> Iterator[Device]:
    assert gpu.uuid is not None
    if not gpu.mig_mode:
        yield Device(
            gpu_index=gpu.index,
            uuid=gpu.uuid,
            name=gpu.name,
            compute_capability=gpu.compute_capability,
            total_mib=gpu.total_mib,
            free_mib=gpu.free_mib,
            display_active=gpu.display_active,
            processes=gpu.processes,
        )
    for mig in gpu.mig_devices if gpu.mig_mode else ():
        yield Device(
            gpu_index=gpu.index,
            uuid=mig.uuid,
            name=gpu.name,
            compute_capability=gpu.compute_capability,
            total_mib=mig.total_mib,
            free_mib=mig.free_mib,
            display_active=gpu.display_active,
            processes=(),
            mig_profile=mig.profile,
            is_mig=True,
        )
