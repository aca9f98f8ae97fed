"""Version, GPU, model and flags decide whether a fix is wanted, each with its reason."""

from collections.abc import Callable
from typing import Any

import pytest
from vllm_graft.decide import Situation, refusal
from vllm_graft.facts import EngineFacts, ModelFacts, RunFacts
from vllm_graft.patch import Capability, Outcome, Patch, When

RTX3090, RTX4090 = (8, 6), (8, 9)


def run(kv_cache_dtype: str = "turboquant_k8v4", method: str | None = "mtp") -> RunFacts:
    model = ModelFacts(("Qwen3_5ForCausalLM",), 16, 48, 0, 1, 256)
    return RunFacts(1, "run-1", model, EngineFacts(kv_cache_dtype, method, 3 if method else 0, 1, "docker"))


def situation(
    vllm: str = "1.0", facts: RunFacts | None = None, capabilities: tuple[Capability, ...] | None = None
) -> Situation:
    return Situation(vllm, facts, capabilities)


@pytest.fixture
def patch(make_patch: Callable[..., Patch]) -> Callable[..., Patch]:
    def make(**values: Any) -> Patch:
        return make_patch("json:dumps", lambda original: original, fingerprints={}, **values)

    return make


@pytest.mark.parametrize("vllm", ["1.0", "1.0+cu129", "1.9.9", "1.5.dev3+g0123abc"])
def test_a_version_in_range_is_affected(patch: Callable[..., Patch], vllm: str) -> None:
    assert refusal(patch(), situation(vllm)) is None


@pytest.mark.parametrize("vllm", ["2.0", "0.9", "2.0.1+cu129"])
def test_a_version_out_of_range_is_not_affected(patch: Callable[..., Patch], vllm: str) -> None:
    refused = refusal(patch(), situation(vllm))
    assert refused is not None
    assert refused.outcome is Outcome.NOT_AFFECTED
    assert vllm in refused.reason


@pytest.mark.parametrize(
    ("when", "here"),
    [
        (When(capability_below=(8, 9)), situation(capabilities=(RTX3090,))),
        (When(capability_below=(8, 9)), situation(capabilities=(RTX4090, RTX3090))),
        (When(capability_at_least=(8, 9)), situation(capabilities=(RTX4090,))),
        (When(capability_at_least=(8, 0), capability_below=(9, 0)), situation(capabilities=(RTX4090,))),
        (When(kv_cache_dtypes=("turboquant_*",)), situation(facts=run())),
        (When(kv_cache_dtypes=("fp8", "turboquant_k8v4")), situation(facts=run())),
        (When(architectures=("Other", "Qwen3_5ForCausalLM")), situation(facts=run())),
        (When(speculation=True), situation(facts=run())),
        (When(speculation=False), situation(facts=run(method=None))),
        (When(), situation()),
    ],
)
def test_a_condition_that_holds_lets_the_fix_in(patch: Callable[..., Patch], when: When, here: Situation) -> None:
    assert refusal(patch(when=when), here) is None


@pytest.mark.parametrize(
    ("when", "here", "reason"),
    [
        (
            When(capability_below=(8, 9)),
            situation(capabilities=(RTX4090,)),
            "needs compute capability < 8.9; here: 8.9",
        ),
        (When(capability_at_least=(8, 9)), situation(capabilities=()), "here: no GPU"),
        (When(capability_at_least=(8, 9)), situation(), "the GPU's is not known"),
        (
            When(kv_cache_dtypes=("turboquant_*",)),
            situation(facts=run("fp8")),
            "needs KV cache turboquant_*; here: fp8",
        ),
        (When(architectures=("Other",)), situation(facts=run()), "needs architecture Other; here: Qwen3_5ForCausalLM"),
        (When(speculation=True), situation(facts=run(method=None)), "needs speculative decoding"),
        (When(speculation=False), situation(facts=run()), "needs no speculative decoding"),
        (When(speculation=True), situation(), "without GRAFT_FACTS the model and the flags are not known"),
        (
            When(capability_below=(8, 9), speculation=True),
            situation(capabilities=(RTX3090,), facts=run(method=None)),
            "needs speculative decoding",
        ),
    ],
)
def test_a_condition_that_does_not_hold_keeps_it_out_with_a_reason(
    patch: Callable[..., Patch], when: When, here: Situation, reason: str
) -> None:
    refused = refusal(patch(when=when), here)
    assert refused is not None
    assert refused.outcome is Outcome.NOT_APPLICABLE
    assert reason in refused.reason
