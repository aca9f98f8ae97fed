"""vLLM's KV block accounting: integer arithmetic without a free parameter.

References are to files of vLLM 0.33.0. Every figure is per GPU; sizes are bytes unless a name says otherwise.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from launcher.fit.geometry import FitError, Geometry

BASE_BLOCK_TOKENS = 16
"""Smallest kernel block of the CUDA attention backends, and `CacheConfig.DEFAULT_BLOCK_SIZE` (config/cache.py:185)."""
CPU_BLOCK_TOKENS = 32
"""Smallest kernel block of the CPU attention backend (v1/attention/backends/cpu_attn.py, 0.32.0)."""
FLASHINFER_GDN_ALIGNMENT = 64
"""Tokens between the states that FlashInfer's GDN prefill exports (qwen_gdn_linear_attn.py)."""
FA4_PAGE_TOKENS = 128
"""Page of FlashAttention 4 at head size 256 (v1/attention/backends/flash_attn.py:328-371)."""
UNPADDED_GROUP_RATIO = 1.5
"""Below this ratio of layer counts the larger one is the group size (v1/core/kv_cache_planning.py:508-532)."""


class KvError(FitError):
    """A combination of model and settings that vLLM refuses, or that is not modelled; the message names the rule."""


@dataclass(frozen=True, slots=True)
class KvDtype:
    """One `--kv-cache-dtype`."""

    name: str
    slot: Callable[[int, int], int]
    """Bytes of one KV head and token, K and V together, from head size and model dtype bytes."""
    bits: float
    """Stored bits per value without scales: the order in which quality falls."""
    needs_fp8_hardware: bool = False
    turboquant: bool = False
    rotated: bool = False
    """Keys are rotated by a Hadamard matrix, which exists for powers of two only."""


def _even(size: int) -> int:
    return size + size % 2


def _bits(head_dim: int, bits: int) -> int:
    return math.ceil(head_dim * bits / 8)


def _turboquant(name: str, key_bits: int, value_bits: int) -> KvDtype:
    """Sizes of model_executor/layers/quantization/turboquant/config.py:129-173; 8-bit keys are plain FP8."""
    key_extra = 0 if key_bits == 8 else 2

    def slot(head_dim: int, _model_bytes: int) -> int:
        return _even(_bits(head_dim, key_bits) + key_extra + _bits(head_dim, value_bits) + 4)

    return KvDtype(name, slot, (key_bits + value_bits) / 2, turboquant=True, rotated=key_bits != 8)


