"""What the reference model is: its config.json, its tokens and its tokenizer's files. Standard library only."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
WEIGHTS = Path(__file__).resolve().parent / "weights"
"""The checkpoint, as transformers and vLLM read it."""

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKUP_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
"""Added, but kept when special tokens are skipped, as in Qwen3."""
ADDED_TOKENS = SPECIAL_TOKENS + MARKUP_TOKENS
BYTES = 256
TOKEN_IDS = {token: BYTES + place for place, token in enumerate(ADDED_TOKENS)}
PAD, IM_START, IM_END = (TOKEN_IDS[token] for token in SPECIAL_TOKENS)
MAX_TOKENS = 16384

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "vocab_size": 320,
    "hidden_size": 256,
    "intermediate_size": 320,
    "num_hidden_layers": 8,
    "layer_types": ["linear_attention", "full_attention"] * 4,
    "full_attention_interval": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "partial_rotary_factor": 0.25,
    "rope_theta": 100000.0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0, "partial_rotary_factor": 0.25},
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [1, 2, 3, 4, 5, 6, 7],
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 1,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": MAX_TOKENS,
    "tie_word_embeddings": False,
    "use_cache": True,
    "dtype": "bfloat16",
    "bos_token_id": None,
    "eos_token_id": IM_END,
    "pad_token_id": PAD,
}
"""Layer 0 is the one with experts, since vLLM gives the MTP layer, which is also a layer 0, the same kind of MLP.

Its linear heads have 128 dimensions, the only size of FlashInfer's prefill kernel, which vLLM takes on Hopper.
"""

_ADDED = re.compile("(" + "|".join(re.escape(token) for token in ADDED_TOKENS) + ")")


def encode(text: str) -> list[int]:
    """Return the token ids of a text: its UTF-8 bytes, and the added tokens where their names stand."""
    ids: list[int] = []
    for place, piece in enumerate(_ADDED.split(text)):
        ids.extend([TOKEN_IDS[piece]] if place % 2 else piece.encode())
    return ids


def decode(ids: list[int]) -> str:
    """Return the text of token ids; bytes that are not UTF-8 become U+FFFD."""
    raw = b"".join(bytes([i]) if i < BYTES else ADDED_TOKENS[i - BYTES].encode() for i in ids)
    return raw.decode(errors="replace")


def write_files(folder: Path) -> None:
    """Write config.json and the tokenizer's files; the chat template is a file of its own."""
    generation = {"do_sample": False, "eos_token_id": [IM_END, PAD], "pad_token_id": PAD}
    files = {
        "config.json": CONFIG,
        "generation_config.json": generation,
        "tokenizer.json": _tokenizer(),
        "tokenizer_config.json": _tokenizer_config(),
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _added_tokens() -> list[dict[str, Any]]:
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return [{"id": i, "content": token, **plain, "special": token in SPECIAL_TOKENS} for token, i in TOKEN_IDS.items()]


def _tokenizer() -> dict[str, Any]:
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(),
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {letter: byte for byte, letter in enumerate(_byte_letters())},
            "merges": [],
        },
    }


def _byte_letters() -> list[str]:
    """The letter by which the tokenizers library's ByteLevel writes each byte.

    Printable bytes of Latin-1 stand for themselves, the others for the letters from U+0100 on (GPT-2's table).
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    letters, others = [], 0
    for byte in range(BYTES):
        letters.append(chr(byte if byte in printable else BYTES + others))
        others += byte not in printable
    return letters


def _tokenizer_config() -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": MAX_TOKENS,
        "clean_up_tokenization_spaces": False,
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "added_tokens_decoder": {
            str(entry["id"]): {key: value for key, value in entry.items() if key != "id"} for entry in _added_tokens()
        },
    }
