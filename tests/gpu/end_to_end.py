#!/usr/bin/env python3
"""Time decoding in vLLM's engine over long contexts: with the fix, by vLLM's own TurboQuant, and on a bfloat16 cache.

    python3 tests/gpu/end_to_end.py --budget-s 560      # again until nothing is left; results/end_to_end.json is kept
    python3 tests/gpu/end_to_end.py --list              # the cases, in their order
    python3 tests/gpu/end_to_end.py --only fixed        # some of them

Needs one NVIDIA GPU and vLLM 0.33.0 importable; no weights and no network.  The model has the layers of Qwen3.6-27B,
random weights, and a quarter of the depth: 4 attention and 12 GDN layers, so that attention has its share of a step.  A
step of the whole model takes about four times as long; ratios are those of the whole.  FULL graphs, one request at a
time; random weights accept no drafts, so a verification step yields one token and its time is what counts.  The case
`safe` is the flags-only safe mode, which a plan falls back to without the fix.

The log of each case (in the work folder) holds vLLM's own JIT monitor; what it reports after the start is counted: with
the fix there must be none of TurboQuant's kernels.  The exit status is 0 when all holds, 3 when cases are left, else 1.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "patches"))

import fit_boots
import spec_decode
import spec_engine

RESULTS = Path(__file__).parent / "results" / "end_to_end.json"
WORK = Path(tempfile.gettempdir()) / "end-to-end"
SCHEMA = 1
DRAFTS = 3
CONTEXTS = (8 * 1024, 64 * 1024, 200 * 1024)
ANSWER_TOKENS = 72
WARM_TOKENS = 8
"""Tokens that are not timed, at the beginning of an answer."""
LAYERS = 16
POOL_BYTES = 8 * 2**30
EXPECTED_S = 60
FIRST_EXPECTED_S = 100
SAFE_EXPECTED_S = 120
"""The safe mode's graphs are piecewise, so its model is compiled."""
JIT_LINE = re.compile(r"(\w+) (kernel JIT compilation|autotuning[\w ]*|\w+ compilation) during inference: ([\w.<>]+)")
TURBOQUANT_KERNELS = re.compile(r"_tq_|^_attend$|^_merge$|^_store$|^_dequantize$|^_rotate$|stage2")


@dataclass(frozen=True)
class Case:
    """One engine."""

    backend: str
    """fixed: with the fix; stock: vLLM's own; safe: vLLM's own with the flags of the safe mode."""
    kv_cache_dtype: str
    mtp: bool

    @property
    def id(self) -> str:
        return f"{self.backend}-{self.kv_cache_dtype}-{'mtp' if self.mtp else 'plain'}"


_FULL = tuple(
    Case(backend, dtype, mtp)
    for dtypes in (("turboquant_k8v4", "auto"), ("turboquant_4bit_nc",))
    for mtp in (True, False)
    for dtype in dtypes
    for backend in (("fixed", "stock") if dtype != "auto" else ("stock",))
)
CASES = (*_FULL, Case("safe", "turboquant_k8v4", mtp=True))
"""The most telling first; the one whose model is compiled takes the longest."""


@dataclass(frozen=True)
class Timed:
    """One answer behind a context of so many tokens."""

    context: int
    first_token_s: float
    steps: int
    tokens: int
    step_ms: float
    tokens_per_s: float


@dataclass(frozen=True)
class Record:
    """What one engine did."""

    answers: tuple[Timed, ...]
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    device_used_bytes: int
    attention: dict[str, int]
    fix: str
    cudagraph_mode: str
    graph_replays: dict[str, int]
    boot_s: float


def config() -> dict[str, Any]:
    """The model's config.json."""
    kinds = fit_boots.TEXT_CONFIG["layer_types"][:LAYERS]
    return {**fit_boots.TEXT_CONFIG, "num_hidden_layers": LAYERS, "layer_types": kinds}


