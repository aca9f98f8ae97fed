"""Every argument of `vllm serve` with its value, its reason and its source. Pure.

The spelling of switched-off options differs between vLLM releases (0.33.0 renamed `--no-enable-X` to `--disable-X`), so
`switch_off` is the only place that spells one.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from packaging.version import Version

from launcher.errors import UsageError
from launcher.fit.budget import capture_sizes
from launcher.plan import EnvironmentVariable, Flag
from launcher.profile import Model, Profile, Speculation

CudagraphMode = Literal["NONE", "PIECEWISE", "FULL_AND_PIECEWISE"]

OWNED: dict[str, str] = {
    "--model": "model, or MODEL=",
    "--host": "serve.host",
    "--port": "serve.port",
    "--api-key": "the secret file api_key",
    "--served-model-name": "the model's served_name",
    "--dtype": "serve.dtype",
    "--tensor-parallel-size": "serve.tensor_parallel_size",
    "-tp": "serve.tensor_parallel_size",
    "--max-model-len": "serve.max_model_len",
    "--max-num-seqs": "serve.max_num_seqs",
    "--max-num-batched-tokens": "serve.max_num_batched_tokens",
    "--gpu-memory-utilization": "serve.gpu_memory_utilization",
    "--kv-cache-memory-bytes": "serve.gpu_memory_utilization",
    "--kv-cache-dtype": "serve.kv_cache_dtype",
    "--enable-prefix-caching": "serve.prefix_caching",
    "--no-enable-prefix-caching": "serve.prefix_caching",
    "--disable-prefix-caching": "serve.prefix_caching",
    "--speculative-config": "serve.speculation",
    "--language-model-only": "serve.language_model_only",
    "--no-language-model-only": "serve.language_model_only",
    "--compilation-config": "the plan's choice of CUDA graphs",
    "--cudagraph-capture-sizes": "the plan's choice of CUDA graphs",
    "--enforce-eager": "the plan's choice of CUDA graphs",
    "--async-scheduling": "the plan's choice of scheduling",
    "--no-async-scheduling": "the plan's choice of scheduling",
    "--disable-custom-all-reduce": "serve.tensor_parallel_size",
    "--reasoning-parser": "the model's reasoning_parser",
    "--tool-call-parser": "the model's tool_call_parser",
    "--enable-auto-tool-choice": "the model's tool_call_parser",
}
"""Arguments that the plan sets, and what to write instead of them."""


@dataclass(frozen=True)
class Decisions:
    """What the plan decided, with the reasons that the flags print."""

    max_model_len: int | None
    max_model_len_reason: str
    max_num_seqs: int
    max_num_seqs_reason: str
    max_num_batched_tokens_reason: str
    speculation: Speculation | None
    speculation_reason: str
    language_model_only: bool
    cudagraph_mode: CudagraphMode
    cudagraph_reason: str
    async_scheduling: bool
    async_scheduling_reason: str
    kv_cache_memory_bytes: int | None
    kv_pool_reason: str


def switch_off(option: str, vllm: str) -> str:
    """Return the flag that turns a boolean option off, such as `enable-prefix-caching`."""
    if Version(vllm) >= Version("0.33") and option.startswith("enable-"):
        return f"--disable-{option.removeprefix('enable-')}"
    return f"--no-{option}"


def refuse_owned(profile: Profile) -> None:
    """Refuse further arguments that the plan sets itself.

    Raises:
        UsageError: naming the argument and the key to use instead.
    """
    for argument in profile.serve.extra_args:
        name = argument.split("=", 1)[0].replace("_", "-")
        for owned in OWNED:
            if name == owned or name.startswith(f"{owned}."):
                where = profile.source_of("serve.extra_args")
                raise UsageError(f"{where}: {name} is set by the plan; use {OWNED[owned]} instead")


def serve_flags(profile: Profile, model: Model, decisions: Decisions) -> tuple[Flag, ...]:
    """Return the flags in the order of `graft explain`, without the model's path, --host and --port."""
    groups = (_identity, _memory, _speculation, _execution, _tools, _extra)
    return tuple(flag for group in groups for flag in group(profile, model, decisions))


def server_environment(profile: Profile) -> tuple[EnvironmentVariable, ...]:
    """Return the server's environment besides the four GRAFT_* settings; secrets never go here."""
    common = (
        EnvironmentVariable(
            name="HF_HUB_OFFLINE", value="1", reason="the server reads the files on disk and no others"
        ),
        EnvironmentVariable(name="VLLM_NO_USAGE_STATS", value="1", reason="nothing is sent to anyone"),
    )
    if profile.gpu is None:
        pool = profile.serve.cpu_kv_cache_gib
        cache = EnvironmentVariable(
            name="VLLM_CPU_KVCACHE_SPACE",
            value=str(pool),
            reason=f"KV pool in GiB of host memory ({profile.source_of('serve.cpu_kv_cache_gib')})",
        )
        return (*common, cache) if pool else common
    return (
        *common,
        EnvironmentVariable(
            name="VLLM_ENABLE_CUDA_COMPATIBILITY",
            value="0",
            reason="CUDA's compatibility libraries do not work on GeForce cards",
        ),
        EnvironmentVariable(
            name="PYTORCH_ALLOC_CONF",
            value="expandable_segments:True",
            reason="keeps fragmentation from eating what little memory is left beside the KV pool",
        ),
    )


