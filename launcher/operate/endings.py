"""What the end of an engine means: start it again, smaller or as planned, or stop for good. Pure."""

from dataclasses import dataclass

from launcher.operate.budget import Budget
from launcher.operate.service_state import Mode, ServiceStatus

MEMORY_CAUSES = frozenset({"serving-oom", "host-oom-killed", "cudagraph-capture-oom", "wsl-host-memory"})
"""Ends for lack of memory: a restart lasts until the next large request, smaller settings last longer."""
DEATHS_UNTIL_DEGRADED = 2
DEATHS_UNTIL_STOP = 4
"""Two of them with the smaller settings."""
BY_WATCHDOG = "engine-hang"


@dataclass(frozen=True)
class End:
    """How an engine ended, and what is known about why."""

    exit_code: int
    """Negative for the signal that ended it."""
    has_served: bool
    """It, or one before it since `graft up`, got as far as serving."""
    at_s: float
    cause: str | None = None
    """A key of `launcher.problems`, by the rules of the diagnosis; None where none knows it."""
    message: str = ""
    remedy: str | None = None
    restart_helps: bool = True
    """By the same rules; an unknown cause may be helped by a restart."""


@dataclass(frozen=True)
class Again:
    """Start the engine again."""

    wait_s: float
    mode: Mode
    reason: str


@dataclass(frozen=True)
class Stop:
    """Do not start it again."""

    reason: str


def judge(end: End, status: ServiceStatus, budget: Budget, *, can_degrade: bool) -> Again | Stop:
    """Return what follows from an end.

    Args:
        status: with this end counted among `ends_s` and, where it is one, `memory_deaths`.
        can_degrade: there are smaller settings.
    """
    why = reason_of(end)
    if not end.has_served:
        return Stop(f"{why}; a first start that fails is not tried again")
    is_memory = end.cause in MEMORY_CAUSES
    if not end.restart_helps and not is_memory:
        return Stop(f"{why}; starting again does not help")
    if is_memory and status.memory_deaths >= DEATHS_UNTIL_STOP:
        return Stop(f"{why}, for the {_nth(status.memory_deaths)} time, smaller settings or not")
    wait_s = budget.wait_s(status.ends_s, end.at_s)
    if wait_s is None:
        times = f"{len(status.ends_s)} times in {budget.within_s / 60:g} minutes"
        return Stop(f"{why}; it ended {times}, and {budget.restarts} restarts are allowed")
    mode: Mode = status.mode
    if is_memory and can_degrade and status.memory_deaths >= DEATHS_UNTIL_DEGRADED:
        mode = "degraded"
    return Again(wait_s, mode, why)


def reason_of(end: End) -> str:
    """Return why it ended, as the beginning of a sentence."""
    if end.message:
        return f"{end.message[0].lower()}{end.message[1:]}"
    if end.exit_code < 0:
        return f"the engine was ended by signal {-end.exit_code}"
    return f"the engine ended with exit code {end.exit_code}"


def _nth(count: int) -> str:
    return {2: "second", 3: "third"}.get(count, f"{count}th")
