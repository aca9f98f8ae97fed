"""A plugin of vLLM for measurements: TurboQuant's kernels take this card for an RTX 3090 (compute capability 8.6).

vLLM's own then keeps FP8 keys as e4b15, which clips at 1.75; those of vllm_graft make e4m3 by integer operations.
"""

from __future__ import annotations

import importlib.util

CAPABILITY = (8, 6)
_DEVICES = 16


def register() -> None:
    """Set what both read when a kernel is launched; called by vLLM in each of its processes."""
    from vllm.v1.attention.ops import triton_turboquant_decode
    from vllm.v1.attention.ops.turboquant_soa import triton_turboquant_decode as soa_decode

    for module in (triton_turboquant_decode, soa_decode):
        module._FP8_E4B15.update(dict.fromkeys(range(_DEVICES), 1))
    if importlib.util.find_spec("vllm_graft") is not None:
        from vllm_graft.attention import card

        card.AS_CAPABILITY = CAPABILITY
