"""The routes that clients may use: one list, for the edge and for the relay; everything else is refused."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

ID = "[A-Za-z0-9_-]{1,128}"
"""What stands for `{id}` in a path."""

Ending = Literal["done", "events"]
"""How a stream of server-sent events ends: with `data: [DONE]`, or with a last event of its own kind."""


@dataclass(frozen=True)
class Route:
    """One method on one path; the path is compared byte by byte, before anything would normalise it."""

    name: str
    """What the access log calls it."""
    method: Literal["GET", "POST"]
    path: str
    """Exact; `{id}` stands for one identifier."""
    generates: bool = False
    """Whether it takes a place in the engine, so that admission decides about it."""
    needs_key: bool = True
    ending: Ending = "done"

    @property
    def pattern(self) -> str | None:
        """Regular expression of the whole path; None where the path is exact."""
        if "{id}" not in self.path:
            return None
        return "^" + "/".join(ID if part == "{id}" else re.escape(part) for part in self.path.split("/")) + "$"

    def fits(self, path: str) -> bool:
        """Whether a raw path is this route's."""
        return path == self.path if self.pattern is None else re.fullmatch(self.pattern, path) is not None


ROUTES = (
    Route("chat-completions", "POST", "/v1/chat/completions", generates=True),
    Route("completions", "POST", "/v1/completions", generates=True),
    Route("responses", "POST", "/v1/responses", generates=True, ending="events"),
    Route("response", "GET", "/v1/responses/{id}", ending="events"),
    Route("response-cancel", "POST", "/v1/responses/{id}/cancel"),
    Route("embeddings", "POST", "/v1/embeddings", generates=True),
    Route("models", "GET", "/v1/models"),
    Route("tokenize", "POST", "/tokenize"),
    Route("detokenize", "POST", "/detokenize"),
    Route("health", "GET", "/health", needs_key=False),
)


def find(method: str, path: str, routes: Iterable[Route] = ROUTES) -> Route | None:
    """Return the route of a request; None where it is not allowed."""
    return next((route for route in routes if route.method == method and route.fits(path)), None)
