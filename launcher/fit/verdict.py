"""FITS, LIKELY or NO, and the number that decides."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from launcher.fit.budget import (
    OTHER_MODEL_ERROR_BYTES,
    PHYSICAL_RESERVE_BYTES,
    Term,
    capture_sizes,
    combined_error_bytes,
    is_fitted,
    load_peak_bytes,
    other_use_bytes,
    outside_terms,
    requested_bytes,
)
from launcher.fit.kv import KvLayout
from launcher.fit.request import GIB, FitRequest

Value = Literal["FITS", "LIKELY", "NO"]
SMALL_CARD_BYTES = 26 * GIB
"""Cards up to here count as 24 GB: single ones showed the widest spread between identical boots."""
_LOWER: dict[Value, Value] = {"FITS": "LIKELY", "LIKELY": "NO", "NO": "NO"}


@dataclass(frozen=True, slots=True)
class Bands:
    """Margins of KV memory per GPU that FITS and LIKELY need."""

    fits_above_bytes: int
    likely_from_bytes: int
    why: str


@dataclass(frozen=True, slots=True)
class Blocker:
    """What stops a start whatever the context; `cause` is from the launcher's vocabulary of problems."""

    cause: str
    message: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answer for one context; sizes in bytes per GPU."""

    value: Value
    context_tokens: int
    margin_bytes: int
    decided_by: str
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Budget:
    """The numbers that verdicts are made from."""

    request: FitRequest
    layout: KvLayout
    inside: tuple[Term, ...]
    """Weights and the other terms inside vLLM's budget."""
    available_bytes: int
    num_blocks: int

    @property
    def pool_bytes(self) -> int:
        return self.num_blocks * self.layout.bytes_per_block


