"""The Docker runtime: argument vectors that run nothing, the calls that run them, and one started service."""

import json
import os
import re
import subprocess
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from launcher import render
from launcher.errors import StartFailed
from launcher.gateway.services import EDGE, RELOAD_SIGNAL
from launcher.host.docker import connect, endpoint_in_use
from launcher.monitoring.services import PROFILE as MONITORING
from launcher.plan import Plan
from launcher.runtime import Health, RunState, Status, Work
from launcher.runtime.host import local_address
from launcher.state import ServiceState
from launcher.watching import folder

API_TIMEOUT_S = 5
_STATUSES: dict[str, Status] = {
    "created": "created",
    "running": "running",
    "paused": "running",
    "restarting": "restarting",
    "removing": "exited",
    "exited": "exited",
    "dead": "exited",
}
_HEALTH: dict[str, Health] = {"starting": "starting", "healthy": "healthy", "unhealthy": "unhealthy"}
_COLOURS = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
_LINE_ENDS = re.compile(r"\r\n|\n|\r")


class DockerFailed(StartFailed):
    """A docker command failed; `lines` is all that it said."""

    def __init__(self, argv: tuple[str, ...], exit_code: int, lines: tuple[str, ...]) -> None:
        said = "\n".join(lines[-20:]) or "it said nothing"
        super().__init__(f"`{' '.join(argv)}` ended with exit code {exit_code}:\n{said}")
        self.lines = lines


def compose(file: Path, *verb: str) -> tuple[str, ...]:
    """Return a docker compose command on one rendered file; its project's name is in it."""
    return ("docker", "compose", "--file", str(file), *verb)


def build(file: Path) -> tuple[str, ...]:
    """Build the server's image, with its progress as plain lines."""
    return ("docker", "compose", "--progress", "plain", "--file", str(file), "build", render.SERVICE)


def up(file: Path) -> tuple[str, ...]:
    """Create and start the containers from images that are there."""
    return compose(file, "up", "--detach", "--no-build", "--remove-orphans")


def down(file: Path) -> tuple[str, ...]:
    """Stop and remove the containers, those that watch too, and the network; the volumes stay."""
    return compose(file, "--profile", MONITORING, "down", "--remove-orphans")


def up_services(file: Path, profile: str, names: tuple[str, ...]) -> tuple[str, ...]:
    """Create and start these services of a Compose profile beside what runs, from images that are there."""
    return compose(file, "--profile", profile, "up", "--detach", "--no-build", "--no-deps", *names)


def service_logs(file: Path, profile: str, names: tuple[str, ...]) -> tuple[str, ...]:
    """Show the last lines of some services."""
    return compose(file, "--profile", profile, "logs", "--no-color", "--tail", "20", *names)


def signal(file: Path, service: str, name: str) -> tuple[str, ...]:
    """Send a signal to a service's main process."""
    return compose(file, "kill", "--signal", name, service)


def inspect(container: str) -> tuple[str, ...]:
    """Show all that the engine knows of a container, as JSON."""
    return ("docker", "container", "inspect", container)


def image_inspect(reference: str) -> tuple[str, ...]:
    """Show an image's id; it fails for one that is not there."""
    return ("docker", "image", "inspect", "--format", "{{.Id}}", reference)


def container_logs(container: str, follow: bool = False) -> tuple[str, ...]:
    """Show a container's log from its beginning."""
    return ("docker", "logs", *(("--follow",) if follow else ()), container)


def endings(container_id: str, since: str, until: str) -> tuple[str, ...]:
    """Ask for what the engine still remembers of a container's ends, one JSON object a line.

    The id, since a name would match every container whose name begins with it; times of RFC 3339, since the CLI cuts
    a relative one down to whole seconds.
    """
    filters = (f"container={container_id}", "event=die", "event=oom")
    chosen = (part for each in filters for part in ("--filter", each))
    return ("docker", "events", "--since", since, "--until", until, *chosen, "--format", "{{json .}}")


