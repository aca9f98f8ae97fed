#!/usr/bin/env python3
"""Boot vLLM 0.33.0 with the budgets of 24 and 32 GB cards and compare what it reports with the fit planner.

One larger GPU stands in for the card: the utilization is scaled so that vLLM claims what it would claim on the card,
and the allocator is capped at the card's memory. The model has the geometry of Qwen3.6-27B with 4-bit linear layers,
and embeddings, output head and MTP head in 16 bits, all with dummy weights. After each boot the longest planned prompt
is prefilled, and vLLM's own admission is asked with exactly the memory that the planner says is needed, and with one
byte less.

    python3 tests/gpu/fit_boots.py run --out tests/gpu/results/fit_boots.json     # on the GPU host; resumes
    python3 tests/gpu/fit_boots.py plan                                           # anywhere: what would be run
    python3 tests/gpu/fit_boots.py show --out tests/gpu/results/fit_boots.json    # anywhere: predicted and reported
    python3 tests/gpu/fit_boots.py compare --out tests/gpu/results/fit_boots.json # anywhere: compare the lines again

`run` starts one process after the other on the GPU; the next one imports vLLM meanwhile and waits. Results are written
after each case; cases that the file already holds are not run again.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if "launcher" not in sys.modules:
    # The GPU host has no installed launcher, whose __init__ asks for its own version; the arithmetic needs none.
    sys.path[:0] = [str(ROOT), str(ROOT / "patches")]
    package = types.ModuleType("launcher")
    package.__path__ = [str(ROOT / "launcher")]
    sys.modules["launcher"] = package

from launcher.fit.calibration import LoggedBoot, compare, parse_boot_log  # noqa: E402
from launcher.fit.geometry import geometry_from_config  # noqa: E402
from launcher.fit.planner import FitReport, fit  # noqa: E402
from launcher.fit.request import GIB, Card, CudagraphMode, FitRequest, Settings  # noqa: E402
from launcher.fit.shapes import weights_from_shapes  # noqa: E402
from launcher.fit.weights import Weights  # noqa: E402

SCHEMA = 1
RESULT_PREFIX = "FIT_BOOT_RESULT "
CASE_TIMEOUT_S = 170
ANSWER_TOKENS = 8
PROMPT_TOKENS_FROM, PROMPT_TOKENS_TO = 10, 200_000

# Qwen/Qwen3.6-27B, config.json at revision 6a9e13bd6fc8f0983b9b99948120bc37f49c13e9, its text_config.
TEXT_CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_output_gate": True,
    "dtype": "bfloat16",
    "eos_token_id": 248044,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 16,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
    "linear_value_head_dim": 128,
    "mamba_ssm_dtype": "float32",
    "max_position_embeddings": 262144,
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "num_attention_heads": 24,
    "num_hidden_layers": 64,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25},
    "tie_word_embeddings": False,
    "vocab_size": 248320,
}
# 4 bits with a 16-bit scale per 128 weights; the MTP head and the small GDN projections stay in 16 bits.
INT4_CONFIG: dict[str, Any] = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": 128,
    "sym": True,
    "desc_act": False,
    "lm_head": False,
    "dynamic": {"-:.*mtp.*": {}},
    "modules_in_block_to_quantize": [
        *(f"self_attn.{name}_proj" for name in "qkvo"),
        *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
        *(f"linear_attn.{name}" for name in ("in_proj_qkv", "in_proj_z", "out_proj")),
    ],
}


@dataclass(frozen=True, slots=True)
class Case:
    """One boot; a context of None is the longest advisable one."""

    id: str
    card_gib: float
    utilization: float
    batched_tokens: int
    kv_cache_dtype: str
    num_speculative_tokens: int
    prefix_caching: bool
    context: int | None = None
    cudagraph_mode: CudagraphMode = "FULL_DECODE_ONLY"
    compile: bool = False
    expandable_segments: bool = False
    """Whether torch's allocator maps memory as it grows, as the launcher's plans have it."""


CASES = (
    Case("24-fp8-mtp3-caching", 23.52, 0.90, 4128, "fp8", 3, True),
    Case("24-k8v4-mtp3-caching", 23.52, 0.90, 4128, "turboquant_k8v4", 3, True),
    Case("24-4bit-mtp3", 23.52, 0.90, 4128, "turboquant_4bit_nc", 3, False),
    Case("24-bf16-caching", 23.52, 0.90, 4128, "auto", 0, True),
    Case("24-k8v4", 23.52, 0.85, 4128, "turboquant_k8v4", 0, False),
    Case("24-fp8-mtp1-caching", 23.52, 0.88, 2048, "fp8", 1, True),
    Case("32-fp8-mtp3", 31.36, 0.90, 8192, "fp8", 3, False, 65_536),
    Case("32-k8v4-mtp3-caching", 31.36, 0.93, 8192, "turboquant_k8v4", 3, True, 131_072),
    Case("24-3bit-caching", 23.52, 0.85, 4128, "turboquant_3bit_nc", 0, True),
    Case("24-fp8-mtp3-caching-compiled", 23.52, 0.90, 4128, "fp8", 3, True, None, "FULL_AND_PIECEWISE", True),
    Case("24-4bit-mtp3-expandable", 23.52, 0.90, 4128, "turboquant_4bit_nc", 3, False, expandable_segments=True),
)


def model_config() -> dict[str, Any]:
    """The config.json of the dummy checkpoint."""
    return {**TEXT_CONFIG, "quantization_config": INT4_CONFIG}


def checkpoint() -> Weights:
    """Sizes of the dummy checkpoint, from its shapes."""
    return weights_from_shapes(model_config(), geometry_from_config(TEXT_CONFIG, "Qwen3.6-27B"), "Qwen3.6-27B")


def prediction(case: Case) -> FitReport:
    """What the planner says about the card that the case stands for."""
    settings = Settings(
        kv_cache_dtype=case.kv_cache_dtype,
        max_num_batched_tokens=case.batched_tokens,
        max_num_seqs=2,
        gpu_memory_utilization=case.utilization,
        num_speculative_tokens=case.num_speculative_tokens,
        prefix_caching=case.prefix_caching,
        max_model_len=case.context,
        cudagraph_mode=case.cudagraph_mode,
        gdn_prefill_backend="triton",
    )
    # The kernels are those of the GPU that stands in, compute capability 9.0.
    card = Card(round(case.card_gib * GIB), (9, 0), None, f"budget of {case.card_gib} GiB", "assumed")
    return fit(FitRequest(geometry_from_config(TEXT_CONFIG, "Qwen3.6-27B"), checkpoint(), settings, card))


def engine_arguments(case: Case, context: int, utilization: float) -> dict[str, Any]:
    """Arguments of `vllm.LLM`."""
    arguments: dict[str, Any] = {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "seed": 0,
        "max_model_len": context,
        "gpu_memory_utilization": utilization,
        "max_num_batched_tokens": case.batched_tokens,
        "max_num_seqs": 2,
        "kv_cache_dtype": case.kv_cache_dtype,
        "enable_prefix_caching": case.prefix_caching,
        "additional_config": {"gdn_prefill_backend": "triton"},
        "compilation_config": {"cudagraph_mode": case.cudagraph_mode, **({} if case.compile else {"mode": 0})},
    }
    if case.num_speculative_tokens:
        arguments["speculative_config"] = {"method": "mtp", "num_speculative_tokens": case.num_speculative_tokens}
    return arguments


def write_config(folder: Path) -> None:
    """Write the model's config.json; there are no weights."""
    (folder / "config.json").write_text(json.dumps(model_config()), encoding="utf-8")


