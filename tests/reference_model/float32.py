#!/usr/bin/env python3
"""Score the reference model in transformers at float32 on the CPU, by generating greedily: `float32.py --results FILE`.

It is the reference for a CPU: vLLM's gated delta net there takes bfloat16 only. The set is that of score_in_vllm.py; a
reply is right when its tokens are those expected, to the end of the turn.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from reference_config import IM_END, PAD, ROOT, WEIGHTS, decode
from reference_rows import held_out, prompt_and_reply

sys.path.append(str(ROOT / "tests" / "gpu"))

import measured

RESULTS = Path(__file__).parent / "results" / "transformers_float32.json"
BATCH_TOKENS = 32_768
"""Of the prompts that are answered at once."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--every", type=int, default=1, metavar="N", help="ask every Nth request of the set")
    options = parser.parse_args()
    model = transformers.Qwen3NextForCausalLM.from_pretrained(str(WEIGHTS), dtype=torch.float32).eval()
    tasks = held_out()[:: options.every]
    asked = [prompt_and_reply(task) for task in tasks]
    right: Counter[str] = Counter()
    faults = []
    start = time.monotonic()
    for places in batches(asked):
        longest = max(len(asked[place][1]) for place in places)
        for place, got in zip(places, generate(model, [asked[place][0] for place in places], longest), strict=True):
            task, (_, reply) = tasks[place], asked[place]
            right[task.kind] += got == reply
            if got != reply:
                faults.append({"kind": task.kind, "expected": decode(reply), "got": decode(got)})
        print(f"{sum(right.values())} right, {len(faults)} wrong, {time.monotonic() - start:.0f} s", flush=True)
    kinds = Counter(task.kind for task in tasks)
    report = {
        "host": measured.host("cpu", WEIGHTS) | {"transformers": transformers.__version__},
        "split": "held-out",
        "dtype": "float32",
        "exact": round(sum(right.values()) / len(tasks), 5),
        "by_kind": {kind: [right[kind], count] for kind, count in sorted(kinds.items())},
        "seconds": round(time.monotonic() - start, 1),
        "faults": faults,
    }
    options.results.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def batches(asked: Sequence[tuple[list[int], list[int]]]) -> Iterator[list[int]]:
    """Yield the places of prompts so that replies, then prompts, of a batch are of about the same length."""
    batch: list[int] = []
    for place in sorted(range(len(asked)), key=lambda place: (len(asked[place][1]) // 100, len(asked[place][0]))):
        width = max(len(asked[one][0]) for one in (*batch, place))
        if batch and (len(batch) + 1) * width > BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(place)
    yield batch


def generate(model: Any, prompts: Sequence[list[int]], longest: int) -> list[list[int]]:
    """Return the greedy continuation of each prompt, to its end of turn or a little longer than the longest reply."""
    width = max(map(len, prompts))
    # Padded on the left: every prompt ends where its reply begins.
    tokens = torch.tensor([[PAD] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    with torch.no_grad():
        rows = model.generate(
            tokens,
            attention_mask=mask,
            max_new_tokens=longest + 16,
            do_sample=False,
            eos_token_id=IM_END,
            pad_token_id=PAD,
        )
    written = rows[:, width:].tolist()
    return [row[: row.index(IM_END) + 1] if IM_END in row else row for row in written]


if __name__ == "__main__":
    main()
