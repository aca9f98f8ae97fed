"""Make the plan: every flag with its reason, the fixes it needs, and all problems found. Pure."""

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from vllm_graft.decide import Situation, refusal
from vllm_graft.facts import EngineFacts, ModelFacts, RunFacts
from vllm_graft.fixes import FIXES
from vllm_graft.patch import Patch
from vllm_graft.report import expected_processes, ordered_roles

from launcher.checks import CheckResult, Demand, check, select
from launcher.errors import UsageError
from launcher.fit.geometry import FitError, Geometry, GeometryError, geometry_from_config
from launcher.fit.shapes import weights_from_shapes
from launcher.fit.weights import Weights
from launcher.flags import Decisions, refuse_owned, serve_flags, server_environment
from launcher.gateway.choices import gateway_of
from launcher.host.devices import Device
from launcher.host.facts import HostFacts
from launcher.host.modelfiles import IncompleteFile
from launcher.images.pins import Pin
from launcher.memory import (
    CHUNK_REASON,
    MemoryInputs,
    MemoryPlan,
    listed_weights,
    plan_cpu_pool,
    plan_memory,
    refused_kv_cache,
)
from launcher.plan import GpuMode, Plan, Runtime, SelectedGpu
from launcher.problems import Problem
from launcher.profile import Model, Profile, Speculation, capability_of
from launcher.watching.choices import Sized, degraded_of, watch_of

TURBOQUANT_SPECULATION_FIX = "tq-spec-decode"
"""Without it, TurboQuant is right only in the flags-only safe mode."""


@dataclass(frozen=True)
class Inputs:
    """Everything that a plan is made from."""

    profile: Profile
    model: Model
    pin: Pin
    facts: HostFacts | None = None
    """This machine; None plans for another one, which nothing is checked on."""
    config: Mapping[str, Any] | None = None
    """The checkpoint's config.json, once it is there."""
    config_source: str = ""
    weights: Weights | None = None
    """Sizes read from the checkpoint's files, once they are there."""
    memory: MemoryInputs = field(default_factory=MemoryInputs)
    model_dir: Path | None = None
    model_is_here: bool = False
    incomplete_files: tuple[IncompleteFile, ...] = ()
    image_is_here: bool = False
    runtime: Runtime | None = None
    """Another runtime than the profile's."""


@dataclass(frozen=True)
class Planned:
    """A plan, and what it was computed from where that is worth showing."""

    plan: Plan
    inputs: Inputs
    memory: MemoryPlan | None
    """None without a GPU, or where the model's geometry is not known."""


@dataclass(frozen=True)
class _Fixes:
    required: tuple[str, ...]
    disabled: tuple[str, ...]
    has_turboquant: bool
    """The fix of TurboQuant is sure to be in where the KV cache is in one of its formats."""
    is_safe_mode: bool
    """TurboQuant, and its fix is not sure to be in."""


def make(inputs: Inputs) -> Planned:
    """Return the plan of a start, with the smaller settings that it falls back to.

    Raises:
        UsageError: the profile passes arguments that the plan owns.
    """
    made = _made(inputs)
    if made.plan.watch is None or not inputs.profile.watch.degraded:
        return made
    degraded = degraded_of(_sized(made), lambda profile: _sized(_made(replace(inputs, profile=profile))))
    return replace(made, plan=made.plan.model_copy(update={"degraded": degraded}))


def _sized(made: Planned) -> Sized:
    report = made.memory.report if made.memory else None
    return Sized(made.plan, made.inputs.profile, report.layout.block_tokens if report else 1)


def _made(inputs: Inputs) -> Planned:
    profile = inputs.profile
    refuse_owned(profile)
    _refuse_unknown_fixes(profile)
    geometry, geometry_problems = _geometry(inputs)
    speculation, speculation_reason = speculation_for(profile, geometry)
    demand = demand_of(inputs)
    devices = select(inputs.facts, demand) if inputs.facts else ()
    fixes = _fixes(inputs, geometry, speculation, devices)
    if fixes.is_safe_mode:
        profile = _one_at_a_time(profile)
    memory = None
    if profile.gpu is not None and geometry is not None:
        memory = plan_memory(
            profile,
            inputs.model,
            geometry,
            _weights(inputs, geometry),
            devices,
            speculation,
            inputs.memory,
            fixes.is_safe_mode,
            fixes.has_turboquant,
        )
    if memory is not None:
        profile = memory.profile
        demand = demand.model_copy(update={"gpu_memory_utilization": profile.serve.gpu_memory_utilization})
    checked = check(inputs.facts, demand) if inputs.facts else _unchecked(demand)
    decisions = _decisions(profile, geometry, speculation, speculation_reason, memory, fixes)
    problems = _without_repeats(
        (
            *checked.problems,
            *geometry_problems,
            *(memory.problems if memory else ()),
            *(plan_cpu_pool(profile, geometry, profile.vllm) if geometry and profile.gpu is None else ()),
            *(
                refused_kv_cache(profile, devices, inputs.memory.card, turboquant_fix=fixes.has_turboquant)
                if profile.gpu and memory is None
                else ()
            ),
            *_fix_problems(inputs.profile, speculation, fixes),
        )
    )
    plan = _plan(inputs, profile, geometry, decisions, fixes, checked, devices, memory, problems)
    return Planned(plan, replace(inputs, profile=profile), memory)