def worker(case: Case) -> dict[str, Any]:
    """Boot, prefill and ask vLLM's admission; runs in a process of its own that has the GPU to itself."""
    for key, value in (
        ("VLLM_ENABLE_V1_MULTIPROCESSING", "0"),
        ("HF_HUB_OFFLINE", "1"),
        ("VLLM_NO_USAGE_STATS", "1"),
        # Consumer cards take Marlin; the kernels of larger GPUs lay weights out differently.
        ("VLLM_DISABLED_KERNELS", "MacheteLinearKernel,CutlassW4A8LinearKernel"),
    ):
        os.environ.setdefault(key, value)
    if case.expandable_segments:
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    import torch
    from vllm import LLM, SamplingParams, TokensPrompt

    sys.stdin.readline()  # the GPU is free now
    report = prediction(case)
    context = report.context_tokens
    torch.zeros(1, device="cuda")
    free, device_total = torch.cuda.mem_get_info()
    context_bytes = device_total - free - torch.cuda.memory_reserved()
    card_bytes = report.request.card.total_bytes
    torch.cuda.set_per_process_memory_fraction((card_bytes - context_bytes) / device_total)
    result: dict[str, Any] = {"device_total_bytes": device_total, "cuda_context_bytes": context_bytes}
    result["device"], result["torch"] = torch.cuda.get_device_name(), torch.__version__
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        write_config(Path(folder))
        try:
            engine = LLM(model=folder, **engine_arguments(case, context, case.utilization * card_bytes / device_total))
        except (ValueError, RuntimeError) as error:  # torch's out-of-memory error is a RuntimeError
            return {**result, "outcome": "refused", "error": f"{type(error).__name__}: {error}"[:2000]}
        result["boot_s"] = round(time.monotonic() - start, 1)
        cache = engine.llm_engine.vllm_config.cache_config
        result |= {
            "available_bytes": engine.collective_rpc(lambda one: one.available_kv_cache_memory_bytes)[0],
            "num_blocks": cache.num_gpu_blocks,
            "block_tokens": cache.block_size,
            "kv_cache_tokens": cache.kv_cache_size_tokens,
            "max_concurrency": cache.kv_cache_max_concurrency,
            "max_model_len": context,
        }
        result["admission"] = admission(engine, report, context)
        result["prefill"] = prefill(engine, torch, context, SamplingParams, TokensPrompt)
        free, _ = torch.cuda.mem_get_info()
        result["device_used_bytes"] = device_total - free
        result["outcome"] = "booted"
        return result


