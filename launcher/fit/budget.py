"""Everything on a card that is not the KV pool: fitted or assumed, never exact.

Coefficients are fitted to public boots of vLLM 0.20 to 0.28 with Qwen3.5/3.6-27B, and compared with vLLM 0.33.0 on one
H200 (tests/gpu/results/fit_boots.json). Every figure is per GPU, in bytes.
"""

import math
from dataclasses import dataclass

from vllm_graft.attention.kernels.workspace import WORKSPACE_BYTES

from launcher.fit.geometry import Geometry
from launcher.fit.kv import KvLayout, kv_dtype
from launcher.fit.request import GIB, Basis, FitRequest, Settings
from launcher.fit.weights import PART_NAMES

ACTIVATION_BYTES_PER_TOKEN = 31e3
ACTIVATION_SHARDED_BYTES_PER_TOKEN = 140e3
FITTED_SHAPE = (5120, 64)
"""Hidden size and layers of the model that the coefficients were fitted to; others scale by the hidden size."""
VISION_PROFILE_GIB = 0.45
ONE_GRAPH_GIB = 0.1
ALL_GRAPHS_GIB = 0.4
DEFAULT_GRAPHS = 51
"""Sizes that vLLM captures by default up to 512 tokens, the case that the full-graph figure is from."""
MAX_CAPTURE_TOKENS = 512
TURBOQUANT_DECODE_TOKENS = 128
"""Up to so many tokens a chunk uses the decode kernel, and no workspace (turboquant_attn.py:84)."""
TURBOQUANT_DECODE_SPLITS = 32
"""Pieces that the decode kernel cuts a context into (`AttentionConfig.tq_max_kv_splits_for_cuda_graph`)."""
GDN_CHUNK_TOKENS = 64
ALLOCATOR_SLACK_SHARE = 0.7
"""What torch's allocator holds beyond what is allocated, for each byte of working memory: 0.5 to 1.04 in the H200's
boots, which ran without the expandable segments that the plan sets."""
PHYSICAL_RESERVE_BYTES = GIB // 2
UNCALIBRATED_ERROR_BYTES = GIB // 2
"""Smallest error of a prediction without a boot of the same configuration."""
OTHER_MODEL_ERROR_BYTES = GIB
CALIBRATED_ERROR_BYTES = GIB // 4
"""Of one boot; identical cold boots differ (vllm-project/vllm#44209)."""


@dataclass(frozen=True, slots=True)
class Term:
    """One share of a card's memory."""

    key: str
    name: str
    size_bytes: int
    basis: Basis
    error_bytes: int
    note: str


def weight_terms(request: FitRequest) -> tuple[Term, ...]:
    """Weights by part; tensor parallelism shards every part."""
    settings, tp = request.settings, request.settings.tensor_parallel_size
    return tuple(
        Term(
            f"weights.{part.part}",
            PART_NAMES[part.part],
            math.ceil(part.size_bytes / tp),
            part.basis,
            math.ceil(part.error_bytes / tp),
            part.note,
        )
        for part in request.weights.loaded(settings.language_model_only, settings.mtp)
    )


def runtime_terms(request: FitRequest, layout: KvLayout) -> tuple[Term, ...]:
    """What vLLM subtracts from its budget besides the weights: activations, vision, graphs, non-torch memory."""
    terms = [_activations(request)]
    if request.weights.has_vision and not request.settings.language_model_only:
        terms.append(
            Term("vision", "vision encoder profiling", _gib(VISION_PROFILE_GIB), "fitted", _gib(0.2), "one encoder run")
        )
    terms.append(_graphs(request.settings))
    checkpoint = _checkpoint_buffer(request, layout)
    if checkpoint is not None:
        terms.append(checkpoint)
    if _graft_serves(request.settings):
        note = "of Graft's kernels, whatever the context: reserved while the model loads"
        terms.append(Term("turboquant_workspace", "TurboQuant workspace", WORKSPACE_BYTES, "exact", 0, note))
    terms.append(_non_torch(request))
    return tuple(terms)


