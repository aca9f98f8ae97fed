"""Combinations that vLLM would refuse, or that no true figure exists for, each with its rule."""

from collections.abc import Iterator
from dataclasses import dataclass

from launcher.fit.geometry import FitError
from launcher.fit.kv import KV_DTYPES
from launcher.fit.request import FitRequest

FP8_CAPABILITY = (8, 9)


@dataclass(frozen=True, slots=True)
class Refusal:
    """One rule that the request breaks."""

    rule: str
    message: str
    remedy: str


class FitRefused(FitError):
    """The request breaks at least one rule."""

    def __init__(self, refusals: tuple[Refusal, ...]) -> None:
        super().__init__("\n".join(f"{one.message} ({one.rule}). {one.remedy}" for one in refusals))
        self.refusals = refusals


def refusals(request: FitRequest) -> tuple[Refusal, ...]:
    """Return every rule that the request breaks."""
    return (
        *_kv_dtype(request),
        *_tensor_parallelism(request),
        *_speculation(request),
        *_context(request),
    )


def _kv_dtype(request: FitRequest) -> Iterator[Refusal]:
    name, geometry = request.settings.kv_cache_dtype, request.geometry
    dtype = KV_DTYPES.get(name)
    if dtype is None:
        yield Refusal("kv-cache-dtype", f"kv_cache_dtype: got {name!r}", f"Use one of {', '.join(KV_DTYPES)}.")
        return
    yield from hardware_refusals(name, request.card.compute_capability, turboquant_fix=request.settings.turboquant_fix)
    if dtype.rotated and geometry.head_dim & (geometry.head_dim - 1):
        yield Refusal(
            "rotated-preset-head-size",
            f"kv_cache_dtype {name} with head_dim {geometry.head_dim}: its keys are rotated by a Hadamard matrix, "
            "which needs a power of two",
            "Use turboquant_k8v4 or fp8.",
        )
    if dtype.turboquant and not geometry.is_hybrid:
        yield Refusal(
            "turboquant-boundary-layers",
            f"kv_cache_dtype {name} with a model of attention layers only: vLLM keeps its first and last two layers "
            "uncompressed there, in blocks whose size depends on the attention backend; that is not modelled",
            "Use fp8 or int8_per_token_head.",
        )


def hardware_refusals(kv_cache_dtype: str, capability: tuple[int, int], *, turboquant_fix: bool) -> Iterator[Refusal]:
    """Return the rules that a KV cache's format breaks on a GPU, whatever the model; unknown formats break none.

    `turboquant_fix`: keys of turboquant_k8v4 are stored by Graft's kernel, which needs no FP8 hardware.
    """
    dtype, name = KV_DTYPES.get(kv_cache_dtype), kv_cache_dtype
    if dtype is None:
        return
    if dtype.needs_fp8_hardware and capability < FP8_CAPABILITY:
        yield Refusal(
            "fp8-kv-needs-capability-8.9",
            f"kv_cache_dtype {name} on compute capability {capability[0]}.{capability[1]}: the Triton backend refuses "
            "every FP8 KV cache below 8.9, and FlashInfer takes fp8_e5m2 there",
            "Use int8_per_token_head, or fp8_e5m2 with FlashInfer.",
        )
    if name == "turboquant_k8v4" and capability < FP8_CAPABILITY and not turboquant_fix:
        yield Refusal(
            "turboquant-k8v4-needs-the-fix",
            f"kv_cache_dtype {name} on compute capability {capability[0]}.{capability[1]} without the fix "
            "tq-spec-decode: below 8.9 vLLM itself keeps keys in a format that clips them at 1.75, which makes "
            "attention wrong",
            "Require the fix again, or write serve.kv_cache_dtype: int8_per_token_head.",
        )


def _tensor_parallelism(request: FitRequest) -> Iterator[Refusal]:
    tp, geometry = request.settings.tensor_parallel_size, request.geometry
    if tp < 1 or tp > request.cards:
        yield Refusal(
            "tensor-parallel-cards",
            f"tensor_parallel_size {tp} with {request.cards} card(s)",
            "Set it to the number of cards.",
        )
        return
    heads = [("num_attention_heads", geometry.num_attention_heads)]
    if geometry.is_hybrid:
        heads += [
            ("linear_num_key_heads", geometry.linear_num_key_heads),
            ("linear_num_value_heads", geometry.linear_num_value_heads),
        ]
    kv = geometry.num_key_value_heads
    uneven = [f"{name} {count}" for name, count in heads if count % tp]
    if kv % tp and tp % kv:
        uneven.append(f"num_key_value_heads {kv}")
    if uneven:
        yield Refusal(
            "tensor-parallel-heads",
            f"tensor_parallel_size {tp} does not divide {', '.join(uneven)}",
            "Use a number of cards that divides them.",
        )


def _speculation(request: FitRequest) -> Iterator[Refusal]:
    if request.settings.mtp and not request.geometry.mtp_layers:
        yield Refusal(
            "mtp-head",
            f"{request.settings.num_speculative_tokens} speculative tokens by MTP, "
            f"and {request.geometry.source} lists no MTP layer",
            "Leave out speculation, or use ngram.",
        )


def _context(request: FitRequest) -> Iterator[Refusal]:
    length, limit = request.settings.max_model_len, request.geometry.max_position_embeddings
    if length is not None and length > limit:
        yield Refusal(
            "context-above-model",
            f"max_model_len {length} is above the model's max_position_embeddings {limit}",
            f"Use at most {limit}.",
        )