def _config(inputs: Inputs) -> tuple[Mapping[str, Any] | None, str]:
    """Return the checkpoint's config.json, else what the model's YAML lists of it; and where it is from."""
    if inputs.config is None and inputs.model.geometry is not None:
        return inputs.model.geometry.config, f"{inputs.model.source}: {inputs.model.geometry.source}"
    return inputs.config, inputs.config_source


def _weights(inputs: Inputs, geometry: Geometry) -> Weights | None:
    """Return the sizes of the checkpoint's files, else the listed ones, else those that follow from the shapes."""
    known = inputs.weights or listed_weights(inputs.model, geometry)
    config, source = _config(inputs)
    if known is not None or config is None:
        return known
    if inputs.config is None and "quantization_config" not in config:
        # A config.json without it has 16 bits; a list of fields may have left it out.
        return None
    try:
        return weights_from_shapes(config, geometry, source)
    except FitError:
        return None


def _geometry(inputs: Inputs) -> tuple[Geometry | None, tuple[Problem, ...]]:
    config, source = _config(inputs)
    if config is None:
        return None, (
            Problem(
                cause="model-geometry-unknown",
                severity="warn",
                message=f"{inputs.model.name}: its config.json is not here yet, so what fits is not known",
                remedy="Nothing: `up` fetches it first and plans again; or run `graft fetch` and `graft plan`.",
            ),
        )
    try:
        return geometry_from_config(config, source, inputs.profile.serve.dtype), ()
    except GeometryError as error:
        return None, (
            Problem(
                cause="model-geometry-unknown",
                severity="refuse",
                message=str(error),
                remedy="Correct that file; with --force vLLM chooses the context itself.",
            ),
        )


def speculation_for(profile: Profile, geometry: Geometry | None) -> tuple[Speculation | None, str]:
    """Return the speculation that the profile asks for where the model can do it, and the reason."""
    asked = profile.serve.speculation
    if asked is None:
        return None, "the profile asks for none"
    if asked.method == "mtp" and geometry is None:
        return None, "whether the model has an MTP layer is not known before its config.json is here"
    if asked.method == "mtp" and geometry is not None and not geometry.mtp_layers:
        return None, f"{geometry.source}: the model has no MTP layer"
    if asked.method == "mtp":
        return asked, f"the model's own MTP layer drafts {asked.num_speculative_tokens} tokens a step"
    return asked, f"up to {asked.num_speculative_tokens} tokens a step are drafted from the text itself"


def _refuse_unknown_fixes(profile: Profile) -> None:
    known = [fix.id for fix in FIXES]
    for key in ("disabled_fixes", "optional_fixes"):
        for name in getattr(profile, key):
            if name not in known:
                where = profile.source_of(key)
                raise UsageError(f"{where}: no fix is called {name!r}; there are {', '.join(known)}")


def _fixes(
    inputs: Inputs, geometry: Geometry | None, speculation: Speculation | None, devices: tuple[Device, ...]
) -> _Fixes:
    profile = inputs.profile
    run = _run_facts(inputs, geometry, speculation, "")
    capabilities = tuple(device.compute_capability for device in devices if device.compute_capability) or (
        (profile.gpu.capability,) if profile.gpu else ()
    )
    situation = Situation(profile.vllm, run, capabilities)
    wanted = [fix for fix in FIXES if refusal(fix, situation) is None]
    disabled = tuple(fix.id for fix in FIXES if fix.id in profile.disabled_fixes)

    def is_sure(fix: Patch) -> bool:
        return fix.id not in disabled and fix.id not in profile.optional_fixes and profile.vllm in fix.fingerprints

    has_turboquant = any(is_sure(fix) for fix in FIXES if fix.id == TURBOQUANT_SPECULATION_FIX)
    turboquant = profile.serve.kv_cache_dtype.startswith("turboquant_")
    return _Fixes(
        required=tuple(fix.id for fix in wanted if is_sure(fix)),
        disabled=disabled,
        has_turboquant=has_turboquant,
        is_safe_mode=turboquant and not has_turboquant,
    )


