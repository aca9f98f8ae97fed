"""Convert a Llama checkpoint from GGUF to safetensors: `python gguf_to_safetensors.py FILE.gguf FOLDER`.

Runs in the engine's environment (torch, transformers, gguf); the launcher starts it as a subprocess.
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, LlamaForCausalLM


def convert(gguf: Path, folder: Path) -> None:
    """Write config, weights (float16: the scales of a Q4 file have no more precision), tokenizer and chat template."""
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    if not tokenizer.chat_template:
        raise SystemExit(f"{gguf}: carries no chat template; a chat model is needed")
    print("tokenizer read", flush=True)
    unpacked = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    print("weights unpacked", flush=True)
    # A model that came from GGUF refuses to be saved; a plain one with the same tensors does not.
    plain = LlamaForCausalLM(unpacked.config)
    plain.load_state_dict(unpacked.state_dict(), strict=True)
    plain.generation_config = unpacked.generation_config
    plain.to(torch.float16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    print("written", flush=True)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
