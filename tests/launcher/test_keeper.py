"""The keeper runs an engine, says how it ended, and starts it again within its budget; the engine is a small script."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.operate import keeper, signs, tail
from launcher.operate.budget import Budget
from launcher.operate.endings import Again, End, Stop, judge
from launcher.operate.events import FILE_NAME
from launcher.operate.service_state import ServiceStatus, StateFile, StatusReader
from tests.launcher import keeping
from tests.launcher.fake_vllm import unused_port
from tests.launcher.webhook_stand_in import Hook, hook

__all__ = ["hook"]

SERVES = "print('INFO:     Application startup complete.', flush=True)\n"
OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 136.00 MiB. GPU 0 has a total capacity of 23.56 GiB "
    "of which 88.00 MiB is free. Of the allocated memory 22.00 GiB is allocated by PyTorch"
)
DIES_OF_MEMORY = f"print('EngineCore encountered a fatal error.\\n{OOM}', flush=True)\nsys.exit(1)\n"


@dataclass
class Kept:
    """A keeper in a process of its own, and the folder that it writes to."""

    folder: Path
    process: ForkServerProcess
    log: Path

    def ended(self, seconds: float = 15) -> int | None:
        """Wait for the keeper's end, and return its exit code."""
        self.process.join(seconds)
        return self.process.exitcode

    @property
    def status(self) -> ServiceStatus:
        return StateFile(self.folder).read()

    @property
    def events(self) -> list[dict[str, Any]]:
        path = self.folder / FILE_NAME
        return [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []

    def change(self, **update: Any) -> None:
        StateFile(self.folder).change(lambda status: status.model_copy(update=update))

    def kinds(self) -> list[str]:
        return [one["kind"] for one in self.events]

    def wait_for(self, condition: Callable[[], bool], seconds: float = 15) -> None:
        deadline_s = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline_s, (self.status, self.kinds(), self.log.read_text("utf-8"))
            time.sleep(0.02)


Keep = Callable[..., Kept]


@pytest.fixture
def keep(tmp_path: Path) -> Iterator[Keep]:
    kept: list[Kept] = []

    def start(script: str, degraded: str | None = None, out: Path | None = None, **settings: Any) -> Kept:
        folder = tmp_path / "operate"
        folder.mkdir(exist_ok=True)
        commands = {"normal": [sys.executable, "-SIc", f"import os, sys, time\n{script}"]}
        if degraded is not None:
            commands["degraded"] = [sys.executable, "-SIc", f"import os, sys, time\n{degraded}"]
        document = {
            "service": "cpu",
            "folder": str(folder),
            "commands": commands,
            "budget": {"restarts": 3, "within_s": 60, "first_wait_s": 0.05, "longest_wait_s": 0.2},
            **settings,
        }
        file = tmp_path / "keep.json"
        file.write_text(json.dumps(document), encoding="utf-8")
        log = tmp_path / "server.log"
        kept.append(Kept(folder, keeping.start(file, out or log), log))
        return kept[-1]

    yield start
    for one in kept:
        one.process.kill()
        one.process.join()
        pid = one.status.engine_pid
        if pid is not None and psutil.pid_exists(pid):
            os.killpg(pid, signal.SIGKILL)


def test_a_first_start_that_fails_ends_as_the_engine_did(keep: Keep) -> None:
    kept = keep("print('ValueError: No available memory for the cache blocks', flush=True)\nsys.exit(3)")
    assert kept.ended() == 3
    assert kept.kinds() == ["engine-started", "engine-ended", "service-stopped"]
    assert kept.status.phase == "stopped"
    assert kept.status.cause == "no-kv-cache-memory"
    assert "No available memory" in kept.log.read_text("utf-8")


def test_a_first_start_that_is_killed_ends_by_the_same_signal(keep: Keep) -> None:
    kept = keep("os.kill(os.getpid(), 9)")
    assert kept.ended() == -signal.SIGKILL


def test_an_engine_that_served_and_ended_is_started_again(keep: Keep, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    first = f"open('{mark}', 'w').close(); print('a word', flush=True); sys.exit(1)"
    script = SERVES + f"if not os.path.exists('{mark}'):\n  {first}\n"
    kept = keep(script + "time.sleep(60)")
    kept.wait_for(lambda: kept.kinds().count("engine-serving") == 2)
    assert kept.kinds() == [
        "engine-started",
        "engine-serving",
        "engine-ended",
        "engine-restarting",
        "engine-started",
        "engine-serving",
    ]
    assert kept.events[-1]["took_s"] < 10
    assert "the engine ended with exit code 1" in kept.events[2]["message"]
    (words,) = kept.folder.glob("last-words-*.log")
    assert "a word" in words.read_text("utf-8")
    assert kept.status.reason == ""


@pytest.mark.parametrize(
    ("said", "cause"), [("", "engine-hang"), (f"EngineCore encountered a fatal error.\n{OOM}", "serving-oom")]
)
def test_an_engine_that_ends_while_the_watchdog_ends_it_served_all_the_same(keep: Keep, said: str, cause: str) -> None:
    script = (
        f"print({said!r}, flush=True)\n{SERVES}import signal\nsignal.signal(15, lambda *_: os._exit(0))\ntime.sleep(60)"
    )
    kept = keep(script)
    kept.wait_for(lambda: "engine-serving" in kept.kinds())
    pid = kept.status.engine_pid
    assert pid is not None
    kept.change(phase="restarting", cause="engine-hang", reason="the engine is stuck")
    os.kill(pid, signal.SIGTERM)
    kept.wait_for(lambda: "engine-ended" in kept.kinds())
    (ended,) = [one for one in kept.events if one["kind"] == "engine-ended"]
    assert ended["cause"] == cause
    kept.wait_for(lambda: kept.kinds().count("engine-serving") == 2)


def test_an_engine_serves_when_health_says_so_not_when_it_is_announced(keep: Keep, tmp_path: Path) -> None:
    mark = tmp_path / "listen"
    server = (
        "from http.server import HTTPServer, BaseHTTPRequestHandler\n"
        "class Health(BaseHTTPRequestHandler):\n"
        "  def do_GET(self): self.send_response(200); self.end_headers()\n"
    )
    port = unused_port()
    waits = f"while not os.path.exists('{mark}'): time.sleep(0.02)\n"
    listens = f"HTTPServer(('127.0.0.1', {port}), Health).serve_forever()"
    script = f"{server}print('Starting vLLM server on http://x', flush=True)\n{waits}{listens}"
    kept = keep(script, health_url=f"http://127.0.0.1:{port}/health")
    kept.wait_for(lambda: kept.log.exists() and "Starting vLLM server" in kept.log.read_text("utf-8"))
    assert kept.status.phase == "loading"
    mark.touch()
    kept.wait_for(lambda: kept.status.phase == "serving")


def test_an_exhausted_budget_stops_and_tells(keep: Keep) -> None:
    kept = keep(SERVES + "sys.exit(1)")
    assert kept.ended() == 0
    assert kept.kinds().count("engine-started") == 4
    assert kept.kinds()[-1] == "service-stopped"
    assert kept.status.phase == "stopped"
    assert "it ended 4 times in 1 minutes, and 3 restarts are allowed" in kept.status.reason


def test_a_cause_that_a_restart_does_not_help_is_not_tried_again(keep: Keep) -> None:
    kept = keep(SERVES + "print(\"OSError: [Errno 28] No space left on device: '/cache/x'\", flush=True)\nsys.exit(1)")
    assert kept.ended() == 0
    assert kept.kinds().count("engine-started") == 1
    assert kept.status.cause == "disk-full"
    assert kept.status.remedy
    assert "starting again does not help" in kept.status.reason


def test_a_second_death_of_memory_takes_the_smaller_settings(keep: Keep) -> None:
    kept = keep(SERVES + DIES_OF_MEMORY, SERVES + "time.sleep(60)")
    kept.wait_for(lambda: kept.status.phase == "serving" and kept.status.is_degraded)
    status = kept.status
    assert (status.memory_deaths, status.restarts, status.cause) == (2, 2, None)
    assert status.reason == "a request needed more GPU memory than was left, 2 times for lack of memory"
    assert "service-degraded" in kept.kinds()
    kept.process.terminate()
    assert kept.ended() == -signal.SIGTERM or kept.status.phase == "stopped"


def test_smaller_settings_that_die_of_memory_too_end_it(keep: Keep) -> None:
    kept = keep(SERVES + DIES_OF_MEMORY, SERVES + DIES_OF_MEMORY, budget={"restarts": 9, "first_wait_s": 0.01})
    assert kept.ended() == 0
    assert kept.status.memory_deaths == 4
    assert "for the 4th time" in kept.status.reason


def test_a_stop_ends_the_engine_and_is_no_failure(keep: Keep) -> None:
    script = (
        "import signal\nsignal.signal(signal.SIGTERM, lambda *_: (print('bye', flush=True), sys.exit(0)))\n" + SERVES
    )
    kept = keep(script + "time.sleep(60)")
    kept.wait_for(lambda: kept.status.phase == "serving")
    kept.process.terminate()
    assert kept.ended() == 0
    assert (kept.status.phase, kept.status.reason) == ("stopped", "stopped on request")
    assert kept.log.read_text("utf-8").rstrip().endswith("bye")


def test_a_stop_while_it_waits_ends_at_once(keep: Keep) -> None:
    kept = keep(SERVES + "sys.exit(1)", budget={"restarts": 3, "first_wait_s": 60})
    kept.wait_for(lambda: "engine-restarting" in kept.kinds())
    assert kept.status.next_start_s is not None
    kept.process.terminate()
    assert kept.ended(5) == 1


def test_processes_that_an_engine_leaves_are_ended_before_the_next_start(keep: Keep) -> None:
    script = "import subprocess\nchild = subprocess.Popen(['sleep', '600'])\nprint('child', child.pid, flush=True)\n"
    kept = keep(script + SERVES + "os.kill(os.getpid(), 9)", budget={"restarts": 0})
    assert kept.ended() == 0
    child = int(kept.log.read_text("utf-8").split("child ")[1].split()[0])
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE
    assert "the engine was ended by signal 9" in kept.status.reason


def test_a_full_disk_under_the_log_does_not_stop_the_engine(keep: Keep) -> None:
    script = "for number in range(300): print('x' * 1000, flush=True)\ntime.sleep(60)"
    kept = keep(SERVES + script, out=Path("/dev/full"))
    kept.wait_for(lambda: "log-not-written" in kept.kinds())
    kept.wait_for(lambda: kept.status.phase == "serving")
    assert kept.process.is_alive()


def test_an_engine_ends_with_its_keeper_and_counts_as_ended(keep: Keep) -> None:
    kept = keep(SERVES + "time.sleep(60)")
    kept.wait_for(lambda: kept.status.phase == "serving")
    pid = kept.status.engine_pid
    assert pid is not None
    kept.process.kill()
    kept.process.join()
    # Nobody would keep it any more.
    kept.wait_for(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    again = keep(SERVES + "time.sleep(60)")
    again.wait_for(lambda: again.status.phase == "serving" and again.status.restarts == 1)
    assert len(again.status.ends_s) == 1


def test_a_watchdog_beside_the_engine_is_started_again(keep: Keep, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    script = f"import os, time\nopen('{pids}', 'a').write(f'{{os.getpid()}}\\n')\ntime.sleep(600)"
    kept = keep(SERVES + "time.sleep(60)", watchdog=[sys.executable, "-c", script])
    kept.wait_for(lambda: pids.exists() and len(pids.read_text().split()) == 1)
    os.kill(int(pids.read_text()), signal.SIGKILL)
    kept.wait_for(lambda: len(pids.read_text().split()) == 2)
    kept.process.terminate()
    kept.ended()
    assert not psutil.pid_exists(int(pids.read_text().split()[1]))


def test_wrong_settings_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "keep.json").write_text("{}", encoding="utf-8")
    assert keeper.main([str(tmp_path / "keep.json")]) == 2
    assert "commands" in capsys.readouterr().err
    assert keeper.main([]) == 2
    settings = {"service": "cpu", "folder": str(tmp_path), "commands": {"degraded": ["x"]}}
    (tmp_path / "keep.json").write_text(json.dumps(settings), encoding="utf-8")
    assert keeper.main([str(tmp_path / "keep.json")]) == 2
    assert "a command for the mode normal is needed" in capsys.readouterr().err


def test_an_engine_that_is_not_there_is_named(keep: Keep) -> None:
    kept = keep("", commands={"normal": ["/no/such/vllm"]})
    assert kept.ended() == 127
    assert "the engine cannot be started: [Errno 2]" in kept.log.read_text("utf-8")


END = End(1, True, 1000.0)
WHY = "the engine ended with exit code 1"


@pytest.mark.parametrize(
    ("changes", "status", "can_degrade", "follows"),
    [
        ({}, {"ends_s": (1000.0,)}, True, Again(2.0, "normal", WHY)),
        ({}, {"ends_s": (990.0, 1000.0)}, True, Again(4.0, "normal", WHY)),
        ({}, {"ends_s": (990.0, 1000.0), "mode": "degraded"}, True, Again(4.0, "degraded", WHY)),
        ({"has_served": False}, {}, True, Stop),
        ({"cause": "gpu-lost", "message": "A GPU was lost", "restart_helps": False}, {}, True, Stop),
        ({"cause": "serving-oom", "restart_helps": False}, {"memory_deaths": 1}, True, "normal"),
        ({"cause": "serving-oom", "restart_helps": False}, {"memory_deaths": 2}, True, "degraded"),
        ({"cause": "serving-oom", "restart_helps": False}, {"memory_deaths": 2}, False, "normal"),
        ({"cause": "serving-oom", "restart_helps": False}, {"memory_deaths": 4}, True, Stop),
    ],
)
def test_what_follows_from_an_end(
    changes: dict[str, Any], status: dict[str, Any], can_degrade: bool, follows: Any
) -> None:
    given_status = ServiceStatus(**{"ends_s": (1000.0,), **status})
    found = judge(replace(END, **changes), given_status, Budget(), can_degrade=can_degrade)
    if isinstance(follows, str):
        assert isinstance(found, Again)
        assert found.mode == follows
    elif isinstance(follows, type):
        assert isinstance(found, follows)
    else:
        assert found == follows


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0, 10_000), max_size=30), st.floats(0, 10_000))
def test_a_budget_never_waits_longer_than_its_longest_and_never_restarts_more_often(
    ends_s: list[float], now_s: float
) -> None:
    budget = Budget()
    recent = budget.recent(ends_s, now_s)
    wait_s = budget.wait_s(ends_s, now_s)
    assert (wait_s is None) == (len(recent) > budget.restarts)
    assert wait_s is None or 0 <= wait_s <= budget.longest_wait_s