def _one_at_a_time(profile: Profile) -> Profile:
    """Return the profile with one request at a time: beside a new prompt the others would lose their cached prefix."""
    serve = profile.serve.model_copy(update={"max_num_seqs": 1})
    return profile.model_copy(
        update={"serve": serve, "origins": {**profile.origins, "serve.max_num_seqs": "safe mode"}}
    )


def _fix_problems(profile: Profile, speculation: Speculation | None, fixes: _Fixes) -> tuple[Problem, ...]:
    if not fixes.is_safe_mode:
        return ()
    cost = "requests wait for each other"
    mode = "one request at a time"
    if speculation is not None:
        mode, cost = f"PIECEWISE graphs, no async scheduling and {mode}", f"decode steps are slower, and {cost}"
    return (
        Problem(
            cause="fixes-inactive",
            severity="warn",
            message=f"TurboQuant runs without the fix {TURBOQUANT_SPECULATION_FIX}: safe mode, with {mode}; {cost} "
            "(README.md, Proof, has what was measured)",
            remedy=_way_to_the_fix(profile),
        ),
    )


def _way_to_the_fix(profile: Profile) -> str:
    for key in ("disabled_fixes", "optional_fixes"):
        if TURBOQUANT_SPECULATION_FIX in getattr(profile, key):
            return f"Take {TURBOQUANT_SPECULATION_FIX} out of {key} ({profile.source_of(key)})."
    (fix,) = (fix for fix in FIXES if fix.id == TURBOQUANT_SPECULATION_FIX)
    known = " or ".join(fix.fingerprints)
    return (
        f"Write vllm: {known}: {fix.id} was made for their sources, and has drifted from {profile.vllm}, whose it does "
        "not know."
    )


def _run_facts(inputs: Inputs, geometry: Geometry | None, speculation: Speculation | None, run_id: str) -> RunFacts:
    profile = inputs.profile
    model = ModelFacts(
        architectures=(geometry.architecture,) if geometry else (),
        attention_layers=geometry.attention_layers if geometry else None,
        gdn_layers=geometry.gdn_layers if geometry else None,
        experts=geometry.num_experts if geometry else None,
        mtp_layers=geometry.mtp_layers if geometry else None,
        head_dim=geometry.head_dim if geometry else None,
    )
    engine = EngineFacts(
        kv_cache_dtype=profile.serve.kv_cache_dtype,
        speculative_method=speculation.method if speculation else None,
        num_speculative_tokens=speculation.num_speculative_tokens if speculation else 0,
        tensor_parallel_size=profile.serve.tensor_parallel_size,
        runtime=inputs.runtime or profile.runtime,
    )
    return RunFacts(schema=1, run_id=run_id, model=model, engine=engine)


def demand_of(inputs: Inputs) -> Demand:
    """Return what the start asks of the machine."""
    profile, model, pin = inputs.profile, inputs.model, inputs.pin
    gpu, runtime = profile.gpu, inputs.runtime or profile.runtime
    return Demand(
        profile=profile.name,
        runtime=runtime,
        needs_gpu=gpu is not None,
        tensor_parallel_size=profile.serve.tensor_parallel_size,
        gpus_asked=gpu.uuids if gpu else (),
        gpu_memory_utilization=profile.serve.gpu_memory_utilization,
        compute_capability=gpu.capability if gpu else None,
        min_compute_capability=capability_of(model.min_compute_capability)
        if gpu and model.min_compute_capability
        else None,
        min_gpu_gib=gpu.min_memory_mib / 1024 if gpu else None,
        image_cuda=pin.cuda if gpu else None,
        min_driver=pin.min_driver if gpu else None,
        image_unpacked_gib=pin.unpacked_gib if runtime == "docker" else None,
        image_is_here=inputs.image_is_here,
        model_gib=model.weights.total_gib if model.weights else None,
        model_is_here=inputs.model_is_here,
        model_dir=inputs.model_dir,
        incomplete_files=inputs.incomplete_files,
        cpu_kv_cache_gib=profile.serve.cpu_kv_cache_gib,
        port=profile.serve.port,
    )


def _unchecked(demand: Demand) -> CheckResult:
    mode: GpuMode = "nvidia" if demand.needs_gpu and demand.runtime == "docker" else "none"
    return CheckResult(verdict="ok", problems=(), selected=(), gpu_mode=mode)


