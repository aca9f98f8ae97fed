"""Whether a fix is wanted: pure, so that the launcher's plan and the process that applies it agree."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from vllm_graft.facts import RunFacts
from vllm_graft.patch import Capability, Outcome, Patch, When


@dataclass(frozen=True)
class Situation:
    """What decides: vLLM's version, the run's facts, the visible GPUs' compute capabilities; None is unknown."""

    vllm: str
    run: RunFacts | None
    capabilities: tuple[Capability, ...] | None


@dataclass(frozen=True)
class Refusal:
    """Why a fix is not wanted."""

    outcome: Outcome
    reason: str


def refusal(patch: Patch, situation: Situation) -> Refusal | None:
    """Why `patch` is not wanted in this situation, or None when it is; processes and settings are not looked at."""
    if not affects(patch, situation.vllm):
        return Refusal(Outcome.NOT_AFFECTED, f"vLLM {situation.vllm} is outside of {patch.affects}")
    if reason := _unmet(patch.when, situation):
        return Refusal(Outcome.NOT_APPLICABLE, reason)
    return None


def affects(patch: Patch, vllm: str) -> bool:
    """Whether this vLLM version is in the fix's range; a local label such as +cu129 does not count."""
    return SpecifierSet(patch.affects, prereleases=True).contains(Version(vllm).public)


def needs_capability(patch: Patch) -> bool:
    """Whether the fix's conditions ask for the GPU."""
    return patch.when.capability_at_least is not None or patch.when.capability_below is not None


def _unmet(when: When, situation: Situation) -> str:
    return _unmet_by_gpu(when, situation.capabilities) or _unmet_by_run(when, situation.run)


def _unmet_by_gpu(when: When, capabilities: tuple[Capability, ...] | None) -> str:
    low, high = when.capability_at_least, when.capability_below
    if low is None and high is None:
        return ""
    wanted = str(When(capability_at_least=low, capability_below=high))
    if capabilities is None:
        return f"needs {wanted}, and the GPU's is not known"
    if any((low is None or low <= found) and (high is None or found < high) for found in capabilities):
        return ""
    seen = ", ".join(f"{major}.{minor}" for major, minor in capabilities) or "no GPU"
    return f"needs {wanted}; here: {seen}"


def _unmet_by_run(when: When, run: RunFacts | None) -> str:
    wanted = When(architectures=when.architectures, kv_cache_dtypes=when.kv_cache_dtypes, speculation=when.speculation)
    if wanted == When():
        return ""
    if run is None:
        return f"needs {wanted}, and without GRAFT_FACTS the model and the flags are not known"
    if when.architectures and not set(when.architectures) & set(run.model.architectures):
        return f"needs {When(architectures=when.architectures)}; here: {', '.join(run.model.architectures)}"
    kv_cache = run.engine.kv_cache_dtype
    if when.kv_cache_dtypes and not any(fnmatchcase(kv_cache, pattern) for pattern in when.kv_cache_dtypes):
        return f"needs {When(kv_cache_dtypes=when.kv_cache_dtypes)}; here: {kv_cache}"
    speculates = run.engine.speculative_method is not None
    if when.speculation is not None and when.speculation != speculates:
        return f"needs {When(speculation=when.speculation)}"
    return ""
