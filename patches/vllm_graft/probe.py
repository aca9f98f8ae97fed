"""Compiles and runs FP8 cast kernels on the first visible GPU; `detect` starts it as a process of its own.

This is the only module that starts CUDA, which is why no other imports it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_graft.detect import Fp8Cast, Fp8Probe
from vllm_graft.records import to_json

# One value that each format rounds: to 3 bits of mantissa (e4m3, e4b15) and to 2 (e5m2).
_INPUT = 1.1
_FORMATS = (("float8e4nv", 1.125), ("float8e4b15", 1.125), ("float8e5", 1.0))


@triton.jit  # type: ignore[untyped-decorator]
def _round_trip(source, target, FORMAT: tl.constexpr):  # type: ignore[no-untyped-def]
    value = tl.load(source)
    tl.store(target, value.to(FORMAT).to(tl.float32))


def run() -> Fp8Probe:
    """Cast one value to each of Triton's FP8 formats and back, on the GPU."""
    return Fp8Probe(casts=tuple(_cast(name, expected) for name, expected in _FORMATS), reason="")


def _cast(name: str, expected: float) -> Fp8Cast:
    source = torch.full((1,), _INPUT, device="cuda")
    target = torch.zeros_like(source)
    try:
        _round_trip[(1,)](source, target, getattr(tl, name))
        found = target.item()
    except Exception as error:  # noqa: BLE001 - a compiler can fail in any way, and how it does is the answer
        # Triton quotes the source line first and says last what is wrong with it.
        return Fp8Cast(name, works=False, reason=f"{type(error).__name__}: {error}".strip().splitlines()[-1])
    works = found == expected
    return Fp8Cast(name, works, "" if works else f"{_INPUT} became {found}, not {expected}")


if __name__ == "__main__":
    print(to_json(run()))