def test_the_tail_keeps_the_last_lines_in_bounded_memory(tmp_path: Path) -> None:
    words = tail.Tail(1000)
    for number in range(5000):
        words.add(f"line {number}\n".encode())
    lines = words.text().splitlines()
    assert lines[-1] == "line 4999"
    assert lines[0].startswith("line ")
    assert len(words.text()) <= 2000
    for number in range(8):
        (tmp_path / f"last-words-2026010{number}T000000Z.log").touch()
    assert tail.save(words, tmp_path) is not None
    assert len(list(tmp_path.glob("last-words-*.log"))) == tail.KEPT_FILES
    assert tail.save(words, tmp_path / "none") is None


def test_what_the_kernel_killed_is_counted_in_both_versions_of_control_groups(tmp_path: Path) -> None:
    (tmp_path / "v2").write_text("low 0\nhigh 0\noom 3\noom_kill 2\n", encoding="ascii")
    (tmp_path / "v1").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 1\n", encoding="ascii")
    assert signs.oom_kills([tmp_path / "none", tmp_path / "v2"]) == 2
    assert signs.oom_kills([tmp_path / "v1"]) == 1
    assert signs.oom_kills([tmp_path / "none"]) == 0


@pytest.mark.parametrize(
    ("says", "code", "error"),
    [
        ("GPU-1", 0, None),
        ("Failed to initialize NVML: Driver/library version mismatch", 18, "version mismatch"),
        ("Unable to determine the device handle for GPU0: GPU is lost. Reboot the system", 15, "GPU is lost"),
    ],
)
def test_nvidias_own_tool_is_asked_about_the_engines_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: str, code: int, error: str | None
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert signs.nvidia_smi_error(("GPU-1",)) is None
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked\necho "{says}"\nexit {code}\n', encoding="utf-8")
    tool.chmod(0o755)
    found = signs.nvidia_smi_error(("GPU-1", "GPU-2"))
    assert found is None if error is None else error in (found or "")
    assert "--id GPU-1,GPU-2" in (tmp_path / "asked").read_text(encoding="utf-8")