def admission(engine: Any, report: FitReport, context: int) -> dict[str, Any]:
    """Ask vLLM whether it admits the context with the memory that is said to be needed, and with a byte less."""
    from vllm.v1.core import kv_cache_planning as planning

    config = engine.llm_engine.vllm_config
    specs = engine.collective_rpc("get_kv_cache_spec")
    groups = planning.get_global_kv_cache_groups(config, specs)
    needed = report.layout.needed_bytes(context)
    answer: dict[str, Any] = {"needed_bytes": needed, "groups": [len(group.layer_names) for group in groups]}
    answer["blocks_with_needed"] = planning.get_kv_cache_configs(config, specs, [needed], groups)[0].num_blocks
    try:
        planning.get_kv_cache_configs(config, specs, [needed - 1], groups)
        answer["one_byte_less"] = "admitted"
    except ValueError as error:
        answer["one_byte_less"] = str(error)
    return answer


def prefill(engine: Any, torch: Any, context: int, sampling: Any, tokens_prompt: Any) -> dict[str, Any]:
    """Answer a prompt that fills the context; the peak is of the allocator's since the boot."""
    tokens = random.Random(7).choices(range(PROMPT_TOKENS_FROM, PROMPT_TOKENS_TO), k=context - 2 * ANSWER_TOKENS)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    start = time.monotonic()
    params = sampling(temperature=0, max_tokens=ANSWER_TOKENS, ignore_eos=True)
    try:
        outputs = engine.generate([tokens_prompt(prompt_token_ids=tokens)], params, use_tqdm=False)
        outcome, answered = "answered", len(outputs[0].outputs[0].token_ids)
    except RuntimeError as error:
        outcome, answered = f"{type(error).__name__}: {error}"[:2000], 0
    return {
        "outcome": outcome,
        "prompt_tokens": len(tokens),
        "answer_tokens": answered,
        "seconds": round(time.monotonic() - start, 1),
        "allocated_before_bytes": before,
        "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
    }


def compared(case: Case, measured: dict[str, Any], log: str) -> dict[str, Any]:
    """Put prediction, report and what follows from both side by side."""
    report = prediction(case)
    logged = logged_boot(log)
    entry: dict[str, Any] = {
        "case": dataclasses.asdict(case),
        "predicted": report.to_json(),
        "reported": measured,
        "logged": dataclasses.asdict(logged),
        "log_lines": memory_lines(log),
    }
    if measured.get("outcome") != "booted":
        return entry
    comparison = compare(report, logged)
    layout, blocks, length = report.layout, measured["num_blocks"], measured["max_model_len"]
    from_pool = layout.num_blocks(measured["available_bytes"])
    inside = sum(term.size_bytes for term in report.waterfall if term.key not in ("other_use", "head_room"))
    entry["comparison"] = {
        "block_tokens_agree": layout.block_tokens == measured["block_tokens"],
        "blocks_of_reported_pool": from_pool,
        "blocks_agree": from_pool == blocks,
        "tokens_agree": layout.reported_tokens(blocks, length) == measured["kv_cache_tokens"],
        "admission_agrees": (
            measured["admission"]["blocks_with_needed"] == layout.request_blocks(length) + 1
            and measured["admission"]["one_byte_less"].startswith("To serve at least one request")
        ),
        "block_deviation": blocks - report.num_blocks,
        "available_deviation_bytes": measured["available_bytes"] - report.available_bytes,
        "predicted_peak_bytes": inside,
        "device_peak_bytes": measured["device_used_bytes"],
        "terms": [dataclasses.asdict(figure) for figure in comparison.figures],
        "cause": comparison.cause,
    }
    return entry


