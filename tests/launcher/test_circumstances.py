"""A look at a service and at this machine gives the rules what they ask for, and no more than is known."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import pytest

from launcher import circumstances
from launcher.diagnose import diagnose
from launcher.evidence import ContainerState, Evidence, context_of
from launcher.host import kernel
from launcher.host.facts import Gpu, GpuProcess, HostFacts, Nvml
from launcher.observed import MemoryHolder, Observed
from launcher.operate import events
from launcher.operate.service_state import ServiceStatus, StateFile
from launcher.state import ServiceState
from tests.launcher.test_diagnose_evidence import BUSY, FACTS, SERVED, plan
from tests.launcher.test_host_runtime import make_plan

NOW = datetime(2026, 5, 17, 6, 44, 0, tzinfo=UTC)
STATS = (
    "(EngineCore pid=95) INFO 05-17 06:31:40 [loggers.py:282] Engine 000: Avg prompt throughput: 0.0 tokens/s, "
    "Avg generation throughput: 0.0 tokens/s, Running: 3 reqs, Waiting: 0 reqs"
)
CONTAINER = {
    "Id": "aa",
    "Name": "/graft-rtx4090",
    "State": {"Status": "running"},
    "Config": {"User": "2000:0", "Healthcheck": {"Interval": int(30e9), "Retries": 3, "StartPeriod": int(1800e9)}},
    "HostConfig": {"ShmSize": 8 << 30, "DeviceRequests": [{"Driver": "nvidia", "Capabilities": [["gpu"]]}]},
    "Mounts": [{"Destination": "/models/m"}, {"Destination": "/cache"}],
}


def test_the_age_of_the_last_throughput_is_told_by_its_own_clock() -> None:
    assert circumstances.seconds_since_stats([STATS, "INFO:     GET /health"], NOW, UTC) == 740
    assert circumstances.seconds_since_stats(["nothing"], NOW, UTC) is None
    # A line of December, read in January.
    line = STATS.replace("05-17", "12-31")
    assert circumstances.seconds_since_stats([line], datetime(2026, 1, 1, 6, 31, 40, tzinfo=UTC), UTC) == 86400


def test_the_last_run_begins_where_its_engine_was_started() -> None:
    started = events.PREFIX + events.line_of(events.event("engine-started", "cpu", "process 7"))
    log = [started, "ValueError: of the first run", started, "INFO: of the second"]
    assert circumstances.last_run(log) == log[2:]
    assert circumstances.last_run(["no keeper"]) == ["no keeper"]


@pytest.mark.parametrize(
    ("status", "stalled"),
    [
        (ServiceStatus(looked_s=1000, progress_s=600, requests_running=3), True),
        (ServiceStatus(looked_s=1000, progress_s=900, requests_running=3), False),
        (ServiceStatus(looked_s=100, progress_s=100, requests_running=3), None),
        (ServiceStatus(), None),
    ],
)
def test_a_stalled_engine_is_known_from_a_watchdog_that_looked_of_late(
    status: ServiceStatus, stalled: bool | None
) -> None:
    metrics = circumstances.metrics_of(status, 1000)
    assert (None if metrics is None else metrics.generation_tokens_300s == 0) is stalled


def test_a_hang_is_diagnosed_from_what_the_watchdog_saw() -> None:
    metrics = circumstances.metrics_of(ServiceStatus(looked_s=1000, progress_s=600, requests_running=3), 1000)
    assert metrics is not None
    observed = Observed(metrics=metrics, seconds_since_last_stats_line=740)
    state = ContainerState(status="running", health="healthy", restart_count=0)
    found = diagnose(Evidence(STATS, context_of(plan(SERVED), HostFacts(), state, observed)))
    assert found is not None
    assert (found.cause, found.restart_helps) == ("engine-hang", True)


def test_what_docker_says_of_the_container_is_used() -> None:
    found = circumstances.container_facts(CONTAINER)
    assert found["shm_size_mib"] == 8192
    assert found["container_user"] == "2000:0"
    assert found["mounts"] == ("/models/m", "/cache")
    assert found["healthcheck"].gives_up_after_s == 1890
    assert circumstances.container_facts({"Config": {}, "HostConfig": {}})["healthcheck"] is None


def test_containers_with_a_gpu_share_it_and_others_do_not() -> None:
    plain = {"Id": "bb", "Name": "/web", "State": {"Status": "running"}, "HostConfig": {}}
    cdi = {
        "Id": "cc",
        "Name": "/embed",
        "State": {"Status": "running"},
        "HostConfig": {"DeviceRequests": [{"Driver": "cdi", "DeviceIDs": ["nvidia.com/gpu=0"]}]},
    }
    found = circumstances.other_containers([CONTAINER, plain, cdi], ["aa"])
    assert [one.name for one in found] == ["embed"]
    observed = Observed(other_containers=found)
    told = diagnose(Evidence(BUSY, context_of(plan(SERVED), FACTS, None, observed)))
    assert told is not None
    assert "the container embed shares it" in told.remedy


def test_an_orphaned_engine_is_named_with_its_children() -> None:
    processes = (
        MemoryHolder(pid=50, name="VLLM::EngineCore", ppid=1, used_mib=0),
        MemoryHolder(pid=51, name="VLLM::Worker_TP0", ppid=50, gpu=0, used_mib=12690),
    )
    told = diagnose(Evidence(BUSY, context_of(plan(SERVED), FACTS, None, Observed(host_processes=processes))))
    assert told is not None
    assert "End PID 50 (VLLM::EngineCore); with it go 51" in told.remedy


def test_holders_have_their_parents_and_processes_of_vllm_are_found_by_their_title() -> None:
    title = "VLLM::EngineCore"
    with subprocess.Popen([title, "-c", "input()"], executable=sys.executable, stdin=subprocess.PIPE) as engine:
        try:
            own = GpuProcess(pid=os.getpid(), name="python", used_mib=100)
            found = circumstances.holders(HostFacts(nvml=Nvml(gpus=(Gpu(index=0, processes=(own,)),))))
        finally:
            engine.kill()
    assert MemoryHolder(pid=os.getpid(), name="python", gpu=0, used_mib=100, ppid=os.getppid()) in found
    assert MemoryHolder(pid=engine.pid, name=title, ppid=os.getpid(), used_mib=0) in found


def test_a_look_at_a_service_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAFT_MODELS", str(tmp_path / "models"))
    state = ServiceState(tmp_path / "cpu")
    state.secrets_dir.mkdir(parents=True)
    state.secrets_dir.joinpath("hf_token").write_text("hf_AbCdEfGhIjKl", encoding="utf-8")
    state.operate_dir.mkdir(parents=True)
    now_s = time.time()
    StateFile(state.operate_dir).change(
        lambda status: status.model_copy(update={"looked_s": now_s, "progress_s": now_s - 301, "requests_running": 2})
    )
    found = circumstances.look(make_plan(8000), state, HostFacts())
    assert found.hf_token == "present"
    assert found.metrics is not None
    assert found.metrics.generation_tokens_300s == 0
    assert found.container_user == f"{os.getuid()}:{os.getgid()}"
    assert found.shm_size_mib
    assert "AbCdEf" not in found.model_dump_json()


def test_a_download_counts_while_some_process_works_on_it(tmp_path: Path) -> None:
    partial = tmp_path / ".small.abc.partial"
    partial.mkdir()
    (partial / "model.safetensors").write_bytes(b"x" * 10)
    os.utime(partial / "model.safetensors", (time.time() - 400,) * 2)
    assert circumstances.download_of(tmp_path, "small") is None
    with (partial / "model.safetensors").open("rb"):
        found = circumstances.download_of(tmp_path, "small")
    assert found is not None
    assert found.bytes_done == 10
    assert found.seconds_without_bytes >= 400
    told = diagnose(Evidence("", context_of(None, None, None, Observed(download=found))))
    assert told is not None
    assert told.cause == "model-download-stalled"


def test_the_kernels_messages_are_read_from_a_moment_on(tmp_path: Path) -> None:
    boot_s = time.time() - time.clock_gettime(time.CLOCK_MONOTONIC)
    read, write = os.pipe()
    os.write(write, b"6,1,5000000,-;early\n")
    os.close(write)
    assert kernel.log(boot_s + 9, Path(f"/proc/self/fd/{read}")) == ""
    os.close(read)
    assert kernel.log(device=tmp_path / "none") is None


@pytest.mark.parametrize(
    ("groups", "cause"),
    [
        ("3:cpuset:/\n4:memory:/user/ann\n0::/\n", None),
        ("0::/user/ann\n", None),
        ("4:cpu,memory:/docker/b6de\n0::/\n", "host-oom-killed"),
        ("0::/docker/b6de\n", "host-oom-killed"),
    ],
)
def test_another_servers_kill_for_memory_is_not_our_own(tmp_path: Path, groups: str, cause: str | None) -> None:
    cgroup = tmp_path / "cgroup"
    cgroup.write_text(groups, encoding="ascii")
    with kill_for_memory("/docker/b6de") as device:
        assert cause_in(kernel.own_log(device=device, cgroup=cgroup)) == cause


@pytest.mark.parametrize("group", [f"/docker/{'b6de' * 16}", f"/system.slice/docker-{'b6de' * 16}.scope"])
@pytest.mark.parametrize(("container", "cause"), [("b6de" * 16, "host-oom-killed"), ("af01" * 16, None), (None, None)])
def test_a_kill_for_memory_in_another_container_is_not_the_services(
    group: str, container: str | None, cause: str | None
) -> None:
    with kill_for_memory(group) as device:
        assert cause_in(kernel.log_of(container, device=device)) == cause


def test_a_kill_for_memory_outside_of_containers_may_be_the_services() -> None:
    with kill_for_memory("/user.slice/user-1000.slice/session-3.scope") as device:
        assert cause_in(kernel.log_of(None, device=device)) == "host-oom-killed"


@contextmanager
def kill_for_memory(group: str) -> Iterator[Path]:
    """What the kernel says of a process of a control group that it killed, as its device gives it."""
    records = (
        f"6,1,5000000,-;oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),oom_memcg={group},"
        f"task_memcg={group},task=vllm,pid=3885,uid=2000\n",
        "3,2,5000001,-;Memory cgroup out of memory: Killed process 3885 (vllm) total-vm:678788kB, UID:2000\n",
    )
    # A read of the device gives one record; one of a pipe of packets does so too.
    read, write = os.pipe2(os.O_DIRECT)
    for record in records:
        os.write(write, record.encode("ascii"))
    os.close(write)
    yield Path(f"/proc/self/fd/{read}")
    os.close(read)


def cause_in(log: str | None) -> str | None:
    assert log is not None
    assert "oom-kill" in log
    told = diagnose(Evidence("", context_of(None, None, None, Observed()), log))
    return told.cause if told else None


def test_versions_of_driver_and_libraries_are_told_apart(tmp_path: Path) -> None:
    version = tmp_path / "version"
    version.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.133.20  Release Build\nGCC version: 12\n",
        encoding="utf-8",
    )
    (tmp_path / "libnvidia-ml.so.580.126.09").touch()
    (tmp_path / "libnvidia-ml.so.1").touch()
    assert kernel.module_version(version) == "570.133.20"
    assert kernel.library_version([tmp_path]) == "580.126.09"
    (tmp_path / "libnvidia-ml.so.570.133.20").touch()
    assert kernel.library_version([tmp_path]) is None
    assert kernel.module_version(tmp_path / "none") is None
