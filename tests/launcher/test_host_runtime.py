"""The host runtime with a stand-in for vLLM: start, find again, logs, and a stop that leaves nothing behind."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from launcher import ready, render
from launcher.errors import Refused, UsageError
from launcher.plan import EnvironmentVariable, Flag, Plan
from launcher.ready import NotReady, Ready, follow
from launcher.runtime import RunState, host
from launcher.service_files import write
from launcher.state import ServiceState
from tests.launcher.fake_vllm import unused_port

FAKE = Path(__file__).with_name("fake_vllm.py")


def make_plan(port: int, **changes: object) -> Plan:
    values: dict[str, object] = {
        "profile": "cpu",
        "model": "small",
        "model_repo": "owner/small",
        "model_revision": None,
        "served_name": "small",
        "runtime": "host",
        "gpu_mode": "none",
        "gpus": (),
        "vllm": "0.32.0",
        "image": None,
        "host": "127.0.0.1",
        "port": port,
        "max_model_len": 256,
        "tensor_parallel_size": 1,
        "flags": (Flag(name="--served-model-name", value="small", reason="its name", source="test"),),
        "environment": (EnvironmentVariable(name="VLLM_CPU_KVCACHE_SPACE", value="1", reason="small"),),
        "required_fixes": ("a-fix", "another-fix"),
        "disabled_fixes": (),
        "processes": (),
        "facts": {"run_id": "abc"},
        "fit": None,
        "problems": (),
        **changes,
    }
    return Plan.model_validate(values)


@dataclass
class Bench:
    """A service's folder, a plan rendered into it, and the stand-in."""

    state: ServiceState
    plan: Plan
    vllm: Path

    def start(self) -> host.HostService:
        return host.start(self.plan, Path("/models/small"), self.state, self.vllm)


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setenv("GRAFT_STATE", str(tmp_path / "state"))
    vllm = tmp_path / "bin" / "vllm"
    vllm.parent.mkdir()
    vllm.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{FAKE}" "$@"\n')
    vllm.chmod(0o755)
    bench = Bench(ServiceState.of("cpu"), make_plan(unused_port()), vllm)
    bench.state.root.mkdir(parents=True)
    write(bench.state.root, {name: text.encode() for name, text in render.run(bench.plan).items()})
    yield bench
    left = host.find(bench.state)
    if left is not None:
        left.stop()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ready, "POLL_INTERVAL_S", 0.02)
    monkeypatch.setattr(ready, "STATE_INTERVAL_S", 0.05)
    monkeypatch.setattr(host, "TERM_GRACE_S", 1.0)


def wait_for_text(service: host.HostService, text: str) -> None:
    deadline_s = time.monotonic() + 10
    while not any(text in line for line in service.log()):
        assert time.monotonic() < deadline_s, f"no {text!r} in the log"
        time.sleep(0.02)


def children_of_session(pid: int) -> list[int]:
    """Return the live processes of a session besides its leader."""
    found = []
    for other in psutil.pids():
        with contextlib.suppress(ProcessLookupError):
            found += [other] if other != pid and os.getsid(other) == pid and is_alive(other) else []
    return found


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        return probe.connect_ex(("127.0.0.1", port)) != 0


def test_a_start_is_followed_to_its_answer_found_again_and_stopped(bench: Bench) -> None:
    service = bench.start()
    *_, last = follow(service, "small")
    assert isinstance(last, Ready)
    found = host.find(bench.state)
    assert found is not None
    assert found.state() == RunState("running")
    assert found.record == service.record
    assert found.record.run_id == "abc"
    assert tuple(found.log()) == found.new_log_lines()
    work = found.work()
    assert work is not None
    assert work.cpu_s > 0
    found.stop()
    assert host.find(bench.state) is None
    assert service.state().status == "exited"
    assert is_free(bench.plan.port)
    found.stop()


