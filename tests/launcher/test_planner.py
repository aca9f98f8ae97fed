"""The plan: what it decides, why, and what it refuses."""

import json
from collections.abc import Mapping
from typing import Any

import pytest
from vllm_graft.facts import RunFacts
from vllm_graft.records import from_json, to_json

from launcher.errors import UsageError
from launcher.fit.calibration import BootRecord, LoggedBoot, configuration_key, record_boot
from launcher.fit.geometry import FitError
from launcher.host.facts import Docker, Gpu, HostFacts, Nvml
from launcher.images.pins import load_pins
from launcher.memory import MemoryInputs, machine_key
from launcher.plan import Plan
from launcher.planner import Inputs, Planned, make
from launcher.profile import Profile, load_model, load_profile, profile_files

UUID = "GPU-00000000-0000-4000-8000-0000000000aa"


def profile_with(name: str, **serve: Any) -> Profile:
    """Return a shipped profile with other values under `serve`."""
    profile = load_profile(name)
    return Profile.model_validate(
        {**profile.model_dump(), "serve": {**profile.serve.model_dump(), **serve}, "source": profile.source}
    )


def planned(profile: Profile, model: str | None = None, **inputs: Any) -> Planned:
    return make(Inputs(profile, load_model(model or profile.model), load_pins().of(profile.vllm), **inputs))


def flag(plan: Plan, name: str) -> str | None:
    (value,) = [one.value for one in plan.flags if one.name == name]
    return value


def has_flag(plan: Plan, name: str) -> bool:
    return any(one.name == name for one in plan.flags)


def causes(made: Planned) -> dict[str, str]:
    return {problem.cause: problem.severity for problem in made.plan.problems}


def machine(total_mib: int = 24564, free_mib: int = 24000) -> HostFacts:
    gpu = Gpu(
        index=0,
        uuid=UUID,
        name="NVIDIA GeForce RTX 4090",
        compute_capability=(8, 9),
        total_mib=total_mib,
        free_mib=free_mib,
    )
    docker = Docker(flavor="docker", engine="29.5.2", api="1.54", compose="5.0.2", runtimes=("nvidia", "runc"))
    return HostFacts(nvml=Nvml(driver="580.126.09", cuda_driver="13.0", gpus=(gpu,)), docker=docker)


@pytest.mark.parametrize("name", profile_files())
def test_every_profile_starts_with_its_own_model(name: str) -> None:
    assert planned(load_profile(name)).plan.refusals == ()


@pytest.mark.parametrize("name", profile_files())
def test_the_same_inputs_give_the_same_plan(name: str) -> None:
    assert planned(load_profile(name)).plan == planned(load_profile(name)).plan


@pytest.mark.parametrize("name", profile_files())
def test_every_flag_has_a_reason_and_a_source(name: str) -> None:
    for one in planned(load_profile(name)).plan.flags:
        assert one.reason
        assert one.source


@pytest.mark.parametrize("name", [name for name in profile_files() if name != "cpu"])
def test_every_gpu_profile_runs_full_graphs_with_async_scheduling(name: str) -> None:
    plan = planned(load_profile(name)).plan
    assert '"cudagraph_mode":"FULL_AND_PIECEWISE"' in (flag(plan, "--compilation-config") or "")
    assert has_flag(plan, "--async-scheduling")


def test_a_turboquant_profile_requires_the_fix_of_speculation() -> None:
    assert "tq-spec-decode" in planned(load_profile("rtx4090")).plan.required_fixes


@pytest.mark.parametrize("key", ["disabled_fixes", "optional_fixes"])
def test_without_that_fix_being_sure_the_plan_falls_back_to_safe_mode_and_says_so(key: str) -> None:
    profile = load_profile("rtx4090").model_copy(update={key: ("tq-spec-decode",)})
    made = planned(profile)
    assert '"cudagraph_mode":"PIECEWISE"' in (flag(made.plan, "--compilation-config") or "")
    assert has_flag(made.plan, "--no-async-scheduling")
    assert flag(made.plan, "--max-num-seqs") == "1"
    assert "tq-spec-decode" not in made.plan.required_fixes
    assert causes(made)["fixes-inactive"] == "warn"


