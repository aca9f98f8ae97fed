#!/usr/bin/env python3
"""Ternary weights in vLLM's engine on one GPU, beside bfloat16 and int4, with the geometry of a 7B model.

    python3 tests/gpu/ternary_engine.py --results tests/gpu/results/ternary_engine.json --budget-s 560

Needs vLLM 0.33.0 and one NVIDIA GPU; no weights and no network: those of the 7B cases are vLLM's dummies, and those of
the case `kl` are made here.  Each case runs in a process of its own; one that is in the results file is not run again.
`kl` compares the output distributions of a ternary model with those of the same weights in bfloat16, and may share the
GPU.  The exit status is 0 when every case asked for is there and every target is met, 3 when cases are left, 1
otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import spec_decode

RESULTS = Path(__file__).parent / "results" / "ternary_engine.json"
WORK = Path(tempfile.gettempdir()) / "ternary-engine"
TIMEOUT_S = 300
EXPECTED_S = 120
SEVEN_B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SMALL = {**SEVEN_B, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8, "vocab_size": 1024}
SMALL |= {"num_attention_heads": 8, "num_key_value_heads": 2}
_INT4 = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
QUANTIZATION: dict[str, dict[str, Any] | None] = {
    "bf16": None,
    "marlin-int4": _INT4,
    "int4": _INT4,
    "ternary": {"quant_method": "ternary", "group_size": -1, "modules_to_not_convert": ["lm_head"]},
    "ternary-g128": {"quant_method": "ternary", "group_size": 128, "modules_to_not_convert": ["lm_head"]},
}
CASES = (*QUANTIZATION, "kl")
WEIGHT_BYTES = 2_200_000_000
LARGEST_KL = 0.012
KL_POOL_BYTES = 2**30
"""KV pool of `kl`: given, since memory profiling breaks where another engine starts beside it."""
KL_QUANTIZATION = {"quant_method": "ternary", "codes": "offset", "packing": "k"}
"""What `pack_bytes` writes; random weights are as often 0 as +1 and -1, and do not tell which code is which."""
DECODE_TOKENS = 256


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is left, print the table, and say whether the targets are met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--budget-s", type=float, default=3600, help="start no case that would probably end later")
    parser.add_argument("--only", default="", help="run only cases whose name contains this")
    parser.add_argument("--case", choices=CASES, help="run this case in this process and print its entry")
    options = parser.parse_args(arguments)
    if options.case:
        print(json.dumps(kl() if options.case == "kl" else seven_b(options.case)))
        return 0
    results: dict[str, Any] = {"schema": 1, "host": {}, "cases": {}}
    if options.results.exists():
        results = json.loads(options.results.read_text(encoding="utf-8"))
    deadline = time.monotonic() + options.budget_s
    asked = [case for case in CASES if options.only in case]
    for case in asked:
        done = "error" not in results["cases"].get(case, {"error": "not run"})
        if done or time.monotonic() + EXPECTED_S > deadline:
            continue
        entry = in_own_process(case)
        results["host"] |= entry.pop("host", {})
        results["cases"][case] = entry
        options.results.parent.mkdir(parents=True, exist_ok=True)
        part = options.results.with_suffix(".part")
        part.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        part.replace(options.results)
        print(f"{case}: {json.dumps(entry)[:400]}", flush=True)
    print(table(results))
    return status(results, asked)


def in_own_process(case: str) -> dict[str, Any]:
    """Run a case; its log is kept in the work folder, and the end of it where the case fails."""
    WORK.mkdir(parents=True, exist_ok=True)
    log = WORK / f"{case}.log"
    began = time.monotonic()
    with log.open("w", encoding="utf-8") as errors:
        try:
            done = subprocess.run(
                (sys.executable, __file__, "--case", case),
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                timeout=TIMEOUT_S,
                check=False,
            )
            lines = done.stdout.strip().splitlines()
        except subprocess.TimeoutExpired:
            return {"error": f"ran past {TIMEOUT_S} s: {log.read_text(encoding='utf-8', errors='replace')[-1500:]}"}
    if done.returncode != 0 or not lines:
        return {"error": f"ended with {done.returncode}: {log.read_text(encoding='utf-8', errors='replace')[-1500:]}"}
    entry: dict[str, Any] = json.loads(lines[-1])
    return {**entry, "total_s": round(time.monotonic() - began, 1)}


def engine(folder: Path, memory: float, **arguments: Any) -> Any:
    """vLLM's engine in this process, with the plugin of this checkout and a share of the GPU's memory."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_STREAM": "ext://sys.stderr"}
    spec_decode.install_plugin(WORK / "plugin")
    from vllm import LLM

    common = {"dtype": "bfloat16", "skip_tokenizer_init": True, "enable_prefix_caching": False, "max_num_seqs": 16}
    return LLM(str(folder), gpu_memory_utilization=memory, **common, **arguments)


