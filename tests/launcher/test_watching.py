"""What the plan says about watching and smaller settings, and what is rendered from it."""

import json
import os
import subprocess
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from launcher import render
from launcher.images.pins import load_pins
from launcher.operate import events
from launcher.operate.keeper import KeeperSettings
from launcher.operate.service_state import FILE_NAME, ServiceStatus, StateFile
from launcher.operate.watchdog import WatchdogSettings
from launcher.plan import Plan
from launcher.planner import Inputs, make
from launcher.profile import Profile, Watch, load_model, load_profile, profile_files
from launcher.state import ServiceState
from launcher.views import operating_lines
from launcher.watching import folder, follow
from launcher.watching.choices import SMALLEST_CONTEXT, Sized, degraded_of
from tests.launcher.golden import NO_GPU, NVIDIA, plan_for, surroundings
from tests.launcher.test_cli_planning import Graft, graft

__all__ = ["graft"]


def shipped(name: str) -> Plan:
    profile = load_profile(name)
    return plan_for(profile, NVIDIA if profile.gpu else NO_GPU)


def number(plan: Plan, flag: str, degraded: bool = False) -> float:
    flags = plan.degraded.flags if degraded and plan.degraded else plan.flags
    return float(next(one.value for one in flags if one.name == flag) or 0)


@pytest.mark.parametrize("name", list(profile_files()))
def test_every_shipped_profile_has_smaller_settings_that_start(name: str) -> None:
    plan = shipped(name)
    assert plan.degraded is not None
    assert plan.max_model_len is not None
    assert SMALLEST_CONTEXT <= plan.degraded.max_model_len <= plan.max_model_len / 2
    assert f"{plan.degraded.max_model_len:,} tokens of context in place of" in plan.degraded.summary
    assert number(plan, "--max-num-batched-tokens", True) < number(plan, "--max-num-batched-tokens")
    assert number(plan, "--max-num-seqs", True) <= number(plan, "--max-num-seqs")
    if load_profile(name).gpu is not None:
        assert number(plan, "--gpu-memory-utilization", True) < number(plan, "--gpu-memory-utilization")
    changed = {flag.name for flag in plan.degraded.flags if flag.source == "plan: smaller settings"}
    assert {"--max-model-len", "--max-num-batched-tokens"} <= changed
    assert [flag.name for flag in plan.degraded.flags] == [flag.name for flag in plan.flags]


def test_smaller_settings_do_not_change_what_runs_when_all_is_well() -> None:
    plan = shipped("rtx4090")
    without = make_with(load_profile("rtx4090"), Watch(degraded=False))
    assert without.degraded is None
    assert without.flags == plan.flags


def make_with(profile: Profile, watch: Watch) -> Plan:
    return plan_for(profile.model_copy(update={"watch": watch}), NVIDIA)


def test_a_hybrid_models_batch_holds_a_whole_block() -> None:
    plan = shipped("rtx4090")
    assert number(plan, "--max-num-batched-tokens", True) == 2112


def test_where_the_context_is_not_known_there_are_no_smaller_settings() -> None:
    plan = shipped("cpu").model_copy(update={"max_model_len": None})
    assert degraded_of(Sized(plan, load_profile("cpu")), lambda profile: pytest.fail(profile.name)) is None


def test_settings_that_would_be_refused_are_not_taken() -> None:
    profile = load_profile("rtx4090")
    plan = shipped("rtx4090")
    too_small = replace(Sized(plan, profile), plan=plan.model_copy(update={"max_model_len": 700}))
    assert degraded_of(Sized(plan, profile), lambda one: too_small) is None


def test_a_profile_may_watch_otherwise_or_not_at_all() -> None:
    watched = make_with(load_profile("rtx4090"), Watch(every_s=5, strikes=4, restarts=1))
    assert watched.watch is not None
    assert (watched.watch.every_s, watched.watch.restarts) == (5, 1)
    assert "no progress for 20 s ends the engine" in [one.reason for one in watched.watch.choices]
    bare = make_with(load_profile("rtx4090"), Watch(enabled=False))
    assert (bare.watch, bare.degraded) == (None, None)
    files = render.run(bare, surroundings(NVIDIA))
    services = yaml.safe_load(files["compose.yaml"])["services"]
    assert "watchdog" not in services
    assert services["vllm"]["entrypoint"] == ["/bin/sh", "/run/graft/entrypoint.sh"]
    assert "degraded" not in files["entrypoint.sh"]
    assert "keep.json" not in files


def test_the_watchdog_has_the_engines_processes_and_user_and_no_socket() -> None:
    services = yaml.safe_load(render.run(shipped("rtx4090"), surroundings(NVIDIA))["compose.yaml"])["services"]
    dog = services["watchdog"]
    assert dog["pid"] == "service:vllm"
    assert dog["user"] == services["vllm"]["user"]
    assert dog["networks"] == ["inside"]
    assert not any("docker.sock" in mount["source"] for mount in dog["volumes"])
    assert "devices" not in dog
    assert "deploy" not in dog


def test_a_webhook_is_a_secret_of_the_watchdog_alone() -> None:
    files = render.run(shipped("rtx4090"), surroundings(NVIDIA, has_webhook=True))
    document = yaml.safe_load(files["compose.yaml"])
    having = [name for name, one in document["services"].items() if "webhook_url" in one.get("secrets", ())]
    assert having == ["watchdog"]
    assert document["secrets"]["webhook_url"] == {"file": "./secrets/webhook_url"}
    assert "outside" in document["services"]["watchdog"]["networks"]
    assert KeeperSettings.model_validate_json(files["keep.json"]).linger_s > 0


