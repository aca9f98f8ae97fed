#!/usr/bin/env python3
"""Score the reference model in transformers at float32 on the CPU, by generating greedily: `float32.py --results FILE`.

It is the reference for a CPU: vLLM's gated delta net there takes bfloat16 only.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from pathlib import Path

import torch
import transformers
from reference_config import IM_END, PAD, WEIGHTS, decode
from reference_rows import judged, prompt_and_reply

RESULTS = Path(__file__).parent / "results" / "transformers_float32.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--dialogues", type=int, default=25, help="of each kind")
    parser.add_argument("--lengths", type=int, nargs="*", default=[250, 500, 1000, 2000, 4000, 6000, 8000])
    options = parser.parse_args()
    model = transformers.Qwen3NextForCausalLM.from_pretrained(str(WEIGHTS), dtype=torch.float32).eval()
    tasks = judged("held-out", "engine", options.dialogues, options.lengths)
    right: Counter[str] = Counter()
    faults = []
    start = time.monotonic()
    for task in tasks:
        prompt, reply = prompt_and_reply(task)
        with torch.no_grad():
            got = model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                max_new_tokens=len(reply) + 16,
                do_sample=False,
                eos_token_id=IM_END,
                pad_token_id=PAD,
            )[0, len(prompt) :].tolist()
        right[task.kind] += got == reply
        if got != reply:
            faults.append({"kind": task.kind, "expected": decode(reply), "got": decode(got)})
    asked = Counter(task.kind for task in tasks)
    report = {
        "split": "held-out",
        "dtype": "float32",
        "device": "cpu",
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "exact": round(sum(right.values()) / len(tasks), 5),
        "by_kind": {kind: [right[kind], count] for kind, count in sorted(asked.items())},
        "needle_characters": options.lengths,
        "seconds": round(time.monotonic() - start, 1),
        "faults": faults,
    }
    options.results.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(json.dumps(report, ensure_ascii=False))


if __name__ == "__main__":
    main()
