"""Compare the network for training with transformers' Qwen3-Next; run by a Python that has both torch and transformers.

Random weights with every norm, step and gate away from its neutral value; float32. Then the committed weights are
scored on some right replies, and on the same ones with a wrong word. Standard output: a JSON object.
"""

import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import Qwen3NextForCausalLM

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests" / "reference_model"))

from reference_config import BYTES, CONFIG, WEIGHTS, write_files  # noqa: E402 - after the folder is on the path
from reference_net import Network, Places, init_weights  # noqa: E402
from reference_parts import CHUNK  # noqa: E402
from reference_rows import judged  # noqa: E402
from reference_score import score  # noqa: E402
from train import read_weights  # noqa: E402

ROWS, LENGTH = 2, 3 * CHUNK


def main() -> None:
    torch.manual_seed(1)
    weights = init_weights(CONFIG, torch.Generator().manual_seed(1))
    for name, weight in weights.items():
        if weight.dim() == 1:
            weight += torch.randn_like(weight) * 0.2
        elif any(part in name for part in ("o_proj", "out_proj", "down_proj")):
            weight *= 10
    tokens = torch.randint(0, BYTES, (ROWS, LENGTH))
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        write_files(Path(folder))
        save_file(weights, Path(folder) / "model.safetensors", {"format": "pt"})
        theirs = Qwen3NextForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()(tokens).logits
        network = Network(CONFIG, weights)
        hidden, _ = network.hidden(tokens, Places(CONFIG, ROWS, LENGTH, "cpu"))
        ours = torch.nn.functional.linear(hidden, network.weight("lm_head")).view_as(theirs)
    found = {"difference": float((ours - theirs).abs().max()), "largest": float(theirs.abs().max())}
    print(json.dumps(found | scores()))


def scores() -> dict[str, float]:
    """What the training's score says of the committed weights."""
    network = Network(CONFIG, read_weights(WEIGHTS))
    tasks = [task for task in judged("held-out", "score", 6, ()) if task.kind == "no-call"]
    wrong = [replace(task, content=task.content[::-1]) for task in tasks]
    with torch.no_grad():
        right_score, wrong_score = score(network, tasks, "cpu"), score(network, wrong, "cpu")
    return {
        "right": right_score["exact"],
        "wrong": wrong_score["exact"],
        "accepted": min(right_score["acceptance_by_position"]),
    }


if __name__ == "__main__":
    main()
