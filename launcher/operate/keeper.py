"""Keep an engine running: the main process of the engine's container, or of the session of a local server.

It starts the engine, passes its output on, and when the engine ends says why, and starts it again or does not.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from launcher.operate import settings_file, tail
from launcher.operate.budget import Budget
from launcher.operate.endings import BY_WATCHDOG, MEMORY_CAUSES, Again, End, Stop, judge, reason_of
from launcher.operate.engine import Engine, adopt_orphans, end_with_parent
from launcher.operate.events import EventLog, Kind, event
from launcher.operate.service_state import Mode, ServiceStatus, StateFile
from launcher.operate.signs import Start, nvidia_smi_error, oom_kills

WATCHDOG_AGAIN_S = 1.0


def _has_normal(commands: dict[Mode, tuple[str, ...]]) -> dict[Mode, tuple[str, ...]]:
    if not commands.get("normal"):
        raise ValueError("a command for the mode normal is needed")
    return commands


class KeeperSettings(BaseModel):
    """What a keeper is told, as JSON."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    service: str
    """The profile's name, for events."""
    folder: Path
    """Where service.json, events and last words go."""
    commands: Annotated[dict[Mode, tuple[str, ...]], AfterValidator(_has_normal)]
    """`normal`, and `degraded` where there are smaller settings."""
    health_url: str | None = None
    """Answers with 200 once the engine serves; None: its log is believed."""
    budget: Budget = Budget()
    watchdog: tuple[str, ...] = ()
    """Started beside the engine; empty where something else starts it."""
    linger_s: float = 0.0
    """After the last event: until the watchdog has told the webhook."""
    gpus: tuple[str, ...] | None = None
    """UUIDs of the engine's GPUs; None: it uses none; empty: all that it sees."""
    context: dict[str, Any] = Field(default_factory=dict)
    """What the plan says, for the diagnosis: fields of `launcher.evidence.Context`."""


