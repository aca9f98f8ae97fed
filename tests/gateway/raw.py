"""Requests written byte by byte, as no well-behaved client would write them."""

import contextlib
import json
import re
import socket
from dataclasses import dataclass
from typing import Any

from tests.gateway.stack import CLIENT_KEY


@dataclass(frozen=True)
class Reply:
    """What came back; status 0 where the connection was closed without a word."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


def head(
    target: str, method: str = "GET", key: str | None = CLIENT_KEY, headers: tuple[str, ...] = (), version: str = "1.1"
) -> bytes:
    """Return a request's head; nothing in it is checked or encoded."""
    lines = [f"{method} {target} HTTP/{version}", "Host: gateway", "Connection: close"]
    lines += [f"Authorization: Bearer {key}"] if key else []
    return "\r\n".join([*lines, *headers, "", ""]).encode("utf-8", "surrogateescape")


def exchange(port: int, data: bytes, timeout_s: float = 10.0) -> Reply:
    """Send bytes and return the first reply."""
    with socket.create_connection(("127.0.0.1", port), timeout=timeout_s) as connection:
        # Refused before all was sent: the reply lies in the socket already.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.sendall(data)
        return read(connection)


def read(connection: socket.socket) -> Reply:
    """Read one reply, to its own end or to that of the connection."""
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while not _is_whole(received) and (piece := connection.recv(65536)):
            received += piece
    return parse(received)


def _is_whole(received: bytes) -> bool:
    top, end, body = received.partition(b"\r\n\r\n")
    length = re.search(rb"(?i)\r\ncontent-length: *(\d+)", top)
    return bool(end) and length is not None and len(body) >= int(length[1])


def parse(received: bytes) -> Reply:
    """Take a reply apart."""
    if not received:
        return Reply(0, {}, b"")
    top, _, body = received.partition(b"\r\n\r\n")
    line, *fields = top.decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (one.partition(":") for one in fields)}
    return Reply(int(line.split(" ")[1]), headers, body)


def is_not_http(reply: Reply) -> bool:
    """Whether HAProxy's parser itself refused: what is no HTTP gets its own words, which nothing can change."""
    return reply.status in (400, 408) and reply.headers["content-type"] == "text/html" and b"<h1>40" in reply.body


def is_openai_error(reply: Reply) -> bool:
    """Whether a reply is an error as clients of the OpenAI API understand one."""
    document = reply.json()
    error = document["error"]
    return (
        reply.headers["content-type"].startswith("application/json")
        and set(error) == {"message", "type", "param", "code"}
        and bool(error["message"] and error["type"] and error["code"])
    )
