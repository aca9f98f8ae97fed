"""What the tests of ternary checkpoints need of vLLM's environment: `python ternary_program.py cut|answer FOLDER...`.

`cut` copies the first layers of the model in the first folder into the second.  `answer` prints of each folder the
likeliest token behind each token of the prompts and of what vLLM answers: `served` by vLLM with the plugin, in this
process, `expected` by transformers in float32 with the weights dequantized here.
"""

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

LAYERS = 4
PROMPTS = (
    "The capital of France is Paris, which lies on the Seine; that of Portugal lies on the Tagus. Its name is",
    "Once upon a time there was a little girl who lived in a village near the forest. Whenever she went out, she",
    "def distance(a, b):\n    return sum((x - y) ** 2 for x, y in zip(a, b)) ** 0.5\n\n\ndef nearest(",
)
TOKENS = 8


def cut(source: Path, target: Path) -> None:
    """Write a model of the first layers, which takes a fraction of the time."""
    from safetensors.torch import load_file, save_file

    target.mkdir()
    for file in source.glob("*.json"):
        shutil.copyfile(file, target / file.name)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    (target / "config.json").write_text(json.dumps(config | {"num_hidden_layers": LAYERS}), encoding="utf-8")
    tensors = load_file(source / "model.safetensors")
    later = re.compile(r"model\.layers\.(\d+)\.")
    kept = {name for name in tensors if (found := later.match(name)) is None or int(found[1]) < LAYERS}
    save_file({name: tensors[name] for name in kept}, target / "model.safetensors")


def answers(folder: Path) -> dict[str, Any]:
    """What vLLM says, and what comes of the same weights without it."""
    given, served, quantization = engine(folder)
    return {"served": served, "expected": reference(folder, given), "quantization": quantization}


def engine(folder: Path) -> tuple[list[list[int]], list[list[int]], str]:
    """What vLLM reads and answers, the likeliest token behind each of these, and how it takes the weights.

    A checkpoint whose config.json says nothing of them has to be told of; it runs eagerly, the other is compiled.
    """
    from vllm import LLM, SamplingParams

    says = "quantization_config" in json.loads((folder / "config.json").read_text(encoding="utf-8"))
    llm = LLM(
        str(folder),
        quantization=None if says else "ternary",
        enforce_eager=not says,
        dtype="float32",
        max_model_len=256,
        max_num_seqs=4,
        kv_cache_memory_bytes=1 << 26,
    )
    sampling = SamplingParams(temperature=0, max_tokens=TOKENS, prompt_logprobs=1)
    given, served = [], []
    for output in llm.generate(list(PROMPTS), sampling, use_tqdm=False):
        answer = list(output.outputs[0].token_ids)
        behind = [min(found, key=lambda token: found[token].rank) for found in output.prompt_logprobs[1:]]
        given.append([*output.prompt_token_ids, *answer[:-1]])
        served.append([*behind, *answer])
    return given, served, llm.llm_engine.vllm_config.model_config.quantization


def reference(folder: Path, given: list[list[int]]) -> list[list[int]]:
    """The likeliest tokens by the same weights, without vLLM and without the code that packs and unpacks for it."""
    import torch
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoModelForCausalLM

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
    vars(config).pop("quantization_config", None)
    model = AutoModelForCausalLM.from_config(config).float().eval()
    absent = model.load_state_dict(dense, strict=False).missing_keys
    assert absent == ["lm_head.weight"]  # tied to the embedding
    model.tie_weights()
    with torch.inference_mode():
        return [model(torch.tensor([tokens])).logits[0].argmax(-1).tolist() for tokens in given]


if __name__ == "__main__":
    folders = list(map(Path, sys.argv[2:]))
    if sys.argv[1] == "cut":
        cut(*folders)
    else:
        print("\n" + json.dumps({folder.name: answers(folder) for folder in folders}))
