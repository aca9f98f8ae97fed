"""The memory part of a plan: the context, the requests and the KV pool that a GPU profile starts with. Pure."""

import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace

from launcher.fit.advice import Advice, advise
from launcher.fit.calibration import BootRecord, calibration, configuration_key, pool_choice
from launcher.fit.geometry import Geometry
from launcher.fit.planner import FitReport, fit, fit_pool
from launcher.fit.refusals import FitRefused, hardware_refusals
from launcher.fit.request import Card, FitRequest, Settings, card_from_name_or_size, card_from_nvml
from launcher.fit.verdict import bands
from launcher.fit.weights import Weights, weights_from_sizes
from launcher.host.devices import Device
from launcher.problems import Cause, Problem
from launcher.profile import Model, Profile, Speculation

GIB = 2**30
MIB = 2**20
MOST_REQUESTS = 8
"""Each running request of a hybrid model holds whole blocks of GDN state whatever its length."""

CHUNK_REASON = "largest prefill chunk; activation memory grows with it"


@dataclass(frozen=True)
class MemoryInputs:
    """What the user and earlier boots add to the memory plan."""

    card: str | None = None
    """A card to plan for instead of this machine's: a name or a size."""
    boots: tuple[BootRecord, ...] = ()
    """The calibration file."""
    advise: bool = False
    """Take the advised settings instead of the profile's where those are unsafe."""


@dataclass(frozen=True)
class MemoryPlan:
    """What the memory model decided, with the reasons that the flags print."""

    profile: Profile
    """With the advised numbers where they were asked for."""
    report: FitReport | None
    """None where the combination is refused or the sizes are not known."""
    advice: Advice | None
    max_model_len: int | None
    max_model_len_reason: str
    max_num_seqs: int
    max_num_seqs_reason: str
    max_num_batched_tokens_reason: str
    kv_cache_memory_bytes: int | None
    kv_pool_reason: str
    problems: tuple[Problem, ...]


def plan_memory(
    profile: Profile,
    model: Model,
    geometry: Geometry,
    weights: Weights | None,
    devices: tuple[Device, ...],
    speculation: Speculation | None,
    inputs: MemoryInputs,
    is_safe_mode: bool,
    turboquant_fix: bool,
) -> MemoryPlan:
    """Return the context, the number of requests and the KV pool of a GPU profile.

    Raises:
        FitError: the card asked for is not known, or the listed sizes contradict each other.
    """
    if weights is None:
        return _unplanned(profile, (_sizes_unknown(model),))
    request = FitRequest(
        geometry,
        weights,
        settings_of(profile, speculation, is_safe_mode, turboquant_fix),
        card_of(profile, devices, inputs.card),
        profile.serve.tensor_parallel_size,
        vllm_version=profile.vllm,
    )
    try:
        advice = advise(request)
    except FitRefused as error:
        return _unplanned(profile, _refused(error))
    if inputs.advise and advice.changes:
        profile = _advised(profile, advice)
        request = request.with_settings(advice.settings)
    report = _with_requests(request, profile, lambda asked: _calibrated(asked, model, devices, inputs))
    machine, configuration = (
        machine_key(device.uuid for device in devices),
        configuration_key(model.name, profile.vllm, report.request.settings),
    )
    pool = pool_choice(report, inputs.boots, machine, configuration)
    report = _with_pool(report, pool.kv_cache_memory_bytes)
    return MemoryPlan(
        profile=profile,
        report=report,
        advice=advice,
        max_model_len=report.context_tokens or None,
        max_model_len_reason=_context_reason(profile, report),
        max_num_seqs=report.request.settings.max_num_seqs,
        max_num_seqs_reason=_requests_reason(profile, report, is_safe_mode),
        max_num_batched_tokens_reason=_chunk_reason(report),
        kv_cache_memory_bytes=pool.kv_cache_memory_bytes,
        kv_pool_reason=pool.reason,
        problems=_problems(profile, report),
    )


def plan_cpu_pool(profile: Profile, geometry: Geometry, vllm_version: str) -> tuple[Problem, ...]:
    """Return why the context does not fit into the CPU engine's KV pool: its size is known, so the answer is exact."""
    serve = profile.serve
    if serve.cpu_kv_cache_gib is None or not isinstance(serve.max_model_len, int):
        return ()
    settings = Settings(
        kv_cache_dtype=serve.kv_cache_dtype,
        max_num_batched_tokens=serve.max_num_batched_tokens,
        max_num_seqs=1,
        gpu_memory_utilization=1.0,
        prefix_caching=serve.prefix_caching,
    )
    pool = fit_pool(geometry, settings, serve.cpu_kv_cache_gib * GIB, None, vllm_version)
    if serve.max_model_len <= pool.largest_context_tokens:
        return ()
    limit = geometry.max_position_embeddings
    if serve.max_model_len > limit:
        return (
            Problem(
                cause="context-too-long",
                severity="refuse",
                message=f"max_model_len {serve.max_model_len} is above the model's max_position_embeddings {limit}",
                remedy=f"Write serve.max_model_len: {limit} or less.",
            ),
        )
    needed_gib = math.ceil(pool.layout.needed_bytes(serve.max_model_len) / GIB)
    return (
        Problem(
            cause="kv-cache-too-small",
            severity="refuse",
            message=f"{serve.max_model_len} tokens do not fit into a KV cache of {serve.cpu_kv_cache_gib} GiB, which "
            f"holds {pool.largest_context_tokens}",
            remedy=f"Write serve.cpu_kv_cache_gib: {needed_gib}, or serve.max_model_len: {pool.largest_context_tokens}."
            if pool.largest_context_tokens
            else f"Write serve.cpu_kv_cache_gib: {needed_gib}.",
        ),
    )


