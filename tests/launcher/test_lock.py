"""The lock: what is in it, what differs from it, and what ran before."""

import json
import os
from pathlib import Path

import pytest

from launcher import choice, release
from launcher.errors import Refused, UsageError
from launcher.images import lock
from launcher.images.lock import Lock, differences
from launcher.images.pins import Pin, load_pins
from launcher.plan import Plan
from launcher.planner import Inputs, make
from launcher.prepare import Options, chosen_profile
from launcher.profile import ModelFile, load_model, load_profile
from launcher.service_files import service_files, write
from launcher.state import ServiceState
from launcher.weights import verify
from launcher.weights.events import Origin

DIGEST = f"sha256:{'a' * 64}"
SHIPPED = Path("no-digests-recorded.json")


def plan_for(profile: str = "rtx4090", vllm: str | None = None, **serve: object) -> Plan:
    one = load_profile(profile)
    one = one.model_copy(
        update={"vllm": vllm or one.vllm, "serve": one.serve.model_copy(update=serve), "runtime": "docker"}
    )
    pin: Pin = load_pins(lock=SHIPPED).of(one.vllm).model_copy(update={"digest": DIGEST})
    return make(Inputs(one, load_model(one.model), pin)).plan


@pytest.fixture(autouse=True)
def state_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAFT_STATE", str(tmp_path / "state"))


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    (folder / "sub").mkdir(parents=True)
    (folder / "config.json").write_text("{}", encoding="utf-8")
    (folder / "sub" / "model.safetensors").write_bytes(b"weights")
    (folder / ".cache").mkdir()
    (folder / ".cache" / "notes").write_text("not part of the model", encoding="utf-8")
    return folder


@pytest.fixture
def locked(model_dir: Path) -> Lock:
    return lock.of(plan_for(), model_dir)


def test_a_lock_names_every_byte_that_a_start_is_made_of(locked: Lock, model_dir: Path) -> None:
    plan = plan_for()
    assert locked.base == f"vllm/vllm-openai@{DIGEST}"
    assert locked.base_id is None
    assert locked.vllm == "0.33.0"
    assert len(locked.wheel_sha256) == len(locked.templates_sha256) == 64
    assert locked.fixes.keys() >= set(plan.required_fixes)
    assert all(len(fingerprint) == 16 for fingerprint in locked.fixes.values())
    assert locked.flags == plan.argv()
    assert set(locked.model.files) == {"config.json", "sub/model.safetensors"}
    assert locked.model.files["config.json"].sha256 == verify.sha256(model_dir / "config.json")


def test_a_lock_says_nothing_of_the_machine(locked: Lock, model_dir: Path) -> None:
    assert str(model_dir) not in locked.model_dump_json()
    moved = model_dir.rename(model_dir.with_name("elsewhere"))
    assert lock.of(plan_for(port=9000), moved) == locked


def test_it_is_read_as_it_was_written(locked: Lock, tmp_path: Path) -> None:
    path = tmp_path / "new" / "lock.json"
    locked.write(path)
    assert lock.read(path) == locked
    assert [file.name for file in path.parent.iterdir()] == ["lock.json"]
    assert lock.read(tmp_path / "absent.json") is None


def test_equal_starts_do_not_differ(locked: Lock, model_dir: Path) -> None:
    assert differences(locked, lock.of(plan_for(), model_dir)) == ()


def test_every_difference_is_named(locked: Lock, model_dir: Path) -> None:
    (model_dir / "config.json").write_text('{"a": 1}', encoding="utf-8")
    (model_dir / "tokenizer.json").write_text("{}", encoding="utf-8")
    now = lock.of(plan_for(vllm="0.32.0", max_num_batched_tokens=2048), model_dir)
    now = now.model_copy(update={"wheel_sha256": "b" * 64, "fixes": {**now.fixes, "none-not-null": "0" * 16}})
    found = {one.what: (one.locked, one.now) for one in differences(locked, now)}
    assert found["vllm"] == ("0.33.0", "0.32.0")
    assert found["wheel_sha256"] == (locked.wheel_sha256, "b" * 64)
    assert found["model.files.config.json.size_bytes"] == ("2", "8")
    assert found["model.files.tokenizer.json.size_bytes"] == (None, "2")
    assert found["fixes.none-not-null"][1] == "0" * 16
    assert "--max-num-batched-tokens 2048" in str(found["flags"][1])
    assert "launcher" not in found


def test_a_start_that_differs_is_refused_with_every_difference(locked: Lock, tmp_path: Path) -> None:
    state = ServiceState(tmp_path / "state")
    locked.write(lock.lock_file(state))
    release.refuse_unlocked(state, locked)
    other = locked.model_copy(update={"base": f"vllm/vllm-openai@sha256:{'b' * 64}", "launcher": "9.9"})
    with pytest.raises(Refused) as error:
        release.refuse_unlocked(state, other)
    assert f"base: locked {locked.base}, now {other.base}" in str(error.value)
    assert f"launcher: locked {locked.launcher}, now 9.9" in str(error.value)