def test_the_log_is_told_once_and_in_whole_lines(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE", "hang")
    service = bench.start()
    wait_for_text(service, "Starting vLLM server")
    service.log_file.write_bytes(b"\x1b[32mone\x1b[0m\nbar 1/2\rbar 2/2\r\nunfin")
    assert service.new_log_lines() == ("one", "bar 1/2", "bar 2/2")
    with service.log_file.open("ab") as log:
        log.write("ishéd\n".encode())
    assert service.new_log_lines() == ("unfinishéd",)
    assert service.new_log_lines() == ()


def test_a_flag_that_vllm_does_not_know_ends_the_start_at_once(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE", "flag")
    with pytest.raises(NotReady, match=r"exit code 2 .*\n.*unrecognized arguments: --no-such-flag"):
        list(follow(bench.start(), "small"))


def test_an_engine_that_crashes_at_boot_ends_the_start_with_its_error(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE", "crash")
    with pytest.raises(NotReady, match="ValueError: No available memory for the cache blocks"):
        list(follow(bench.start(), "small"))


def test_a_server_that_dies_over_the_question_is_noticed(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE", "dies-when-asked")
    with pytest.raises(NotReady, match="exit code 3 while in phase canary"):
        list(follow(bench.start(), "small"))


def test_processes_that_ignore_sigterm_are_killed_with_their_children(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE", "stubborn")
    service = bench.start()
    wait_for_text(service, "Starting vLLM server")
    assert children_of_session(service.record.pid)
    service.stop()
    assert not children_of_session(service.record.pid)
    assert service.state() == RunState("exited", exit_code=-signal.SIGKILL)


def test_orphans_of_a_killed_server_are_stopped_too(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE", "stubborn")
    service = bench.start()
    wait_for_text(service, "Starting vLLM server")
    os.kill(service.record.pid, signal.SIGKILL)
    while service.state().is_alive:
        time.sleep(0.01)
    (orphan,) = children_of_session(service.record.pid)
    found = host.find(bench.state)
    assert found is not None
    assert not found.state().is_alive
    with pytest.raises(UsageError, match="runs already"):
        bench.start()
    found.stop()
    assert not is_alive(orphan)


def test_a_stranger_with_the_recorded_pid_is_neither_seen_nor_stopped(bench: Bench) -> None:
    service = bench.start()
    service.stop()
    # The kernel's clock ticks every 10 ms; numbers are not used again within one.
    time.sleep(0.05)
    with subprocess.Popen(("sleep", "60"), start_new_session=True) as stranger:
        try:
            record = service.record.model_copy(update={"pid": stranger.pid})
            bench.state.process_file.write_text(record.model_dump_json(), encoding="utf-8")
            found = host.find(bench.state)
            assert found is not None
            assert found.state().status == "exited"
            found.stop()
            assert stranger.poll() is None
        finally:
            stranger.kill()


def test_a_second_start_says_that_it_runs_already(bench: Bench) -> None:
    service = bench.start()
    with pytest.raises(UsageError, match=f"runs already \\(process {service.record.pid}\\)"):
        bench.start()


def test_a_taken_port_is_refused_with_its_holder(bench: Bench) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", bench.plan.port))
        holder.listen()
        with pytest.raises(Refused, match=f"port {bench.plan.port} is taken by .*{os.getpid()}"):
            bench.start()
    assert host.find(bench.state) is None


def test_the_environment_is_the_plans_and_secrets_come_from_files(bench: Bench) -> None:
    bench.state.secrets_dir.mkdir()
    (bench.state.secrets_dir / "api_key").write_text("top-secret\n", encoding="utf-8")
    inherited = {"PATH": "/bin", "HOME": "/home/me", "VLLM_LOGGING_LEVEL": "DEBUG", "HF_TOKEN": "t", "PYTHONPATH": "/x"}
    environment = host.environment(bench.plan, bench.state, bench.vllm, inherited)
    assert environment["PATH"] == f"{bench.vllm.parent}:/bin"
    assert environment["HOME"] == "/home/me"
    assert environment["VLLM_CPU_KVCACHE_SPACE"] == "1"
    assert environment["GRAFT_REQUIRE"] == "a-fix,another-fix"
    assert environment["GRAFT_FACTS"] == str(bench.state.facts_file)
    assert environment["GRAFT_REPORTS"] == str(bench.state.reports_dir)
    assert environment["VLLM_API_KEY"] == "top-secret"
    assert not {"VLLM_LOGGING_LEVEL", "HF_TOKEN", "PYTHONPATH", "GRAFT_DISABLE"} & set(environment)
    assert "top-secret" not in bench.plan.model_dump_json()


def test_an_unreadable_record_says_what_to_do(bench: Bench) -> None:
    bench.state.process_file.write_text("{}", encoding="utf-8")
    with pytest.raises(UsageError, match="not a record of this launcher"):
        host.find(bench.state)
    bench.state.process_file.unlink()