def settings(case: Case) -> dict[str, Any]:
    """The arguments of vLLM's LLM for a case, without the model."""
    arguments: dict[str, Any] = {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "seed": 0,
        "max_model_len": max(CONTEXTS) + 2 * ANSWER_TOKENS,
        "max_num_batched_tokens": 8192,
        "max_num_seqs": 2,
        "gpu_memory_utilization": 0.5,
        "kv_cache_memory_bytes": POOL_BYTES,
        "kv_cache_dtype": case.kv_cache_dtype,
        "enable_prefix_caching": False,
        "additional_config": {"gdn_prefill_backend": "triton"},
        "compilation_config": {"cudagraph_mode": "FULL_DECODE_ONLY", "mode": 0},
        "jit_monitor_verbose": True,
        "disable_log_stats": False,
    }
    if case.backend == "safe":  # as launcher/planner.py has it
        arguments |= {
            "max_num_seqs": 1,
            "async_scheduling": False,
            "compilation_config": {"cudagraph_mode": "PIECEWISE"},
        }
    if case.mtp:
        arguments["speculative_config"] = {"method": "mtp", "num_speculative_tokens": DRAFTS}
    return arguments


def facts(case: Case) -> str:
    """The run's facts file, which tells the fix that it is wanted."""
    from vllm_graft.facts import EngineFacts, ModelFacts, RunFacts
    from vllm_graft.records import to_json

    attention = config()["layer_types"].count("full_attention")
    model = ModelFacts(
        architectures=tuple(config()["architectures"]),
        attention_layers=attention,
        gdn_layers=LAYERS - attention,
        experts=None,
        mtp_layers=1,
        head_dim=config()["head_dim"],
    )
    engine = EngineFacts(
        kv_cache_dtype=case.kv_cache_dtype,
        speculative_method="mtp" if case.mtp else None,
        num_speculative_tokens=DRAFTS if case.mtp else 0,
        tensor_parallel_size=1,
        runtime="host",
    )
    return to_json(RunFacts(schema=1, run_id=case.id, model=model, engine=engine))


def environment(case: Case, directory: Path) -> dict[str, str]:
    """What a case's process needs in its environment; the fix is required in fixed runs and disabled in others."""
    fixed = case.backend == "fixed"
    return {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "INFO",
        "HF_HUB_OFFLINE": "1",
        "GRAFT_FACTS": str(directory / "facts.json"),
        "GRAFT_REPORTS": str(directory / "reports"),
        "GRAFT_REQUIRE": spec_engine.FIX if fixed else "",
        "GRAFT_DISABLE": "" if fixed else spec_engine.FIX,
    }


def run(case: Case, directory: Path) -> Record:
    """Start the engine and answer behind each context; run it in a process of its own."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "facts.json").write_text(facts(case), encoding="utf-8")
    (directory / "config.json").write_text(json.dumps(config()), encoding="utf-8")
    os.environ.update(environment(case, directory))
    import torch
    from vllm import LLM

    replays = spec_engine._count_replays()
    start = time.monotonic()
    llm = LLM(model=str(directory), **settings(case))
    boot_s = time.monotonic() - start
    attention, _ = spec_engine._what_runs(llm)
    answers = tuple(answer(llm.llm_engine, context) for context in CONTEXTS)
    free, total = torch.cuda.mem_get_info()
    return Record(
        answers=answers,
        peak_allocated_bytes=torch.cuda.max_memory_allocated(),
        peak_reserved_bytes=torch.cuda.max_memory_reserved(),
        device_used_bytes=total - free,
        attention=dict(attention),
        fix=spec_engine._fix_outcome(directory / "reports"),
        cudagraph_mode=llm.llm_engine.vllm_config.compilation_config.cudagraph_mode.name,
        graph_replays=dict(replays),
        boot_s=round(boot_s, 1),
    )


def answer(engine: Any, context: int) -> Timed:
    """Ask once behind a context of so many tokens, and time the steps after the first few."""
    from vllm import SamplingParams

    parameters = SamplingParams(temperature=0, max_tokens=ANSWER_TOKENS, ignore_eos=True, detokenize=False)
    prompt = [10 + 7919 * place % 200_000 for place in range(context - ANSWER_TOKENS)]
    begun = time.monotonic()
    engine.add_request(f"context-{context}", {"prompt_token_ids": prompt}, parameters)
    stamps: list[tuple[float, int]] = []
    while engine.has_unfinished_requests():
        for output in engine.step():
            stamps.append((time.monotonic(), len(output.outputs[0].token_ids)))
    return timed(context, begun, stamps)


def timed(context: int, begun: float, stamps: Sequence[tuple[float, int]]) -> Timed:
    """What the times of an answer's steps say; each has the tokens that were there after it."""
    first = next(index for index, (_, tokens) in enumerate(stamps) if tokens >= WARM_TOKENS)
    (since, before), (until, after) = stamps[first], stamps[-1]
    steps = len(stamps) - 1 - first
    seconds = until - since
    return Timed(
        context=context,
        first_token_s=round(stamps[0][0] - begun, 3),
        steps=steps,
        tokens=after - before,
        step_ms=round(1000 * seconds / steps, 3),
        tokens_per_s=round((after - before) / seconds, 2),
    )


