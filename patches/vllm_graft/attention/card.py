"""What the attention kernels need to know of the card that they run on."""

from __future__ import annotations

from dataclasses import dataclass

import torch

AS_CAPABILITY: tuple[int, int] | None = None
"""Set by tests on a newer card to run there what an older one runs, such as the integer conversions below 8.9."""

_TWO_FLASH_PROGRAMS_BYTES = 2 * 96 * 1024
_INTERPRETER = (8, 0)


@dataclass(frozen=True)
class Card:
    """One CUDA device; `shared_bytes` is the shared memory of a multiprocessor."""

    capability: tuple[int, int]
    multiprocessors: int
    shared_bytes: int

    @property
    def hardware_fp8(self) -> bool:
        """Whether the conversion to e4m3 is an instruction."""
        from vllm_graft.attention.kernels.float8 import MIN_HARDWARE_CAPABILITY  # imports Triton

        return self.capability >= MIN_HARDWARE_CAPABILITY

    @property
    def flash_slots(self) -> int:
        """Programs of flash attention that run at a time: each takes 96 KiB at head size 256."""
        return self.multiprocessors * (2 if self.shared_bytes >= _TWO_FLASH_PROGRAMS_BYTES else 1)


def card(device: torch.device) -> Card:
    """The card behind a device; the CPU, where Triton's interpreter runs kernels, is a small one without FP8."""
    if device.type != "cuda":
        return Card(AS_CAPABILITY or _INTERPRETER, 2, 0)
    properties = torch.cuda.get_device_properties(device)
    capability = AS_CAPABILITY or (properties.major, properties.minor)
    return Card(capability, properties.multi_processor_count, properties.shared_memory_per_multiprocessor)
