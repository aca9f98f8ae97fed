"""Which profile suits a machine, and which one is taken when none is named."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.host.facts import Gpu, HostFacts, MigDevice, Nvml
from launcher.match import Choice, Match, choose, match
from launcher.profile import Profile, load_profile, profile_files


def profile(name: str, **gpu: Any) -> Profile:
    setup = {"card": "24GiB", "compute_capability": "8.6", "min_memory_mib": 23500, "max_memory_mib": 25600, **gpu}
    count = setup.get("count", 1)
    serve = {"gpu_memory_utilization": 0.85, "max_num_batched_tokens": 4128, "tensor_parallel_size": count}
    return Profile.model_validate(
        {"name": name, "title": name, "model": "m", "vllm": "0.33.0", "gpu": setup, "serve": serve}
    )


CPU = Profile.model_validate(
    {
        "name": "cpu",
        "title": "cpu",
        "runtime": "host",
        "model": "m",
        "vllm": "0.32.0",
        "serve": {"max_num_batched_tokens": 2048, "cpu_kv_cache_gib": 1},
    }
)
RTX3090 = profile("rtx3090")
RTX4090 = profile("rtx4090", compute_capability="8.9")
RTX5090 = profile("rtx5090", compute_capability="12.0", min_memory_mib=31500, max_memory_mib=33500)
RTX3090_X2 = profile("rtx3090-x2", count=2)
PROFILES = (CPU, RTX3090, RTX3090_X2, RTX4090, RTX5090)


def gpu(index: int = 0, **changes: Any) -> Gpu:
    values = {
        "index": index,
        "uuid": f"GPU-{index}",
        "name": "NVIDIA GeForce RTX 3090",
        "compute_capability": (8, 6),
        "total_mib": 24576,
        "free_mib": 24100,
    }
    return Gpu.model_validate({**values, **changes})


def laptop() -> Gpu:
    return gpu(name="NVIDIA GeForce RTX 4090 Laptop GPU", compute_capability=(8, 9), total_mib=16376)


def host(*gpus: Gpu) -> HostFacts:
    return HostFacts(nvml=Nvml(driver="580.126.09", cuda_driver="13.0", gpus=gpus))


def chosen(facts: HostFacts, *profiles: Profile) -> Choice:
    return choose(match(profiles or PROFILES, facts), facts)


def compatible(facts: HostFacts) -> dict[str, bool | None]:
    return {one.profile.name: one.compatible for one in match(PROFILES, facts)}


def only(profile: Profile, facts: HostFacts) -> Match:
    (found,) = match([profile], facts)
    return found


def test_a_card_suits_the_profile_of_its_kind_only() -> None:
    assert compatible(host(gpu())) == {
        "cpu": True, "rtx3090": True, "rtx3090-x2": False, "rtx4090": False, "rtx5090": False
    }  # fmt: skip
    assert chosen(host(gpu())).profile == RTX3090


def test_a_pair_takes_the_profile_that_uses_both_and_the_other_is_named() -> None:
    choice = chosen(host(gpu(), gpu(1)))
    assert choice.profile == RTX3090_X2
    assert choice.why == (
        "rtx3090-x2 suits this machine: 2 x NVIDIA GeForce RTX 3090 (8.6, 24576 MiB); also suitable: rtx3090"
    )


def test_the_cards_of_a_match_are_named_by_uuid_and_the_freest_are_taken() -> None:
    facts = host(gpu(free_mib=9000), gpu(1), gpu(2))
    assert only(RTX3090_X2, facts).gpus == ("GPU-1", "GPU-2")
    assert only(RTX3090, facts).gpus == ("GPU-1",)


def test_a_name_that_fits_does_not_make_a_card_fit() -> None:
    choice = chosen(host(laptop()))
    assert choice.profile is None
    assert choice.closest is not None
    assert choice.closest.profile == RTX4090
    assert choice.closest.reasons == ("16376 MiB of memory; at least 23500 MiB needed",)
    assert "NVIDIA GeForce RTX 4090 Laptop GPU (8.9, 16376 MiB)" in choice.why
    assert "PROFILE=cpu" in choice.why


def test_the_closest_profile_says_what_to_change() -> None:
    choice = chosen(host(gpu(compute_capability=(8, 0), total_mib=40960)), RTX3090, RTX5090, CPU)
    assert choice.closest is not None
    assert choice.closest.profile == RTX3090
    assert choice.closest.reasons == (
        "compute capability 8.0; it is made for 8.6",
        "40960 MiB of memory; its numbers are made for at most 25600 MiB",
    )


def test_a_profile_for_one_card_is_closer_to_one_card_than_a_pairs_is() -> None:
    pair = profile("pair", count=2, min_memory_mib=20000)
    choice = chosen(host(gpu(total_mib=12288)), pair, RTX3090)
    assert choice.closest is not None
    assert choice.closest.profile == RTX3090


def test_one_card_of_a_kind_and_one_of_another_are_no_pair() -> None:
    facts = host(gpu(), gpu(1, compute_capability=(8, 9), total_mib=24564))
    assert only(RTX3090_X2, facts).reasons == ("1 GPU(s) of the kind; it needs 2",)
    assert {name for name, suits in compatible(facts).items() if suits} == {"cpu", "rtx3090", "rtx4090"}
    assert chosen(facts).profile == RTX4090


def test_among_equals_the_narrower_memory_range_is_taken() -> None:
    narrow = profile("zzz", min_memory_mib=24000, max_memory_mib=25000)
    choice = chosen(host(gpu()), RTX3090, narrow)
    assert choice.profile == narrow
    assert "also suitable: rtx3090" in choice.why


def test_a_profile_that_names_these_cards_goes_first() -> None:
    mine = profile("mine", uuids=("GPU-1",))
    assert chosen(host(gpu(), gpu(1)), *PROFILES, mine).profile == mine
    assert only(mine, host(gpu(), gpu(1))).gpus == ("GPU-1",)


def test_a_profile_that_names_another_card_is_not_compatible() -> None:
    found = only(profile("mine", uuids=("GPU-7",)), host(gpu()))
    assert (found.compatible, found.reasons) == (False, ("its GPU GPU-7 is not there, or is of another kind",))


def test_unknown_memory_is_unknown_and_still_chosen() -> None:
    facts = host(gpu(total_mib=None, free_mib=None))
    found = only(RTX3090, facts)
    assert (found.compatible, found.gpus) == (None, ("GPU-0",))
    choice = chosen(facts)
    assert choice.profile == RTX3090
    assert "--force" in choice.why


def test_what_is_known_to_suit_goes_before_what_may() -> None:
    facts = host(gpu(), gpu(1, compute_capability=(12, 0), total_mib=None, free_mib=None))
    assert chosen(facts).profile == RTX3090


def test_a_mig_slice_is_matched_by_its_own_memory() -> None:
    slices = (MigDevice(uuid="MIG-a", profile="2g.20gb", total_mib=20096, free_mib=20080),)
    facts = host(gpu(total_mib=81559, mig_mode=True, mig_devices=slices))
    assert only(RTX3090, facts).reasons == ("20096 MiB of memory; at least 23500 MiB needed",)


@pytest.mark.parametrize("error", ["NVML Shared Library Not Found", "Driver Not Loaded"])
def test_a_machine_without_a_gpu_takes_the_cpu(error: str) -> None:
    choice = chosen(HostFacts(nvml=Nvml(error=error)))
    assert choice == Choice(CPU, f"no usable NVIDIA GPU (NVML: {error})")
    assert chosen(host()).profile == CPU


@pytest.mark.parametrize(
    "nvml",
    [
        Nvml(error="RM has detected an NVML/RM version mismatch."),
        Nvml(gpus=(Gpu(index=0, error="GPU is lost"),)),
        Nvml(gpus=(gpu(mig_mode=True),)),
    ],
)
def test_a_gpu_that_cannot_be_used_is_not_passed_over_in_silence(nvml: Nvml) -> None:
    choice = chosen(HostFacts(nvml=nvml))
    assert choice.profile is None
    assert "graft check" in choice.why
    assert "PROFILE=cpu" in choice.why


def test_without_any_profile_nothing_is_chosen() -> None:
    assert choose((), host(gpu())).profile is None
    assert choose((), host()).profile is None


@pytest.mark.parametrize(
    ("facts", "name"),
    [
        (host(), "cpu"),
        (host(gpu()), "rtx3090"),
        (host(gpu(compute_capability=(8, 9), total_mib=24564)), "rtx4090"),
        (host(gpu(compute_capability=(12, 0), total_mib=32607)), "rtx5090"),
        (host(*(gpu(n, compute_capability=(8, 9), total_mib=24564) for n in range(2))), "rtx4090-x2"),
        (host(gpu(), gpu(1)), "rtx3090-x2"),
        (host(laptop()), None),
    ],
)
def test_the_shipped_profiles_suit_their_cards(facts: HostFacts, name: str | None) -> None:
    shipped = [load_profile(one) for one in profile_files()]
    choice = choose(match(shipped, facts), facts)
    assert (choice.profile.name if choice.profile else None) == name


cards = st.lists(
    st.fixed_dictionaries(
        {
            "compute_capability": st.none() | st.sampled_from([(7, 5), (8, 6), (8, 9), (12, 0)]),
            "total_mib": st.none() | st.integers(4_000, 90_000),
            "free_mib": st.none() | st.integers(0, 4_000),
        }
    ),
    max_size=4,
)


@settings(deadline=None)  # a busy machine is no failure
@given(cards)
def test_a_match_on_any_machine_has_its_cards_or_its_reasons(found: list[dict[str, Any]]) -> None:
    facts = host(*(gpu(n, **card) for n, card in enumerate(found)))
    for one in match(PROFILES, facts):
        assert one.reasons
        if one.profile.gpu is not None:
            assert len(one.gpus) == (0 if one.compatible is False else one.profile.gpu.count)
            assert (one.distance == (0, 0, 0)) is (one.compatible is not False)
    choice = chosen(facts)
    assert choice.why
    assert (choice.profile is None) is (
        bool(found) and all(one.compatible is False for one in match(PROFILES, facts) if one.profile.gpu)
    )
