"""Upgrade and rollback, with a runtime that only remembers: the order of things, and who serves after a failure."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from vllm_graft.fixes import FIXES

from launcher import bring, choice, engine_env, release, service, upgrade, upgrade_check
from launcher.ask import Answer
from launcher.errors import GraftError, Refused, StartFailed, UsageError
from launcher.images import build, lock
from launcher.images.pins import Pin, load_pins, record_digest
from launcher.plan import Flag, Plan
from launcher.planner import Inputs, Planned, make
from launcher.prepare import Options
from launcher.problems import Problem
from launcher.profile import Profile, load_model, load_profile
from launcher.reports import Collected
from launcher.runtime import RunState
from launcher.service import Running, Started
from launcher.service_files import service_files, store_secret, write
from launcher.state import ServiceState

OLD, NEW = "0.32.0", "0.33.0"
ANSWER = Answer("Paris", "", "smollm2", "stop", 5, 1, 0.1, 1.0)
BUSY = Problem(cause="gpu-memory-busy", severity="refuse", message="taken", remedy="stop it")
FULL = Problem(cause="disk-full", severity="refuse", message="full", remedy="free some")


class Quiet:
    """Takes every report."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def phase(self, name: str) -> None: ...
    def progress(self, done: float, total: float, unit: str, detail: str = "") -> None: ...
    def files(self, files: Sequence[object]) -> None: ...
    def line(self, text: str) -> None: ...

    def note(self, text: str) -> None:
        self.notes.append(text)


@dataclass
class World:
    """What runs, what happened, and what will fail."""

    profile: Profile
    running: dict[str, Plan] = field(default_factory=dict)
    events: list[str] = field(default_factory=list)
    problems: tuple[Problem, ...] = ()
    failing: set[str] = field(default_factory=set)
    """Services, by name and release, whose start fails."""
    images: set[str] = field(default_factory=set)

    def plan(self, options: Options, profile: Profile, facts: object = None) -> Planned:
        made = make(Inputs(profile, load_model(profile.model), load_pins().of(profile.vllm), runtime="docker"))
        against = self.problems if profile.name.endswith("-next") else ()
        return Planned(made.plan.model_copy(update={"problems": against}), made.inputs, made.memory)

    def render(self, made: Planned) -> None:
        state = ServiceState.of(made.plan.profile)
        write(state.root, service_files(made.plan, state, state.root / "model"))

    def begin(self, plan: Plan) -> None:
        name = f"{plan.profile} {plan.vllm}"
        self.events.append(f"start {name}")
        if name in self.failing:
            raise StartFailed(f"{name} does not start")
        self.running[plan.profile] = plan

    def start(self, made: Planned, engine: object, report: object) -> Started:
        self.render(made)
        self.begin(made.plan)
        return Started(made.plan, "http://127.0.0.1:1", ANSWER, 1.0, Collected((), ()), None)

    def down(self, name: str) -> bool:
        was_there = self.running.pop(name, None) is not None
        if was_there:
            self.events.append(f"stop {name}")
        return was_there

    def find(self, name: str) -> Running | None:
        plan = self.running.get(name)
        return None if plan is None else Running(plan, "http://127.0.0.1:1", RunState("running"), True)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setenv("GRAFT_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("GRAFT_MODELS", str(tmp_path / "models"))
    for vllm, digit in ((OLD, "a"), (NEW, "b")):
        record_digest(f"vllm/vllm-openai:v{vllm}", f"sha256:{digit * 64}")
    record_digest(load_pins().services["haproxy"].base, f"sha256:{'3' * 64}")
    profile = load_profile("cpu")
    model = tmp_path / "models" / profile.model
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}", encoding="utf-8")
    world = World(profile)
    monkeypatch.setattr(upgrade, "planned", world.plan)
    monkeypatch.setattr(upgrade, "host_facts", lambda profile: None)
    monkeypatch.setattr(service, "render", world.render)
    monkeypatch.setattr(service, "start", world.start)
    monkeypatch.setattr(service, "down", world.down)
    monkeypatch.setattr(service, "find", world.find)
    monkeypatch.setattr(bring, "fetch", lambda options, profile, report: None)
    monkeypatch.setattr(bring, "bring_image", lambda plan, state, report: world.events.append(f"build {plan.vllm}"))
    monkeypatch.setattr(service, "follow", lambda service, plan, state, report: (ANSWER, 1.0))
    monkeypatch.setattr(build, "is_there", lambda image: image not in world.images)

    class Composed:
        base_url = "http://127.0.0.1:1"

        def __init__(self, file: Path, plan: Plan) -> None:
            self.plan = plan

        def start(self, on_line: object = None) -> None:
            world.begin(self.plan)

        def log(self) -> Sequence[str]:
            return ("what it said",)

        def stop(self) -> None:
            world.down(self.plan.profile)

    monkeypatch.setattr(upgrade, "ComposeService", Composed)
    return world


