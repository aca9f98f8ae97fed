"""The tokens that both sides get: read as given, or cut from a text by the checkpoint's tokenizer."""

import json
from pathlib import Path
from typing import Any

from launcher.reconcile.program.problems import Problem

LEAST_TOKENS = 4
"""A prompt of three that is read at once, and one token that is decoded."""


def tokens_of(prompts: list[Any], model: Path, most: int, passages: int) -> list[list[int]]:
    """Return each prompt's tokens, at most so many of so many; a single long text gives as many passages as there are.

    Raises:
        Problem: there is no tokenizer, or nothing long enough.

    """
    rows = [prompt if isinstance(prompt, list) else _encode(prompt, model) for prompt in prompts]
    if len(rows) == 1:
        rows = [rows[0][start : start + most] for start in range(0, len(rows[0]), most)]
    rows = [row[:most] for row in rows if len(row) >= LEAST_TOKENS][:passages]
    if not rows:
        raise Problem(f"the prompts: none has {LEAST_TOKENS} tokens or more; give longer ones")
    size = _vocabulary(model)
    if bad := [token for row in rows for token in row if not 0 <= token < size]:
        raise Problem(f"the prompts: token {bad[0]}; {model} has tokens 0 to {size - 1}")
    return rows


def _encode(text: str, model: Path) -> list[int]:
    file = model / "tokenizer.json"
    if file.is_file():
        from tokenizers import Tokenizer

        return list(Tokenizer.from_file(str(file)).encode(text, add_special_tokens=False).ids)
    from transformers import AutoTokenizer

    try:
        return list(AutoTokenizer.from_pretrained(model).encode(text, add_special_tokens=False))
    except (OSError, ValueError) as error:
        raise Problem(f"{model}: no tokenizer; give prompts as a .jsonl of lists of token ids") from error


def _vocabulary(model: Path) -> int:
    return int(text_config(model)["vocab_size"])


def text_config(model: Path) -> dict[str, Any]:
    """The part of config.json that is about the language model."""
    config: dict[str, Any] = json.loads((model / "config.json").read_text(encoding="utf-8"))
    part: dict[str, Any] = config.get("text_config", config)
    return part


def layers_of(model: Path) -> int:
    """How many decoder layers there are.

    Raises:
        Problem: config.json does not say.

    """
    config = text_config(model)
    for key in ("num_hidden_layers", "n_layer"):
        if key in config:
            return int(config[key])
    raise Problem(f"{model / 'config.json'}: has no num_hidden_layers")
