"""Runs one case in a real vLLM engine in this process, and says what ran."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import spec_model
from spec_cases import Backend, Case, Graph
from spec_compare import Generated

FIX = "tq-spec-decode"
CAPTURE_SIZES = [1, 2, 4, 8, 12, 16, 24, 32]
MAX_SEQS = 8
POOL_BYTES = 2 * 2**30
"""KV pool: given, since memory profiling breaks where another engine starts beside it."""


@dataclass(frozen=True)
class Record:
    """What one engine did; counts of graph replays are by manager and tokens per request ('*' is any)."""

    streams: dict[str, tuple[Generated, ...]]
    acceptance_length: float | None
    accepted_per_position: tuple[int, ...]
    graph_replays: dict[str, int]
    attention: dict[str, int]
    builders: tuple[str, ...]
    cudagraph_mode: str
    async_scheduling: bool
    model_runner_v2: bool
    block_size: int
    fix: str
    boot_s: float
    run_s: float


def graphs_needed(case: Case) -> set[str]:
    """The graphs that a case must have replayed to say anything of FULL graphs, as keys of `graph_replays`.

    The MTP drafter has two kinds of its own: one that runs over the verified tokens, and one for its further drafts.
    """
    if case.graph not in (Graph.FULL_DECODE_ONLY, Graph.FULL_AND_PIECEWISE):
        return set()
    tokens = 1 + (spec_model.DRAFTS if case.method else 0)
    needed = {f"ModelCudaGraphManager/{tokens}"}
    if case.method == "mtp":
        needed |= {f"SpeculatorCudaGraphManager/{tokens}", "SpeculatorCudaGraphManager/1"}
    return needed


def settings(case: Case) -> dict[str, Any]:
    """The arguments of vLLM's LLM for a case, without the model."""
    arguments: dict[str, Any] = {
        "load_format": "seeded",
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "seed": 0,
        "max_model_len": spec_model.MAX_MODEL_LEN,
        "max_num_batched_tokens": spec_model.MAX_BATCHED_TOKENS,
        "max_num_seqs": MAX_SEQS,
        "gpu_memory_utilization": 0.05,
        "kv_cache_memory_bytes": POOL_BYTES,
        "kv_cache_dtype": case.kv_cache_dtype,
        "enable_prefix_caching": case.prefix_caching == "on",
        "async_scheduling": case.scheduling == "async",
        "additional_config": {"gdn_prefill_backend": "triton"},
        "disable_log_stats": False,
    }
    if case.method is not None:
        arguments["speculative_config"] = {"method": case.method, "num_speculative_tokens": spec_model.DRAFTS}
        if case.method == "ngram":
            arguments["speculative_config"] |= {"prompt_lookup_max": 3, "prompt_lookup_min": 1}
    if case.graph is Graph.EAGER:
        arguments["enforce_eager"] = True
    else:
        compilation: dict[str, Any] = {"cudagraph_mode": str(case.graph), "cudagraph_capture_sizes": CAPTURE_SIZES}
        if case.graph is Graph.FULL_DECODE_ONLY:
            compilation["mode"] = 0  # nothing to compile for; saves a minute
        arguments["compilation_config"] = compilation
    return arguments


def facts(case: Case) -> str:
    """The run's facts file, which tells the fix that it is wanted."""
    from vllm_graft.facts import EngineFacts, ModelFacts, RunFacts
    from vllm_graft.records import to_json

    attention = spec_model.ATTENTION_LAYERS
    model = ModelFacts(
        architectures=tuple(spec_model.CONFIG["architectures"]),  # type: ignore[arg-type]
        attention_layers=attention,
        gdn_layers=attention,
        experts=None,
        mtp_layers=1,
        head_dim=256,
    )
    engine = EngineFacts(
        kv_cache_dtype=case.kv_cache_dtype,
        speculative_method=case.method,
        num_speculative_tokens=spec_model.DRAFTS if case.method else 0,
        tensor_parallel_size=1,
        runtime="host",
    )
    return to_json(RunFacts(schema=1, run_id=case.id, model=model, engine=engine))


def environment(case: Case, directory: Path) -> dict[str, str]:
    """What a case's process needs in its environment; the fix is required in fixed runs and disabled in stock ones."""
    wanted = case.backend is Backend.FIXED
    return {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "INFO",
        "HF_HUB_OFFLINE": "1",
        "GRAFT_FACTS": str(directory / "facts.json"),
        "GRAFT_REPORTS": str(directory / "reports"),
        "GRAFT_REQUIRE": FIX if wanted else "",
        "GRAFT_DISABLE": "" if wanted else FIX,
    }


def run(case: Case, directory: Path) -> Record:
    """Start the engine, serve all streams, and report; run it in a process of its own.

    Raises:
        RuntimeError: the attention code that ran is not the case's.

    """
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "facts.json").write_text(facts(case), encoding="utf-8")
    os.environ.update(environment(case, directory))
    from vllm import LLM

    replays = _count_replays()
    spec_model.register_loader()
    start = time.monotonic()
    llm = LLM(model=str(spec_model.write_config(directory / "model")), **settings(case))
    boot_s = time.monotonic() - start
    attention, builders = _what_runs(llm)
    fix = _fix_outcome(directory / "reports")
    _check(case, attention, builders, fix)
    start = time.monotonic()
    streams = _streams(llm, case)
    accepted = _acceptance(llm)
    config = llm.llm_engine.vllm_config
    return Record(
        streams=streams,
        acceptance_length=accepted[0],
        accepted_per_position=accepted[1],
        graph_replays=dict(replays),
        attention=dict(attention),
        builders=builders,
        cudagraph_mode=config.compilation_config.cudagraph_mode.name,
        async_scheduling=bool(config.scheduler_config.async_scheduling),
        model_runner_v2=bool(config.use_v2_model_runner),
        block_size=config.cache_config.block_size,
        fix=fix,
        boot_s=round(boot_s, 1),
        run_s=round(time.monotonic() - start, 1),
    )