@pytest.fixture
def state(world: World) -> ServiceState:
    """Start the old release, as `up` does."""
    state = ServiceState.of("cpu")
    made = world.plan(Options(), world.profile)
    world.start(made, None, None)
    store_secret(state, "api_key", "a-key")
    release.keep(state, service.lock_of(made.plan, Quiet()))
    world.events.clear()
    return state


def move(world: World, report: Quiet | None = None, to: str | None = None) -> upgrade.Upgraded | None:
    return upgrade.upgrade(Options(), world.profile, report or Quiet(), to=to, force=False, unpinned=False)


def test_a_candidate_is_proven_beside_the_old_server_and_then_takes_its_place(
    world: World, state: ServiceState
) -> None:
    done = move(world)
    assert world.events == [
        f"build {NEW}",
        f"start cpu-next {NEW}",
        "stop cpu-next",
        "stop cpu",
        f"start cpu {NEW}",
    ]
    assert done is not None
    assert (done.before, done.was_beside) == (OLD, True)
    now, former = lock.read(lock.lock_file(state)), lock.read(release.previous_lock_file(state))
    assert now is not None
    assert former is not None
    assert (now.vllm, former.vllm) == (NEW, OLD)
    assert choice.chosen_vllm(state) == NEW
    assert not ServiceState.of("cpu-next").root.exists()


def test_the_candidate_has_the_services_secrets_and_a_port_of_its_own(
    world: World, state: ServiceState, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, str]] = []

    def look(plan: Plan, candidate: ServiceState, report: object) -> None:
        seen.append((plan.port, (candidate.secrets_dir / "api_key").read_text(encoding="utf-8")))

    monkeypatch.setattr(bring, "bring_image", look)
    move(world)
    ((port, key),) = seen
    assert port != world.profile.serve.port
    assert key == "a-key"


def test_the_same_again_is_no_upgrade(world: World, state: ServiceState) -> None:
    assert move(world, to=OLD) is None
    assert world.events == []


def test_a_failed_candidate_leaves_the_old_server_alone(world: World, state: ServiceState) -> None:
    world.failing.add(f"cpu-next {NEW}")
    with pytest.raises(StartFailed, match="cpu-next"):
        move(world)
    assert world.events == [f"build {NEW}", f"start cpu-next {NEW}"]
    assert world.running["cpu"].vllm == OLD
    assert choice.chosen_vllm(state) is None
    assert not ServiceState.of("cpu-next").root.exists()


def test_without_room_the_old_server_is_stopped_first(world: World, state: ServiceState) -> None:
    world.problems = (BUSY,)
    done = move(world)
    assert done is not None
    assert not done.was_beside
    assert world.events == [f"build {NEW}", "stop cpu", f"start cpu {NEW}"]


def test_what_a_stop_would_not_solve_is_refused_before_anything_is_stopped(world: World, state: ServiceState) -> None:
    world.problems = (BUSY, FULL)
    with pytest.raises(Refused, match="disk-full"):
        move(world)
    assert world.events == []


def test_a_failed_switch_puts_the_old_server_back(world: World, state: ServiceState) -> None:
    world.problems = (BUSY,)
    world.failing.add(f"cpu {NEW}")
    files, report = release.rendered_files(state.root), Quiet()
    with pytest.raises(StartFailed, match=f"cpu {NEW} does not start"):
        move(world, report)
    assert world.events == [f"build {NEW}", "stop cpu", f"start cpu {NEW}", f"start cpu {OLD}"]
    assert world.running["cpu"].vllm == OLD
    assert release.rendered_files(state.root) == files
    assert report.notes[-1] == f"vLLM {OLD} serves again, as before."


def test_when_neither_starts_both_are_named(world: World, state: ServiceState) -> None:
    world.problems = (BUSY,)
    world.failing |= {f"cpu {NEW}", f"cpu {OLD}"}
    with pytest.raises(StartFailed) as error:
        move(world)
    assert f"cpu {NEW} does not start" in str(error.value)
    assert f"the former service does not come back either: cpu {OLD} does not start" in str(error.value)


def test_a_rollback_starts_what_ran_before_and_can_be_taken_back(world: World, state: ServiceState) -> None:
    before = release.rendered_files(state.root)
    move(world)
    world.events.clear()
    done = upgrade.rollback(Options(), "cpu", Quiet())
    assert world.events == ["stop cpu", f"start cpu {OLD}"]
    assert done.plan.vllm == OLD
    assert release.rendered_files(state.root) == before
    # The profile's own release again: nothing is left to be chosen.
    assert choice.chosen_vllm(state) is None
    assert upgrade.rollback(Options(), "cpu", Quiet()).plan.vllm == NEW


