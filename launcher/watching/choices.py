"""Watch and smaller settings of a plan, with the reasons that `graft explain` prints. Pure."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from launcher.plan import Degraded, Flag, Plan, Watch
from launcher.profile import Profile, Serve

SHARES_LESS = (0.05, 0.03, 0.02, 0.01)
"""Of the card: room for what the measurement at the start does not see; the most that leaves a context."""
SMALLEST_CONTEXT = 1024
SMALLEST_BATCH = 512
SMALLER = "plan: smaller settings"
"""Source of a flag that differs from the planned one."""
_STEP = 256
"""Contexts are given in multiples of it."""


def watch_of(profile: Profile) -> Watch | None:
    """Return how a plan's engine is watched; None where it is not."""
    asked = profile.watch
    if not asked.enabled:
        return None
    rows = (
        ("every_s", str(asked.every_s), "/health says 200 of a stuck engine, so its steps are looked at"),
        ("strikes", str(asked.strikes), f"no progress for {asked.strikes * asked.every_s} s ends the engine"),
        ("idle_probe_s", str(asked.idle_probe_s), "where nobody asks, one token is asked for so often"),
        ("restarts", str(asked.restarts), f"in {asked.within_s} s; then it stays down and says so"),
    )
    return Watch(
        every_s=asked.every_s,
        strikes=asked.strikes,
        idle_probe_s=asked.idle_probe_s,
        restarts=asked.restarts,
        within_s=asked.within_s,
        choices=tuple(
            Flag(name=f"watch.{key}", value=value, reason=reason, source=profile.source_of(f"watch.{key}"))
            for key, value, reason in rows
        ),
    )


@dataclass(frozen=True)
class Sized:
    """A plan and the profile whose numbers are in it."""

    plan: Plan
    profile: Profile
    block_tokens: int = 1
    """Of the KV cache: a hybrid model with prefix caching computes prompts in whole blocks, so a batch holds one."""

    def value(self, flag: str) -> int | None:
        """Return the number behind a flag."""
        text = next((one.value for one in self.plan.flags if one.name == flag), None)
        return int(text) if text is not None and text.isdigit() else None


def degraded_of(planned: Sized, resize: Callable[[Profile], Sized]) -> Degraded | None:
    """Return smaller settings that start; None where there are none, or sizes are not known.

    Fewer tokens in a batch need less temporary memory, and a smaller share of the card leaves room for it; the KV pool
    gets smaller with it, and so context and requests do. KV offload is not among them: it keeps what was computed in
    host memory for later requests, and what a request needs must be on the card all the same.

    Args:
        resize: makes the plan of another profile with the same model on the same machine.
    """
    context = planned.plan.max_model_len
    if context is None:
        return None
    for serve in _smaller(planned):
        found = resize(_with(planned.profile, serve))
        length = min(found.plan.max_model_len or 0, context // 2)
        length -= length % _STEP
        if length < SMALLEST_CONTEXT or not _is_as_good(found, planned):
            continue
        sized = resize(_with(planned.profile, serve.model_copy(update={"max_model_len": length})))
        if _is_as_good(sized, planned):
            return Degraded(flags=_flags(planned, sized), max_model_len=length, summary=_summary(planned, sized))
    return None


def _flags(planned: Sized, smaller: Sized) -> tuple[Flag, ...]:
    before = {flag.name: flag for flag in planned.plan.flags}
    return tuple(
        flag
        if flag.value == (before[flag.name].value if flag.name in before else "")
        else flag.model_copy(update={"source": SMALLER})
        for flag in smaller.plan.flags
    )


def _smaller(planned: Sized) -> Iterator[Serve]:
    """Yield settings to try, the smallest first."""
    serve = planned.profile.serve
    share = serve.gpu_memory_utilization
    fewer = serve.model_copy(
        update={
            "max_num_seqs": max(1, (planned.value("--max-num-seqs") or 1) // 2),
            "max_model_len": "auto" if planned.profile.gpu else serve.max_model_len,
        }
    )
    batch, block = max(SMALLEST_BATCH, serve.max_num_batched_tokens // 2), planned.block_tokens
    half = {"max_num_batched_tokens": min(serve.max_num_batched_tokens, -(-batch // block) * block)}
    if share is None:
        yield fewer.model_copy(update=half)
        return
    for less in SHARES_LESS:
        lower = fewer.model_copy(update={"gpu_memory_utilization": round(share - less, 3)})
        yield lower.model_copy(update=half)
        yield lower


def _with(profile: Profile, serve: Serve) -> Profile:
    return profile.model_copy(update={"serve": serve})


def _is_as_good(sized: Sized, planned: Sized) -> bool:
    """Whether nothing new stands in the way; what is wrong with the machine is so with either."""
    before = {problem.cause for problem in planned.plan.refusals}
    return all(problem.cause in before for problem in sized.plan.refusals)


def _summary(planned: Sized, smaller: Sized) -> str:
    parts = [f"{smaller.plan.max_model_len:,} tokens of context in place of {planned.plan.max_model_len:,}"]
    for flag, what in (("--max-num-seqs", "request(s) at once"), ("--max-num-batched-tokens", "tokens in a batch")):
        now, before = smaller.value(flag), planned.value(flag)
        if now != before:
            parts.append(f"{now} {what} in place of {before}")
    share, before_share = (one.profile.serve.gpu_memory_utilization for one in (smaller, planned))
    if share is not None and share != before_share:
        parts.append(f"{share:g} of the card in place of {before_share:g}")
    return "; ".join(parts)