def write_config(folder: Path, config: Mapping[str, Any]) -> Path:
    """Make a model folder that has a config and no more."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def seven_b(case: str) -> dict[str, Any]:
    """Bytes of the weights, and tokens a second of decoding and of prefill."""
    if case == "marlin-int4":  # which consumer cards run; on 9.0 vLLM would rather take Machete
        os.environ["VLLM_DISABLED_KERNELS"] = "MacheteLinearKernel"
    config = {**SEVEN_B, **({"quantization_config": QUANTIZATION[case]} if QUANTIZATION[case] else {})}
    llm = engine(write_config(WORK / case, config), 0.5, load_format="dummy", max_model_len=2560)
    one = tokens_per_s(llm, requests=1, prompt=32)
    eight = tokens_per_s(llm, requests=8, prompt=32)
    sixteen = tokens_per_s(llm, requests=16, prompt=32)
    return {
        "weight_bytes": llm.apply_model(weight_bytes)[0],
        "kernels": llm.apply_model(kernels)[0],
        "decode_tokens_per_s": {"1": one, "8": eight, "16": sixteen},
        "prefill_tokens_per_s": prefill_tokens_per_s(llm, 2048),
        "host": spec_decode.host(),
    }


def weight_bytes(model: Any) -> int:
    """Bytes of all parameters, each memory once."""
    sizes = {tensor.data_ptr(): tensor.numel() * tensor.element_size() for tensor in model.parameters()}
    return sum(sizes.values())


def kernels(model: Any) -> list[str]:
    """The classes that compute the quantized linear layers, as the layers' methods name them."""
    methods: list[Any] = [getattr(module, "quant_method", None) for module in model.modules()]
    return sorted({type(method.kernel).__name__ for method in methods if hasattr(method, "kernel")})


def _generate(llm: Any, requests: int, prompt: int, tokens: int) -> float:
    from vllm import SamplingParams

    prompts = [{"prompt_token_ids": [(7 * i + 13 * j) % 31000 + 5 for i in range(prompt)]} for j in range(requests)]
    sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    began = time.perf_counter()
    llm.generate(prompts, sampling, use_tqdm=False)
    return time.perf_counter() - began


def tokens_per_s(llm: Any, requests: int, prompt: int) -> float:
    """Median of three: tokens a second of all requests together, without their prefill."""
    _generate(llm, requests, prompt, 8)
    rates = []
    for _ in range(3):
        first = _generate(llm, requests, prompt, 1)
        rates.append(requests * (DECODE_TOKENS - 1) / (_generate(llm, requests, prompt, DECODE_TOKENS) - first))
    return round(statistics.median(rates), 1)


def prefill_tokens_per_s(llm: Any, prompt: int) -> float:
    """Median of three: tokens a second of one long prompt."""
    _generate(llm, 1, prompt, 1)
    return round(prompt / statistics.median([_generate(llm, 1, prompt, 1) for _ in range(3)]), 1)


def kl() -> dict[str, Any]:
    """The largest and mean KL divergence at any position, between a ternary model and the same weights in bfloat16."""
    import torch
    from safetensors.torch import save_file

    random = torch.Generator().manual_seed(0)
    dense, packed = _small_model(torch, random)
    reference = write_config(WORK / "kl-bf16", SMALL)
    ternary = write_config(WORK / "kl-ternary", {**SMALL, "quantization_config": KL_QUANTIZATION})
    save_file(dense, reference / "model.safetensors")
    save_file(packed, ternary / "model.safetensors")
    prompts = [torch.randint(5, 1000, (64,), generator=random).tolist() for _ in range(8)]
    found = [_distributions(torch, folder, prompts) for folder in (reference, ternary)]
    divergence = (found[0].exp() * (found[0] - found[1])).sum(-1)
    entropy = -(found[0].exp() * found[0]).sum(-1).mean()
    top = (found[0].argmax(-1) == found[1].argmax(-1)).float().mean()
    return {
        "positions": divergence.numel(),
        "largest_kl": float(divergence.max()),
        "mean_kl": float(divergence.mean()),
        "top_1_agreement": float(top),
        "mean_entropy": float(entropy),
        "host": spec_decode.host(),
    }


