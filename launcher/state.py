"""Where a service's state lies on disk: `$GRAFT_STATE`, else `.graft/` in the checkout."""

import os
from dataclasses import dataclass
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent
"""The checkout that the launcher is installed from (an editable install)."""


def state_root() -> Path:
    """Return the folder that holds one folder per service."""
    configured = os.environ.get("GRAFT_STATE")
    return Path(configured).expanduser().resolve() if configured else CHECKOUT / ".graft"


def cache_root() -> Path:
    """Return the folder of downloads and converted weights; deleting it costs time, never data."""
    return state_root() / "cache"


@dataclass(frozen=True)
class ServiceState:
    """The paths of one service, named by its profile."""

    root: Path

    @classmethod
    def of(cls, profile_name: str) -> "ServiceState":
        return cls(state_root() / profile_name)

    @property
    def compose_file(self) -> Path:
        return self.root / "compose.yaml"

    @property
    def plan_file(self) -> Path:
        return self.root / "plan.json"

    @property
    def facts_file(self) -> Path:
        return self.root / "facts.json"

    @property
    def reports_dir(self) -> Path:
        return self.root / "reports"

    @property
    def secrets_dir(self) -> Path:
        return self.root / "secrets"

    @property
    def logs_dir(self) -> Path:
        """Logs of the running server (host runtime) and logs saved from failed starts."""
        return self.root / "logs"

    @property
    def process_file(self) -> Path:
        """Written by the host runtime: pid, start time of the process, port, run id."""
        return self.root / "process.json"

    @property
    def operate_dir(self) -> Path:
        """What keeper, watchdog and gateway share: `service.json`, events, last words; others write here too."""
        return self.root / "operate" / "shared"
