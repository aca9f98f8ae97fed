"""Server-sent events on their way through: whole events only, and an end that a client can read. Pure."""

import json
from dataclasses import dataclass, field

from launcher.operate.gateway.replies import DEGRADED
from launcher.operate.gateway.routes import Ending

DONE = b"data: [DONE]\n\n"
MOST_HELD_BYTES = 1 << 20
"""An event without an end is passed on in pieces from here on: memory is bounded, whatever comes."""
_LAST_EVENTS = (
    b"event: response.completed",
    b"event: response.incomplete",
    b"event: response.failed",
    b"event: error",
)


@dataclass
class EventStream:
    """Cuts what the engine sends at the ends of events, so that a broken stream never ends inside one."""

    ending: Ending
    _held: bytes = b""
    _last: bytes = b""
    _is_whole: bool = field(default=True)
    """Whether what was passed on ends with a whole event."""

    def feed(self, data: bytes) -> bytes:
        """Return what can be passed on now."""
        text = self._held + data
        end = text.rfind(b"\n\n")
        if end >= 0:
            passed, self._held = text[: end + 2], text[end + 2 :]
            self._last, self._is_whole = passed, True
        elif len(text) > MOST_HELD_BYTES:
            passed, self._held, self._is_whole = text, b"", False
        else:
            passed, self._held = b"", text
        return passed

    @property
    def is_finished(self) -> bool:
        """Whether the last event that was passed on says that nothing more comes."""
        if self._held or not self._is_whole:
            return False
        if self.ending == "done":
            return self._last.endswith(DONE)
        return self._last[:-2].rpartition(b"\n\n")[2].partition(b"\n")[0] in _LAST_EVENTS

    def broken_end(self, reason: str) -> bytes:
        """Return the events that end a stream which broke off; what was held of a half event is dropped."""
        gap = b"" if self._is_whole else b"\n\n"
        message = f"The answer broke off: {reason}."
        if self.ending == "events":
            document = {"type": "error", "code": "stream_interrupted", "message": message, "param": None}
            return gap + b"event: error\n" + _event({**document, "status": DEGRADED, "reason": reason})
        error = {"message": message, "type": "service_unavailable", "param": None, "code": "stream_interrupted"}
        return gap + _event({"error": error, "status": DEGRADED, "reason": reason}) + DONE


def _event(document: dict[str, object]) -> bytes:
    return b"data: " + json.dumps(document).encode() + b"\n\n"
