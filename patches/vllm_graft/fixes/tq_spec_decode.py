"""TurboQuant KV cache: speculation as decode, and mixed batches judged request by request.

Three faults of vLLM's TurboQuant backend are one fix, since one replacement removes all of them and none of its parts
stands alone: verifying drafts in the decode kernel, with lengths from the device, is what makes FULL graphs right
(tq-spec-fullgraph) and rejected drafts harmless (tq-optimistic-lengths), and a batch that holds such rows beside
prompts has to be cut by request (tq-mixed-batch).  The last of them needs no speculation, so neither does the fix.
The proof shows each fault and each repair by name.  vLLM 0.32.0 has the same backend but for one line of the ROCm
path, and the same faults.
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
    title="TurboQuant verifies drafts as decodes and judges a batch request by request",
    symptom=(
        "with speculation in FULL CUDA graphs replies turn to repetition and tool calls break (tq-spec-fullgraph); "
        "after a rejected draft attention reads past the text (tq-optimistic-lengths); a long new prompt makes the "
        "requests beside it lose their cached prefix (tq-mixed-batch)"
    ),
    upstream=(
        f"{_ISSUES}/52475",
        f"{_ISSUES}/53180",
        f"{_ISSUES}/40831",
        f"{_ISSUES}/40880",
        f"{_ISSUES}/46460",
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
            "vllm.v1.attention.backend:AttentionMetadataBuilder",
            "vllm.v1.attention.backend:CommonAttentionMetadata",
            "vllm.v1.worker.utils:AttentionGroup",
        ),
    ),
    fingerprints={"0.32.0": "a5dc281da779cab1", "0.33.0": "ed4564dcb4868d9a"},
    build=build,
    extension=Extension(install=install, current=current, restore=restore),
    reached=reached,
    remove_when="vLLM #53406 or #53410, and #46461, are in the oldest supported version",
    proof="tests/patches/test_tq_spec_decode.py",
)
