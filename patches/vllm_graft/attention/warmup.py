"""Compiles every kernel that serving will meet, through vLLM's registry of kernels to warm up.

vLLM runs the registry once the KV cache is bound, before it captures graphs and before it takes requests.
"""

from __future__ import annotations

from typing import Any

from vllm.model_executor.warmup.jit_warmup import VllmJitKernel

Key = tuple[Any, int, int]


class AttentionWarmup(VllmJitKernel[Key]):  # type: ignore[misc]
    """Warms up the kernels of one attention layer, which are those of all layers of its group."""

    CompileKey = tuple

    def get_warmup_keys(self, layer: Any, max_query_len: int, max_requests: int) -> list[Key]:
        """The one key of a layer that verifies up to `max_query_len` tokens of up to `max_requests` requests."""
        return [(layer, max_query_len, max_requests)]

    def compile(self, compile_key: Key) -> None:
        """Run the layer's kernels on its cache; nothing is stored."""
        layer, max_query_len, max_requests = compile_key
        layer.impl.warm_up(layer, max_query_len, max_requests)


WARMUP = AttentionWarmup()
