"""Tell a webhook what happened: Slack's form, `{"text": ...}`; bounded, and never in the way of the watchdog."""

import json
import queue
import threading
import time
import urllib.request
from collections.abc import Callable, Sequence
from http.client import HTTPException
from pathlib import Path

from launcher.operate.events import TOLD, Event

TIMEOUT_S = 5.0
WAITS_S = (1.0, 4.0)
"""Before the second and the third attempt."""
MAX_WAITING = 50
_LONGEST_URL = 2048


def url_of(file: Path) -> str | None:
    """Return the address in a secret's file; None where there is none, or nothing that is one."""
    try:
        url = file.read_text(encoding="utf-8").strip()
    except OSError:
        return None
    is_one = url.startswith(("https://", "http://")) and len(url.split()) == 1 and len(url) <= _LONGEST_URL
    return url if is_one else None


def text_of(one: Event) -> str:
    """Return an event as the text of a message."""
    parts = [f"graft {one.service}: {one.message}"]
    parts += [f"cause: {one.cause}"] if one.cause else []
    parts += [f"-> {one.remedy}"] if one.remedy else []
    return "\n".join(parts)


class Webhook:
    """Sends events from a thread of its own; when too many wait, the oldest are dropped."""

    def __init__(
        self,
        url: str,
        on_failure: Callable[[str], None],
        timeout_s: float = TIMEOUT_S,
        waits_s: Sequence[float] = WAITS_S,
    ) -> None:
        """Args: on_failure: told the kind of error, never the address, when an event is given up."""
        self._url, self._on_failure = url, on_failure
        self._timeout_s, self._waits_s = timeout_s, waits_s
        self._waiting: queue.Queue[Event] = queue.Queue(MAX_WAITING)
        threading.Thread(target=self._run, daemon=True, name="webhook").start()

    def tell(self, one: Event) -> None:
        """Hand over an event; returns at once."""
        if one.kind not in TOLD:
            return
        while True:
            try:
                self._waiting.put_nowait(one)
                return
            except queue.Full:
                self._drop()

    def _drop(self) -> None:
        try:
            self._waiting.get_nowait()
        except queue.Empty:
            return

    def _run(self) -> None:
        while True:
            self._send(self._waiting.get())

    def _send(self, one: Event) -> None:
        body = json.dumps({"text": text_of(one)}).encode()
        request = urllib.request.Request(self._url, body, {"Content-Type": "application/json"}, method="POST")
        error = ""
        for wait_s in (0.0, *self._waits_s):
            time.sleep(wait_s)
            try:
                with urllib.request.urlopen(request, timeout=self._timeout_s):
                    return
            except (OSError, HTTPException, ValueError) as failure:
                # Its text may hold the address, which is a secret.
                error = type(failure).__name__
        self._on_failure(error)