def _count_replays() -> Counter[str]:
    """Count the replays of FULL graphs from here on, by what they are for."""
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

    replays: Counter[str] = Counter()
    original = CudaGraphManager.run_fullgraph

    def run_fullgraph(self: Any, desc: Any) -> Any:
        replays[f"{type(self).__name__}/{desc.uniform_token_count or '*'}"] += 1
        return original(self, desc)

    CudaGraphManager.run_fullgraph = run_fullgraph
    return replays


def _what_runs(llm: Any) -> tuple[Counter[str], tuple[str, ...]]:
    """The attention layers by the class that computes them, and the classes that build their metadata."""

    def builders(worker: Any) -> list[str]:
        runner = worker.model_runner
        speculator = getattr(runner, "speculator", None)
        groups = [*runner.attn_groups, *(getattr(speculator, "attn_groups", None) or [])]
        return [type(group.get_metadata_builder(0)).__name__ for found in groups for group in found]

    from vllm.model_executor.layers.attention import Attention

    layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()
    attention = Counter(type(layer.impl).__name__ for layer in layers if isinstance(layer, Attention))
    return attention, tuple(sorted(llm.collective_rpc(builders)[0]))


def _fix_outcome(reports: Path) -> str:
    """What the report of this process says of the fix."""
    report = json.loads((reports / f"graft-{os.getpid()}.json").read_text(encoding="utf-8"))
    return next(f"{fix['outcome']}: {fix['reason']}" for fix in report["fixes"] if fix["id"] == FIX)


def _check(case: Case, attention: Counter[str], builders: Sequence[str], fix: str) -> None:
    """Refuse a run whose attention code is not what the case says."""
    fixed = case.backend is Backend.FIXED
    turboquant = case.kv_cache_dtype != "auto"
    problems = []
    if fixed != fix.startswith("applied"):
        problems.append(f"the fix is {fix}")
    if turboquant and set(attention) != {"SpecDecodeImpl" if fixed else "TurboQuantAttentionImpl"}:
        problems.append(f"attention runs {dict(attention)}")
    if turboquant and ("SpecDecodeMetadataBuilder" if fixed else "TurboQuantMetadataBuilder") not in builders:
        problems.append(f"metadata is built by {', '.join(builders)}")
    if problems:
        raise RuntimeError(f"{case.id}: {'; '.join(problems)}")


def _streams(llm: Any, case: Case) -> dict[str, tuple[Generated, ...]]:
    load = spec_model.load()
    margins = case.method is None
    streams = {
        "single": tuple(_generate(llm, [item], margins)[0] for item in load.single),
        "batch": _generate(llm, load.batch, margins),
        "two-users": _two_users(llm, load, margins),
    }
    if case.prefix_caching == "on":  # the same long prompts again, now with a cached prefix
        streams["again"] = tuple(_generate(llm, [item], margins)[0] for item in load.single if len(item[0]) > 2000)
    return streams


def _parameters(max_tokens: int, margins: bool) -> Any:
    from vllm import SamplingParams

    return SamplingParams(
        temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, logprobs=2 if margins else None
    )


def _generate(llm: Any, items: Sequence[tuple[tuple[int, ...], int]], margins: bool) -> tuple[Generated, ...]:
    prompts = [{"prompt_token_ids": list(tokens)} for tokens, _ in items]
    outputs = llm.generate(prompts, [_parameters(count, margins) for _, count in items], use_tqdm=False)
    return tuple(_generated(output.outputs[0]) for output in outputs)


def _generated(completion: Any) -> Generated:
    margins = []
    for position in completion.logprobs or ():
        best, second = sorted((entry.logprob for entry in position.values()), reverse=True)[:2]
        margins.append(round(best - second, 5))
    return Generated(tuple(completion.token_ids), tuple(margins))


def _two_users(llm: Any, load: spec_model.Load, margins: bool) -> tuple[Generated, ...]:
    """A second user sends a fresh long prompt while the first is being answered."""
    engine = llm.llm_engine
    parameters = _parameters(load.user_tokens, margins)
    engine.add_request("first", {"prompt_token_ids": list(load.first_user)}, parameters)
    finished: dict[str, Any] = {}
    joined = False
    while engine.has_unfinished_requests():
        for output in engine.step():
            name = output.request_id.split("-")[0]
            if output.finished:
                finished[name] = output.outputs[0]
            if not joined and len(output.outputs[0].token_ids) >= 10:
                engine.add_request("second", {"prompt_token_ids": list(load.second_user)}, parameters)
                joined = True
    return _generated(finished["first"]), _generated(finished["second"])


def _acceptance(llm: Any) -> tuple[float | None, tuple[int, ...]]:
    """Mean tokens per verification (1 + accepted drafts), and accepted drafts by position; None without speculation."""
    found = {metric.name: metric for metric in llm.get_metrics()}
    drafts = found.get("vllm:spec_decode_num_drafts")
    if drafts is None or not drafts.value:
        return None, ()
    accepted = found["vllm:spec_decode_num_accepted_tokens"].value
    positions = found["vllm:spec_decode_num_accepted_tokens_per_pos"].values
    return round(1 + accepted / drafts.value, 4), tuple(int(value) for value in positions)