def _small_model(torch: Any, random: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """A random Llama whose logits are about as spread as a trained one's: in bfloat16, and packed."""
    sys.path.insert(0, str(spec_decode.ROOT / "patches"))
    from vllm_graft.quantization.ternary.formats import pack_bytes

    hidden, wide = int(SMALL["hidden_size"]), int(SMALL["intermediate_size"])  # type: ignore[call-overload]
    small = hidden // 4
    shapes = {"self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (small, hidden)}
    shapes |= {"self_attn.v_proj": (small, hidden), "self_attn.o_proj": (hidden, hidden)}
    shapes |= {"mlp.gate_proj": (wide, hidden), "mlp.up_proj": (wide, hidden), "mlp.down_proj": (hidden, wide)}
    both = {"model.embed_tokens.weight": torch.randn(1024, hidden, generator=random).bfloat16()}
    both["lm_head.weight"] = (torch.randn(1024, hidden, generator=random) * 3 / hidden**0.5).bfloat16()
    both["model.norm.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    dense: dict[str, Any] = {}
    packed: dict[str, Any] = {}
    for layer in range(int(SMALL["num_hidden_layers"])):  # type: ignore[call-overload]
        for norm in ("input_layernorm", "post_attention_layernorm"):
            both[f"model.layers.{layer}.{norm}.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
        for name, (n, k) in shapes.items():
            values = torch.randint(-1, 2, (n, k), generator=random, dtype=torch.int8)
            scales = ((torch.rand(n, 1, generator=random) + 0.5) / k**0.5).bfloat16()
            full = f"model.layers.{layer}.{name}.weight"
            dense[full] = values.bfloat16() * scales
            packed |= {full: pack_bytes(values), f"{full}_scale": scales}
    return {**both, **dense}, {**both, **packed}


def _distributions(torch: Any, folder: Path, prompts: Sequence[Sequence[int]]) -> Any:
    """Log-probabilities [positions, vocabulary] of each prompt's next tokens."""
    from vllm import SamplingParams

    llm = engine(folder, 0.05, kv_cache_memory_bytes=KL_POOL_BYTES, max_model_len=256, max_logprobs=-1)
    sampling = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=-1, detokenize=False)
    rows = []
    for output in llm.generate([{"prompt_token_ids": list(prompt)} for prompt in prompts], sampling, use_tqdm=False):
        for position in output.prompt_logprobs[1:]:
            row = torch.full((1024,), -torch.inf, dtype=torch.float64)
            for token, found in position.items():
                row[token] = found.logprob
            rows.append(row)
    del llm
    return torch.stack(rows).log_softmax(-1)


def table(results: Mapping[str, Any]) -> str:
    """One line a case, with the ratios to the other two."""
    lines = [json.dumps(results["host"])]
    cases = {name: entry for name, entry in results["cases"].items() if "error" not in entry}
    for name, entry in results["cases"].items():
        if "error" in entry:
            lines.append(f"{name}: ERROR {entry['error'][-300:]}")
        elif name == "kl":
            lines.append(f"kl: largest {entry['largest_kl']:.5f}, mean {entry['mean_kl']:.6f}")
        else:
            decode = entry["decode_tokens_per_s"]
            lines.append(
                f"{name}: {entry['weight_bytes'] / 1e9:.2f} GB, decode {decode['1']} / {decode['8']} / {decode['16']} "
                f"tokens/s, prefill {entry['prefill_tokens_per_s']} tokens/s"
            )
    for other in ("bf16", "marlin-int4", "int4"):
        if "ternary" in cases and other in cases:
            mine, theirs = cases["ternary"]["decode_tokens_per_s"], cases[other]["decode_tokens_per_s"]
            ratios = ", ".join(f"{mine[m] / theirs[m]:.2f} at {m}" for m in mine)
            lines.append(f"ternary over {other}: {ratios}")
    return "\n".join(lines)


def status(results: Mapping[str, Any], asked: Sequence[str] = CASES) -> int:
    """The exit status: 1 a case failed or a target is missed, 3 some of those asked for are left, 0 otherwise."""
    cases = {case: entry for case, entry in results["cases"].items() if case in asked}
    if any("error" in entry for entry in cases.values()):
        return 1
    if cases.get("kl", {}).get("largest_kl", 0) >= LARGEST_KL:
        return 1
    if cases.get("ternary", {}).get("weight_bytes", 0) > WEIGHT_BYTES:
        return 1
    return 3 if any(case not in cases for case in asked) else 0


if __name__ == "__main__":
    sys.exit(main())