@pytest.mark.parametrize("requests", ["auto", 4])
def test_without_speculation_turboquant_needs_the_fix_for_more_than_one_request(requests: str | int) -> None:
    profile = profile_with("rtx4090", speculation=None, max_num_seqs=requests, max_model_len=4096)
    made = planned(profile.model_copy(update={"disabled_fixes": ("tq-spec-decode",)}))
    assert flag(made.plan, "--max-num-seqs") == "1"
    assert '"cudagraph_mode":"FULL_AND_PIECEWISE"' in (flag(made.plan, "--compilation-config") or "")
    assert has_flag(made.plan, "--async-scheduling")
    (problem,) = (one for one in made.plan.problems if one.cause == "fixes-inactive")
    assert "one request at a time; requests wait for each other" in problem.message
    assert "out of disabled_fixes" in problem.remedy
    assert int(flag(planned(profile).plan, "--max-num-seqs") or 0) > 1


def test_a_kv_cache_without_turboquant_needs_no_safe_mode() -> None:
    profile = profile_with("rtx4090", kv_cache_dtype="fp8").model_copy(update={"disabled_fixes": ("tq-spec-decode",)})
    assert "fixes-inactive" not in causes(planned(profile))


@pytest.mark.parametrize("version", ["0.32.1", "0.33.1"])
def test_a_vllm_that_the_fix_was_not_made_for_means_safe_mode_and_names_those_it_was(version: str) -> None:
    profile = load_profile("rtx4090").model_copy(update={"vllm": version})
    made = make(Inputs(profile, load_model(profile.model), load_pins().of("0.33.0")))
    assert "tq-spec-decode" not in made.plan.required_fixes
    assert '"cudagraph_mode":"PIECEWISE"' in (flag(made.plan, "--compilation-config") or "")
    (problem,) = (one for one in made.plan.problems if one.cause == "fixes-inactive")
    assert "Write vllm: 0.32.0 or 0.33.0" in problem.remedy
    assert f"drifted from {version}" in problem.remedy


def test_a_fix_that_does_not_exist_is_refused_with_those_there_are() -> None:
    profile = load_profile("rtx4090").model_copy(update={"disabled_fixes": ("tq-everything",)})
    with pytest.raises(UsageError, match=r"disabled_fixes.*no fix is called 'tq-everything'.*tq-spec-decode"):
        planned(profile)


def test_a_plan_without_mtp_layers_leaves_speculation_out() -> None:
    plan = planned(profile_with("rtx4090", kv_cache_dtype="auto"), "smollm2-135m-instruct").plan
    assert not has_flag(plan, "--speculative-config")


@pytest.mark.parametrize(
    ("profile", "model", "expected"),
    [("rtx4090", "qwen3.6-27b-int4", True), ("rtx3090", "smollm2-135m-instruct", False), ("cpu", None, False)],
)
def test_only_multimodal_models_are_told_to_leave_vision_out(profile: str, model: str | None, expected: bool) -> None:
    assert has_flag(planned(load_profile(profile), model).plan, "--language-model-only") is expected


def test_the_spelling_of_switched_off_options_follows_the_version() -> None:
    new = load_profile("rtx4090")
    old = new.model_copy(update={"vllm": "0.32.0"})
    assert has_flag(planned(new).plan, "--disable-prefix-caching")
    assert has_flag(planned(old).plan, "--no-enable-prefix-caching")


@pytest.mark.parametrize(
    ("argument", "instead"),
    [
        ("--max-model-len=8192", "serve.max_model_len"),
        ("--max_num_seqs", "serve.max_num_seqs"),
        ("--compilation-config.mode", "CUDA graphs"),
        ("--api-key", "api_key"),
    ],
)
def test_further_arguments_that_the_plan_owns_are_refused_with_the_key_to_use(argument: str, instead: str) -> None:
    with pytest.raises(UsageError, match=rf"extra_args.*is set by the plan; use .*{instead}"):
        planned(profile_with("rtx4090", extra_args=(argument, "1")))


