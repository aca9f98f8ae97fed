"""What the gateway itself says: every refusal as an error of the OpenAI API. Pure.

One table for the edge, whose configuration is rendered from it, and for the relay.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

DEGRADED = "degraded"


@dataclass(frozen=True)
class Refusal:
    """One kind of refusal."""

    status: int
    """HTTP status."""
    code: str
    message: str
    type: str = "invalid_request_error"
    retry_after_s: int | None = None
    reason: str | None = None
    """Set where the service cannot serve now: the body then says `"status": "degraded"` and this reason."""

    def body(self) -> dict[str, Any]:
        """Return the JSON document."""
        error = {"message": self.message, "type": self.type, "param": None, "code": self.code}
        return {"error": error} if self.reason is None else {"error": error, "status": DEGRADED, "reason": self.reason}

    def text(self) -> str:
        """Return the body as one line of JSON."""
        return json.dumps(self.body())

    def headers(self) -> Mapping[str, str]:
        """Return the headers besides those of the content."""
        return {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}


BAD_REQUEST = Refusal(400, "bad_request", "The request is not well-formed HTTP, or its headers are too large.")
BAD_FORM = Refusal(400, "bad_request", "The request line must be METHOD /path, with one Host and no method override.")
NO_KEY = Refusal(401, "invalid_api_key", "Send a known API key: Authorization: Bearer KEY. `graft keys add` makes one.")
UNKNOWN_ROUTE = Refusal(404, "unknown_url", "No such method and path here; see docs/gateway.md for those there are.")
TIMEOUT = Refusal(408, "request_timeout", "The request did not arrive in time.", "timeout")
TOO_LARGE = Refusal(413, "request_too_large", "The request's body is larger than this service takes.")
RATE = Refusal(429, "rate_limit_exceeded", "This API key has used its requests of this minute.", "rate_limit_error")
CONCURRENCY = Refusal(
    429, "concurrency_limit_exceeded", "This API key has as many requests under way as it may.", "rate_limit_error", 1
)
KV_PRESSURE = Refusal(
    429, "overloaded_kv_cache", "The KV cache is nearly full; try again shortly.", "server_overloaded", 5
)
QUEUE = Refusal(429, "overloaded_queue", "Too many requests wait already; try again shortly.", "server_overloaded", 2)
BODIES = Refusal(429, "overloaded_bodies", "Too many large requests arrive at once.", "server_overloaded", 1)
RELAY_AWAY = Refusal(
    503,
    "gateway_restarting",
    "A part of the gateway is restarting; try again shortly.",
    "service_unavailable",
    2,
    "the relay of the gateway is restarting",
)
SILENT = Refusal(504, "engine_timeout", "The engine gave no answer in time.", "timeout", None, "the engine is silent")


def unavailable(reason: str, retry_after_s: int, *, loading: bool = False) -> Refusal:
    """Return the answer while no engine serves."""
    code = "engine_loading" if loading else "engine_unavailable"
    message = f"The model is not served right now: {reason}."
    return Refusal(503, code, message, "service_unavailable", retry_after_s, reason)