def logged_boot(log: str) -> LoggedBoot:
    """What vLLM printed, without the script's own line (which quotes a refusal) and the total of the larger GPU."""
    lines = [line for line in log.splitlines() if not line.startswith(RESULT_PREFIX)]
    return dataclasses.replace(parse_boot_log("\n".join(lines)), total_gib=None)


def compared_again(entry: dict[str, Any]) -> dict[str, Any]:
    """Compare the kept lines again; what was measured, and what was predicted before the boot, stay as they are."""
    if "comparison" not in entry:
        return entry
    case = next(case for case in CASES if case.id == entry["case"]["id"])
    logged = logged_boot("\n".join(entry["log_lines"]))
    logged = dataclasses.replace(logged, vllm_version=entry["logged"]["vllm_version"])
    comparison = compare(prediction(case), logged)
    terms = {"terms": [dataclasses.asdict(figure) for figure in comparison.figures], "cause": comparison.cause}
    return {**entry, "logged": dataclasses.asdict(logged), "comparison": {**entry["comparison"], **terms}}


def memory_lines(log: str) -> list[str]:
    """The lines of a log that the figures come from, without process prefixes."""
    marks = (
        "GiB",
        "KV cache",
        "block size",
        "mamba page",
        "padding layers",
        "GDN",
        "attention backend",
        "LinearKernel",
    )
    found = (line for line in log.splitlines() if any(mark in line for mark in marks))
    return [re.sub(r"^(\([^)]*\) )?[A-Z]+ [\d:. -]+ ", "", line)[:600] for line in found if "RESULT" not in line][:60]


def start(case: Case, logs: Path) -> tuple[subprocess.Popen[str], Path]:
    """Start a worker; it imports vLLM and waits for a line before it touches the GPU."""
    path = logs / f"{case.id}.log"
    with path.open("w", encoding="utf-8") as file:
        command = [sys.executable, str(Path(__file__).resolve()), "worker", case.id]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=file, stderr=subprocess.STDOUT, text=True), path


def finish(process: subprocess.Popen[str], path: Path) -> tuple[dict[str, Any], str]:
    """Let a waiting worker go, and return its result and its log."""
    try:
        process.communicate("go\n", timeout=CASE_TIMEOUT_S)
        failure = f"exit status {process.returncode} without a result"
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        failure = f"no result in {CASE_TIMEOUT_S} s"
    log = path.read_text(encoding="utf-8", errors="replace")
    lines = [line for line in log.splitlines() if line.startswith(RESULT_PREFIX)]
    if lines:
        measured = json.loads(lines[-1].removeprefix(RESULT_PREFIX))
        assert isinstance(measured, dict)
        return measured, log
    return {"outcome": "failed", "error": failure, "log_tail": log[-3000:]}, log


def load_results(path: Path) -> dict[str, Any]:
    """Read the results so far; empty when there are none."""
    if not path.is_file():
        return {"schema": SCHEMA, "vllm_version": "0.33.0", "cases": {}}
    document = json.loads(path.read_text(encoding="utf-8"))
    if document.get("schema") != SCHEMA:
        raise SystemExit(f"{path}: schema {document.get('schema')}, this script writes {SCHEMA}; give another --out")
    assert isinstance(document, dict)
    return document