def _decisions(
    profile: Profile,
    geometry: Geometry | None,
    speculation: Speculation | None,
    speculation_reason: str,
    memory: MemoryPlan | None,
    fixes: _Fixes,
) -> Decisions:
    serve = profile.serve
    asked = serve.max_model_len if isinstance(serve.max_model_len, int) else None
    requests = serve.max_num_seqs if isinstance(serve.max_num_seqs, int) else 1
    drafts = " and drafts are verified inside them" if speculation else ""
    drafts_unsafely = fixes.is_safe_mode and speculation is not None
    return Decisions(
        max_model_len=memory.max_model_len if memory else asked,
        max_model_len_reason=memory.max_model_len_reason
        if memory
        else ("the profile's own" if asked else "the model's geometry is not known, so vLLM takes what fits"),
        max_num_seqs=memory.max_num_seqs if memory else requests,
        max_num_seqs_reason=memory.max_num_seqs_reason
        if memory
        else "requests served at once; vLLM's default of 256 or more is for other machines",
        max_num_batched_tokens_reason=memory.max_num_batched_tokens_reason if memory else CHUNK_REASON,
        speculation=speculation,
        speculation_reason=speculation_reason,
        language_model_only=serve.language_model_only and geometry is not None and geometry.has_vision,
        cudagraph_mode="PIECEWISE" if drafts_unsafely else "FULL_AND_PIECEWISE",
        cudagraph_reason="safe mode: full graphs answer wrongly without the fix"
        if drafts_unsafely
        else f"decode steps run as one graph{drafts}",
        async_scheduling=not drafts_unsafely,
        async_scheduling_reason="safe mode: host lengths are wrong after a rejected draft without the fix"
        if drafts_unsafely
        else "the next step is prepared while the GPU works",
        kv_cache_memory_bytes=memory.kv_cache_memory_bytes if memory else None,
        kv_pool_reason=memory.kv_pool_reason if memory else "",
    )


def _plan(
    inputs: Inputs,
    profile: Profile,
    geometry: Geometry | None,
    decisions: Decisions,
    fixes: _Fixes,
    checked: CheckResult,
    devices: tuple[Device, ...],
    memory: MemoryPlan | None,
    problems: tuple[Problem, ...],
) -> Plan:
    runtime = inputs.runtime or profile.runtime
    draft = Plan(
        profile=profile.name,
        model=inputs.model.name,
        model_repo=inputs.model.repo,
        model_revision=inputs.model.revision,
        served_name=inputs.model.served_name,
        recall_tokens=inputs.model.recall_tokens,
        right_replies=inputs.model.right_replies,
        canary=inputs.model.canary,
        runtime=runtime,
        gpu_mode=checked.gpu_mode,
        gpus=tuple(
            SelectedGpu(
                uuid=device.uuid,
                name=device.name,
                compute_capability=device.compute_capability,
                total_mib=device.total_mib,
            )
            for device in devices
        ),
        vllm=profile.vllm,
        image=inputs.pin.image() if runtime == "docker" else None,
        host=profile.serve.host,
        port=profile.serve.port,
        gateway=gateway_of(profile, runtime, decisions.max_num_seqs),
        watch=watch_of(profile),
        monitoring=profile.monitoring,
        max_model_len=decisions.max_model_len,
        tensor_parallel_size=profile.serve.tensor_parallel_size,
        flags=serve_flags(profile, inputs.model, decisions),
        environment=server_environment(profile),
        required_fixes=fixes.required,
        disabled_fixes=fixes.disabled,
        processes=_processes(profile),
        facts={},
        fit=memory.report.to_json() if memory and memory.report else None,
        problems=problems,
    )
    # What was found on the host, and who looks on, say nothing about what is started: the run's identity stays.
    decided = draft.model_dump_json(
        exclude={"problems", "fit", "facts", "monitoring", "recall_tokens", "right_replies", "canary"}
    )
    run_id = hashlib.sha256(decided.encode()).hexdigest()[:16]
    facts = _run_facts(replace(inputs, profile=profile), geometry, decisions.speculation, run_id)
    return draft.model_copy(update={"facts": asdict(facts)})


def _processes(profile: Profile) -> tuple[tuple[str, ...], ...]:
    expected = expected_processes(profile.serve.tensor_parallel_size, cpu=profile.gpu is None)
    return tuple(ordered_roles(roles) for roles in expected)


def _without_repeats(problems: tuple[Problem, ...]) -> tuple[Problem, ...]:
    """Keep the first problem of each cause: what the host check measured comes before what the memory plan derives."""
    return tuple({problem.cause: problem for problem in reversed(problems)}.values())[::-1]
