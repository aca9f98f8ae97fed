"""The doctor's findings from facts, the facts from files, and the command on this machine."""

import json
import subprocess
import threading
import time
from collections.abc import Iterator
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from launcher import checks
from launcher.checks.demand import Demand
from launcher.diagnose import Diagnosis
from launcher.doctor import host_checks, probe
from launcher.doctor.facts import Copy, DoctorFacts, Finding, Hub, Limits, Running, Shm, Unknown
from launcher.doctor.findings import examine, worst
from launcher.host.facts import Docker, Gpu, GpuClocks, HostFacts, Nvml, Proc
from launcher.operate import p2p
from tests.launcher.test_cli_planning import Graft, graft

__all__ = ["graft"]

UUIDS = tuple(f"GPU-00000000-0000-4000-8000-00000000000{number}" for number in range(2))
PAIR = HostFacts(
    nvml=Nvml(
        driver="580.126.09",
        cuda_driver="13.0",
        p2p={"0-1": "OK"},
        gpus=tuple(
            Gpu(index=index, uuid=uuid, compute_capability=(8, 6), total_mib=24576, free_mib=24100)
            for index, uuid in enumerate(UUIDS)
        ),
    ),
    docker=Docker(flavor="docker", engine="28.2.2", api="1.50", compose="2.36.0", runtimes=("nvidia", "runc")),
    proc=Proc(kernel="6.8.0-60-generic", mem_total_gib=62.0, mem_available_gib=50.0),
)
DEMAND = Demand(
    profile="rtx3090-x2",
    tensor_parallel_size=2,
    gpu_memory_utilization=0.88,
    compute_capability=(8, 6),
    min_gpu_gib=23.0,
    image_cuda="13.0",
    min_driver="580",
    model_gib=17.7,
    model_is_here=True,
    port=8000,
)
CPU = Demand(profile="cpu", runtime="host", needs_gpu=False, model_gib=0.5, cpu_kv_cache_gib=1, model_is_here=True)
HEALTHY = Running(True, True, "running", None, (), ())


def facts(host: HostFacts = PAIR, **changes: Any) -> DoctorFacts:
    good: dict[str, Any] = {
        "clocks": tuple(GpuClocks(uuid=uuid, sm_mhz=210, max_sm_mhz=2100, held_back_by=("idle",)) for uuid in UUIDS),
        "limits": Limits(),
        "shm": Shm(8192),
        "hub": Hub("https://hub"),
        "container_gpus": UUIDS,
        "copies": (Copy(0, 1, True, 0), Copy(1, 0, True, 0)),
        "running": HEALTHY,
    }
    return DoctorFacts(host=host, graft="0.1.0", python="3.11", **{**good, **changes})


def findings(found: DoctorFacts, check: str, demand: Demand = DEMAND) -> tuple[Finding, ...]:
    return tuple(one for one in examine(found, demand) if one.check == check)


def test_a_good_machine_has_no_finding_but_ok() -> None:
    assert {one.verdict for one in examine(facts(), DEMAND)} == {"ok"}
    assert worst(examine(facts(), DEMAND)) == "ok"


def test_every_rule_of_the_check_before_a_start_is_one_of_the_doctors() -> None:
    rules = set(checks.GPU_RULES + checks.DOCKER_RULES + checks.MACHINE_RULES)
    demands = (DEMAND, CPU)
    assert {check.rule for demand in demands for check in host_checks._host_checks(demand)} == rules


def test_a_lost_driver_makes_what_needs_it_unknown_not_ok() -> None:
    broken = facts(HostFacts(nvml=Nvml(error="Driver/library version mismatch"), docker=PAIR.docker), running=None)
    (driver,) = findings(broken, "driver")
    assert driver.verdict == "fail"
    assert driver.remedy == "Reboot, so that the kernel loads the new driver."
    for check in ("free GPU memory", "kind of card", "peer access"):
        assert [one.verdict for one in findings(broken, check)] == ["unknown"]
    assert worst(examine(broken, DEMAND)) == "fail"