def test_a_failed_rollback_leaves_the_newer_release(world: World, state: ServiceState) -> None:
    move(world)
    world.failing.add(f"cpu {OLD}")
    with pytest.raises(service.FailedStart) as error:
        upgrade.rollback(Options(), "cpu", Quiet())
    assert error.value.log_file is not None
    assert error.value.log_file.read_text(encoding="utf-8") == "what it said\n"
    assert world.running["cpu"].vllm == NEW
    current = release.current(state)
    assert current is not None
    assert current.lock.vllm == NEW


def test_a_rollback_starts_a_service_that_was_stopped_and_leaves_its_files_where_it_fails(
    world: World, state: ServiceState
) -> None:
    move(world)
    world.running.clear()
    files = release.rendered_files(state.root)
    world.failing.add(f"cpu {OLD}")
    with pytest.raises(service.FailedStart):
        upgrade.rollback(Options(), "cpu", Quiet())
    assert release.rendered_files(state.root) == files
    assert world.running == {}
    world.failing.clear()
    upgrade.rollback(Options(), "cpu", Quiet())
    assert world.running["cpu"].vllm == OLD


def test_there_is_nothing_to_go_back_to_before_an_upgrade(world: World, state: ServiceState) -> None:
    with pytest.raises(UsageError, match="nothing to go back to"):
        upgrade.rollback(Options(), "cpu", Quiet())


def test_without_its_image_a_rollback_is_refused(world: World, state: ServiceState) -> None:
    before = release.current(state)
    assert before is not None
    assert before.image is not None
    move(world)
    world.images.add(before.image)
    with pytest.raises(Refused, match=f"{before.image}: the image of the previous start is not here any more"):
        upgrade.rollback(Options(), "cpu", Quiet())
    assert world.running["cpu"].vllm == NEW


def test_with_another_model_a_rollback_is_refused(world: World, state: ServiceState, tmp_path: Path) -> None:
    move(world)
    (tmp_path / "models" / world.profile.model / "config.json").write_text('{"a": 1}', encoding="utf-8")
    with pytest.raises(Refused, match=r"model\.files\.config\.json\.sha256"):
        upgrade.rollback(Options(), "cpu", Quiet())


def test_what_does_not_run_cannot_be_upgraded(world: World) -> None:
    with pytest.raises(UsageError, match="not running and healthy, so there is nothing to upgrade"):
        move(world)


def test_the_host_runtime_says_why_not(world: World, state: ServiceState) -> None:
    world.running["cpu"] = world.running["cpu"].model_copy(update={"runtime": "host"})
    with pytest.raises(UsageError, match="two releases cannot lie beside each other there"):
        move(world)


def test_a_release_that_is_not_pinned_is_refused(world: World, state: ServiceState) -> None:
    with pytest.raises(GraftError, match=r"0\.31\.0 is not in images/pins\.yaml"):
        move(world, to="0.31.0")


def test_fixes_that_retire_or_are_unknown_there_are_told() -> None:
    found = upgrade_check.fix_changes(FIXES, NEW, "0.34.0")
    assert set(found.retired) == {fix.id for fix in FIXES}
    assert upgrade_check.fix_changes(FIXES, OLD, NEW) == upgrade_check.FixChanges((), (), ())
    assert set(upgrade_check.fix_changes(FIXES, "0.31.0", OLD).added) == {fix.id for fix in FIXES}
    assert upgrade_check.fix_changes(FIXES, OLD, "0.32.1").unknown == tuple(fix.id for fix in FIXES)


def test_flags_that_change_are_told() -> None:
    def flags(**values: str | None) -> tuple[Flag, ...]:
        return tuple(Flag(name=f"--{name}", value=value, reason="", source="") for name, value in values.items())

    found = upgrade_check.flag_changes(flags(a="1", b=None, c="3"), flags(a="2", c="3", d=None))
    assert found == (("--a", "1", "2"), ("--b", "set", None), ("--d", None, "set"))


def test_without_its_parser_flags_that_disappear_are_not_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAFT_STATE", str(tmp_path))
    monkeypatch.setattr(engine_env, "is_installed", lambda env: False)
    profile = load_profile("rtx4090")
    monkeypatch.setattr(upgrade_check, "host_facts", lambda profile: None)
    target: Pin = load_pins().of(OLD)
    found = upgrade_check.preview(Options(), profile, profile.model_copy(update={"vllm": target.vllm}), None)
    assert found.refused_flags is None
    assert found.parser_remedy == "graft engine install engine"
    assert found.vllm == (NEW, OLD)
    assert found.memory[0].verdict in ("FITS", "LIKELY")
    assert found.memory[0].kv_cache_bytes
