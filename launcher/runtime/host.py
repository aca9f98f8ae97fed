"""The host runtime: the plan's `vllm serve` as a local process in a session of its own, with its log in a file."""

import hashlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil
from pydantic import BaseModel, ConfigDict

from launcher.errors import Refused, UsageError
from launcher.plan import Plan, Watch
from launcher.runtime import RunState, Work
from launcher.state import ServiceState, cache_root
from launcher.watching import folder

TERM_GRACE_S = 20.0
KILL_GRACE_S = 10.0
POLL_INTERVAL_S = 0.1
LOG_NAME = "server.log"

_COLOURS = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
_LINE_END = re.compile(r"\r\n|\n|\r")
_NOT_INHERITED = re.compile(r"VLLM_|GRAFT_|HF_|TRANSFORMERS_|PYTHON(PATH|HOME)$|VIRTUAL_ENV$|CUDA_VISIBLE_DEVICES$")
"""What would change the server behind the plan's back, or is a secret that it does not need."""


class ProcessRecord(BaseModel):
    """What is written about a started server, so that a later command finds it and nothing else."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    pid: int
    """Also the id of its session and its process group."""
    start_ticks: int
    """Kernel clock ticks from boot to its start: with `boot_id` it tells a process from a later one of the same pid."""
    boot_id: str
    host: str
    port: int
    model: str
    run_id: str
    argv_sha256: str


class HostService:
    """A server that runs, or ran, as a local process."""

    def __init__(self, state: ServiceState, record: ProcessRecord, is_child: bool = False) -> None:
        self.record = record
        self._state = state
        self._is_child = is_child
        """Whether this command started it, and has not taken its exit code yet."""
        self._exit_code: int | None = None
        self._read_to = 0
        self._unfinished = b""

    @property
    def base_url(self) -> str:
        return f"http://{local_address(self.record.host)}:{self.record.port}"

    @property
    def log_file(self) -> Path:
        return self._state.logs_dir / LOG_NAME

    def state(self) -> RunState:
        if self._is_running_child() or (self._exit_code is None and self._leader_lives()):
            return RunState("running")
        return RunState("exited", exit_code=self._exit_code)

    def new_log_lines(self) -> tuple[str, ...]:
        has_ended = not self.state().is_alive
        with self.log_file.open("rb") as file:
            file.seek(self._read_to)
            new = file.read()
        self._read_to += len(new)
        *lines, self._unfinished = re.split(rb"(?<=[\n\r])(?!\n)", self._unfinished + new)
        if has_ended and self._unfinished:
            lines, self._unfinished = [*lines, self._unfinished], b""
        return tuple(_text(line) for line in lines)

    def log(self) -> Iterator[str]:
        with self.log_file.open("rb") as file:
            for line in file:
                yield from (_COLOURS.sub("", part) for part in _LINE_END.split(_text(line)))

    def work(self) -> Work | None:
        cpu_s = 0.0
        read_bytes = 0
        for process in self._members():
            try:
                times = process.cpu_times()
                cpu_s += times.user + times.system
                read_bytes += process.io_counters().read_bytes
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return Work(cpu_s, read_bytes)

    def stop(self) -> None:
        """End every process of the session, the engine's orphans too: SIGTERM, and SIGKILL after 20 s.

        Raises:
            Refused: a process does not end even so (one that waits for a broken device cannot).
        """
        for number, grace_s in ((signal.SIGTERM, TERM_GRACE_S), (signal.SIGKILL, KILL_GRACE_S)):
            for process in self._members():
                _signal(process, number)
            if self._wait_for_end(grace_s, again=signal.SIGKILL if number == signal.SIGKILL else None):
                self._state.process_file.unlink(missing_ok=True)
                return
        pids = ", ".join(str(process.pid) for process in self._members())
        raise Refused(f"processes {pids} did not end after SIGKILL; they wait for a device: restart the machine")

    def _wait_for_end(self, grace_s: float, again: signal.Signals | None) -> bool:
        """Wait for the session's end; `again` is sent to processes that appeared meanwhile."""
        deadline_s = time.monotonic() + grace_s
        while members := self._members():
            if time.monotonic() > deadline_s:
                return False
            if again is not None:
                for process in members:
                    _signal(process, again)
            time.sleep(POLL_INTERVAL_S)
        return True

    def _is_running_child(self) -> bool:
        """Whether this command started the server and it runs; takes its exit code when it ended."""
        if self._is_child:
            pid, status = os.waitpid(self.record.pid, os.WNOHANG)
            if pid:
                self._is_child = False
                self._exit_code = os.waitstatus_to_exitcode(status)
        return self._is_child

    def _leader_lives(self) -> bool:
        return _identity(self.record.pid) == (self.record.boot_id, self.record.start_ticks) and not _is_zombie(
            self.record.pid
        )

    def _members(self) -> list[psutil.Process]:
        """Return the live processes of the server's session.

        Once the leader is gone its number may belong to a stranger: then only processes that started after it and work
        in the service's folder are the server's.
        """
        # An ended child keeps its number until it is waited for.
        self._is_running_child()
        if _boot_id() != self.record.boot_id:
            return []
        leader_lives = self._leader_lives()
        return [
            process
            for process in _session(self.record.pid)
            if leader_lives or _is_orphan(process, self.record.start_ticks, self._state.root)
        ]