def running() -> tuple[str, ...]:
    """List the ids of all running containers."""
    return ("docker", "container", "ls", "--no-trunc", "--format", "{{.ID}}")


@dataclass(frozen=True)
class Finished:
    """A command that ran to its end; its two streams are one, in the order in which they were written."""

    exit_code: int
    lines: tuple[str, ...]


def run(argv: tuple[str, ...], on_line: Callable[[str], None] | None = None) -> Finished:
    """Run a command and give each line to `on_line` as it comes.

    Raises:
        StartFailed: there is no such program.
    """
    lines = []
    with _start(argv) as process:
        assert process.stdout is not None
        for raw in process.stdout:
            for line in _clean_lines(raw):
                lines.append(line)
                if on_line is not None:
                    on_line(line)
    return Finished(exit_code=process.returncode, lines=tuple(lines))


def runs_any(file: Path, profile: str, names: tuple[str, ...]) -> bool:
    """Whether one of these services has a container that runs."""
    argv = compose(file, "--profile", profile, "ps", "--status", "running", "--services")
    return not set(names).isdisjoint(must(argv).lines)


def must(argv: tuple[str, ...], on_line: Callable[[str], None] | None = None) -> Finished:
    """Run a command that has to succeed.

    Raises:
        DockerFailed: it did not.
        StartFailed: there is no such program.
    """
    finished = run(argv, on_line)
    if finished.exit_code != 0:
        raise DockerFailed(argv, finished.exit_code, finished.lines)
    return finished


def _start(argv: tuple[str, ...]) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    except FileNotFoundError as error:
        raise StartFailed(f"{argv[0]}: not on PATH; install Docker with its Compose plugin") from error


def _clean_lines(raw: bytes) -> list[str]:
    text = _COLOURS.sub("", raw.decode("utf-8", errors="replace"))
    return [line for line in _LINE_ENDS.split(text) if line]


def container_of(profile: str) -> dict[str, Any] | None:
    """Return Docker's description of a profile's server; None where there is none, or Docker does not answer."""
    found = _described(inspect(render.project_name(profile)))
    return found[0] if found else None


def running_containers() -> tuple[dict[str, Any], ...]:
    """Return Docker's descriptions of all running containers; none where it does not answer."""
    try:
        listed = run(running())
    except StartFailed:
        return ()
    ids = listed.lines if listed.exit_code == 0 else ()
    return tuple(_described(("docker", "container", "inspect", *ids))) if ids else ()


def _described(argv: tuple[str, ...]) -> list[dict[str, Any]]:
    try:
        finished = run(argv)
    except StartFailed:
        return []
    if finished.exit_code != 0:
        return []
    found: list[dict[str, Any]] = json.loads("\n".join(finished.lines))
    return found


