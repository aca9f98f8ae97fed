"""Greedy tokens of a ternary checkpoint: `python ternary_program.py engine|reference FOLDER`, in vLLM's environment.

`engine` is vLLM with the plugin; `reference` is transformers in float32 with the weights dequantized here.
"""

import json
import sys
from pathlib import Path
from typing import Any

PROMPTS = ("The capital of France is", "Once upon a time", "def f(x):")
TOKENS = 24


def engine(folder: Path) -> dict[str, Any]:
    """What vLLM answers, and the classes that its linear layers and its embedding have."""
    from vllm import LLM, SamplingParams

    llm = LLM(str(folder), dtype="float32", max_model_len=256, max_num_seqs=4, kv_cache_memory_bytes=1 << 28)
    outputs = llm.generate(list(PROMPTS), SamplingParams(temperature=0, max_tokens=TOKENS))
    quantization = llm.llm_engine.vllm_config.model_config.quantization
    return {"tokens": [list(output.outputs[0].token_ids) for output in outputs], "quantization": quantization}


def reference(folder: Path) -> dict[str, Any]:
    """What the same weights answer without vLLM and without the code that packs and unpacks for it."""
    import torch
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    stored = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    dense = {}
    for name, tensor in stored.items():
        scale = stored.get(f"{name}_scale")
        if scale is not None:
            columns = [(tensor >> 2 * place & 3).float() - 1 for place in range(4)]
            weight = torch.stack(columns, dim=2).flatten(1)
            dense[name] = weight * scale.float().repeat_interleave(weight.shape[1] // scale.shape[1], dim=1)
        elif not name.endswith(".weight_scale"):
            dense[name] = tensor.float()
    config = AutoConfig.from_pretrained(folder)
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config).float().eval()
    absent = model.load_state_dict(dense, strict=False).missing_keys
    assert absent == ["lm_head.weight"]  # tied to the embedding
    model.tie_weights()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokens = []
    for prompt in PROMPTS:
        given = tokenizer(prompt, return_tensors="pt")
        made = model.generate(**given, do_sample=False, max_new_tokens=TOKENS)
        tokens.append(made[0, given.input_ids.shape[1] :].tolist())
    return {"tokens": tokens}


if __name__ == "__main__":
    answer = {"engine": engine, "reference": reference}[sys.argv[1]](Path(sys.argv[2]))
    print("\n" + json.dumps(answer))