def machine_key(uuids: Iterable[str]) -> str:
    """Return what identifies the GPUs that boots are recorded for."""
    return "+".join(sorted(uuids))


def card_of(profile: Profile, devices: tuple[Device, ...], card: str | None) -> Card:
    """Return the card to plan for: the one asked for, else the selected one, else the profile's.

    Raises:
        FitError: the card asked for is neither a known name nor a size.
    """
    assert profile.gpu is not None
    own = profile.gpu.capability
    if card is not None:
        return card_from_name_or_size(card, own)
    known = [device for device in devices if device.total_mib is not None and device.free_mib is not None]
    if not known or len(known) < len(devices):
        return card_from_name_or_size(profile.gpu.card, own)
    # The rank with the least memory decides for all.
    smallest = min(known, key=lambda device: device.total_mib or 0)
    return card_from_nvml(
        (smallest.total_mib or 0) * MIB,
        None,
        min(device.free_mib or 0 for device in known) * MIB,
        min((one.compute_capability for one in known if one.compute_capability), default=own),
        smallest.name or smallest.uuid,
    )


def settings_of(
    profile: Profile, speculation: Speculation | None, is_safe_mode: bool, turboquant_fix: bool
) -> Settings:
    """Return the profile's values as the memory model takes them; `auto` requests start from one."""
    serve = profile.serve
    assert serve.gpu_memory_utilization is not None
    return Settings(
        kv_cache_dtype=serve.kv_cache_dtype,
        max_num_batched_tokens=serve.max_num_batched_tokens,
        max_num_seqs=serve.max_num_seqs if isinstance(serve.max_num_seqs, int) else 1,
        gpu_memory_utilization=serve.gpu_memory_utilization,
        tensor_parallel_size=serve.tensor_parallel_size,
        num_speculative_tokens=speculation.num_speculative_tokens if speculation else 0,
        speculative_method=speculation.method if speculation else "mtp",
        prefix_caching=serve.prefix_caching,
        max_model_len=serve.max_model_len if isinstance(serve.max_model_len, int) else None,
        language_model_only=serve.language_model_only,
        cudagraph_mode="PIECEWISE" if is_safe_mode and speculation else "FULL_AND_PIECEWISE",
        turboquant_fix=turboquant_fix,
    )


def listed_weights(model: Model, geometry: Geometry) -> Weights | None:
    """Return the sizes that the model's YAML lists; None where it lists none."""
    if model.weights is None:
        return None
    sizes = model.weights
    return weights_from_sizes(
        geometry,
        round(sizes.total_gib * GIB),
        f"{model.source}: {sizes.source}",
        None if sizes.vision_gib is None else round(sizes.vision_gib * GIB),
        None if sizes.mtp_gib is None else round(sizes.mtp_gib * GIB),
    )


def _sizes_unknown(model: Model) -> Problem:
    return Problem(
        cause="model-geometry-unknown",
        severity="warn",
        message=f"{model.name}: the size of its weights is not known before its files are here",
        remedy="Nothing: `up` fetches them first and plans again.",
    )


def _calibrated(request: FitRequest, model: Model, devices: tuple[Device, ...], inputs: MemoryInputs) -> FitRequest:
    """Ask with what earlier boots of exactly these settings on these GPUs say, where there are any."""
    if not devices or not inputs.boots:
        return request
    key = configuration_key(model.name, request.vllm_version, request.settings)
    predicted = fit(replace(request, calibration=None)).available_bytes
    return replace(
        request, calibration=calibration(inputs.boots, machine_key(device.uuid for device in devices), key, predicted)
    )


def _with_requests(request: FitRequest, profile: Profile, calibrated: Callable[[FitRequest], FitRequest]) -> FitReport:
    """Fit with as many requests as hold the whole context at once, unless the profile says how many."""
    report = fit(calibrated(request))
    if isinstance(profile.serve.max_num_seqs, int) or not report.context_tokens:
        return report
    for requests in range(MOST_REQUESTS, 1, -1):
        settings = replace(request.settings, max_num_seqs=requests, max_model_len=report.context_tokens)
        more = fit(calibrated(replace(request, settings=settings)))
        if more.running_requests >= requests and more.verdict.value == report.verdict.value:
            return more
    return report


