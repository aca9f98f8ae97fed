"""How often an engine is started again, and after how long: the one budget of restarts. Pure."""

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict, Field


class Budget(BaseModel):
    """Restarts in a span of time; each one waits twice as long as the one before."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    restarts: int = Field(default=5, ge=0)
    within_s: float = Field(default=3600.0, gt=0)
    first_wait_s: float = Field(default=2.0, ge=0)
    longest_wait_s: float = Field(default=120.0, ge=0)

    def recent(self, ends_s: Sequence[float], now_s: float) -> tuple[float, ...]:
        """Return the ends that still count."""
        return tuple(end_s for end_s in ends_s if now_s - end_s < self.within_s)

    def wait_s(self, ends_s: Sequence[float], now_s: float) -> float | None:
        """Return the seconds to wait before the next start; None where the budget is exhausted.

        Args:
            ends_s: when the engine ended without being asked to, the end at hand included.
        """
        count = len(self.recent(ends_s, now_s))
        if count > self.restarts:
            return None
        return float(min(self.longest_wait_s, self.first_wait_s * 2 ** max(0, count - 1)))
