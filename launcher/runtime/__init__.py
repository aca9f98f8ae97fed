"""The two runtimes, Docker Compose and a local process, behind one interface that a start is followed through."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

Status = Literal["absent", "created", "running", "restarting", "exited"]
Health = Literal["starting", "healthy", "unhealthy"]


@dataclass(frozen=True)
class RunState:
    """What the runtime knows about the server's main process."""

    status: Status
    exit_code: int | None = None
    """Exit code of the last run; negative for the signal that ended it; None while running or where unknown."""
    restart_count: int = 0
    oom_killed: bool = False
    health: Health | None = None
    """Verdict of the runtime's own health check; None where it has none."""

    @property
    def is_alive(self) -> bool:
        """Whether this run can still become ready: a restart counts as the end of the run that was started."""
        return self.status in ("created", "running") and self.restart_count == 0


@dataclass(frozen=True)
class Work:
    """What the server's processes have done so far; two samples tell a busy server from a hanging one."""

    cpu_s: float
    read_bytes: int
    """Bytes read from storage."""


class Service(Protocol):
    """One started server: a Compose project or a local process."""

    @property
    def base_url(self) -> str:
        """URL that clients on this machine use, without a path, such as `http://127.0.0.1:8000`."""

    def state(self) -> RunState:
        """Ask the runtime; answers in well under a second and never waits for the server."""

    def new_log_lines(self) -> tuple[str, ...]:
        """Return the lines written since the last call (on the first: since the start); never waits.

        A line ends at a newline or a carriage return (progress bars) and carries neither it nor colour codes.
        """

    def log(self) -> Iterator[str]:
        """Yield every line of this start from its beginning, for saving and diagnosis."""

    def work(self) -> Work | None:
        """Return the sum over the server's live processes; None where the runtime cannot tell."""

    def stop(self) -> None:
        """Stop the server and everything it started; returns when the port is free again; twice is once."""
