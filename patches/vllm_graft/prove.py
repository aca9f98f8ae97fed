"""The proof that an image build asks for: every fix that this vLLM version should get can be put in and taken out."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass

from vllm_graft.decide import affects
from vllm_graft.engine import Attempt, Engine, UndoError, resolve
from vllm_graft.patch import Outcome, Patch


@dataclass(frozen=True)
class Proof:
    """What came of one fix; it holds when the fix was applied, or this version is not affected."""

    id: str
    outcome: Outcome
    reason: str
    fingerprint: str | None
    holds: bool


def prove(fixes: Sequence[Patch], vllm: str) -> tuple[Proof, ...]:
    """Apply all fixes of this version on top of each other, whatever the GPU and the model, then undo them.

    The modules of by-value copies are imported first: that is the order in which a copy can be missed.
    """
    engine = Engine()
    attempts = {patch.id: _attempt(engine, patch, vllm) for patch in fixes}
    for patch in reversed(fixes):
        if patch.id in engine:
            attempts[patch.id] = _undone(engine, patch, attempts[patch.id])
    return tuple(_proof(name, attempt) for name, attempt in attempts.items())


def _attempt(engine: Engine, patch: Patch, vllm: str) -> Attempt:
    if not affects(patch, vllm):
        return Attempt(Outcome.NOT_AFFECTED, f"vLLM {vllm} is outside of {patch.affects}", None)
    for path in patch.target.also:
        try:
            importlib.import_module(path.partition(":")[0])
        except ImportError as error:
            return Attempt(Outcome.DRIFTED, f"{path}: {error}", None)
    return engine.apply(patch, vllm)


def _undone(engine: Engine, patch: Patch, attempt: Attempt) -> Attempt:
    applied = engine.applied(patch.id)
    try:
        engine.undo(patch.id)
    except UndoError as error:
        return Attempt(Outcome.FAILED, f"undo: {error}", attempt.fingerprint)
    extension = applied.extension
    now = [resolve(place.path).value for place in applied.places] if extension is None else [extension.current()]
    if any(value is not applied.original for value in now):
        return Attempt(Outcome.FAILED, "undo did not give the original object back", attempt.fingerprint)
    return attempt


def _proof(name: str, attempt: Attempt) -> Proof:
    holds = attempt.outcome in (Outcome.APPLIED, Outcome.NOT_AFFECTED)
    return Proof(name, attempt.outcome, attempt.reason, attempt.fingerprint, holds)