def test_what_the_running_service_takes_itself_is_not_missing() -> None:
    full = tuple(gpu.model_copy(update={"free_mib": 900}) for gpu in PAIR.nvml.gpus)
    host = PAIR.model_copy(update={"nvml": PAIR.nvml.model_copy(update={"gpus": full})})
    assert [one.verdict for one in findings(facts(host), "free GPU memory")] == ["ok"]
    stopped = findings(facts(host, running=None), "free GPU memory")
    assert {one.verdict for one in stopped} == {"fail"}
    assert all(one.remedy for one in stopped)


@pytest.mark.parametrize(
    ("changes", "check", "verdict", "said"),
    [
        ({"copies": (Copy(0, 1, True, 7),)}, "copies between cards", "fail", "0->1 (7 elements)"),
        ({"copies": Unknown("no torch")}, "copies between cards", "unknown", "no torch"),
        ({"container_gpus": UUIDS[:1]}, "GPU inside the container", "fail", UUIDS[1]),
        ({"container_gpus": Unknown("no image")}, "GPU inside the container", "unknown", "no image"),
        ({"clocks": ()}, "clocks", "unknown", "does not report"),
        ({"shm": Shm(64)}, "/dev/shm", "fail", "64 MiB"),
        ({"shm": Shm(8192, 100)}, "/dev/shm", "warn", "100 of 8192"),
        ({"limits": Limits(memory_gib=8)}, "limits", "warn", "8.0 GiB"),
        ({"limits": Limits(pids=100)}, "limits", "warn", "100 processes"),
        ({"limits": Limits(cpus=1.5)}, "limits", "warn", "1.5 CPUs"),
        ({"hub": Hub("https://hub", "no route")}, "model hub", "ok", "not needed"),
        ({"hub": Hub("https://hub", clock_skew_s=-900)}, "clock", "warn", "900 s behind"),
        ({"running": None}, "service", "unknown", "not started"),
        ({"running": Running(True, False, "running", None, (), ())}, "service", "warn", "does not answer"),
        ({"running": Running(False, False, "exited", None, ("KeyError",), ())}, "service", "fail", "KeyError"),
        ({"running": Running(True, True, "running", None, (), ("Degraded: x.",))}, "operation", "warn", "Degraded"),
    ],
)
def test_what_is_wrong_is_found_with_its_numbers(changes: dict[str, Any], check: str, verdict: str, said: str) -> None:
    (found,) = findings(facts(**changes), check)
    assert found.verdict == verdict
    assert said in found.message


def test_heat_and_power_are_told_from_idle_clocks() -> None:
    hot = GpuClocks(uuid=UUIDS[0], sm_mhz=900, max_sm_mhz=2100, temperature_c=93, held_back_by=("heat (hardware)",))
    limited = GpuClocks(uuid=UUIDS[1], power_w=349.0, power_limit_w=350.0, held_back_by=("power limit",))
    first, second = findings(facts(clocks=(hot, limited)), "clocks")
    assert (first.verdict, second.verdict) == ("warn", "ok")
    assert "900 of 2100 MHz, 93 C: the card slows itself down for heat" in first.message
    assert "349 of 350 W; held back by power limit" in second.message


def test_the_services_failure_is_told_by_the_rules_of_the_diagnosis() -> None:
    diagnosis = Diagnosis(
        cause="gpu-lost", rule="r", message="A GPU was lost", remedy="Reboot.", excerpt=(), restart_helps=False
    )
    (found,) = findings(facts(running=Running(False, False, "exited", diagnosis, (), ())), "service")
    assert (found.verdict, found.remedy) == ("fail", "Reboot.")
    assert "gpu-lost" in found.message


def test_wsl_1_is_refused_and_wsl_2_is_not() -> None:
    for kernel, verdict in (("4.4.0-19041-Microsoft", "fail"), ("6.6.87.2-microsoft-standard-WSL2", "ok")):
        host = PAIR.model_copy(update={"proc": Proc(kernel=kernel, mem_total_gib=62.0)})
        assert [one.verdict for one in findings(facts(host), "WSL")] == [verdict]


def test_a_hub_that_is_needed_and_silent_is_a_warning_never_a_failure() -> None:
    demand = DEMAND.model_copy(update={"model_is_here": False})
    (found,) = findings(facts(hub=Hub("https://hub", "no route")), "model hub", demand)
    assert found.verdict == "warn"


