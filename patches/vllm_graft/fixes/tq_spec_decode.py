"""TurboQuant KV cache: our own kernels, speculation as decode, and mixed batches judged request by request.

Several faults of vLLM's TurboQuant backend are one fix, since they share one replacement: the backend's class.

| fault | what removes it |
| --- | --- |
| tq-spec-fullgraph, tq-optimistic-lengths | verification is decoding, with lengths from the device |
| tq-mixed-batch | a batch is cut by request |
| k8v4-key-clip | e4m3 keys are e4m3 on every card |
| tq-workspace-unbudgeted, tq-continuation-copies | a prefix is read in a workspace of fixed size, reserved at load |
| tq-decode-per-q-head, tq-verify-loop | one kernel reads each packed byte once |
| jit-on-first-use | kernels are compiled before the first request |

None of them needs speculation, so neither does the fix.  The proof shows each by name.  vLLM 0.32.0 has the same
backend but for one line of the ROCm path, and the same faults.
"""

from __future__ import annotations

from typing import Any

from vllm_graft.patch import Extension, Patch, Process, Target, When

_STOCK = "vllm.v1.attention.backends.turboquant_attn"
_ISSUES = "https://github.com/vllm-project/vllm/issues"


def build(original: Any) -> Any:
    """The subclass of vLLM's backend that takes its place.

    Raises:
        TypeError: the backend in place is not the one that this subclass was written for.

    """
    from vllm_graft.attention.turboquant import SpecDecodeBackend

    if SpecDecodeBackend.__base__ is not original:
        raise TypeError(f"{SpecDecodeBackend.__qualname__} extends {SpecDecodeBackend.__base__}, not {original}")
    return SpecDecodeBackend


def current() -> Any:
    """The class behind TURBOQUANT at this moment."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    return AttentionBackendEnum.TURBOQUANT.get_class()


def install(replacement: Any) -> None:
    """Put a class behind TURBOQUANT."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.TURBOQUANT)(replacement)


def restore(original: Any) -> None:
    """Put the former class back behind TURBOQUANT."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    AttentionBackendEnum.TURBOQUANT.clear_override()
    if current() is not original:
        install(original)


def reached() -> Any:
    """The class that a layer gets: `get_attn_backend` resolves the path that the platform takes from the enum."""
    from vllm.utils.import_utils import resolve_obj_by_qualname
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    return resolve_obj_by_qualname(AttentionBackendEnum["TURBOQUANT"].get_path())


PATCH = Patch(
    id="tq-spec-decode",
    title="TurboQuant by Graft's kernels: drafts are verified as decodes, a batch is judged request by request",
    symptom=(
        "with speculation in FULL CUDA graphs replies turn to repetition and tool calls break (tq-spec-fullgraph); "
        "after a rejected draft attention reads past the text (tq-optimistic-lengths); a long new prompt makes the "
        "requests beside it lose their cached prefix (tq-mixed-batch); below compute capability 8.9 turboquant_k8v4 "
        "clips keys at 1.75 (k8v4-key-clip); a long prompt takes up to 3 GiB that no plan counts "
        "(tq-workspace-unbudgeted, tq-continuation-copies) and compiles kernels while it waits (jit-on-first-use); "
        "long contexts decode many times slower than without compression (tq-decode-per-q-head, tq-verify-loop)"
    ),
    upstream=(
        f"{_ISSUES}/52475",
        f"{_ISSUES}/53180",
        f"{_ISSUES}/40831",
        f"{_ISSUES}/40880",
        f"{_ISSUES}/46460",
        f"{_ISSUES}/40420",
    ),
    processes=(Process.ENGINE_CORE, Process.WORKER),
    affects=">=0.32.0,<=0.33.0",
    when=When(kv_cache_dtypes=("turboquant_*",)),
    kind="register",
    target=Target(
        f"{_STOCK}:TurboQuantAttentionBackend",
        reads=(
            _STOCK,
            "vllm.v1.attention.ops.triton_turboquant_decode:triton_turboquant_decode_attention",
            "vllm.v1.attention.ops.triton_turboquant_store",
            "vllm.model_executor.layers.quantization.turboquant.config",
            "vllm.model_executor.layers.quantization.turboquant.centroids:get_centroids",
            "vllm.model_executor.warmup.jit_warmup:VllmJitKernel",
            "vllm.model_executor.warmup.jit_warmup:JitWarmupRegistry",
            "vllm.v1.attention.backend:AttentionMetadataBuilder",
            "vllm.v1.attention.backend:CommonAttentionMetadata",
            "vllm.v1.worker.utils:AttentionGroup",
            "vllm.v1.worker.workspace:WorkspaceManager",
        ),
    ),
    fingerprints={"0.32.0": "4e50b50413136510", "0.33.0": "da26cedcd5065fcb"},
    build=build,
    extension=Extension(install=install, current=current, restore=restore),
    reached=reached,
    remove_when="the oldest supported vLLM has #53406 or #53410, #46461, #40420, e4m3 keys below 8.9 and a fast decode",
    proof="tests/patches/test_tq_spec_decode.py",
)