def save_results(path: Path, document: dict[str, Any]) -> None:
    """Replace the results file at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".part")
    draft.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    draft.replace(path)


def pending(document: dict[str, Any], only: Sequence[str]) -> list[Case]:
    """Cases that have not booted yet, in order of priority."""
    done = {name for name, entry in document["cases"].items() if entry["reported"].get("outcome") == "booted"}
    return [case for case in CASES if case.id not in done and (not only or case.id in only)]


def run(out: Path, logs: Path, budget_s: float, only: Sequence[str]) -> int:
    """Boot what is pending, one at a time; 1 when a case is left or the exact part did not hold."""
    document = load_results(out)
    queue = pending(document, only)
    began, slowest = time.monotonic(), 45.0
    following = start(queue[0], logs) if queue else None
    for index, case in enumerate(queue):
        assert following is not None
        process, path = following
        case_began = time.monotonic()
        more = index + 1 < len(queue) and case_began - began + 2 * slowest < budget_s
        following = start(queue[index + 1], logs) if more else None
        measured, log = finish(process, path)
        slowest = max(slowest, time.monotonic() - case_began)
        document["cases"][case.id] = compared(case, measured, log)
        save_results(out, document)
        print(f"{case.id}: {summary(document['cases'][case.id])} [{time.monotonic() - case_began:.0f} s]", flush=True)
        if following is None:
            break
    left = [case.id for case in pending(document, only)]
    print(f"not booted: {', '.join(left) or 'none'}; {time.monotonic() - began:.0f} s")
    return int(bool(left) or not agrees(document))


def agrees(document: dict[str, Any]) -> bool:
    """Whether the exact part held in every boot."""
    exact = ("block_tokens_agree", "blocks_agree", "tokens_agree", "admission_agrees")
    compared_cases = [entry["comparison"] for entry in document["cases"].values() if "comparison" in entry]
    return bool(compared_cases) and all(one[name] for one in compared_cases for name in exact)


def summary(entry: dict[str, Any]) -> str:
    """One line about a case."""
    reported = entry["reported"]
    if "comparison" not in entry:
        return f"{reported['outcome']}: {reported.get('error', '')[:300]}"
    one = entry["comparison"]
    exact = "exact" if agrees({"cases": {"": entry}}) else "NOT EXACT"
    return (
        f"{exact}; {reported['num_blocks']} blocks, predicted {entry['predicted']['kv']['num_blocks']} "
        f"({one['available_deviation_bytes'] / GIB:+.2f} GiB); {reported['max_model_len']} tokens "
        f"{reported['prefill']['outcome']}; peak {one['device_peak_bytes'] / GIB:.2f} GiB of "
        f"{entry['case']['card_gib']}, predicted {one['predicted_peak_bytes'] / GIB:.2f}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    runner = commands.add_parser("run", help="boot the cases that have no result yet")
    runner.add_argument("--out", type=Path, required=True)
    runner.add_argument("--logs", type=Path, help="keep the engines' whole logs in this folder")
    runner.add_argument("--budget-s", type=float, default=400, help="start no case that may end after so many seconds")
    runner.add_argument("--only", nargs="*", default=[], choices=[case.id for case in CASES])
    shower = commands.add_parser("show", help="print the results")
    shower.add_argument("--out", type=Path, required=True)
    again = commands.add_parser("compare", help="compare the kept lines of the results again")
    again.add_argument("--out", type=Path, required=True)
    commands.add_parser("plan", help="print the cases with their predictions")
    one = commands.add_parser("worker", help="run one case; used by run")
    one.add_argument("case", choices=[case.id for case in CASES])
    options = parser.parse_args(arguments)
    if options.command == "run":
        with tempfile.TemporaryDirectory() as folder:
            logs = options.logs or Path(folder)
            logs.mkdir(parents=True, exist_ok=True)
            return run(options.out, logs, options.budget_s, options.only)
    if options.command == "show":
        document = load_results(options.out)
        for name, entry in document["cases"].items():
            print(f"{name}: {summary(entry)}")
        return int(not agrees(document))
    if options.command == "compare":
        document = load_results(options.out)
        document["cases"] = {name: compared_again(entry) for name, entry in document["cases"].items()}
        save_results(options.out, document)
        return int(not agrees(document))
    if options.command == "worker":
        case = next(case for case in CASES if case.id == options.case)
        print(RESULT_PREFIX + json.dumps(worker(case)), flush=True)
        return 0
    for case in CASES:
        report = prediction(case)
        print(
            f"{case.id}: {report.available_bytes / GIB:.2f} GiB, {report.num_blocks} blocks of "
            f"{report.layout.block_tokens}, context {report.context_tokens}, {report.verdict.value}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
