"""A tiny random Qwen3.5 hybrid (gated delta net and full attention in turn, one MTP layer), made from seeds.

Only LIVE tokens can be generated, since the rows of all others in the output matrix are zero: the best token leads by
more than among thousands, so rounding decides less often, and drafts are accepted now and then.
"""

from __future__ import annotations

import hashlib
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LIVE = 64
VOCABULARY = 4096
MAX_BATCHED_TOKENS = 4128
MAX_MODEL_LEN = 8192
DRAFTS = 3

CONFIG = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "vocab_size": VOCABULARY,
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 2,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
    "eos_token_id": VOCABULARY - 1,
    "mtp_num_hidden_layers": 1,
    "hidden_act": "silu",
    "attn_output_gate": True,
    "mamba_ssm_dtype": "float32",
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25},
}
ATTENTION_LAYERS = CONFIG["num_hidden_layers"] // CONFIG["full_attention_interval"]  # type: ignore[operator]


def write_config(directory: Path) -> Path:
    """Write the model's config.json and return the directory, which is the model."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    return directory


def weight(name: str, shape: tuple[int, ...], torch: Any) -> Any:
    """The weight called `name`; the MTP layer's equal those of the layer of the same name in the model.

    Norm weights stay 0, since Qwen3.5 applies them as 1 + w.
    """
    if len(shape) <= 1:
        return torch.ones(shape) if name.endswith("linear_attn.norm.weight") else torch.zeros(shape)
    seed = int(hashlib.md5(name.replace("mtp.", "").encode(), usedforsecurity=False).hexdigest()[:8], 16)
    scale = 1.0 if "embed_tokens" in name else (1.6 if "qk" in name else 1.0) / shape[-1] ** 0.5
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale
    if "lm_head" in name:
        values[LIVE:] = 0
    return values


def register_loader() -> None:
    """Register the weights as vLLM's load format `seeded`."""
    import torch
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    @register_model_loader("seeded")
    class Seeded(DummyModelLoader):  # type: ignore[misc]
        def load_weights(self, model: Any, model_config: Any) -> None:
            for name, parameter in [*model.named_parameters(), *model.named_buffers()]:
                if parameter.is_floating_point() and not any(
                    part in name.lower() for part in ("inv_freq", "cos_sin", "hadamard")
                ):
                    parameter.data.copy_(weight(name, tuple(parameter.shape), torch).to(parameter.dtype))


@dataclass(frozen=True)
class Load:
    """The prompts of each stream, as token ids, and how many tokens each prompt's continuation has."""

    single: tuple[tuple[tuple[int, ...], int], ...]
    batch: tuple[tuple[tuple[int, ...], int], ...]
    first_user: tuple[int, ...]
    second_user: tuple[int, ...]
    user_tokens: int = 48


def load(seed: int = 7) -> Load:
    """The load of every run: prompts of 1+K tokens, shorter, longer than a batch may be, and of repetition for n-grams.

    The batch has more prompts than the engine takes at a time, with continuations of unequal length, so that long
    prompts arrive while others verify drafts.
    """
    draw = random.Random(seed)

    def prompt(length: int, top: int = 4000) -> tuple[int, ...]:
        return tuple(draw.randrange(top) for _ in range(length))

    phrase = prompt(12, LIVE)
    repeated = phrase * 6
    single = [prompt(n) for n in (1 + DRAFTS, 40, 200, 900, 2500, MAX_BATCHED_TOKENS + 900)] + [
        repeated,
        prompt(90, LIVE),
    ]
    batch = [
        prompt(n) for n in (40, 1 + DRAFTS, 3, 200, 64, 900, 1, 130, 3300, 1 + DRAFTS, 2500, MAX_BATCHED_TOKENS + 300)
    ]
    return Load(
        single=tuple((tokens, 32) for tokens in single),
        batch=tuple((tokens, 16 + 4 * (i % 5)) for i, tokens in enumerate(batch)),
        first_user=prompt(200),
        second_user=prompt(3000),
    )
