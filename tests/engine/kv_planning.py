"""Ask vLLM's own KV cache planning for blocks, admission and report; run by a Python that has vLLM.

Standard input: a JSON list of cases. Standard output, last line: a JSON list of answers in the same order. The layers'
specifications are vLLM's classes, filled as its model runner fills them; only the configuration around them is a
stand-in, of the attributes that planning reads.
"""

import importlib.util
import json
import sys
from types import SimpleNamespace
from typing import Any

import torch
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator
from vllm.model_executor.layers.quantization.turboquant.config import TurboQuantConfig
from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, get_kv_quant_mode


def attention_spec(case: dict[str, Any], block_tokens: int) -> FullAttentionSpec:
    """One attention layer; packed sizes from the backends that pack."""
    name = case["kv_cache_dtype"]
    dtype = torch.bfloat16 if name == "auto" else STR_DTYPE_TO_TORCH_DTYPE[name]
    packed = None
    if name.startswith("turboquant_"):
        packed = TurboQuantConfig.from_cache_dtype(name, case["head_dim"]).slot_size_aligned
    elif name.endswith("_per_token_head"):
        from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend

        plain = _spec(case, block_tokens, dtype, None)
        customize = getattr(TritonAttentionBackend, "customize_spec", None)
        if customize is not None:
            spec = customize(plain)
            assert isinstance(spec, FullAttentionSpec)
            return spec
    return _spec(case, block_tokens, dtype, packed)


def _spec(case: dict[str, Any], block_tokens: int, dtype: torch.dtype, packed: int | None) -> FullAttentionSpec:
    return FullAttentionSpec(
        block_size=block_tokens,
        num_kv_heads=max(1, case["num_key_value_heads"] // case["tp"]),
        head_size=case["head_dim"],
        dtype=dtype,
        kv_quant_mode=get_kv_quant_mode(case["kv_cache_dtype"]),
        **({} if packed is None else {"state_content_bytes": packed}),
    )


def mamba_spec(case: dict[str, Any], block_tokens: int, page_bytes: int | None) -> MambaSpec:
    """One GDN layer."""
    shapes = MambaStateShapeCalculator.gated_delta_net_state_shape(
        case["tp"],
        case["linear_num_key_heads"],
        case["linear_num_value_heads"],
        case["linear_key_head_dim"],
        case["linear_value_head_dim"],
        case["linear_conv_kernel_dim"],
        case["num_speculative_tokens"],
    )
    return MambaSpec(
        shapes=tuple(shapes),
        dtypes=(torch.bfloat16, torch.float32),
        block_size=block_tokens,
        page_size_padded=page_bytes,
        mamba_cache_mode="align" if case["prefix_caching"] else "none",
        num_speculative_blocks=case["num_speculative_tokens"],
        **({"num_prefill_checkpoint_blocks": 1} if case["checkpoint"] else {}),
    )


def configuration(case: dict[str, Any], max_model_len: int) -> Any:
    """Only what planning reads."""
    return SimpleNamespace(
        model_config=SimpleNamespace(
            max_model_len=max_model_len, original_max_model_len=max_model_len, supports_kv_cache_grouping=False
        ),
        cache_config=SimpleNamespace(
            mamba_cache_mode="align" if case["prefix_caching"] else "none",
            num_gpu_blocks_override=None,
            prefix_cache_retention_interval=None,
            enable_prefix_caching=case["prefix_caching"],
            get_resolved_kv_cache_layout=_layout,
        ),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=1, prefill_context_parallel_size=1, tensor_parallel_size=case["tp"]
        ),
        attention_config=SimpleNamespace(hisparse_config=None),
        speculative_config=None,
        kv_transfer_config=None,
        num_speculative_tokens=case["num_speculative_tokens"],
        num_prefill_lookahead_tokens=0,
    )


def _layout() -> Any:
    from vllm.v1.kv_cache_interface import KVCacheLayout

    return KVCacheLayout["LBNHC"]


def answer(case: dict[str, Any]) -> dict[str, Any]:
    """Blocks of a pool, the smallest pool that admits the context, and the printed figures."""
    tokens = case["block_tokens"]
    attention = attention_spec(case, tokens)
    page = attention.page_size_bytes
    state = mamba_spec(case, tokens, None).page_size_bytes
    specs: dict[str, Any] = {f"model.layers.{i}.attn": attention for i in range(case["attention_layers"])}
    specs |= {f"model.layers.{100 + i}.gdn": mamba_spec(case, tokens, page) for i in range(case["gdn_layers"])}
    config = configuration(case, case["context"])

    def plan(available: int) -> Any:
        return planned(config, dict(specs), available)

    pool = plan(case["available_bytes"])
    printed = kv_cache_utils.get_kv_cache_capacity(config, pool)
    plan(case["needed_bytes"])
    try:
        plan(case["needed_bytes"] - 1)
        refusal = "admitted"
    except ValueError as error:
        refusal = str(error)
    return {
        "page_bytes": page,
        "state_bytes": state,
        "num_blocks": pool.num_blocks,
        "groups": sorted(len(group.layer_names) for group in pool.kv_cache_groups),
        "kv_cache_tokens": printed[0],
        "max_concurrency": printed[1],
        "one_byte_less": refusal,
    }


def planned(config: Any, specs: dict[str, Any], available: int) -> Any:
    """vLLM 0.33.0 plans in a module of its own and takes the groups; 0.32.0 groups by itself."""
    if importlib.util.find_spec("vllm.v1.core.kv_cache_planning") is None:
        return kv_cache_utils.get_kv_cache_configs(config, [specs], [available])[0]
    planning = importlib.import_module("vllm.v1.core.kv_cache_planning")
    groups = planning.get_global_kv_cache_groups(config, [specs])
    return planning.get_kv_cache_configs(config, [specs], [available], groups)[0]


if __name__ == "__main__":
    print(json.dumps([answer(case) for case in json.load(sys.stdin)]))
