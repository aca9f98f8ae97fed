"""What the doctor looks at besides the facts that a plan is made from, and what it finds; frozen values."""

from dataclasses import dataclass, field
from typing import Literal

from launcher.diagnose import Diagnosis
from launcher.host.facts import GpuClocks, HostFacts

Verdict = Literal["ok", "warn", "fail", "unknown"]


@dataclass(frozen=True)
class Finding:
    """The answer of one check."""

    check: str
    verdict: Verdict
    message: str
    remedy: str | None = None
    """One thing to do; None where there is nothing."""


@dataclass(frozen=True)
class Limits:
    """What a control group allows; None: no limit, or none that can be read."""

    memory_gib: float | None = None
    cpus: float | None = None
    pids: int | None = None


@dataclass(frozen=True)
class Hub:
    """Whether the model hub answers."""

    endpoint: str
    error: str | None = None
    """None: it answered."""
    clock_skew_s: float | None = None
    """This machine's clock less the hub's."""


@dataclass(frozen=True)
class Shm:
    """The server's /dev/shm."""

    total_mib: float
    free_mib: float | None = None


@dataclass(frozen=True)
class Copy:
    """Data that was copied from one GPU to another, and compared."""

    source: int
    target: int
    has_peer_access: bool
    wrong_elements: int


@dataclass(frozen=True)
class Unknown:
    """Something that could not be looked at, and why."""

    reason: str


@dataclass(frozen=True)
class Running:
    """A service that was started."""

    is_alive: bool
    is_healthy: bool
    status: str
    diagnosis: Diagnosis | None
    last_words: tuple[str, ...]
    """Where something failed whose cause no rule knows."""
    operating: tuple[str, ...]
    """What keeper and watchdog say, in sentences."""
    fix_problems: tuple[str, ...] = ()


@dataclass(frozen=True)
class DoctorFacts:
    """All of it."""

    host: HostFacts
    graft: str
    """Version of the launcher."""
    python: str
    clocks: tuple[GpuClocks, ...] = ()
    limits: Limits | Unknown = field(default_factory=lambda: Unknown("not read"))
    """Of the server's container where it runs, else of this process."""
    shm: Shm | Unknown = field(default_factory=lambda: Unknown("not read"))
    hub: Hub | None = None
    container_gpus: tuple[str, ...] | Unknown = field(default_factory=lambda: Unknown("not asked"))
    """UUIDs that a container of the service sees."""
    copies: tuple[Copy, ...] | Unknown = field(default_factory=lambda: Unknown("not asked"))
    running: Running | None = None
    """None: not started."""
