"""What the Docker runtime runs, word for word, and how it reads what comes back."""

import sys
import time
from pathlib import Path

import pytest

from launcher.errors import StartFailed
from launcher.runtime import Work, compose

FILE = Path("/srv/graft/rtx4090/compose.yaml")
IN_PROJECT = ("docker", "compose", "--file", "/srv/graft/rtx4090/compose.yaml")


def test_the_commands_are_these() -> None:
    assert compose.up(FILE) == (*IN_PROJECT, "up", "--detach", "--no-build", "--remove-orphans")
    assert compose.down(FILE) == (*IN_PROJECT, "--profile", "monitoring", "down", "--remove-orphans")
    assert compose.up_services(FILE, "monitoring", ("grafana",)) == (
        *(*IN_PROJECT, "--profile", "monitoring"),
        *("up", "--detach", "--no-build", "--no-deps", "grafana"),
    )
    assert compose.build(FILE) == ("docker", "compose", "--progress", "plain", *IN_PROJECT[2:], "build", "vllm")
    assert compose.inspect("graft-rtx4090") == ("docker", "container", "inspect", "graft-rtx4090")
    assert compose.container_logs("graft-rtx4090") == ("docker", "logs", "graft-rtx4090")
    assert compose.container_logs("graft-rtx4090", follow=True) == ("docker", "logs", "--follow", "graft-rtx4090")
    assert compose.image_inspect("a:b") == ("docker", "image", "inspect", "--format", "{{.Id}}", "a:b")
    assert compose.endings("0123", "2026-11-30T02:00:00Z", "2026-11-30T02:01:00Z") == (
        *("docker", "events", "--since", "2026-11-30T02:00:00Z", "--until", "2026-11-30T02:01:00Z"),
        *("--filter", "container=0123", "--filter", "event=die", "--filter", "event=oom", "--format", "{{json .}}"),
    )


def python(program: str) -> tuple[str, ...]:
    return (sys.executable, "-c", program)


def test_a_command_is_heard_line_by_line_on_both_streams() -> None:
    heard: list[str] = []
    program = r"import sys; print('one\rtwo', flush=True); print('\x1b[31mthree\x1b[0m', file=sys.stderr); sys.exit(3)"
    finished = compose.run(python(program), heard.append)
    assert finished == compose.Finished(exit_code=3, lines=("one", "two", "three"))
    assert heard == ["one", "two", "three"]


def test_a_failed_command_is_told_with_its_last_words() -> None:
    with pytest.raises(compose.DockerFailed, match="ended with exit code 7:\nport is already allocated") as error:
        compose.must(python("print('port is already allocated'); raise SystemExit(7)"))
    assert error.value.lines == ("port is already allocated",)
    assert error.value.exit_code == 4


def test_a_missing_program_is_told_as_such() -> None:
    with pytest.raises(StartFailed, match="no-such-docker: not on PATH"):
        compose.run(("no-such-docker", "ps"))


def test_a_log_is_followed_without_waiting_for_it() -> None:
    program = r"""
import sys, time
sys.stdout.write('whole\n50%\rpart'); sys.stdout.flush()
time.sleep(0.5)
sys.stdout.write('ly\nrest')
"""
    follower = compose._Follower(python(program))
    lines: list[str] = []
    slowest_s = 0.0
    deadline_s = time.monotonic() + 30
    while "rest" not in lines and time.monotonic() < deadline_s:
        begun_s = time.monotonic()
        lines += follower.lines()
        slowest_s = max(slowest_s, time.monotonic() - begun_s)
        time.sleep(0.01)
    assert lines == ["whole", "50%", "partly", "rest"]
    assert slowest_s < 0.4
    assert follower.lines() == ()


def test_following_ends_with_the_follower() -> None:
    follower = compose._Follower(python("import time; time.sleep(60)"))
    process = follower._process
    assert process.poll() is None
    del follower
    assert process.poll() is not None


@pytest.mark.parametrize(("docker", "signed"), [(None, None), (0, 0), (1, 1), (137, -9), (143, -15), (255, 255)])
def test_an_exit_code_tells_a_signal_from_an_exit(docker: int | None, signed: int | None) -> None:
    assert compose._signed(docker) == signed


def test_work_is_read_from_the_engines_totals() -> None:
    stats = {
        "cpu_stats": {"cpu_usage": {"total_usage": 2_500_000_000}},
        "blkio_stats": {
            "io_service_bytes_recursive": [
                {"op": "Read", "value": 1000},
                {"op": "read", "value": 24},
                {"op": "Write", "value": 7},
            ]
        },
    }
    assert compose._work_in(stats) == Work(cpu_s=2.5, read_bytes=1024)
    assert compose._work_in({**stats, "blkio_stats": {"io_service_bytes_recursive": None}}) == Work(2.5, 0)
    assert compose._work_in({"cpu_stats": {"cpu_usage": {"total_usage": 0}}}) is None
    assert compose._work_in({}) is None