def test_a_status_is_read_again_only_when_it_changed(tmp_path: Path) -> None:
    reader, state = StatusReader(tmp_path), StateFile(tmp_path)
    assert reader.read() == ServiceStatus()
    state.change(lambda status: status.model_copy(update={"phase": "serving"}))
    first = reader.read()
    assert first.phase == "serving"
    assert reader.read() is first
    state.path.write_text("{ half", encoding="utf-8")
    assert reader.read() == ServiceStatus()
    state.path.unlink()
    assert reader.read() == ServiceStatus()


@pytest.mark.parametrize(
    ("status", "seconds"),
    [
        (ServiceStatus(phase="serving"), 1),
        (ServiceStatus(phase="stopped"), None),
        (ServiceStatus(phase="restarting", since_s=90, next_start_s=110), 70),
        (ServiceStatus(phase="restarting", since_s=0), 1),
    ],
)
def test_a_retry_is_promised_for_when_the_engine_may_be_back(status: ServiceStatus, seconds: int | None) -> None:
    assert status.retry_after_s(100) == seconds


def test_a_stop_for_good_reaches_the_webhook_before_the_end(keep: Keep, hook: str, tmp_path: Path) -> None:
    (tmp_path / "url").write_text(hook, encoding="utf-8")
    watch = {
        "service": "cpu",
        "folder": str(tmp_path / "operate"),
        "base_url": "http://127.0.0.1:9",
        "served_name": "small",
        "webhook_file": str(tmp_path / "url"),
        "watch": {"every_s": 0.2},
    }
    (tmp_path / "watch.json").write_text(json.dumps(watch), encoding="utf-8")
    go = tmp_path / "go"
    dies = f"while not os.path.exists('{go}'): time.sleep(0.02)\n"
    dies += "print(\"OSError: [Errno 28] No space left on device: '/cache/x'\", flush=True)\nsys.exit(1)"
    kept = keep(
        SERVES + dies,
        watchdog=[sys.executable, "-m", "launcher.operate", "watch", str(tmp_path / "watch.json")],
        linger_s=3,
    )
    kept.wait_for(lambda: "watchdog-started" in kept.kinds(), 30)
    go.touch()
    kept.wait_for(lambda: any("starting again does not help" in text for text in Hook.texts), 30)
    assert kept.ended() == 0
    assert hook not in kept.log.read_text("utf-8")