def test_further_arguments_of_the_user_are_passed_on_last() -> None:
    plan = planned(profile_with("cpu", extra_args=("--uvicorn-log-level", "warning"))).plan
    assert plan.argv()[-2:] == ("--uvicorn-log-level", "warning")


def test_an_unknown_geometry_is_said_and_leaves_the_context_to_vllm() -> None:
    made = planned(load_profile("rtx4090"), "qwen3.5-9b-int4")
    assert causes(made)["model-geometry-unknown"] == "warn"
    assert flag(made.plan, "--max-model-len") == "auto"


def test_a_config_without_a_needed_field_is_refused_by_its_name() -> None:
    config: Mapping[str, Any] = {"architectures": ["LlamaForCausalLM"], "hidden_size": 64}
    made = planned(load_profile("rtx4090"), config=config, config_source="here/config.json")
    (problem,) = [one for one in made.plan.problems if one.cause == "model-geometry-unknown"]
    assert problem.severity == "refuse"
    assert "here/config.json" in problem.message
    assert "num_hidden_layers" in problem.message


def test_a_context_that_does_not_fit_is_refused_with_the_longest_that_does() -> None:
    made = planned(profile_with("rtx4090", max_model_len=262144))
    (problem,) = made.plan.refusals
    assert problem.cause == "kv-cache-too-small"
    longest = planned(load_profile("rtx4090")).plan.max_model_len
    assert f"serve.max_model_len: {longest}" in problem.remedy


def test_k8v4_below_compute_capability_8_9_is_planned_with_the_fix_and_refused_without() -> None:
    profile = load_profile("rtx3090")
    assert profile.serve.kv_cache_dtype == "turboquant_k8v4"
    made = planned(profile)
    assert "tq-spec-decode" in made.plan.required_fixes
    assert not made.plan.refusals
    for key in ("disabled_fixes", "optional_fixes"):
        without = planned(profile.model_copy(update={key: ("tq-spec-decode",)}))
        assert causes(without)["kv-cache-dtype-unsupported"] == "refuse"


def test_fp8_below_compute_capability_8_9_is_refused() -> None:
    assert causes(planned(profile_with("rtx3090", kv_cache_dtype="fp8")))["kv-cache-dtype-unsupported"] == "refuse"


def test_the_card_of_the_machine_decides_and_is_named_by_its_uuid() -> None:
    made = planned(load_profile("rtx4090"), facts=machine())
    assert [gpu.uuid for gpu in made.plan.gpus] == [UUID]
    assert made.plan.gpu_mode == "nvidia"
    assert made.memory is not None
    assert made.memory.report is not None
    assert "RTX 4090" in made.memory.report.request.card.source
    assert made.plan.refusals == ()


def test_memory_held_by_others_is_refused_once() -> None:
    made = planned(load_profile("rtx4090"), facts=machine(free_mib=12000))
    assert [one.cause for one in made.plan.refusals].count("gpu-memory-busy") == 1


def test_a_card_that_is_asked_for_is_planned_with() -> None:
    made = planned(load_profile("rtx4090"), memory=MemoryInputs(card="32GiB"))
    assert made.plan.max_model_len is not None
    here = planned(load_profile("rtx4090")).plan.max_model_len
    assert here is not None
    assert made.plan.max_model_len > here
    with pytest.raises(FitError, match="--card"):
        planned(load_profile("rtx4090"), memory=MemoryInputs(card="large"))


def test_the_run_id_follows_what_is_started_and_not_what_was_found_on_the_machine() -> None:
    base = planned(load_profile("rtx4090"), facts=machine()).plan
    busier = planned(load_profile("rtx4090"), facts=machine(free_mib=23900)).plan
    other = planned(profile_with("rtx4090", port=9000), facts=machine()).plan
    assert base.run_id == busier.run_id or base.max_model_len != busier.max_model_len
    assert base.run_id != other.run_id


def test_the_facts_of_the_fixes_are_those_that_vllm_graft_reads() -> None:
    plan = planned(load_profile("rtx4090")).plan
    facts = from_json(RunFacts, json.dumps(plan.facts))
    assert facts.run_id == plan.run_id
    assert facts.engine.kv_cache_dtype == "turboquant_k8v4"
    assert facts.model.gdn_layers == 48
    assert to_json(facts)


