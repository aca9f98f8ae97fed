"""Starts that fail in a real Docker Engine: each ends soon, with what happened and the lines that say why."""

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from launcher.images import build
from launcher.images.build import PATCHES, build_wheel
from launcher.operate.events import PREFIX
from launcher.ready import Limits, NotReady, follow, save_and_stop
from launcher.runtime.compose import DockerFailed
from tests.compose.conftest import Deployed, Deployer

pytestmark = [pytest.mark.compose, pytest.mark.timeout(600)]

LIMITS = Limits(idle_s=12)


def change(deployed: Deployed, edit: Callable[[dict[str, Any]], None]) -> None:
    """Change the server's part of a rendered compose file."""
    document = yaml.safe_load(deployed.state.compose_file.read_text(encoding="utf-8"))
    edit(document["services"]["vllm"])
    deployed.state.compose_file.write_text(yaml.safe_dump(document), encoding="utf-8")


def start(deployed: Deployed) -> None:
    build.ensure(deployed.state.compose_file, deployed.image)
    deployed.service.start()


def outcome(deployed: Deployed) -> NotReady:
    """Follow a start that must fail."""
    with pytest.raises(NotReady) as error:
        for _ in follow(deployed.service, deployed.plan.served_name, limits=LIMITS):
            pass
    return error.value


def assert_stopped_with_its_log(deployed: Deployed, expected: str) -> None:
    log = save_and_stop(deployed.service, deployed.state.logs_dir)
    assert expected in log.read_text(encoding="utf-8")
    assert deployed.service.state().status == "absent"


@pytest.fixture
def empty_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir(mode=0o755)
    return folder


def test_a_crash_at_boot_ends_at_its_first_restart(deploy: Deployer, empty_folder: Path) -> None:
    deployed = deploy("crash", empty_folder)
    start(deployed)
    failure = outcome(deployed)
    assert failure.state is not None
    assert failure.state.restart_count == 1
    assert failure.state.exit_code == 1
    assert "is being restarted (exit code 1)" in failure.what
    assert any("/models/smollm2-135m-instruct" in line for line in failure.lines), failure.lines
    assert_stopped_with_its_log(deployed, "Traceback")


def test_a_server_that_keeps_crashing_is_never_alive(deploy: Deployer, empty_folder: Path) -> None:
    deployed = deploy("loop", empty_folder)
    script = "echo a run; sleep 0.2; exit 3\n"
    deployed.state.root.joinpath("entrypoint.sh").write_text(script, encoding="utf-8")
    for _ in ("first start", "second start, with nothing left of the first"):
        start(deployed)
        deadline_s = time.monotonic() + 30
        while (state := deployed.service.state()).status != "exited" and time.monotonic() < deadline_s:
            assert state.is_alive == (state.restart_count == 0)
            time.sleep(0.05)
        assert (state.status, state.restart_count, state.exit_code, state.oom_killed) == ("exited", 3, 3, False)
        assert [line for line in deployed.service.log() if not line.startswith(PREFIX)] == ["a run"] * 4
    deployed.service.stop()


def test_a_server_killed_for_memory_is_told_as_such(deploy: Deployer, model_dir: Path) -> None:
    deployed = deploy("memory", model_dir)
    # Enough to begin with, too little for vLLM's imports.
    change(deployed, lambda server: server.update(mem_limit="200m", memswap_limit="200m"))
    start(deployed)
    failure = outcome(deployed)
    assert failure.what.startswith("the kernel killed the server for memory")
    assert failure.state is not None
    assert failure.state.oom_killed
    assert_stopped_with_its_log(deployed, "graft: exec vllm serve")


@contextmanager
def frozen(deployed: Deployed) -> Iterator[None]:
    """Stop every process of the server, as a deadlock would; they go on afterwards."""
    argv = ["docker", "top", deployed.service.container, "-eo", "pid"]
    rows = subprocess.run(argv, capture_output=True, text=True, check=True).stdout.split()[1:]
    processes = [psutil.Process(int(pid)) for pid in rows]
    for process in processes:
        process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        for process in processes:
            process.send_signal(signal.SIGCONT)


