"""The one entry: a request in, a report out."""

from dataclasses import asdict, dataclass

from launcher.fit.budget import (
    Term,
    combined_error_bytes,
    load_peak_bytes,
    other_use_bytes,
    outside_terms,
    requested_bytes,
    runtime_terms,
    weight_terms,
)
from launcher.fit.geometry import Geometry
from launcher.fit.kv import KvLayout, KvRules, block_alignment, gdn_prefill_checkpoint, kv_layout, null_block_deducted
from launcher.fit.refusals import FitRefused, refusals
from launcher.fit.request import GIB, Basis, FitRequest, Settings
from launcher.fit.verdict import Blocker, Budget, Verdict, blockers, judge, longest, physical_slack_bytes


@dataclass(frozen=True, slots=True)
class FitReport:
    """What fits; sizes in bytes per GPU, contexts in tokens."""

    request: FitRequest
    layout: KvLayout
    available_bytes: int
    available_error_bytes: int
    num_blocks: int
    context_tokens: int
    """The context that the verdict and the waterfall are about."""
    largest_context_tokens: int
    """Longest context that vLLM would admit by this prediction; 0 when it would not start."""
    advisable_context_tokens: int
    """Longest context whose verdict is LIKELY or better; 0 when there is none."""
    verdict: Verdict
    blockers: tuple[Blocker, ...]
    waterfall: tuple[Term, ...]
    """Sums to the card's total; the head room is the rest and may be negative."""
    requested_bytes: int
    load_peak_bytes: int
    physical_slack_bytes: int

    @property
    def concurrency(self) -> float:
        """Requests of the full context that the pool holds, as vLLM prints it."""
        return self.layout.concurrency(self.num_blocks, self.context_tokens) if self.context_tokens else 0.0

    @property
    def reported_tokens(self) -> int:
        """KV cache size in tokens, as vLLM prints it."""
        return self.layout.reported_tokens(self.num_blocks, self.context_tokens) if self.context_tokens else 0

    @property
    def running_requests(self) -> int:
        """Requests of the full context that run at once, the null block and max_num_seqs considered."""
        if not self.context_tokens:
            return 0
        whole = (self.num_blocks - self.layout.reserved_blocks) // self.layout.request_blocks(self.context_tokens)
        return min(whole, self.request.settings.max_num_seqs)

    def to_json(self) -> dict[str, object]:
        """Return plain data with units in the keys."""
        layout = self.layout
        return {
            "model": self.request.geometry.source,
            "weights": self.request.weights.source,
            "card": asdict(self.request.card),
            "cards": self.request.cards,
            "settings": asdict(self.request.settings),
            "verdict": asdict(self.verdict),
            "blockers": [asdict(blocker) for blocker in self.blockers],
            "context_tokens": self.context_tokens,
            "largest_context_tokens": self.largest_context_tokens,
            "advisable_context_tokens": self.advisable_context_tokens,
            "concurrency": round(self.concurrency, 2),
            "running_requests": self.running_requests,
            "reported_tokens": self.reported_tokens,
            "kv": {
                "available_bytes": self.available_bytes,
                "available_error_bytes": self.available_error_bytes,
                "num_blocks": self.num_blocks,
                "block_tokens": layout.block_tokens,
                "block_bytes": layout.bytes_per_block,
                "state_blocks_per_request": layout.state_blocks,
                "group_layers": layout.group_layers,
                "padding_layers": layout.padding_layers,
                "rules": asdict(layout.rules),
            },
            "requested_bytes": self.requested_bytes,
            "load_peak_bytes": self.load_peak_bytes,
            "physical_slack_bytes": self.physical_slack_bytes,
            "waterfall": [asdict(term) for term in self.waterfall],
        }


@dataclass(frozen=True, slots=True)
class PoolReport:
    """What a pool of known size holds: a CPU engine's, or one that a log printed."""

    layout: KvLayout
    num_blocks: int
    largest_context_tokens: int


def layout_for(request: FitRequest) -> KvLayout:
    """Return the blocks of a request on its card."""
    return _layout(
        request.geometry,
        request.settings,
        request.card.compute_capability,
        request.vllm_version,
        request.cuda_major,
    )