class Keeper:
    """Runs engines one after the other."""

    def __init__(self, settings: KeeperSettings, out: int = 1) -> None:
        self._settings, self._out = settings, out
        self._state = StateFile(settings.folder)
        self._events = EventLog(settings.folder, out)
        self._engine: Engine | None = None
        self._watchdog: subprocess.Popen[bytes] | None = None
        self._watchdog_s = float("-inf")
        self._is_stopping = False
        self._log_fails = False
        self._has_served = False
        """Since `graft up`, by this engine or one before it."""
        self._ended_s: float | None = None
        """When the engine ended that is being replaced; None where none is."""

    def run(self) -> int:
        """Keep engines running; return the exit code of the last, or 0 after giving up."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        adopt_orphans()
        status = self._taken_over()
        self._has_served = status.phase != "loading"
        while True:
            exit_code, words = self._one_run()
            if self._is_stopping:
                self._change(phase="stopped", reason="stopped on request", engine_pid=None, next_start_s=None)
                return self._over(exit_code)
            follows = self._after(self._end(exit_code, words))
            if isinstance(follows, Stop):
                self._pause(self._settings.linger_s)
                # What gives up on purpose is not started again by others; a first start fails as the engine did.
                return self._over(0 if self._has_served else exit_code)
            self._pause(follows.wait_s)
            if self._is_stopping:
                self._change(phase="stopped", reason="stopped on request", next_start_s=None)
                return self._over(exit_code)

    def _taken_over(self) -> ServiceStatus:
        """Return the status to begin with: a fresh one, or that of a keeper that died while it kept."""
        before = self._state.read()
        if before.phase not in ("serving", "restarting"):
            return self._state.change(lambda status: ServiceStatus(since_s=time.time()))
        now_s = self._ended_s = time.time()
        ends = (*self._settings.budget.recent(before.ends_s, now_s), now_s)
        reason = "the process that keeps the engine was ended"
        self._tell("engine-ended", reason)
        return self._change(
            phase="restarting", reason=reason, cause=None, ends_s=ends, restarts=before.restarts + 1, engine_pid=None
        )

    def _one_run(self) -> tuple[int, tail.Tail]:
        """Start an engine, follow it to its end, and return its exit code and its last words."""
        status, words = self._state.read(), tail.Tail()
        self._oom_kills = oom_kills()
        commands = self._settings.commands
        # A status of before may name settings that this plan has not.
        mode = status.mode if status.mode in commands else "normal"
        self._engine = engine = Engine(commands[mode])
        self._started_s = time.time()
        self._change(engine_pid=engine.pid, mode=mode, next_start_s=None)
        self._tell("engine-started", f"process {engine.pid}, {mode} settings")
        if self._is_stopping:
            engine.signal_leader(signal.SIGTERM)
        start = Start(self._settings.health_url)

        def on_output(data: bytes) -> None:
            words.add(data)
            self._write(data)
            start.read(data)

        def on_tick() -> None:
            self._keep_watchdog()
            if start.has_ended():
                self._serves()

        exit_code = engine.follow(on_output, on_tick)
        self._engine = None
        return exit_code, words

    def _serves(self) -> None:
        took_s = None if self._ended_s is None else round(time.time() - self._ended_s, 2)
        self._ended_s, self._has_served = None, True
        status = self._change(phase="serving", cause=None, remedy=None)
        if not status.is_degraded:
            self._change(reason="")
        again = "" if took_s is None else f" again, {took_s:.0f} s after it ended"
        mode = " with the smaller settings" if status.is_degraded else ""
        self._tell("engine-serving", f"the engine serves{again}{mode}", took_s=took_s)

    def _end(self, exit_code: int, words: tail.Tail) -> End:
        """Return how the engine ended and why; its last words are saved."""
        tail.save(words, self._settings.folder)
        now_s = time.time()
        status = self._state.read()
        found = self._diagnosis(exit_code, words, status)
        # An engine that dies slowly may have been ended by the watchdog: what it said itself comes first.
        if found is not None:
            how = (found.cause, found.message, found.remedy, found.restart_helps)
            return End(exit_code, self._has_served, now_s, *how)
        if status.cause == BY_WATCHDOG:
            return End(exit_code, self._has_served, now_s, BY_WATCHDOG, status.reason)
        return End(exit_code, self._has_served, now_s)

    def _diagnosis(self, exit_code: int, words: tail.Tail, status: ServiceStatus) -> Any:
        # Late: most keepers never need the rules, and they are half of the memory.
        from launcher.diagnose import diagnose
        from launcher.evidence import ContainerState, Context, Evidence
        from launcher.host import kernel

        state = ContainerState(
            status="exited",
            exit_code=exit_code,
            oom_killed=oom_kills() > self._oom_kills,
            restart_count=status.restarts,
        )
        nvml_error = None if self._settings.gpus is None else nvidia_smi_error(self._settings.gpus)
        known = {**self._settings.context, "container": state, "nvml_error": nvml_error}
        context = Context.model_validate(known)
        return diagnose(Evidence(words.text(), context, kernel.own_log(self._started_s)))

    def _after(self, end: End) -> Again | Stop:
        """Count an end, decide what follows, and tell it."""
        self._ended_s = end.at_s
        is_memory = end.cause in MEMORY_CAUSES
        counted = self._state.change(
            lambda status: status.model_copy(
                update={
                    "ends_s": (*self._settings.budget.recent(status.ends_s, end.at_s), end.at_s),
                    "memory_deaths": status.memory_deaths + is_memory,
                    "engine_pid": None,
                }
            )
        )
        told = {"cause": end.cause, "remedy": end.remedy}
        self._tell("engine-ended", reason_of(end), **told)
        follows = judge(end, counted, self._settings.budget, can_degrade="degraded" in self._settings.commands)
        if isinstance(follows, Stop):
            self._change(phase="stopped", reason=follows.reason, next_start_s=None, **told)
            self._tell("service-stopped", follows.reason, **told)
            return follows
        is_news = follows.mode == "degraded" and not counted.is_degraded
        reason = f"{follows.reason}, {counted.memory_deaths} times for lack of memory" if is_news else follows.reason
        self._change(
            phase="restarting",
            mode=follows.mode,
            reason=reason,
            next_start_s=end.at_s + follows.wait_s,
            restarts=counted.restarts + 1,
            **told,
        )
        if is_news:
            self._tell("service-degraded", f"{reason}: it is started with the smaller settings", **told)
        self._tell("engine-restarting", f"in {follows.wait_s:g} s")
        return follows

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self._is_stopping = True
        if self._engine is not None:
            self._engine.signal_leader(signal.SIGTERM)

    def _pause(self, seconds: float) -> None:
        deadline_s = time.monotonic() + seconds
        while not self._is_stopping and (left_s := deadline_s - time.monotonic()) > 0:
            self._keep_watchdog()
            time.sleep(min(0.2, left_s))

    def _keep_watchdog(self) -> None:
        """Start the watchdog, again where it ended; not in a hurry, should it end each time."""
        if not self._settings.watchdog or (self._watchdog is not None and self._watchdog.poll() is None):
            return
        if time.monotonic() - self._watchdog_s < WATCHDOG_AGAIN_S or self._is_stopping:
            return
        self._watchdog_s = time.monotonic()
        self._watchdog = subprocess.Popen(
            self._settings.watchdog, stdin=subprocess.DEVNULL, stdout=self._out, preexec_fn=end_with_parent
        )

    def _over(self, exit_code: int) -> int:
        if self._watchdog is not None and self._watchdog.poll() is None:
            self._watchdog.terminate()
            self._watchdog.wait()
        return exit_code

    def _write(self, data: bytes) -> None:
        """Pass output on; a log that takes none must not stop the engine."""
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self._out, view) :]
        except OSError as error:
            if not self._log_fails:
                self._log_fails = True
                self._tell("log-not-written", f"the log takes no more: {error.strerror}; the engine goes on")
            return
        self._log_fails = False

    def _change(self, **update: object) -> ServiceStatus:
        return self._state.change(lambda status: status.model_copy(update=update))

    def _tell(self, kind: Kind, message: str, **more: object) -> None:
        self._events.write(event(kind, self._settings.service, message, **more))


def main(argv: Sequence[str]) -> int:
    """Keep the engine that a settings file describes; ends as the engine did, by the same signal where it was one."""
    settings = settings_file.read("keep", KeeperSettings, argv)
    if settings is None:
        return 2
    try:
        exit_code = Keeper(settings).run()
    except (FileNotFoundError, PermissionError) as error:
        print(f"keep: the engine cannot be started: {error}", file=sys.stderr)
        return 127
    if exit_code < 0:
        signal.signal(-exit_code, signal.SIG_DFL) if -exit_code != signal.SIGKILL else None
        os.kill(os.getpid(), -exit_code)
    return exit_code