def _with_pool(report: FitReport, pool_bytes: int | None) -> FitReport:
    """Fit again with the pool that is fixed: what fits in it is exact."""
    if pool_bytes is None:
        return report
    settings = replace(report.request.settings, max_model_len=report.context_tokens, kv_cache_memory_bytes=pool_bytes)
    return fit(replace(report.request, settings=settings))


def _advised(profile: Profile, advice: Advice) -> Profile:
    changed = {change.setting: change.after for change in advice.changes}
    origins = {**profile.origins, **{f"serve.{name}": "--advise" for name in changed}}
    return profile.model_copy(update={"serve": profile.serve.model_copy(update=changed), "origins": origins})


def _context_reason(profile: Profile, report: FitReport) -> str:
    verdict = report.verdict
    if isinstance(profile.serve.max_model_len, int):
        return f"the profile's own: {verdict.value}, {verdict.decided_by}"
    return f"the longest advisable context: {verdict.value}, {verdict.decided_by}"


def _requests_reason(profile: Profile, report: FitReport, is_safe_mode: bool) -> str:
    if is_safe_mode:
        return "safe mode: one request at a time"
    if isinstance(profile.serve.max_num_seqs, int):
        return f"the profile's own; {report.running_requests} hold the whole context at once"
    return "as many as hold the whole context at once; write serve.max_num_seqs for more and shorter ones"


def _chunk_reason(report: FitReport) -> str:
    """Say what the block size, which follows from the GDN state, means for the chunks."""
    block, chunk = report.layout.block_tokens, report.request.settings.max_num_batched_tokens
    if not report.layout.gdn_groups:
        return CHUNK_REASON
    allowed = ", which vLLM allows" if chunk < block else ""
    return f"{CHUNK_REASON}. The GDN state makes blocks of {block} tokens, {chunk / block:.3g} to a chunk{allowed}"


def _problems(profile: Profile, report: FitReport) -> tuple[Problem, ...]:
    found = [Problem.model_validate({**asdict(blocker), "severity": "refuse"}) for blocker in report.blockers]
    if report.verdict.value == "NO" and not found:
        longest = report.advisable_context_tokens
        is_pool_short = report.verdict.margin_bytes < bands(report.request).likely_from_bytes
        found.append(
            Problem(
                cause="kv-cache-too-small" if is_pool_short else "serving-oom",
                severity="refuse",
                message=f"{report.context_tokens} tokens: {report.verdict.decided_by}",
                remedy=f"Write serve.max_model_len: {longest}."
                if longest
                else "No context is advisable: `graft plan` lists the changes that make one.",
            )
        )
    return tuple(found)


_CAUSES: dict[str, Cause] = {
    "tensor-parallel-cards": "gpu-too-few",
    "tensor-parallel-heads": "gpu-too-few",
    "context-above-model": "context-too-long",
}
"""Causes of the memory model's rules; all others are about the KV cache's format."""


def _refused(error: FitRefused) -> tuple[Problem, ...]:
    return tuple(
        Problem(
            cause=_CAUSES.get(one.rule, "kv-cache-dtype-unsupported"),
            severity="refuse",
            message=f"{one.message} ({one.rule})",
            remedy=one.remedy,
        )
        for one in error.refusals
    )


def refused_kv_cache(
    profile: Profile, devices: tuple[Device, ...], card: str | None, *, turboquant_fix: bool
) -> tuple[Problem, ...]:
    """Return why the GPUs cannot hold the KV cache in the profile's format: known before the model is.

    Raises:
        FitError: the card asked for is not known.
    """
    capability = card_of(profile, devices, card).compute_capability
    broken = tuple(hardware_refusals(profile.serve.kv_cache_dtype, capability, turboquant_fix=turboquant_fix))
    return _refused(FitRefused(broken)) if broken else ()


def _unplanned(profile: Profile, problems: tuple[Problem, ...]) -> MemoryPlan:
    serve = profile.serve
    return MemoryPlan(
        profile=profile,
        report=None,
        advice=None,
        max_model_len=serve.max_model_len if isinstance(serve.max_model_len, int) else None,
        max_model_len_reason="the profile's own" if isinstance(serve.max_model_len, int) else "vLLM takes what fits",
        max_num_seqs=serve.max_num_seqs if isinstance(serve.max_num_seqs, int) else 1,
        max_num_seqs_reason="the profile's own" if isinstance(serve.max_num_seqs, int) else "one is always safe",
        max_num_batched_tokens_reason=CHUNK_REASON,
        kv_cache_memory_bytes=None,
        kv_pool_reason="",
        problems=problems,
    )