class ComposeService:
    """The server of one rendered Compose project."""

    def __init__(self, file: Path, plan: Plan) -> None:
        self.file = file
        self.container = render.project_name(plan.profile)
        self._host, self._port = plan.host, plan.port
        self._follower: _Follower | None = None

    def start(self, on_line: Callable[[str], None] | None = None) -> None:
        """Create and start the containers from an image that is there; where that fails, none is left behind.

        Raises:
            DockerFailed: Docker refused, such as for a port that is taken or a GPU that it does not know.
        """
        if self.state().status == "exited":
            # Started again it would go on with the log of its former life.
            must(down(self.file))
        folder.prepare(ServiceState(self.file.parent))
        try:
            must(up(self.file), on_line)
        except DockerFailed:
            run(down(self.file))
            raise

    @property
    def base_url(self) -> str:
        return f"http://{local_address(self._host)}:{self._port}"

    def state(self) -> RunState:
        """Ask Docker for the container.

        Raises:
            DockerFailed: the engine did not answer.
        """
        found = self._inspect()
        if found is None:
            return RunState("absent")
        state, restart_count = found["State"], int(found["RestartCount"])
        status = _STATUSES[state["Status"]]
        health = (state.get("Health") or {}).get("Status")
        exit_code = None if status in ("created", "running") else int(state["ExitCode"])
        oom_killed = bool(state["OOMKilled"])
        if restart_count > 0:
            # The new run has taken the place of the one that ended; the engine's events still tell how it did.
            exit_code, oom_killed = self._last_end(found, exit_code, oom_killed)
        return RunState(
            status=status,
            exit_code=_signed(exit_code),
            restart_count=restart_count,
            oom_killed=oom_killed,
            health=_HEALTH.get(health or ""),
        )

    def new_log_lines(self) -> tuple[str, ...]:
        if self._follower is None:
            if self._inspect() is None:
                return ()
            self._follower = _Follower(container_logs(self.container, follow=True))
        return self._follower.lines()

    def log(self) -> Iterator[str]:
        if self._inspect() is not None:
            yield from must(container_logs(self.container)).lines

    def work(self) -> Work | None:
        # Only the API has totals: `docker stats` prints rates, and a command inside the container would itself be work.
        import docker
        import requests

        try:
            with connect(endpoint_in_use(), API_TIMEOUT_S) as client:
                return _work_in(client.stats(self.container, stream=False, one_shot=True))
        except (docker.errors.DockerException, requests.RequestException, OSError):
            return None

    def stop(self) -> None:
        must(down(self.file))

    def reload_gateway(self) -> None:
        """Let the edge read its keys and its configuration again; running answers go on.

        Raises:
            DockerFailed: there is no edge that runs.
        """
        must(signal(self.file, EDGE, RELOAD_SIGNAL))

    def _inspect(self) -> dict[str, Any] | None:
        argv = inspect(self.container)
        finished = run(argv)
        if finished.exit_code == 0:
            found: list[dict[str, Any]] = json.loads("\n".join(finished.lines))
            return found[0]
        if any("no such container" in line.lower() for line in finished.lines):
            return None
        raise DockerFailed(argv, finished.exit_code, finished.lines)

    def _last_end(self, found: dict[str, Any], exit_code: int | None, oom_killed: bool) -> tuple[int | None, bool]:
        for line in must(endings(found["Id"], found["Created"], datetime.now(UTC).isoformat())).lines:
            event = json.loads(line)
            if event["Action"] == "oom":
                oom_killed = True
            else:
                exit_code = int(event["Actor"]["Attributes"]["exitCode"])
        return exit_code, oom_killed


class _Follower:
    """The output of a running command, read without ever waiting for it."""

    def __init__(self, argv: tuple[str, ...]) -> None:
        self._process = _start(argv)
        assert self._process.stdout is not None
        self._output = self._process.stdout
        self._rest = b""
        os.set_blocking(self._output.fileno(), False)
        # The command ends with its reader, and with this program at the latest.
        self._end = weakref.finalize(self, _end, self._process)

    def lines(self) -> tuple[str, ...]:
        """Return the lines that were completed since the last call."""
        while self._end.alive:
            piece = self._output.read(1 << 16)
            if piece is None:
                break
            self._rest += piece
            if not piece:
                self._end()
        complete = len(self._rest) if not self._end.alive else _after_last_line(self._rest)
        done, self._rest = self._rest[:complete], self._rest[complete:]
        return tuple(_clean_lines(done))


def _work_in(stats: Mapping[str, Any]) -> Work | None:
    cpu_ns = stats.get("cpu_stats", {}).get("cpu_usage", {}).get("total_usage")
    if not cpu_ns:
        # An engine answers zeros for a container that does not run.
        return None
    transfers = stats.get("blkio_stats", {}).get("io_service_bytes_recursive") or ()
    read_bytes = sum(int(item["value"]) for item in transfers if item["op"].lower() == "read")
    return Work(cpu_s=cpu_ns / 1e9, read_bytes=read_bytes)


def _after_last_line(text: bytes) -> int:
    return max(text.rfind(b"\n"), text.rfind(b"\r")) + 1


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


def _signed(exit_code: int | None) -> int | None:
    """Return the exit code with a shell's 128 + n as -n, for a process that signal n ended."""
    return 128 - exit_code if exit_code is not None and 128 < exit_code < 160 else exit_code