def test_limits_of_a_control_group_are_the_tightest_on_the_way_up(tmp_path: Path) -> None:
    group = tmp_path / "system.slice" / "graft.service"
    group.mkdir(parents=True)
    (tmp_path / "cgroup.controllers").touch()
    (group / "memory.max").write_text("max\n", encoding="ascii")
    (group.parent / "memory.max").write_text(f"{8 << 30}\n", encoding="ascii")
    (group / "cpu.max").write_text("150000 100000\n", encoding="ascii")
    (group / "pids.max").write_text("4096\n", encoding="ascii")
    own = tmp_path / "own"
    own.write_text("0::/system.slice/graft.service\n", encoding="ascii")
    assert probe.limits(tmp_path, own) == Limits(memory_gib=8.0, cpus=1.5, pids=4096)


def test_limits_of_version_1_are_read_too(tmp_path: Path) -> None:
    for controller, name, text in (
        ("memory", "memory.limit_in_bytes", str(4 << 30)),
        ("cpu", "cpu.cfs_quota_us", "-1"),
        ("cpu", "cpu.cfs_period_us", "100000"),
        ("pids", "pids.max", "max"),
    ):
        (tmp_path / controller).mkdir(exist_ok=True)
        (tmp_path / controller / name).write_text(text, encoding="ascii")
    own = tmp_path / "own"
    own.write_text("3:memory:/\n2:cpu,cpuacct:/\n1:pids:/\n", encoding="ascii")
    assert probe.limits(tmp_path, own) == Limits(memory_gib=4.0)
    assert isinstance(probe.limits(tmp_path, tmp_path / "none"), Unknown)


def test_limits_that_docker_gave_are_the_containers() -> None:
    host = {"Memory": 16 << 30, "NanoCpus": int(4e9), "PidsLimit": 0}
    assert probe.limits_of({"HostConfig": host}) == Limits(16.0, 4.0, None)


class _Front(BaseHTTPRequestHandler):
    def do_HEAD(self) -> None:
        self.send_response_only(404)
        self.send_header("Date", formatdate(time.time() + 600, usegmt=True))
        self.end_headers()

    def log_message(self, *arguments: Any) -> None:
        """Say nothing."""


@pytest.fixture
def front() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Front) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_hub_that_answers_tells_the_time(front: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", front)
    found = probe.hub()
    assert found.error is None
    assert found.clock_skew_s == pytest.approx(-600, abs=5)


def test_a_hub_that_does_not_answer_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert probe.hub(0.5).error


def test_copies_are_read_from_what_the_probe_prints(capsys: pytest.CaptureFixture[str]) -> None:
    printed = json.dumps({"pairs": [{"from": 0, "to": 1, "peer": False, "wrong": 3}]})
    assert probe.copies_from(f"a warning of torch\n{printed}\n") == (Copy(0, 1, False, 3),)
    assert probe.copies_from('{"error": "no CUDA"}') == Unknown("no CUDA")
    assert isinstance(probe.copies_from("Traceback"), Unknown)
    # The launcher's environment has no torch, which is an answer too.
    assert p2p.main(()) == 1
    assert isinstance(probe.copies_from(capsys.readouterr().out), Unknown)


def test_the_command_examines_this_machine(
    graft: Graft,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    ended = graft("doctor", "rtx4090", "--json")
    found = ended.document
    verdicts = {one["check"]: one["verdict"] for one in found["checks"]}
    assert verdicts["Docker"] == "fail"
    assert found["verdict"] == "fail"
    assert all(one["remedy"] for one in found["checks"] if one["verdict"] == "fail")
    assert ended.exit_code == 1
    assert "rtx4090: " in ended.err
    shown = graft("doctor", "cpu")
    assert "fail" not in shown.out or shown.exit_code == 1
    assert "service" in shown.out


def test_a_container_is_asked_for_the_gpus_that_it_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    listing = f"GPU 0: NVIDIA GeForce RTX 3090 (UUID: {UUIDS[0]})\nGPU 1: NVIDIA GeForce RTX 3090 (UUID: {UUIDS[1]})\n"
    monkeypatch.setattr(
        subprocess, "run", lambda argv, **options: subprocess.CompletedProcess(argv, 0, stdout=listing, stderr="")
    )
    from tests.launcher.test_diagnose_evidence import SERVED, plan

    assert probe._container_gpus(plan(SERVED), DEMAND, PAIR, runs=True) == UUIDS