KV_DTYPES = {
    dtype.name: dtype
    for dtype in (
        KvDtype("auto", lambda d, model_bytes: 2 * d * model_bytes, 16),
        KvDtype("bfloat16", lambda d, _: 4 * d, 16),
        KvDtype("float16", lambda d, _: 4 * d, 16),
        KvDtype("fp8", lambda d, _: 2 * d, 8, needs_fp8_hardware=True),
        KvDtype("fp8_e4m3", lambda d, _: 2 * d, 8, needs_fp8_hardware=True),
        KvDtype("fp8_e5m2", lambda d, _: 2 * d, 8),
        KvDtype("fp8_per_token_head", lambda d, _: 2 * d + 8, 8, needs_fp8_hardware=True),
        KvDtype("int8_per_token_head", lambda d, _: 2 * d + 8, 8),
        KvDtype("int4_per_token_head", lambda d, _: d + 8, 4),
        KvDtype("nvfp4", lambda d, _: 2 * (d // 2 + d // 16), 4),
        _turboquant("turboquant_k8v4", 8, 4),
        _turboquant("turboquant_4bit_nc", 4, 4),
        _turboquant("turboquant_k3v4_nc", 3, 4),
        _turboquant("turboquant_3bit_nc", 3, 3),
    )
}


def kv_dtype(name: str) -> KvDtype:
    """Look up a KV dtype by vLLM's name."""
    if name not in KV_DTYPES:
        raise KvError(f"kv_cache_dtype: got {name!r}; known: {', '.join(KV_DTYPES)}")
    return KV_DTYPES[name]


@dataclass(frozen=True, slots=True)
class KvRules:
    """What the block rules take from the platform and the vLLM build instead of the model."""

    block_alignment: int = BASE_BLOCK_TOKENS
    """Tokens that a block is a multiple of."""
    gdn_prefill_checkpoint_blocks: int = 0
    """1 when FlashInfer's GDN prefill keeps one more state per group."""
    null_block_deducted: bool = True
    """Whether admission leaves out the block that the pool never hands out."""


def null_block_deducted(vllm_version: str) -> bool:
    """Whether this vLLM subtracts the null block before it admits a context (kv_cache_planning.py:1534-1564).

    Read in 0.32.0 and 0.33.0; boots up to 0.27.1 did not. Versions between were not read: the safe answer is given.
    """
    release = tuple(int(part) for part in vllm_version.split("+")[0].split(".")[:2])
    return release > (0, 27)


def gdn_prefill_checkpoint(
    geometry: Geometry,
    compute_capability: tuple[int, int] | None,
    cuda_major: int,
    prefix_caching: bool,
    gdn_prefill_backend: str = "auto",
) -> int:
    """Return 1 when GDN prefill runs on FlashInfer and prefix caching is on, else 0.

    The choice is `_resolve_gdn_prefill_backend` (model_executor/layers/mamba/gdn/qwen_gdn_linear_attn.py:148-271).
    """
    if not geometry.is_hybrid or not prefix_caching or compute_capability is None:
        return 0
    if gdn_prefill_backend not in ("auto", "flashinfer"):
        return 0
    if compute_capability == (9, 0):
        return 1
    blackwell = compute_capability[0] in (10, 12)
    return int(blackwell and geometry.linear_key_head_dim == 128 and cuda_major >= 13)


def block_alignment(
    geometry: Geometry,
    compute_capability: tuple[int, int] | None,
    kv_cache_dtype: str,
    checkpoint_blocks: int,
) -> int:
    """Return the tokens that a block is a multiple of (platforms/interface.py:1062-1113); no capability: the CPU."""
    base = BASE_BLOCK_TOKENS
    if compute_capability is None:
        base = CPU_BLOCK_TOKENS
    elif compute_capability[0] in (10, 11) and geometry.head_dim == 256 and kv_dtype(kv_cache_dtype).bits == 16:
        base = FA4_PAGE_TOKENS
    return math.lcm(base, FLASHINFER_GDN_ALIGNMENT) if checkpoint_blocks else base


def slot_bytes(geometry: Geometry, kv_cache_dtype: str) -> int:
    """Bytes of one KV head and token in one layer, K and V together."""
    return kv_dtype(kv_cache_dtype).slot(geometry.head_dim, geometry.model_dtype_bytes)


def gdn_state_bytes(geometry: Geometry, tensor_parallel_size: int, num_speculative_tokens: int) -> int:
    """Bytes of one GDN layer's state in one slot (model_executor/layers/mamba/mamba_utils.py:272-293)."""
    if not geometry.is_hybrid:
        return 0
    keys = geometry.linear_num_key_heads * geometry.linear_key_head_dim
    values = geometry.linear_num_value_heads * geometry.linear_value_head_dim
    conv = (2 * keys + values) // tensor_parallel_size
    recurrent = values // tensor_parallel_size * geometry.linear_key_head_dim
    rows = geometry.linear_conv_kernel_dim - 1 + num_speculative_tokens
    return conv * rows * geometry.model_dtype_bytes + recurrent * geometry.ssm_dtype_bytes


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Blocks of one configuration."""

    rules: KvRules
    slot_bytes: int
    token_bytes: int
    """One token in one attention layer."""
    state_bytes: int
    """One GDN layer's state, unpadded; 0 for a dense model."""
    block_tokens: int
    group_layers: int
    attention_groups: int
    gdn_groups: int
    padding_layers: int
    states_per_group: int
    """Blocks that each GDN group of one running request holds, whatever its length."""

    @property
    def page_bytes(self) -> int:
        """Bytes of one block in one layer; GDN states are padded up to it."""
        return self.block_tokens * self.token_bytes

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block of the pool: a page in every layer of a group (kv_cache_planning.py:574-607)."""
        return self.group_layers * self.page_bytes

    @property
    def state_blocks(self) -> int:
        """Blocks of GDN state of one running request."""
        return self.gdn_groups * self.states_per_group

    @property
    def reserved_blocks(self) -> int:
        """Blocks that admission leaves out."""
        return int(self.rules.null_block_deducted)

    def num_blocks(self, available_bytes: int) -> int:
        """Blocks that a pool of this size holds."""
        return max(0, available_bytes) // self.bytes_per_block

    def request_blocks(self, context_tokens: int) -> int:
        """Blocks of one request of this length."""
        return self.attention_groups * math.ceil(context_tokens / self.block_tokens) + self.state_blocks

    def needed_bytes(self, context_tokens: int, requests: int = 1) -> int:
        """Smallest pool that admits this context, with room for `requests` of that length."""
        return (requests * self.request_blocks(context_tokens) + self.reserved_blocks) * self.bytes_per_block

    def longest_context(self, num_blocks: int, max_position_embeddings: int) -> int:
        """Longest context in tokens that a pool of `num_blocks` admits; 0 when none."""
        free = num_blocks - self.reserved_blocks - self.state_blocks
        return max(0, min(free // self.attention_groups * self.block_tokens, max_position_embeddings))

    def concurrency(self, num_blocks: int, context_tokens: int) -> float:
        """What vLLM prints as maximum concurrency; the null block is not subtracted (kv_cache_utils.py:1061-1093)."""
        return num_blocks / self.request_blocks(context_tokens)

    def reported_tokens(self, num_blocks: int, context_tokens: int) -> int:
        """What vLLM prints as KV cache size in tokens: concurrency times context (kv_cache_utils.py:1120-1128)."""
        return int(self.concurrency(num_blocks, context_tokens) * context_tokens)


def kv_layout(
    geometry: Geometry,
    kv_cache_dtype: str,
    tensor_parallel_size: int,
    num_speculative_tokens: int,
    prefix_caching: bool,
    rules: KvRules,
    draft_layers: int | None = None,
) -> KvLayout:
    """Compute the blocks of one configuration.

    `draft_layers` are the attention layers that the drafter adds: by default the model's MTP layers when it speculates.
    """
    if draft_layers is None:
        draft_layers = geometry.mtp_layers if num_speculative_tokens else 0
    slot = slot_bytes(geometry, kv_cache_dtype)
    token = max(1, geometry.num_key_value_heads // tensor_parallel_size) * slot
    state = gdn_state_bytes(geometry, tensor_parallel_size, num_speculative_tokens)
    attention = geometry.attention_layers + draft_layers
    if not geometry.is_hybrid:
        return KvLayout(rules, slot, token, 0, rules.block_alignment, attention, 1, 0, 0, 0)
    group = _group_layers(attention, geometry.gdn_layers)
    groups = [math.ceil(layers / group) for layers in (attention, geometry.gdn_layers)]
    aligned = rules.block_alignment * token
    return KvLayout(
        rules=rules,
        slot_bytes=slot,
        token_bytes=token,
        state_bytes=state,
        block_tokens=rules.block_alignment * math.ceil(state / aligned),
        group_layers=group,
        attention_groups=groups[0],
        gdn_groups=groups[1],
        padding_layers=sum(groups) * group - attention - geometry.gdn_layers,
        states_per_group=(
            2 + num_speculative_tokens + rules.gdn_prefill_checkpoint_blocks
            if prefix_caching
            else 1 + num_speculative_tokens
        ),
    )


def _group_layers(attention_layers: int, gdn_layers: int) -> int:
    smaller, larger = sorted((attention_layers, gdn_layers))
    return larger if larger < smaller * UNPADDED_GROUP_RATIO else smaller