def outside_terms(request: FitRequest, layout: KvLayout, context_tokens: int) -> tuple[Term, ...]:
    """What vLLM allocates on top of its budget, because profiling does not see it."""
    pair = turboquant_continuation_bytes(request, layout, context_tokens)
    workspace = turboquant_workspace_bytes(request, layout, context_tokens)
    terms = []
    if workspace:
        terms.append(
            Term(
                "turboquant_workspace",
                "TurboQuant workspace",
                workspace + pair,
                "fitted",
                pair // 2,
                "K and V of one whole context in 16 bits, reserved once, and again by a long continuation chunk",
            )
        )
    scratch = _gdn_scratch_bytes(request, layout)
    if scratch:
        terms.append(
            Term(
                "gdn_prefill_scratch",
                "GDN prefill scratch",
                scratch,
                "assumed",
                scratch // 2,
                f"states of {request.settings.max_num_batched_tokens} tokens in chunks of {GDN_CHUNK_TOKENS}",
            )
        )
    slack = round(ALLOCATOR_SLACK_SHARE * (_activations(request).size_bytes + scratch + pair))
    note = "freed pieces that torch keeps: as on an H200 without expandable segments"
    return (*terms, Term("allocator_slack", "allocator slack", slack, "fitted", slack // 2, note))


def other_use_bytes(request: FitRequest) -> int:
    """What other processes hold on the card now; 0 where the card is not at hand."""
    free = request.card.free_bytes
    return 0 if free is None else max(0, request.card.total_bytes - free)


def requested_bytes(request: FitRequest) -> int:
    """What vLLM claims under the utilization (v1/worker/utils.py:717-772)."""
    return math.ceil(request.card.total_bytes * request.settings.gpu_memory_utilization)


def load_peak_bytes(request: FitRequest) -> int:
    """Largest use while weights load: the drafter's own embedding and head lie beside the target's until they are
    shared (models/qwen3_5_mtp.py:84-87, v1/worker/gpu/spec_decode/eagle/utils.py:74-119)."""
    weights = sum(term.size_bytes for term in weight_terms(request))
    if not request.settings.mtp:
        return weights
    matrices = 1 if request.geometry.tie_word_embeddings else 2
    return weights + math.ceil(matrices * request.geometry.embedding_bytes / request.settings.tensor_parallel_size)


def turboquant_continuation_bytes(request: FitRequest, layout: KvLayout, context_tokens: int) -> int:
    """K and V of a whole context in 16 bits, which vLLM's own backend computes long continuation chunks from
    (v1/attention/backends/turboquant_attn.py:227-262, :1048-1056)."""
    settings = request.settings
    if not kv_dtype(settings.kv_cache_dtype).turboquant or settings.turboquant_fix:
        return 0
    if settings.max_num_batched_tokens <= TURBOQUANT_DECODE_TOKENS:
        return 0
    heads = max(1, request.geometry.num_key_value_heads // settings.tensor_parallel_size)
    length = math.ceil(max(0, context_tokens - 1) / layout.block_tokens) * layout.block_tokens
    return 2 * heads * length * request.geometry.head_dim * 2


def turboquant_workspace_bytes(request: FitRequest, layout: KvLayout, context_tokens: int) -> int:
    """Workspace that vLLM's own metadata builder reserves after profiling: the larger of a continuation pair and the
    decode kernel's scratch, which share it."""
    settings, geometry = request.settings, request.geometry
    if not kv_dtype(settings.kv_cache_dtype).turboquant or settings.turboquant_fix:
        return 0
    heads = geometry.num_attention_heads // settings.tensor_parallel_size
    # Partial results and their log-sums in 32 bits, the result in 16, its log-sum in 32.
    per_head = TURBOQUANT_DECODE_SPLITS * (geometry.head_dim + 1) * 4 + geometry.head_dim * 2 + 4
    pair = turboquant_continuation_bytes(request, layout, context_tokens)
    return max(pair, settings.max_num_seqs * heads * per_head)


def _graft_serves(settings: Settings) -> bool:
    return settings.turboquant_fix and kv_dtype(settings.kv_cache_dtype).turboquant


def capture_sizes(max_num_seqs: int, num_speculative_tokens: int) -> tuple[int, ...]:
    """Token counts that vLLM 0.33.0 captures by default (config/vllm.py, `_set_cudagraph_sizes`)."""
    query = 1 + num_speculative_tokens
    limit = min(max_num_seqs * query * 2, MAX_CAPTURE_TOKENS)
    grid = [1, 2, 4, *range(8, 256, 8), *range(256, MAX_CAPTURE_TOKENS + 1, 16)]
    sizes = {size for size in grid if size <= limit}
    requests = {max_num_seqs} if query == 1 else {count for count in grid if count < max_num_seqs} | {max_num_seqs}
    sizes.update(count * query for count in requests if count * query <= limit)
    return tuple(sorted(sizes))


def combined_error_bytes(request: FitRequest, terms: tuple[Term, ...]) -> int:
    """Error of the predicted KV memory: independent errors combined, and never less than boots have shown."""
    if request.settings.kv_cache_memory_bytes is not None:
        return 0
    combined = math.ceil(math.sqrt(sum(term.error_bytes**2 for term in terms)))
    if request.calibration is not None:
        return max(request.calibration.spread_bytes, CALIBRATED_ERROR_BYTES // request.calibration.boots)
    return max(combined, UNCALIBRATED_ERROR_BYTES if is_fitted(request.geometry) else OTHER_MODEL_ERROR_BYTES)


def is_fitted(geometry: Geometry) -> bool:
    """Whether the coefficients were fitted to a model of this shape; for others they are scaled."""
    return geometry.is_hybrid and (geometry.hidden_size, geometry.num_hidden_layers) == FITTED_SHAPE


def _activations(request: FitRequest) -> Term:
    settings, geometry = request.settings, request.geometry
    per_token = ACTIVATION_BYTES_PER_TOKEN + ACTIVATION_SHARDED_BYTES_PER_TOKEN / settings.tensor_parallel_size
    size = settings.max_num_batched_tokens * per_token * geometry.hidden_size / FITTED_SHAPE[0]
    fitted = is_fitted(geometry)
    return Term(
        "activations",
        "activation peak",
        round(size),
        "fitted" if fitted else "assumed",
        round(size * (0.3 if fitted else 0.6)),
        f"{settings.max_num_batched_tokens} tokens at once"
        + ("" if fitted else "; scaled by hidden size from a model of 5120"),
    )


def _graphs(settings: Settings) -> Term:
    mode = settings.cudagraph_mode
    if mode == "NONE":
        return Term("cuda_graphs", "CUDA graphs", 0, "exact", 0, "none are captured")
    if mode == "PIECEWISE":
        return Term("cuda_graphs", "CUDA graphs", _gib(ONE_GRAPH_GIB), "fitted", _gib(0.2), "piecewise graphs")
    sizes = len(capture_sizes(settings.max_num_seqs, settings.num_speculative_tokens))
    size = _gib(ONE_GRAPH_GIB + ALL_GRAPHS_GIB * min(1.0, sizes / DEFAULT_GRAPHS))
    return Term("cuda_graphs", "CUDA graphs", size, "assumed", _gib(0.2), f"full graphs of {sizes} sizes")


def _non_torch(request: FitRequest) -> Term:
    several = request.settings.tensor_parallel_size > 1
    major = request.card.compute_capability[0]
    basis: Basis = "fitted" if major in (8, 12) else "assumed"
    size = (0.45 if several else 0.35) if major == 8 else (0.75 if several else 0.60)
    note = "CUDA context, kernels" + (", NCCL" if several else "")
    return Term("non_torch", "non-torch memory", _gib(size), basis, _gib(0.2), note)


def _checkpoint_buffer(request: FitRequest, layout: KvLayout) -> Term | None:
    """States that FlashInfer's GDN prefill exports from inside a chunk; part of the profiled peak."""
    if not layout.rules.gdn_prefill_checkpoint_blocks:
        return None
    states = math.ceil(request.settings.max_num_batched_tokens / layout.block_tokens)
    size = states * _state_elements(request) * 4
    return Term("gdn_checkpoints", "GDN prefill checkpoints", size, "assumed", size, f"{states} states of 4 bytes")


def _gdn_scratch_bytes(request: FitRequest, layout: KvLayout) -> int:
    """Chunk states of the Triton kernel (third_party/flash_linear_attention/ops/chunk_delta_h.py:302-312)."""
    if not request.geometry.is_hybrid or layout.rules.gdn_prefill_checkpoint_blocks:
        return 0
    return math.ceil(request.settings.max_num_batched_tokens / GDN_CHUNK_TOKENS) * _state_elements(request) * 2


def _state_elements(request: FitRequest) -> int:
    geometry = request.geometry
    values = geometry.linear_num_value_heads * geometry.linear_value_head_dim
    return values // request.settings.tensor_parallel_size * geometry.linear_key_head_dim


def _gib(value: float) -> int:
    return round(value * GIB)
