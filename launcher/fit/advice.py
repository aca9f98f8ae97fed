"""What would have to change: to reach a longer context, and to be safe with the profile's own numbers."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from launcher.fit.budget import requested_bytes
from launcher.fit.kv import KV_DTYPES, kv_dtype, slot_bytes
from launcher.fit.planner import FitReport, fit, layout_for
from launcher.fit.refusals import refusals
from launcher.fit.request import GIB, FitRequest, Settings
from launcher.fit.verdict import Verdict, bands

TARGETS = (65_536, 131_072, 262_144)
ALTERNATIVES_PER_TARGET = 5
OTHER_MODEL_COST = 100.0
"""Above every change of settings: another model answers differently."""
_ALIASES = frozenset({"auto", "bfloat16", "float16", "fp8_e4m3"})

LASTING_UTILIZATION = 0.90
"""Highest advised share: on 32 GB cards 0.88 to 0.90 is what lasts, 0.93 is tight."""
LOWEST_UTILIZATION = 0.70
SMALLEST_BATCHED_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class Change:
    """One thing to change; `kind` names what it touches."""

    kind: str
    text: str
    quality_cost: float
    """Bits per stored value that are lost; 0 when the answers stay the same. An order, not a measurement."""
    effort: int


@dataclass(frozen=True, slots=True)
class Alternative:
    """Changes that reach a context together."""

    changes: tuple[Change, ...]
    verdict: Verdict
    settings: Settings
    cards: int

    @property
    def rank(self) -> tuple[float, int, int]:
        """Best first: quality, then effort, then the number of changes."""
        cost = sum(change.quality_cost for change in self.changes)
        return cost, sum(change.effort for change in self.changes), len(self.changes)


@dataclass(frozen=True, slots=True)
class TargetAdvice:
    """How to reach one context."""

    target_tokens: int
    verdict: Verdict
    """With nothing changed."""
    alternatives: tuple[Alternative, ...]
    """Best first; empty when it is reached already, or by none of the changes that are tried."""


@dataclass(frozen=True, slots=True)
class OtherModel:
    """Another model that could be served; `request` asks for it on the same card with its own settings."""

    name: str
    request: FitRequest


def alternatives(
    request: FitRequest, targets: Sequence[int] = TARGETS, other_models: Iterable[OtherModel] = ()
) -> tuple[TargetAdvice, ...]:
    """Compute what reaches each target, by asking for every combination of changes.

    Targets above the model's own limit are left out. A combination is left out when fewer kinds of change reach it too.
    """
    reachable = [target for target in targets if target <= request.geometry.max_position_embeddings]
    options = tuple(_combinations(request))
    others = tuple(other_models)
    return tuple(_target_advice(request, target, options, others) for target in reachable)


def _target_advice(
    request: FitRequest,
    target: int,
    options: Sequence[tuple[tuple[Change, ...], Settings, int]],
    other_models: Sequence[OtherModel],
) -> TargetAdvice:
    now = fit(request.with_settings(replace(request.settings, max_model_len=target))).verdict
    if now.value != "NO":
        return TargetAdvice(target, now, ())
    found = []
    for changes, settings, cards in options:
        asked = request.with_settings(replace(settings, max_model_len=target), cards)
        found += _reached(asked, changes)
    for other in other_models:
        if target <= other.request.geometry.max_position_embeddings:
            change = Change(f"model:{other.name}", f"serve {other.name}", OTHER_MODEL_COST, 20)
            settings = replace(other.request.settings, max_model_len=target)
            found += _reached(other.request.with_settings(settings), (change,))
    return TargetAdvice(target, now, _distinct(sorted(found, key=lambda one: one.rank)))


def _reached(asked: FitRequest, changes: tuple[Change, ...]) -> list[Alternative]:
    if refusals(asked):
        return []
    verdict = fit(asked).verdict
    return [] if verdict.value == "NO" else [Alternative(changes, verdict, asked.settings, asked.cards)]


def _distinct(ranked: Sequence[Alternative]) -> tuple[Alternative, ...]:
    kept: list[Alternative] = []
    for one in ranked:
        kinds = {change.kind for change in one.changes}
        if not any({change.kind for change in other.changes} <= kinds for other in kept):
            kept.append(one)
    return tuple(kept[:ALTERNATIVES_PER_TARGET])


def _combinations(request: FitRequest) -> Iterator[tuple[tuple[Change, ...], Settings, int]]:
    settings = request.settings
    none: list[tuple[Change | None, dict[str, object]]] = [(None, {})]
    text_only = list(none)
    if request.weights.has_vision and not settings.language_model_only:
        change = Change("text-only", "text only (no images)", 0, 1)
        text_only.append((change, {"language_model_only": True}))
    caching = list(none)
    if settings.prefix_caching and request.geometry.is_hybrid:
        change = Change("prefix-caching", "prefix caching off (repeated prompts are computed again)", 0, 2)
        caching.append((change, {"prefix_caching": False}))
    depth = list(none)
    for tokens in range(settings.num_speculative_tokens - 1, -1, -1):
        text = f"{tokens} speculative tokens (slower)" if tokens else "no speculation (slower)"
        depth.append((Change("speculation", text, 0, 3), {"num_speculative_tokens": tokens}))
    for parts in itertools.product(text_only, caching, depth, _kv_options(request), _card_options(request)):
        changes = tuple(change for change, _ in parts if change is not None)
        if not changes:
            continue
        values: dict[str, object] = {}
        for _, some in parts:
            values.update(some)
        cards = values.pop("cards", request.cards)
        assert isinstance(cards, int)
        yield changes, replace(settings, **values), cards  # type: ignore[arg-type]


def _kv_options(request: FitRequest) -> list[tuple[Change | None, dict[str, object]]]:
    current = kv_dtype(request.settings.kv_cache_dtype)
    size = slot_bytes(request.geometry, current.name)
    options: list[tuple[Change | None, dict[str, object]]] = [(None, {})]
    for dtype in KV_DTYPES.values():
        if dtype.name in _ALIASES or slot_bytes(request.geometry, dtype.name) >= size:
            continue
        change = Change("kv-cache-dtype", f"{dtype.name} KV cache", current.bits - dtype.bits, 4)
        options.append((change, {"kv_cache_dtype": dtype.name}))
    return options


def _card_options(request: FitRequest) -> list[tuple[Change | None, dict[str, object]]]:
    cards = request.cards * 2
    change = Change("card", f"{cards} such cards instead of {request.cards}", 0, 10)
    return [(None, {}), (change, {"cards": cards, "tensor_parallel_size": cards})]


@dataclass(frozen=True, slots=True)
class AdvisedChange:
    """One number of the profile that is unsafe, with what it would be replaced by."""

    setting: str
    before: float | int | None
    after: float | int
    reason: str


@dataclass(frozen=True, slots=True)
class Advice:
    """The profile's numbers judged."""

    safe: bool
    unsafe_by_bytes: int
    """What is missing per GPU for a safe start; 0 when safe."""
    findings: tuple[str, ...]
    changes: tuple[AdvisedChange, ...]
    settings: Settings
    """The settings with the changes made; the profile's own when it is safe or nothing better was found."""
    report: FitReport
    """The fit of `settings`."""