def fit(request: FitRequest) -> FitReport:
    """Compute what fits.

    Raises:
        FitRefused: the request breaks a rule; all broken rules are named.
    """
    broken = refusals(request)
    if broken:
        raise FitRefused(broken)
    layout = layout_for(request)
    inside = (*weight_terms(request), *runtime_terms(request, layout), *_correction(request))
    settings = request.settings
    available = settings.kv_cache_memory_bytes
    if available is None:
        available = requested_bytes(request) - sum(term.size_bytes for term in inside)
    budget = Budget(request, layout, inside, available, layout.num_blocks(available))
    stopped_by = blockers(budget)
    largest = 0 if stopped_by else longest(budget, lambda _: True)
    advisable = 0 if stopped_by else longest(budget, lambda length: judge(budget, length, ()).value != "NO")
    context = settings.max_model_len or advisable or largest
    return FitReport(
        request=request,
        layout=layout,
        available_bytes=available,
        available_error_bytes=combined_error_bytes(request, inside),
        num_blocks=budget.num_blocks,
        context_tokens=context,
        largest_context_tokens=largest,
        advisable_context_tokens=advisable,
        verdict=judge(budget, context, stopped_by),
        blockers=stopped_by,
        waterfall=_waterfall(budget, context),
        requested_bytes=requested_bytes(request),
        load_peak_bytes=load_peak_bytes(request),
        physical_slack_bytes=physical_slack_bytes(budget, context),
    )


def fit_pool(
    geometry: Geometry,
    settings: Settings,
    pool_bytes: int,
    compute_capability: tuple[int, int] | None,
    vllm_version: str,
    cuda_major: int = 13,
) -> PoolReport:
    """Return what a pool of known size holds; without a compute capability it is the CPU engine's."""
    layout = _layout(geometry, settings, compute_capability, vllm_version, cuda_major)
    blocks = layout.num_blocks(pool_bytes)
    return PoolReport(layout, blocks, layout.longest_context(blocks, geometry.max_position_embeddings))


def _layout(
    geometry: Geometry,
    settings: Settings,
    compute_capability: tuple[int, int] | None,
    vllm_version: str,
    cuda_major: int,
) -> KvLayout:
    checkpoint = gdn_prefill_checkpoint(
        geometry, compute_capability, cuda_major, settings.prefix_caching, settings.gdn_prefill_backend
    )
    rules = KvRules(
        block_alignment(geometry, compute_capability, settings.kv_cache_dtype, checkpoint),
        checkpoint,
        null_block_deducted(vllm_version),
    )
    return kv_layout(
        geometry,
        settings.kv_cache_dtype,
        settings.tensor_parallel_size,
        settings.num_speculative_tokens,
        settings.prefix_caching,
        rules,
        draft_layers=geometry.mtp_layers if settings.mtp else 0,
    )


def _correction(request: FitRequest) -> tuple[Term, ...]:
    known = request.calibration
    if known is None or request.settings.kv_cache_memory_bytes is not None:
        return ()
    note = f"{known.boots} boot(s): {known.source}"
    return (Term("correction", "measured correction", -known.offset_bytes, "measured", known.spread_bytes, note),)


def _waterfall(budget: Budget, context_tokens: int) -> tuple[Term, ...]:
    request = budget.request
    other = other_use_bytes(request)
    at_hand = request.card.free_bytes is not None
    other_term = Term(
        "other_use",
        "desktop and other use",
        other,
        "measured" if at_hand else "assumed",
        0 if at_hand else GIB // 2,
        "the card's total less what is free now" if at_hand else "the card is not at hand: taken to be unused",
    )
    terms = [*budget.inside, *_pool_terms(budget, context_tokens)]
    terms += [*outside_terms(request, budget.layout, context_tokens), other_term]
    room = request.card.total_bytes - sum(term.size_bytes for term in terms)
    error = combined_error_bytes(request, tuple(terms)) or request.card.total_error_bytes
    return (*terms, Term("head_room", "head room", room, "assumed", error, "what is left of the card"))


def _pool_terms(budget: Budget, context_tokens: int) -> tuple[Term, ...]:
    """Split the pool: GDN states of the requests that run at once, and blocks of tokens."""
    layout = budget.layout
    usable = max(0, budget.num_blocks - layout.reserved_blocks)
    requests = 0
    if context_tokens:
        requests = min(budget.request.settings.max_num_seqs, usable // layout.request_blocks(context_tokens))
    states = min(usable, max(1, requests) * layout.state_blocks)
    basis: Basis = "exact" if budget.request.settings.kv_cache_memory_bytes is not None else "fitted"
    error = combined_error_bytes(budget.request, budget.inside)
    block = layout.bytes_per_block
    split = f"{max(1, requests)} running request(s) of {layout.state_blocks} blocks"
    kv_note = f"{budget.num_blocks - states} of {budget.num_blocks} blocks of {layout.block_tokens} tokens"
    terms = [Term("kv", "KV cache", (budget.num_blocks - states) * block, basis, error, kv_note)]
    if states:
        terms.insert(0, Term("gdn_state", "GDN state", states * block, "exact", 0, split))
    return tuple(terms)
