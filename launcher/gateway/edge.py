"""The edge's configuration: HAProxy, rendered from the list of routes and the table of refusals. Pure."""

from dataclasses import dataclass

from launcher.operate.gateway import replies
from launcher.operate.gateway.replies import Refusal
from launcher.operate.gateway.routes import ROUTES
from launcher.templates import template

TEMPLATE = "compose/gateway/haproxy.cfg.j2"
HAPROXY_ERRORS = (
    replies.BAD_REQUEST,
    replies.TIMEOUT,
    replies.RELAY_AWAY,
    Refusal(500, "gateway_error", "The gateway failed.", "server_error"),
    Refusal(502, "gateway_error", "The gateway got no valid answer.", "service_unavailable", 2, "the relay failed"),
    replies.SILENT,
)
"""What HAProxy says of itself, by its status; one for each."""

# The route instead of the path, and no query: neither prompts nor keys can be in it.
LOG_FORMAT = (
    '{"time":"%[date,utime(%Y-%m-%dT%H:%M:%SZ)]","ip":"%ci","key":"%[var(txn.name)]","method":"%[method,json(utf8s)]",'
    '"route":"%[var(txn.route)]","status":%ST,"end":"%ts","request_id":"%ID","bytes_in":%U,"bytes_out":%B,'
    '"request_ms":%TR,"connect_ms":%Tc,"first_byte_ms":%Tr,"total_ms":%Ta}'
)


@dataclass(frozen=True)
class Edge:
    """Where the edge listens and what it bounds."""

    bind: str
    relay: str
    """Host and port of the relay."""
    keys_file: str
    """Map of SHA-256 of a key to NAME:REQUESTS PER MINUTE:CONCURRENCY."""
    max_request_bytes: int
    silence_timeout_s: int
    resolve: bool = True
    """Whether the relay's name is looked up again and again, as a container's must be."""
    tls_bind: str = ""
    tls_file: str = ""
    """Certificate with its key; empty: no TLS."""
    metrics_bind: str = ""
    """Empty: no metrics are served."""
    max_connections: int = 4000
    threads: int = 2
    header_timeout_s: int = 10
    client_timeout_s: int = 60
    keepalive_timeout_s: int = 30


def configuration(edge: Edge, heading: str) -> str:
    """Return the text of haproxy.cfg."""
    return template(TEMPLATE, word=word).render(
        heading=heading,
        edge=edge,
        routes=ROUTES,
        errors=HAPROXY_ERRORS,
        log_format=LOG_FORMAT,
        deny=deny,
        headers=headers,
        bad_form=replies.BAD_FORM,
        no_key=replies.NO_KEY,
        unknown_route=replies.UNKNOWN_ROUTE,
        too_large=replies.TOO_LARGE,
        concurrency=replies.CONCURRENCY,
        rate=replies.RATE,
    )


def deny(refusal: Refusal) -> str:
    """Return the rule that answers with a refusal, without its condition."""
    return (
        f"http-request return status {refusal.status} content-type application/json string {word(refusal.text())}"
        f"{headers(refusal)}"
    )


def headers(refusal: Refusal) -> str:
    """Return the header arguments of a rule."""
    return "".join(f" hdr {name} {value}" for name, value in refusal.headers().items())


def word(text: str) -> str:
    """Return a text as one word of HAProxy's configuration, where nothing is special between single quotes.

    Raises:
        ValueError: it has a line end, which no word can hold.
    """
    if "\n" in text:
        raise ValueError(f"{text!r}: a line end has no place in a word of HAProxy's configuration")
    quote = r"'\''"
    return f"'{text.replace(chr(39), quote)}'"