def test_without_a_lock_there_is_nothing_to_hold_to(locked: Lock, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no lock; `graft lock` writes one"):
        release.refuse_unlocked(ServiceState(tmp_path / "state"), locked)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[]", "write it again: `graft lock`"),
        ('{"schema_version": 2, "launcher": "9.0"}', "a lock of version 2, this launcher reads version 1; .*9.0"),
        ('{"schema_version": 1}', "launcher: Field required; write it again"),
    ],
)
def test_a_lock_of_another_version_says_what_to_do(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "lock.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UsageError, match=message) as error:
        lock.read(path)
    assert str(path) in str(error.value)


def test_hashes_of_the_fetch_are_used_and_untouched_files_not_read_again(model_dir: Path) -> None:
    weights = model_dir / "sub" / "model.safetensors"
    files = tuple(
        ModelFile(path=name, size_bytes=path.stat().st_size, sha256=verify.sha256(path))
        for name, path in (("config.json", model_dir / "config.json"), ("sub/model.safetensors", weights))
    )
    Origin(repo="a/b", revision="c" * 40, files=files).write(model_dir)
    read: list[str] = []
    found = lock.of(plan_for(), model_dir, on_bytes=lambda name, done, total: read.append(name))
    assert read == []
    assert (found.model.repo, found.model.revision) == ("a/b", "c" * 40)

    weights.write_bytes(b"WEIGHTS")
    os.utime(weights, ns=(2**62, 2**62))
    changed = lock.of(plan_for(), model_dir, on_bytes=lambda name, done, total: read.append(name))
    assert read == ["sub/model.safetensors"]
    assert [one.what for one in differences(found, changed)] == ["model.files.sub/model.safetensors.sha256"]


def test_files_that_were_put_there_by_hand_are_read_once(model_dir: Path, tmp_path: Path) -> None:
    read: list[str] = []
    first = lock.of(plan_for(), model_dir, lambda name, done, total: read.append(name))
    assert set(read) == {"config.json", "sub/model.safetensors"}
    read.clear()
    assert lock.of(plan_for(), model_dir, lambda name, done, total: read.append(name)) == first
    assert read == []
    weights = model_dir / "sub" / "model.safetensors"
    times = weights.stat()
    weights.write_bytes(b"WEIGHTS")
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert lock.of(plan_for(), model_dir).model.files["sub/model.safetensors"].sha256 == verify.sha256(weights)
    (tmp_path / "state" / "cache" / "hashes.json").write_text("{", encoding="utf-8")
    assert lock.of(plan_for(), model_dir) != first


def started(state: ServiceState, model_dir: Path, **serve: object) -> Lock:
    plan = plan_for(**serve)  # type: ignore[arg-type]
    write(state.root, service_files(plan, state, model_dir))
    now = lock.of(plan, model_dir)
    release.keep(state, now)
    return now


def test_the_start_before_is_kept_with_its_files(model_dir: Path, tmp_path: Path) -> None:
    state = ServiceState(tmp_path / "state")
    first = started(state, model_dir)
    files = release.rendered_files(state.root)
    assert release.previous(state) is None
    second = started(state, model_dir, max_num_batched_tokens=2048)
    started(state, model_dir, max_num_batched_tokens=2048)

    current, previous = release.current(state), release.previous(state)
    assert current is not None
    assert previous is not None
    assert (current.lock, previous.lock) == (second, first)
    assert previous.files == files
    assert {"compose.yaml", "entrypoint.sh", "facts.json", "plan.json", "image/Dockerfile"} <= set(files)
    assert previous.image is not None
    assert previous.image.startswith("graft-vllm:0.33.0-")
    assert lock.read(lock.lock_file(state)) == second
    assert lock.read(release.previous_lock_file(state)) == first

    release.swap(state)
    assert lock.read(lock.lock_file(state)) == first
    assert lock.read(release.previous_lock_file(state)) == second
    release.restore(state, previous.files)
    assert release.rendered_files(state.root) == files


def test_a_chosen_release_goes_before_the_profiles() -> None:
    state = ServiceState.of("cpu")
    state.root.mkdir(parents=True)
    assert chosen_profile(Options("cpu"))[0].vllm == "0.32.0"
    choice.choose_vllm(state, "0.33.0", "0.32.0")
    assert chosen_profile(Options("cpu"))[0].vllm == "0.33.0"
    choice.choose_vllm(state, "0.31.0", "0.32.0")
    assert chosen_profile(Options("cpu"))[0].vllm == "0.32.0"
    choice.choose_vllm(state, "0.32.0", "0.32.0")
    assert not choice.choice_file(state).exists()
    choice.choice_file(state).write_text(json.dumps({"vllm": 1}), encoding="utf-8")
    with pytest.raises(UsageError, match=r"vllm\.json: not a choice of this launcher; remove it"):
        chosen_profile(Options("cpu"))