def advise(request: FitRequest) -> Advice:
    """Judge the profile's utilization, batched tokens and context, and choose safer ones where they are unsafe.

    Raises:
        FitRefused: the request breaks a rule.
    """
    report = fit(request)
    missing, findings = _unsafe(report)
    if not findings:
        return Advice(True, 0, (), (), request.settings, report)
    wanted = request.settings.max_model_len or request.geometry.max_position_embeddings
    asked = (_asked(request, utilization, tokens, wanted) for utilization, tokens in _candidates(request))
    best = max(asked, key=lambda one: _merit(one, wanted, request.settings))
    context = min(best.advisable_context_tokens, wanted)
    if not context:
        return Advice(False, missing, findings, (), request.settings, report)
    fixed = request.settings.max_model_len is not None
    settings = replace(best.request.settings, max_model_len=context if fixed else None)
    after = fit(request.with_settings(settings))
    return Advice(False, missing, findings, _changes(request.settings, after), settings, after)


def _unsafe(report: FitReport) -> tuple[int, tuple[str, ...]]:
    findings = [blocker.message for blocker in report.blockers]
    missing = 0
    if report.request.card.free_bytes is not None:
        missing = max(missing, requested_bytes(report.request) - report.request.card.free_bytes)
    if report.physical_slack_bytes < 0:
        missing = max(missing, -report.physical_slack_bytes)
        findings.append(f"the card is {-report.physical_slack_bytes / GIB:.2f} GiB short at full context")
    short = bands(report.request).likely_from_bytes - report.verdict.margin_bytes
    if report.verdict.value == "NO" and short > 0 and report.context_tokens:
        missing = max(missing, short)
        findings.append(f"{report.context_tokens} tokens are {short / GIB:.2f} GiB of KV memory short of LIKELY")
    if not findings and report.verdict.value == "NO":
        findings.append(report.verdict.decided_by)
    return missing, tuple(findings)


