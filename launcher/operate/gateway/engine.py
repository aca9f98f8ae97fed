"""What the relay knows of the engine behind it: whether it serves, why not, and how loaded it is."""

import asyncio
import time
from dataclasses import dataclass
from typing import Literal

import aiohttp

from launcher.operate.gateway.admission import Admission, Bounds, read_metrics
from launcher.operate.gateway.replies import KV_PRESSURE, QUEUE, Refusal, unavailable
from launcher.operate.gateway.settings import Settings
from launcher.operate.service_state import ServiceStatus, StatusReader

Health = Literal["unknown", "ready", "gone"]
POLL_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Look:
    """What the service is doing, as clients are told."""

    status: Literal["ready", "loading", "degraded"]
    is_serving: bool
    reason: str = ""
    retry_after_s: int = 1

    def refusal(self) -> Refusal:
        """Return the answer for a service that does not serve."""
        return unavailable(self.reason, self.retry_after_s, loading=self.status == "loading")


def look(written: ServiceStatus, health: Health, was_ready: bool, now_s: float, loading_retry_s: int) -> Look:
    """Put together what the watchdog wrote and what the engine itself answers; the engine's answer comes first. Pure.

    Args:
        now_s: seconds since the epoch.
    """
    if health == "ready" and written.phase != "stopped":
        if written.is_degraded:
            return Look("degraded", True, _sentence(written) or "smaller settings are in force")
        return Look("ready", True)
    retry_s = written.retry_after_s(now_s)
    if written.phase == "stopped":
        # Nobody starts it again by itself: a client that asks often gains nothing.
        return Look("degraded", False, _sentence(written) or "the engine ended and is not started again", 300)
    if written.phase == "restarting" or was_ready:
        known = retry_s if written.phase == "restarting" and retry_s is not None else loading_retry_s
        return Look("degraded", False, _sentence(written) or "the engine ended and is being restarted", known)
    return Look("loading", False, "the model is being loaded", loading_retry_s)


def _sentence(written: ServiceStatus) -> str:
    return written.reason.strip().rstrip(".")


class Engine:
    """The engine as seen by polling it; requests that fail report here, too."""

    def __init__(self, settings: Settings, session: aiohttp.ClientSession) -> None:
        self.admission = Admission()
        self.kv_usage = 0.0
        self.waiting = 0
        self.health: Health = "unknown"
        self.was_ready = False
        self._settings = settings
        self._session = session
        self._status = StatusReader(settings.state_dir)
        self._bounds = Bounds(max_waiting=settings.max_waiting)
        self._answered_s = time.monotonic()

    def look(self) -> Look:
        """Return what the service is doing now."""
        return look(self._status.read(), self.health, self.was_ready, time.time(), self._settings.loading_retry_s)

    def refusal(self) -> Refusal | None:
        """Return why no new request is let in; None: it is."""
        if "kv-cache" in self.admission.closed_by:
            return KV_PRESSURE
        return QUEUE if "queue" in self.admission.closed_by else None

    def is_gone(self) -> None:
        """Note that a request found nobody there."""
        self.health = "gone"
        self.admission = Admission()

    async def watch(self) -> None:
        """Poll until cancelled."""
        while True:
            await self.poll()
            await asyncio.sleep(self._settings.poll_interval_s)

    async def poll(self) -> None:
        """Look once at /health and /metrics."""
        try:
            status, _ = await self._get("/health")
        except TimeoutError:
            # Busy, or stopped: the watchdog sees progress and decides; here only a long silence counts.
            if time.monotonic() - self._answered_s > self._settings.unresponsive_s:
                self.is_gone()
            return
        except (aiohttp.ClientError, OSError):
            self.is_gone()
            return
        self._answered_s = time.monotonic()
        if status != 200:
            self.is_gone()
            return
        self.health, self.was_ready = "ready", True
        try:
            status, text = await self._get("/metrics")
        except (aiohttp.ClientError, OSError, TimeoutError):
            return
        sample = read_metrics(text) if status == 200 else None
        if sample is not None:
            self.kv_usage, self.waiting = sample.kv_usage, sample.waiting
            self.admission = self.admission.after(sample, time.monotonic(), self._bounds)

    async def _get(self, path: str) -> tuple[int, str]:
        timeout = aiohttp.ClientTimeout(total=POLL_TIMEOUT_S)
        async with self._session.get(self._settings.upstream + path, timeout=timeout) as answer:
            return answer.status, await answer.text()