def test_settings_of_keeper_and_watchdog_can_be_read_again() -> None:
    files = render.run(shipped("rtx4090"), surroundings(NVIDIA))
    keep = KeeperSettings.model_validate_json(files["keep.json"])
    assert keep.commands["degraded"] == (*keep.commands["normal"], "degraded")
    assert keep.context["vllm_args"]["max_num_batched_tokens"] == 4128
    dog = WatchdogSettings.model_validate_json(files["watch.json"])
    assert dog.base_url == "http://vllm:8000"
    assert dog.served_name == "qwen3.6-27b"
    assert dog.watch.strikes == 3


@pytest.mark.parametrize(("argument", "smaller"), [((), False), (("degraded",), True), (("other",), False)])
def test_the_entrypoint_chooses_by_its_argument(tmp_path: Path, argument: tuple[str, ...], smaller: bool) -> None:
    context = f"{number(shipped('rtx4090'), '--max-model-len', smaller):.0f}"
    script = tmp_path / "entrypoint.sh"
    script.write_text(render.run(shipped("rtx4090"), surroundings(NVIDIA))["entrypoint.sh"], encoding="utf-8")
    vllm = tmp_path / "vllm"
    vllm.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n', encoding="utf-8")
    vllm.chmod(0o755)
    argv = ["/bin/sh", str(script), *argument]
    said = subprocess.run(argv, env={"PATH": f"{tmp_path}:/bin:/usr/bin"}, capture_output=True, text=True, check=True)
    line, *arguments = said.stdout.splitlines()
    assert line.startswith("graft: exec vllm serve ")
    assert arguments[arguments.index("--max-model-len") + 1] == context
    # What is told is what is done.
    assert f"--max-model-len {context} " in line


def test_the_shared_folder_is_open_inside_one_that_is_closed(tmp_path: Path) -> None:
    state = ServiceState(tmp_path / "cpu")
    folder.make(state)
    (state.operate_dir / FILE_NAME).write_text("{}", encoding="utf-8")
    (state.operate_dir / "events.jsonl").write_text("{}\n", encoding="utf-8")
    folder.prepare(state)
    assert state.operate_dir.stat().st_mode & 0o777 == 0o777
    assert state.operate_dir.parent.stat().st_mode & 0o777 == 0o700
    assert [path.name for path in state.operate_dir.iterdir()] == ["events.jsonl"]


def test_the_plan_is_json_with_both_kinds_of_settings() -> None:
    plan = shipped("cpu")
    document = json.loads(plan.model_dump_json())
    assert document["degraded"]["max_model_len"] == 2048
    assert Plan.model_validate(document).degraded == plan.degraded
    inputs = Inputs(profile=load_profile("cpu"), model=load_model(load_profile("cpu").model), pin=load_pins().pins[1])
    assert make(inputs).plan.watch is not None


def test_what_happens_to_a_service_is_followed(graft: Graft) -> None:
    assert graft("watch", "cpu").exit_code == 2
    state = ServiceState.of("cpu")
    folder.make(state)
    log = events.EventLog(state.operate_dir, os.open(os.devnull, os.O_WRONLY))
    for number in range(3):
        log.write(events.event("engine-ended", "cpu", f"end {number}", cause="gpu-lost", remedy="Reboot."))
    StateFile(state.operate_dir).change(
        lambda status: status.model_copy(update={"phase": "stopped", "reason": "a GPU was lost", "remedy": "Reboot."})
    )
    ended = graft("watch", "cpu", "--last", "2")
    assert ended.out.startswith("cpu: stopped. Stopped: a GPU was lost. -> Reboot.\n")
    assert "end 0" not in ended.out
    assert "end 2 (gpu-lost)" in ended.out
    lines = graft("watch", "cpu", "--once", "--json").out.splitlines()
    assert [json.loads(line)["message"] for line in lines] == ["end 0", "end 1", "end 2"]


def test_events_that_come_are_told_until_the_service_is_stopped(tmp_path: Path) -> None:
    state = ServiceState(tmp_path / "cpu")
    folder.make(state)
    file = StateFile(state.operate_dir)
    file.change(lambda status: status.model_copy(update={"phase": "serving"}))
    coming = follow.events_from_now(state, poll_s=0.01)

    def go_on() -> None:
        log = events.EventLog(state.operate_dir, os.open(os.devnull, os.O_WRONLY))
        log.write(events.event("engine-stalled", "cpu", "no step"))
        file.change(lambda status: status.model_copy(update={"phase": "stopped"}))

    timer = threading.Timer(0.1, go_on)
    timer.start()
    assert [one.message for one in coming] == ["no step"]
    timer.join()


def test_the_plan_and_its_explanation_show_watch_and_smaller_settings(graft: Graft) -> None:
    assert "Should memory end the engine twice: " in graft("plan", "rtx4090").out
    explained = graft("explain", "rtx4090").out
    assert "watch.strikes" in explained
    assert "Smaller settings" in explained
    document = graft("explain", "rtx4090", "--json").document
    assert document["degraded"]["max_model_len"] >= SMALLEST_CONTEXT
    assert {one["name"] for one in document["watch"]} >= {"watch.every_s", "watch.restarts"}


def test_a_degraded_service_says_so_in_its_status() -> None:
    status = ServiceStatus(
        phase="serving", mode="degraded", reason="a request needed more memory, 2 times for lack of memory", restarts=2
    )
    first, second = operating_lines(status, 0)
    assert first.startswith("Degraded: a request needed more memory")
    assert "`graft up` returns to the planned ones" in first
    assert second == "Started again 2 time(s) since `graft up`."
    waiting = ServiceStatus(phase="restarting", reason="the engine is stuck", next_start_s=130)
    assert operating_lines(waiting, 100) == ["Restarting: the engine is stuck.", "The engine is started again in 30 s."]
