"""Watch an engine's progress and end it when it is stuck: a service of the compose project, or a process on the host.

It needs no Docker socket: it shares the engine's PID namespace and user, and signals its process group.
"""

import json
import os
import re
import signal
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from launcher.operate import settings_file
from launcher.operate.endings import BY_WATCHDOG
from launcher.operate.events import EventLog, Follower, Kind, event
from launcher.operate.service_state import ServiceStatus, StateFile
from launcher.operate.watchdog_state import Ask, Counters, Kill, Probe, Sample, Wait, Watch, WatchSettings, look
from launcher.operate.webhook import Webhook, url_of

METRICS_TIMEOUT_S = 5.0
EVENTS_EVERY_S = 1.0
SLEPT_S = 60.0
"""A look that comes later than planned by so much: the machine slept, and the time before says nothing."""
_MAX_BYTES = 8 << 20
_COUNTER = re.compile(
    r"^vllm:(iteration_tokens_total_count|iteration_tokens_total_sum|num_requests_running|num_requests_waiting)"
    r"(?:\{[^}]*\})? (\S+)$",
    re.MULTILINE,
)


class WatchdogSettings(BaseModel):
    """What a watchdog is told, as JSON; secrets are in files that it names."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    service: str
    folder: Path
    base_url: str
    """Of the engine itself, such as `http://vllm:8000`."""
    served_name: str
    api_key_file: Path | None = None
    webhook_file: Path | None = None
    watch: WatchSettings = WatchSettings()


class Server:
    """The engine's HTTP server, asked within bounds."""

    def __init__(self, base_url: str, served_name: str, api_key: str | None) -> None:
        self._base_url, self._served_name = base_url, served_name
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        # Proxies are for other machines.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def counters(self) -> Counters | None:
        """Return the counters; None where they did not come in time or are not all there."""
        request = urllib.request.Request(f"{self._base_url}/metrics", headers=self._headers)
        try:
            with self._opener.open(request, timeout=METRICS_TIMEOUT_S) as answer:
                return counters_in(answer.read(_MAX_BYTES).decode("utf-8", errors="replace"))
        except (OSError, HTTPException, ValueError):
            return None

    def probe(self, timeout_s: float) -> Probe:
        """Ask for one token."""
        body = {"model": self._served_name, "prompt": "1", "max_tokens": 1, "temperature": 0}
        request = urllib.request.Request(
            f"{self._base_url}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json", **self._headers},
            method="POST",
        )
        try:
            with self._opener.open(request, timeout=timeout_s) as answer:
                answer.read(_MAX_BYTES)
                return "answered"
        except urllib.error.HTTPError as error:
            error.close()
            return "refused" if error.code < 500 else "failed"
        except (OSError, HTTPException, ValueError):
            return "failed"


def counters_in(text: str) -> Counters | None:
    """Return the counters in a page of Prometheus, summed over the engine's parts; None unless all are there."""
    sums: dict[str, float] = {}
    for name, value in _COUNTER.findall(text):
        try:
            sums[name] = sums.get(name, 0.0) + float(value)
        except ValueError:
            return None
    if len(sums) < 4:
        return None
    return Counters(
        steps=sums["iteration_tokens_total_count"],
        tokens=sums["iteration_tokens_total_sum"],
        running=sums["num_requests_running"],
        waiting=sums["num_requests_waiting"],
    )


class Watchdog:
    """Looks, decides by `watchdog_state.look`, acts."""

    def __init__(self, settings: WatchdogSettings, server: Server, out: int = 1) -> None:
        self._settings, self._server = settings, server
        self._state = StateFile(settings.folder)
        self._events = EventLog(settings.folder, out)
        self._watch = Watch()
        self._was_refused = False

    def look(self) -> None:
        """Look once, and do what follows."""
        sample = self._sample()
        self._watch, action = look(self._watch, sample, self._settings.watch)
        if isinstance(action, Ask):
            sample = self._sample(self._server.probe(self._settings.watch.probe_timeout_s))
            self._watch, action = look(self._watch, sample, self._settings.watch)
        if sample.probe == "refused" and not self._was_refused:
            self._tell("probe-refused", "the server refuses a request for one token; it answers, and is left alone")
        self._was_refused = sample.probe == "refused"
        self._record(sample)
        if isinstance(action, Kill):
            self._kill(action)
        elif isinstance(action, Wait) and action.struck:
            self._tell("engine-stalled", f"{action.struck} ({self._watch.strikes} of {self._settings.watch.strikes})")

    def forget(self) -> None:
        """Begin anew: the time since the last look says nothing."""
        self._watch = Watch(acted_on=self._watch.acted_on)

    def _sample(self, probe: Probe | None = None) -> Sample:
        status = self._state.read()
        counters = self._server.counters() if status.phase == "serving" else None
        return Sample(time.time(), status.phase, status.engine_pid, counters, probe)

    def _record(self, sample: Sample) -> None:
        running = int(sample.counters.running) if sample.counters else 0
        update = {"looked_s": sample.at_s, "progress_s": self._watch.progress_s, "requests_running": running}
        self._state.change(lambda status: status.model_copy(update=update))

    def _kill(self, action: Kill) -> None:
        def mark(status: ServiceStatus) -> ServiceStatus:
            if status.engine_pid != action.engine_pid or status.phase == "stopped":
                return status
            update = {"phase": "restarting", "reason": action.reason, "cause": BY_WATCHDOG, "remedy": None}
            return status.model_copy(update=update)

        if self._state.change(mark).cause != BY_WATCHDOG:
            return
        self._tell("engine-stalled", f"{action.reason}; it is ended", cause=BY_WATCHDOG)
        try:
            # SIGKILL: a stopped process gets no other signal, and one that waits for a GPU takes no notice of it.
            os.killpg(action.engine_pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        except PermissionError:
            self._tell("engine-stalled", "the engine belongs to another user and cannot be ended from here")

    def _tell(self, kind: Kind, message: str, **more: object) -> None:
        self._events.write(event(kind, self._settings.service, message, **more))


def run(settings: WatchdogSettings, out: int = 1) -> None:
    """Watch until ended."""
    events = EventLog(settings.folder, out)
    webhook = _webhook(settings, events)
    follower = Follower(settings.folder)
    events.write(event("watchdog-started", settings.service, f"looks every {settings.watch.every_s:g} s"))
    api_key = settings_file.read_key(settings.api_key_file)
    watchdog = Watchdog(settings, Server(settings.base_url, settings.served_name, api_key), out)
    due_s = time.monotonic()
    while True:
        late_s = time.monotonic() - due_s
        if late_s >= 0:
            if late_s > SLEPT_S:
                watchdog.forget()
            due_s = time.monotonic() + settings.watch.every_s
            watchdog.look()
            due_s = max(due_s, time.monotonic() + 0.1 * settings.watch.every_s)
        for one in follower.new():
            if webhook is not None:
                webhook.tell(one)
        time.sleep(min(EVENTS_EVERY_S, settings.watch.every_s))


def _webhook(settings: WatchdogSettings, events: EventLog) -> Webhook | None:
    url = None if settings.webhook_file is None else url_of(settings.webhook_file)
    if url is None:
        return None

    def give_up(error: str) -> None:
        events.write(event("webhook-failed", settings.service, f"the webhook was not told: {error}"))

    return Webhook(url, give_up)


def main(argv: Sequence[str]) -> int:
    """Watch the engine that a settings file names, until a signal."""
    settings = settings_file.read("watch", WatchdogSettings, argv)
    if settings is None:
        return 2
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(0))
    with suppress(KeyboardInterrupt):
        run(settings)
    return 0