def start(plan: Plan, model_dir: Path, state: ServiceState, vllm: Path) -> HostService:
    """Start `vllm serve` for a plan whose files are rendered into the service's folder.

    Args:
        vllm: the console script of the engine's environment.

    Raises:
        UsageError: this service runs already.
        Refused: its port is taken.
    """
    running = find(state)
    if running is not None and running._members():
        raise UsageError(f"{plan.profile} runs already (process {running.record.pid}); stop it with `make down`")
    _refuse_taken_port(plan.port)
    for needed in (state.logs_dir, state.reports_dir):
        needed.mkdir(parents=True, exist_ok=True)
    folder.prepare(state)
    serve = (str(vllm), "serve", str(model_dir), "--host", plan.host, "--port", str(plan.port))
    argv = (*serve, *plan.argv()) if plan.watch is None else _kept(plan, plan.watch, state, serve)
    for report in state.reports_dir.glob("*.json"):
        report.unlink()
    with (state.logs_dir / LOG_NAME).open("wb") as log:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=state.root,
            env=environment(plan, state, vllm, os.environ),
            start_new_session=True,
        )
    # It outlives this command on purpose: HostService asks for its exit code, not this object.
    process.returncode = 0
    # The identity of a child that was not waited for cannot be lost: at worst it is a zombie.
    boot_id, start_ticks = _identity(process.pid) or ("", 0)
    record = ProcessRecord(
        pid=process.pid,
        start_ticks=start_ticks,
        boot_id=boot_id,
        host=plan.host,
        port=plan.port,
        model=plan.served_name,
        run_id=plan.run_id,
        argv_sha256=argv_digest(argv),
    )
    state.process_file.write_text(record.model_dump_json(indent=2) + "\n", encoding="utf-8")
    return HostService(state, record, is_child=True)


def _kept(plan: Plan, watch: Watch, state: ServiceState, serve: tuple[str, ...]) -> tuple[str, ...]:
    """Write the settings of keeper and watchdog, and return the command that starts the keeper."""
    # Imported late: commands that start nothing have no use for them.
    from launcher.watching import services

    key, webhook = state.secrets_dir / "api_key", state.secrets_dir / services.WEBHOOK
    base_url = f"http://{local_address(plan.host)}:{plan.port}"
    dog = services.watchdog_settings(
        plan, watch, state.operate_dir, base_url, key if key.is_file() else None, webhook if webhook.is_file() else None
    )
    smaller = plan.degraded.argv() if plan.degraded else ()
    keep = services.keeper_settings(
        plan,
        watch,
        state.operate_dir,
        {"normal": (*serve, *plan.argv()), "degraded": (*serve, *smaller)},
        health_url=f"{base_url}/health",
        watchdog=(*_program("watch"), str(state.root / services.WATCH_NAME)),
        linger_s=services.LINGER_S if webhook.is_file() else 0.0,
    )
    (state.root / services.WATCH_NAME).write_text(dog.model_dump_json(indent=2) + "\n", encoding="utf-8")
    (state.root / services.KEEP_NAME).write_text(keep.model_dump_json(indent=2) + "\n", encoding="utf-8")
    return (*_program("keep"), str(state.root / services.KEEP_NAME))