def _identity(profile: Profile, model: Model, decisions: Decisions) -> Iterator[Flag]:
    yield Flag(
        name="--served-model-name",
        value=model.served_name,
        reason="the name that clients ask for",
        source=f"{model.source}: served_name",
    )
    if profile.serve.dtype != "auto":
        yield _from(profile, "--dtype", "dtype", "activations, and a 16-bit KV cache, have this type")
    if profile.serve.tensor_parallel_size > 1:
        yield _from(profile, "--tensor-parallel-size", "tensor_parallel_size", "one rank a card")
        yield Flag(
            name="--disable-custom-all-reduce",
            value=None,
            reason="it copies between cards directly (P2P), which GeForce pairs refuse or answer with wrong data",
            source="plan: more than one card",
        )


def _memory(profile: Profile, model: Model, decisions: Decisions) -> Iterator[Flag]:
    serve = profile.serve
    yield Flag(
        name="--max-model-len",
        value="auto" if decisions.max_model_len is None else str(decisions.max_model_len),
        reason=decisions.max_model_len_reason,
        source=profile.source_of("serve.max_model_len"),
    )
    yield Flag(
        name="--max-num-seqs",
        value=str(decisions.max_num_seqs),
        reason=decisions.max_num_seqs_reason,
        source=profile.source_of("serve.max_num_seqs"),
    )
    yield _from(
        profile,
        "--max-num-batched-tokens",
        "max_num_batched_tokens",
        decisions.max_num_batched_tokens_reason,
    )
    if profile.gpu is not None:
        if decisions.kv_cache_memory_bytes is not None:
            yield Flag(
                name="--kv-cache-memory-bytes",
                value=str(decisions.kv_cache_memory_bytes),
                reason=decisions.kv_pool_reason,
                source="plan: calibration",
            )
        yield _from(
            profile,
            "--gpu-memory-utilization",
            "gpu_memory_utilization",
            "share of the card's total memory for weights, activations and KV"
            if decisions.kv_cache_memory_bytes is None
            else "checked against the free memory at the start; the pool itself is fixed",
        )
    if serve.kv_cache_dtype != "auto":
        yield _from(profile, "--kv-cache-dtype", "kv_cache_dtype", "how keys and values are kept")
    if serve.prefix_caching:
        yield _from(
            profile, "--enable-prefix-caching", "prefix_caching", "prompts that begin alike share KV", bare=True
        )
    else:
        yield Flag(
            name=switch_off("enable-prefix-caching", profile.vllm),
            value=None,
            reason="the profile keeps it off; vLLM's default is on",
            source=profile.source_of("serve.prefix_caching"),
        )
    if decisions.language_model_only:
        yield _from(
            profile, "--language-model-only", "language_model_only", "the vision tower's memory goes to KV", bare=True
        )


def _speculation(profile: Profile, model: Model, decisions: Decisions) -> Iterator[Flag]:
    speculation = decisions.speculation
    if speculation is None:
        return
    value: dict[str, Any] = {"method": speculation.method, "num_speculative_tokens": speculation.num_speculative_tokens}
    if speculation.method == "ngram":
        value["prompt_lookup_max"] = speculation.num_speculative_tokens
    yield Flag(
        name="--speculative-config",
        value=_json(value),
        reason=decisions.speculation_reason,
        source=profile.source_of("serve.speculation"),
    )


def _execution(profile: Profile, model: Model, decisions: Decisions) -> Iterator[Flag]:
    if profile.gpu is None:
        yield Flag(
            name="--enforce-eager",
            value=None,
            reason="a small model gains nothing from compilation and starts sooner without",
            source="plan: CPU",
        )
        return
    tokens = decisions.speculation.num_speculative_tokens if decisions.speculation else 0
    sizes = capture_sizes(decisions.max_num_seqs, tokens)
    yield Flag(
        name="--compilation-config",
        value=_json({"cudagraph_mode": decisions.cudagraph_mode, "cudagraph_capture_sizes": sizes}),
        reason=f"{decisions.cudagraph_reason}; sizes: what {decisions.max_num_seqs} request(s) can need, as the memory "
        "plan counted them",
        source="plan: CUDA graphs",
    )
    yield Flag(
        name="--async-scheduling" if decisions.async_scheduling else "--no-async-scheduling",
        value=None,
        reason=decisions.async_scheduling_reason,
        source="plan: scheduling",
    )
    yield Flag(
        name="--fail-on-environ-validation",
        value=None,
        reason="a misspelt VLLM_ variable ends the start instead of doing nothing",
        source="plan: always",
    )


def _tools(profile: Profile, model: Model, decisions: Decisions) -> Iterator[Flag]:
    if model.reasoning_parser:
        yield Flag(
            name="--reasoning-parser",
            value=model.reasoning_parser,
            reason="separates reasoning from the answer",
            source=f"{model.source}: reasoning_parser",
        )
    if model.tool_call_parser:
        source = f"{model.source}: tool_call_parser"
        yield Flag(name="--enable-auto-tool-choice", value=None, reason="the model decides when to call", source=source)
        yield Flag(
            name="--tool-call-parser", value=model.tool_call_parser, reason="the model's call format", source=source
        )


def _extra(profile: Profile, model: Model, decisions: Decisions) -> Iterator[Flag]:
    source = profile.source_of("serve.extra_args")
    for argument in profile.serve.extra_args:
        yield Flag(name=argument, value=None, reason="asked for by the profile", source=source)


def _from(profile: Profile, name: str, key: str, reason: str, bare: bool = False) -> Flag:
    value = getattr(profile.serve, key)
    return Flag(name=name, value=None if bare else str(value), reason=reason, source=profile.source_of(f"serve.{key}"))


def _json(value: dict[str, Any]) -> str:
    return json.dumps(value, separators=(",", ":"))