def test_the_plan_lists_the_processes_that_must_report() -> None:
    assert planned(load_profile("rtx4090")).plan.processes == (("api-server",), ("engine-core", "worker"))
    assert planned(load_profile("rtx4090-x2")).plan.processes[2:] == (("worker",), ("worker",))


def test_a_plan_survives_its_file() -> None:
    plan = planned(load_profile("rtx4090"), facts=machine()).plan
    read = Plan.model_validate_json(plan.model_dump_json())
    assert read.model_dump_json() == plan.model_dump_json()


def test_advice_takes_the_place_of_unsafe_numbers_where_it_is_asked_for() -> None:
    profile = profile_with("rtx4090", gpu_memory_utilization=0.98)
    obeyed = planned(profile)
    advised = planned(profile, memory=MemoryInputs(advise=True))
    assert flag(obeyed.plan, "--gpu-memory-utilization") == "0.98"
    assert float(flag(advised.plan, "--gpu-memory-utilization") or 1) < 0.98
    assert advised.plan.refusals == ()


def boot_of(made: Planned, gib: float) -> BootRecord:
    """A boot as the launcher records one after a start of this plan."""
    assert made.memory is not None
    assert made.memory.report is not None
    report = made.memory.report
    key = configuration_key(made.plan.model, made.plan.vllm, report.request.settings)
    machines = machine_key(gpu.uuid for gpu in made.plan.gpus)
    logged = LoggedBoot(available_gib=gib)
    record = record_boot(report, logged, machines, key, "2026-11-30T00:00:00+00:00")
    assert record is not None
    return record


@pytest.mark.parametrize(("profile", "gib", "requests"), [("rtx4090", 1.7, "1"), ("rtx5090", 24.0, "2")])
def test_a_recorded_boot_corrects_the_prediction_and_fixes_the_pool(profile: str, gib: float, requests: str) -> None:
    """Also where several requests hold the context: their number is part of what was recorded."""
    facts = machine(total_mib=49140, free_mib=48000) if requests == "2" else machine()
    first = planned(load_profile(profile), facts=facts)
    assert flag(first.plan, "--max-num-seqs") == requests
    assert not has_flag(first.plan, "--kv-cache-memory-bytes")
    boot = boot_of(first, gib)
    again = planned(load_profile(profile), facts=facts, memory=MemoryInputs(boots=(boot,)))
    assert again.memory is not None
    assert again.memory.report is not None
    assert again.memory.report.request.calibration is not None
    assert again.memory.report.request.settings.max_num_seqs == int(requests)
    assert again.memory.report.available_error_bytes == 0
    pool = int(flag(again.plan, "--kv-cache-memory-bytes") or 0)
    assert 0 < pool <= boot.available_bytes
    assert again.memory.report.available_bytes == pool
    assert again.memory.report.verdict.value == "FITS"
    assert again.memory.problems == ()


def test_a_smaller_pool_than_was_thought_shortens_the_context() -> None:
    first = planned(load_profile("rtx4090"), facts=machine())
    boot = boot_of(first, 1.1)
    again = planned(load_profile("rtx4090"), facts=machine(), memory=MemoryInputs(boots=(boot,)))
    assert first.plan.max_model_len is not None
    assert again.plan.max_model_len is not None
    assert again.plan.max_model_len < first.plan.max_model_len


def test_the_cpu_refuses_a_context_that_its_pool_does_not_hold() -> None:
    made = planned(profile_with("cpu", max_model_len=8192, cpu_kv_cache_gib=1))
    assert made.plan.refusals == ()
    big = planned(profile_with("cpu", max_model_len=8192, cpu_kv_cache_gib=1), model="qwen3.6-27b-int4")
    (problem,) = [one for one in big.plan.refusals if one.cause == "kv-cache-too-small"]
    assert "8192 tokens do not fit into a KV cache of 1 GiB" in problem.message
    assert "Write serve.cpu_kv_cache_gib: 2" in problem.remedy
    long = planned(profile_with("cpu", max_model_len=16384))
    assert causes(long)["context-too-long"] == "refuse"