def _program(name: str) -> tuple[str, ...]:
    """Return the command of one of the programs of `launcher.operate`, run by the launcher's own Python."""
    return (sys.executable, "-m", "launcher.operate", name)


def find(state: ServiceState) -> HostService | None:
    """Return the service that was started here, running or not; None after a stop or before the first start.

    Raises:
        UsageError: its record is not readable.
    """
    try:
        text = state.process_file.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    try:
        return HostService(state, ProcessRecord.model_validate_json(text))
    except ValueError as error:
        raise UsageError(
            f"{state.process_file}: not a record of this launcher; stop the server by hand and delete the file"
        ) from error


def environment(plan: Plan, state: ServiceState, vllm: Path, inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the server's environment: the user's, less what would change the plan, plus the plan's and its secrets."""
    from launcher.render import SECRETS

    kept = {name: value for name, value in inherited.items() if not _NOT_INHERITED.match(name)}
    secrets = {
        variable: (state.secrets_dir / name).read_text(encoding="utf-8").strip()
        for name, variable in SECRETS.items()
        if (state.secrets_dir / name).is_file()
    }
    fixes = {"GRAFT_REQUIRE": plan.required_fixes, "GRAFT_DISABLE": plan.disabled_fixes}
    caches = cache_root()
    return {
        **kept,
        # Compilers that torch calls, such as ninja, come with the engine.
        "PATH": os.pathsep.join((str(vllm.parent), kept.get("PATH", os.defpath))),
        "PYTHONUNBUFFERED": "1",
        "HF_HOME": str(caches / "huggingface"),
        "VLLM_CACHE_ROOT": str(caches / "vllm"),
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
        **{variable.name: variable.value for variable in plan.environment},
        "GRAFT_FACTS": str(state.facts_file),
        "GRAFT_REPORTS": str(state.reports_dir),
        **{name: ",".join(ids) for name, ids in fixes.items() if ids},
        **secrets,
    }


def argv_digest(argv: tuple[str, ...]) -> str:
    """Return the SHA-256 of a command line, in hex."""
    return hashlib.sha256("\0".join(argv).encode()).hexdigest()


def local_address(host: str) -> str:
    """Return the address that reaches a server bound to `host` from this machine."""
    return {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)


def _refuse_taken_port(port: int) -> None:
    from launcher.host import system

    listener = system.listeners((port,), {}).get(str(port))
    if listener is None:
        return
    holder = f"by {listener.process or 'a process'} ({listener.pid})" if listener.pid else "by another user's process"
    raise Refused(f"port {port} is taken {holder}; stop it, or set serve.port in the profile")


def _text(line: bytes) -> str:
    return _COLOURS.sub("", line.decode("utf-8", errors="replace").rstrip("\r\n"))


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def _start_ticks(pid: int) -> int | None:
    """Return field 22 of /proc/PID/stat; unlike a wall-clock time it does not move when the clock is set."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The second field is the name in parentheses, and may hold spaces and parentheses itself.
    return int(stat.rpartition(")")[2].split()[19])


def _identity(pid: int) -> tuple[str, int] | None:
    ticks = _start_ticks(pid)
    return None if ticks is None else (_boot_id(), ticks)


def _is_zombie(pid: int) -> bool:
    """Whether a process ended and nobody took its exit code; not while threads of it still run and hold its port."""
    try:
        process = psutil.Process(pid)
        return process.status() == psutil.STATUS_ZOMBIE and process.num_threads() <= 1
    except psutil.NoSuchProcess:
        return True


def _session(session_id: int) -> Iterator[psutil.Process]:
    for pid in psutil.pids():
        try:
            if os.getsid(pid) == session_id and not _is_zombie(pid):
                yield psutil.Process(pid)
        except (ProcessLookupError, PermissionError, psutil.NoSuchProcess):
            continue


def _is_orphan(process: psutil.Process, leader_ticks: int, folder: Path) -> bool:
    ticks = _start_ticks(process.pid)
    try:
        return ticks is not None and ticks >= leader_ticks and Path(process.cwd()) == folder.resolve()
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False


def _signal(process: psutil.Process, number: signal.Signals) -> None:
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        return