@pytest.mark.skipif(os.geteuid() != 0, reason="stopping a container's processes needs root")
def test_a_server_that_hangs_is_told_from_one_that_works(deploy: Deployer, model_dir: Path) -> None:
    deployed = deploy("hang", model_dir)
    start(deployed)
    while not any("version " in line for line in deployed.service.log()):
        assert deployed.service.state().is_alive
        time.sleep(0.2)
    with frozen(deployed):
        begun_s = time.monotonic()
        failure = outcome(deployed)
        taken_s = time.monotonic() - begun_s
    assert "the server hangs" in failure.what
    assert failure.lines
    assert LIMITS.idle_s <= taken_s < LIMITS.idle_s + 20
    assert_stopped_with_its_log(deployed, "graft: exec vllm serve")


def test_a_port_that_is_taken_leaves_nothing_behind(deploy: Deployer, empty_folder: Path) -> None:
    deployed = deploy("port", empty_folder)
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", deployed.plan.port))
        holder.listen()
        build.ensure(deployed.state.compose_file, deployed.image)
        with pytest.raises(DockerFailed, match="address already in use"):
            deployed.service.start()
    assert deployed.service.state().status == "absent"


def test_a_model_folder_that_is_missing_is_not_made_up(deploy: Deployer, tmp_path: Path) -> None:
    deployed = deploy("no-model", tmp_path / "nowhere")
    build.ensure(deployed.state.compose_file, deployed.image)
    with pytest.raises(DockerFailed, match="bind source path does not exist"):
        deployed.service.start()
    assert not (tmp_path / "nowhere").exists()
    assert deployed.service.state().status == "absent"


def test_an_image_that_is_missing_is_not_looked_for_elsewhere(deploy: Deployer, empty_folder: Path) -> None:
    deployed = deploy("no-image", empty_folder)
    text = deployed.state.compose_file.read_text(encoding="utf-8")
    deployed.state.compose_file.write_text(text.replace(deployed.image, "graft-vllm:not-built"), encoding="utf-8")
    with pytest.raises(DockerFailed, match="graft-vllm:not-built"):
        deployed.service.start()
    assert deployed.service.state().status == "absent"


def test_a_fix_that_cannot_be_applied_fails_the_build(deploy: Deployer, empty_folder: Path, tmp_path: Path) -> None:
    deployed = deploy("drifted", empty_folder)
    source = tmp_path / "patches"
    shutil.copytree(PATCHES, source, ignore=shutil.ignore_patterns("__pycache__"))
    fixes = source / "vllm_graft" / "fixes" / "__init__.py"
    fixes.write_text(fixes.read_text(encoding="utf-8") + DRIFTED_FIX, encoding="utf-8")
    wheel = build_wheel(source)
    (deployed.state.root / "image" / wheel.name).write_bytes(wheel.content)
    with pytest.raises(DockerFailed) as error:
        build.ensure(deployed.state.compose_file, "graft-vllm:this-one-is-not-there")
    assert any('"id": "made-up-fault"' in line for line in error.value.lines)
    assert any('"outcome": "drifted"' in line for line in error.value.lines)


DRIFTED_FIX = """

from vllm_graft.patch import Process, Target, When

FIXES += (
    Patch(
        id="made-up-fault",
        title="A fix whose target has changed",
        symptom="none",
        upstream=("https://github.com/vllm-project/vllm/issues/1",),
        processes=(Process.API_SERVER,),
        affects=">=0.32.0,<=0.33.0",
        when=When(),
        kind="wrap",
        target=Target("vllm.utils.mem_utils:format_gib"),
        fingerprints={"0.32.0": "0123456789abcdef", "0.33.0": "0123456789abcdef"},
        build=lambda original: original,
        reached=lambda: None,
        remove_when="never",
        proof="tests/compose/test_failures.py",
    ),
)
"""