def _candidates(request: FitRequest) -> Iterator[tuple[float, int]]:
    settings, card = request.settings, request.card
    top = min(LASTING_UTILIZATION, 1.0 if card.free_bytes is None else card.free_bytes / card.total_bytes)
    block = layout_for(request).block_tokens
    batched = {settings.max_num_batched_tokens}
    if request.geometry.is_hybrid:
        batched.update(n for n in (block, 2 * block) if SMALLEST_BATCHED_TOKENS <= n < settings.max_num_batched_tokens)
    for hundredths in range(round(LOWEST_UTILIZATION * 100), int(top * 100 + 1e-9) + 1):
        for tokens in sorted(batched):
            yield hundredths / 100, tokens
    yield settings.gpu_memory_utilization, settings.max_num_batched_tokens


def _asked(request: FitRequest, utilization: float, batched_tokens: int, wanted_tokens: int) -> FitReport:
    """Fit with other numbers, at the wanted context or the longest advisable one below it."""
    settings = replace(
        request.settings,
        gpu_memory_utilization=utilization,
        max_num_batched_tokens=batched_tokens,
        max_model_len=None,
    )
    report = fit(request.with_settings(settings))
    if report.advisable_context_tokens < wanted_tokens:
        return report
    return fit(request.with_settings(replace(settings, max_model_len=wanted_tokens)))


def _merit(report: FitReport, wanted_tokens: int, profile: Settings) -> tuple[int, int, int, int, float]:
    """A card with room, more context up to the wanted one, a better verdict, then what is nearest to the profile."""
    settings = report.request.settings
    return (
        int(report.advisable_context_tokens > 0 and report.physical_slack_bytes >= 0),
        min(report.advisable_context_tokens, wanted_tokens),
        int(report.verdict.value == "FITS"),
        settings.max_num_batched_tokens,
        -abs(settings.gpu_memory_utilization - profile.gpu_memory_utilization),
    )


def _changes(before: Settings, report: FitReport) -> tuple[AdvisedChange, ...]:
    after = report.request.settings
    slack = f"leaves {max(0, report.physical_slack_bytes) / GIB:.2f} GiB beyond the reserve at full context"
    reasons = {
        "gpu_memory_utilization": slack,
        "max_num_batched_tokens": f"a multiple of the {report.layout.block_tokens}-token block; smaller peak",
        "max_model_len": f"the longest context that is {report.verdict.value} with these numbers",
    }
    return tuple(
        AdvisedChange(name, getattr(before, name), getattr(after, name), reason)
        for name, reason in reasons.items()
        if getattr(before, name) != getattr(after, name)
    )