def bands(request: FitRequest) -> Bands:
    """Return the margins that apply; a pool that is known leaves no band."""
    if request.settings.kv_cache_memory_bytes is not None:
        return Bands(-1, 0, "the pool is fixed, so admission is exact")
    if request.calibration is not None:
        error = combined_error_bytes(request, ())
        return Bands(error, 0, f"calibrated by {request.calibration.boots} boot(s) of this configuration")
    if request.settings.tensor_parallel_size == 1 and request.card.total_bytes < SMALL_CARD_BYTES:
        return Bands(2 * GIB, GIB // 2, "one 24 GB card, where identical boots differed most")
    if not is_fitted(request.geometry):
        return Bands(OTHER_MODEL_ERROR_BYTES, 0, "scaled from the fitted model, so good to a GiB at best")
    return Bands(GIB // 2, 0, "fitted terms are good to half a GiB")


def blockers(budget: Budget) -> tuple[Blocker, ...]:
    """Return what stops the start before a context matters."""
    request, layout = budget.request, budget.layout
    card, settings = request.card, request.settings
    found = []
    usable = card.total_bytes - other_use_bytes(request)
    peak = load_peak_bytes(request)
    if peak > usable:
        found.append(
            Blocker(
                "weights-do-not-fit",
                f"loading needs {_gib(peak)} GiB per GPU and {_gib(usable)} GiB are there",
                "Use a smaller quantization, text-only mode, no MTP, or another card.",
            )
        )
    requested = requested_bytes(request)
    if card.free_bytes is not None and card.free_bytes < requested:
        found.append(
            Blocker(
                "gpu-memory-busy",
                f"utilization {settings.gpu_memory_utilization} claims {_gib(requested)} GiB, "
                f"{_gib(card.free_bytes)} GiB are free: vLLM refuses to start",
                "Close what uses the card, or lower the utilization to at most "
                f"{_floor2(card.free_bytes / card.total_bytes)}.",
            )
        )
    found.extend(_graph_blockers(budget, peak, usable))
    if budget.num_blocks <= layout.state_blocks + layout.reserved_blocks:
        found.append(
            Blocker(
                "no-kv-cache-memory",
                f"{_gib(budget.available_bytes)} GiB are left for KV: {budget.num_blocks} blocks, and one request "
                f"of any length takes {layout.state_blocks + layout.reserved_blocks + 1}",
                "See the list of changes that make it fit.",
            )
        )
    return tuple(found)


def _graph_blockers(budget: Budget, peak_bytes: int, usable_bytes: int) -> list[Blocker]:
    """Graph profiling first takes a block per sequence (v1/worker/gpu/cudagraph_utils.py:922-1035)."""
    settings, layout = budget.request.settings, budget.layout
    if settings.cudagraph_mode == "NONE":
        return []
    sizes = capture_sizes(settings.max_num_seqs, settings.num_speculative_tokens)
    blocks = min(settings.max_num_seqs, sizes[-1])
    weights = sum(term.size_bytes for term in budget.inside if term.key.startswith("weights."))
    needed = weights + blocks * layout.bytes_per_block
    found = []
    if peak_bytes <= usable_bytes < needed:
        found.append(
            Blocker(
                "cudagraph-capture-oom",
                f"graph profiling takes {blocks} blocks, {_gib(needed)} GiB with the weights, "
                f"and {_gib(usable_bytes)} GiB are there",
                "Lower max_num_seqs.",
            )
        )
    if "FULL" in settings.cudagraph_mode and settings.max_num_seqs > budget.num_blocks > 0 and layout.gdn_groups:
        found.append(
            Blocker(
                "max-num-seqs-too-high",
                f"max_num_seqs {settings.max_num_seqs} with {budget.num_blocks} blocks: vLLM refuses full CUDA graphs",
                f"Use at most {budget.num_blocks}.",
            )
        )
    return found


def physical_slack_bytes(budget: Budget, context_tokens: int) -> int:
    """What is left of the card beyond all terms, other use and a reserve of half a GiB; negative is a shortfall."""
    request = budget.request
    outside = outside_terms(request, budget.layout, context_tokens)
    used = sum(term.size_bytes for term in (*budget.inside, *outside)) + budget.pool_bytes
    return request.card.total_bytes - other_use_bytes(request) - used - PHYSICAL_RESERVE_BYTES


def judge(budget: Budget, context_tokens: int, stopped_by: tuple[Blocker, ...]) -> Verdict:
    """Judge one context."""
    margin = budget.available_bytes - budget.layout.needed_bytes(context_tokens)
    if stopped_by:
        return Verdict("NO", context_tokens, margin, stopped_by[0].message, tuple(one.message for one in stopped_by))
    limits = bands(budget.request)
    value: Value = "NO"
    if margin > limits.fits_above_bytes:
        value = "FITS"
    elif margin >= limits.likely_from_bytes:
        value = "LIKELY"
    decided = f"{_gib(margin)} GiB of KV memory beyond what {context_tokens} tokens need; {_needs(limits)}"
    reasons = [limits.why]
    slack = physical_slack_bytes(budget, context_tokens)
    if slack < 0 and value != "NO":
        value = _LOWER[value]
        decided = (
            f"at full context the card is {_gib(-slack)} GiB short of a reserve of "
            f"{_gib(PHYSICAL_RESERVE_BYTES)} GiB beyond everything that is allocated"
        )
        reasons.append(f"{_gib(margin)} GiB of KV memory are spare, but what vLLM allocates outside its budget is not")
    return Verdict(value, context_tokens, margin, decided, tuple(reasons))


def longest(budget: Budget, accepts: Callable[[int], bool]) -> int:
    """Return the longest admitted context that `accepts` takes; it must take every shorter one too. 0: none."""
    block = budget.layout.block_tokens
    limit = budget.layout.longest_context(budget.num_blocks, budget.request.geometry.max_position_embeddings)
    if limit and accepts(limit):
        return limit
    low, high = 0, max(0, (limit - 1) // block)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if accepts(middle * block) else (low, middle - 1)
    return low * block


def _needs(limits: Bands) -> str:
    if limits.fits_above_bytes < 0:
        return "0 or more FITS"
    return f"LIKELY from {_gib(limits.likely_from_bytes)}, FITS above {_gib(limits.fits_above_bytes)}"


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / GIB:.2f}"


def _floor2(value: float) -> str:
    return f"{int(value * 100) / 100:.2f}"