def compiled_while_serving(log: str) -> dict[str, int]:
    """Kernels that vLLM's monitor saw compiled after the start, with how often."""
    found: dict[str, int] = {}
    for match in JIT_LINE.finditer(log):
        found[match[3]] = found.get(match[3], 0) + 1
    return found


def problems(results: Mapping[str, Any]) -> list[str]:
    """What does not hold of the cases that have run."""
    found = []
    for name, entry in results["cases"].items():
        if "error" in entry:
            found.append(f"{name}: {entry['error'].strip().splitlines()[-1][:200]}")
            continue
        fixed = entry["backend"] == "fixed"
        if fixed != entry["fix"].startswith("applied"):
            found.append(f"{name}: the fix is {entry['fix']}")
        jit = [kernel for kernel in entry["compiled_while_serving"] if TURBOQUANT_KERNELS.search(kernel)]
        if fixed and jit:
            found.append(f"{name}: compiled while serving: {', '.join(jit)}")
        if entry["backend"] != "safe" and not entry["graph_replays"]:
            found.append(f"{name}: no FULL graph was replayed")
    return found


def table(results: Mapping[str, Any]) -> str:
    """Step times and tokens per second of each case that has run."""
    lines = []
    for name, entry in results["cases"].items():
        if "error" not in entry:
            steps = "  ".join(
                f"{one['context'] // 1024}K {one['step_ms']} ms {one['tokens_per_s']} tok/s" for one in entry["answers"]
            )
            lines.append(f"{name}: {steps}; peak {entry['peak_allocated_bytes'] / 2**30:.2f} GiB")
    return "\n".join(lines)


def read(path: Path) -> dict[str, Any]:
    """The results so far.

    Raises:
        SystemExit: the file is of another schema.

    """
    if not path.exists():
        return {"schema": SCHEMA, "layers": LAYERS, "host": {}, "cases": {}}
    results: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if results.get("schema") != SCHEMA:
        raise SystemExit(f"{path}: schema {results.get('schema')}, not {SCHEMA}; move it away and run all cases again")
    return results


def main(arguments: Sequence[str] | None = None, execute: Any = spec_decode.execute) -> int:
    """Run what is left; `execute` stands in for running a case in tests."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS, help="the results file, which is gone on with")
    parser.add_argument("--work", type=Path, default=WORK, help="logs of the cases")
    parser.add_argument(
        "--budget-s", type=float, default=3600, help="start no case that would probably end later, and end one"
    )
    parser.add_argument("--only", help="run only cases whose id contains this")
    parser.add_argument("--list", action="store_true", help="print the ids of all cases and stop")
    options = parser.parse_args(arguments)
    if options.list:
        print("\n".join(case.id for case in CASES))
        return 0
    results = read(options.results)
    deadline = time.monotonic() + options.budget_s
    left = [case for case in CASES if "error" in results["cases"].get(case.id, {"error": "not run"})]
    for case in (case for case in left if not options.only or options.only in case.id):
        if time.monotonic() + _expected_s(case, first=not results["cases"]) > deadline:
            print("stopping within the budget")
            break
        print(case.id, flush=True)
        try:
            entry = execute(case, run, options.work, deadline - time.monotonic())
        except spec_decode.Cut:
            print(f"{case.id}: cut by the budget, to be run again")
            break
        log = options.work / case.id / "log"
        entry["compiled_while_serving"] = compiled_while_serving(
            log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
        )
        results["host"].update(entry.pop("host", {}))
        results["cases"][case.id] = {**asdict(case), **entry}
        spec_decode.write(options.results, results)
    print(table(results))
    found = problems(results)
    print("\n".join(found))
    if found:
        return 1
    return 0 if all(case.id in results["cases"] for case in CASES) else 3


def _expected_s(case: Case, *, first: bool) -> int:
    if case.backend == "safe":
        return SAFE_EXPECTED_S
    return FIRST_EXPECTED_S if first else EXPECTED_S


if __name__ == "__main__":
    if not {"--list", "-h", "--help"} & set(sys.argv):
        spec_decode.install_plugin(WORK / "plugin")
        spec_decode.preload()
    sys.exit(main())
