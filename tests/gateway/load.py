"""Many streams at once through a gateway, each followed to an end that is known: whole, told, refused, cut, or lost."""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Literal

from launcher.operate.gateway.replies import DEGRADED
from tests.gateway.stack import CLIENT_KEY

Outcome = Literal["whole", "told", "refused", "cut", "lost"]
"""whole: to its `[DONE]`. told: ended by an error event. refused: an error of the API instead of an answer.
cut: the connection broke, which a client sees. lost: none of them, an end without a word or none at all."""
HANG_S = 120.0
RETRY_S = 2.0


@dataclass
class Tally:
    """What became of all requests."""

    outcomes: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)
    cut_at_s: list[float] = field(default_factory=list)
    whole_at_s: list[float] = field(default_factory=list)
    first_byte_s: list[float] = field(default_factory=list)
    """Of streams that began."""
    not_openai: list[str] = field(default_factory=list)
    """Refusals that are no errors of the API."""
    refusals: Counter[str] = field(default_factory=Counter)
    """Their codes."""
    reasons: Counter[str] = field(default_factory=Counter)
    """Why the service could not serve, in its own words."""
    not_degraded: list[str] = field(default_factory=list)
    """Refusals of a service that cannot serve which do not say so, or not why."""

    def refused(self, status: int, body: bytes) -> Outcome:
        """Note a refusal, and return what it counts as."""
        try:
            document = json.loads(body)
            self.refusals[f"{status} {document['error']['code']}"] += 1
        except (ValueError, LookupError, TypeError):
            self.not_openai.append(f"{status}: {body[:200]!r}")
            return "lost"
        if status == HTTPStatus.SERVICE_UNAVAILABLE:
            if document.get("status") == DEGRADED and document.get("reason"):
                self.reasons[document["reason"]] += 1
            else:
                self.not_degraded.append(f"{status}: {body[:200]!r}")
        return "refused"


async def streams(
    port: int, count: int, body: Mapping[str, object], path: str, tally: Tally, is_over: Callable[[], bool]
) -> None:
    """Keep so many streams running until it is over; each that ends is followed by the next."""
    async with asyncio.TaskGroup() as group:
        for _ in range(count):
            group.create_task(_client(port, json.dumps(body).encode(), path, tally, is_over))


async def _client(port: int, body: bytes, path: str, tally: Tally, is_over: Callable[[], bool]) -> None:
    while not is_over():
        outcome = await one(port, body, path, tally)
        tally.outcomes[outcome] += 1
        now_s = time.monotonic()
        if outcome == "whole":
            tally.whole_at_s.append(now_s)
        elif outcome == "cut":
            tally.cut_at_s.append(now_s)
        if outcome != "whole":
            await asyncio.sleep(RETRY_S)


async def one(port: int, body: bytes, path: str, tally: Tally, key: str = CLIENT_KEY) -> Outcome:
    """Ask once and follow the answer to its end."""
    try:
        async with asyncio.timeout(HANG_S):
            return await _asked(port, body, path, tally, key)
    except TimeoutError:
        return "lost"
    except (ConnectionError, asyncio.IncompleteReadError):
        return "cut"


async def _asked(port: int, body: bytes, path: str, tally: Tally, key: str) -> Outcome:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        begun_s = time.monotonic()
        writer.write(
            f"POST {path} HTTP/1.1\r\nHost: g\r\nAuthorization: Bearer {key}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode()
            + body
        )
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
        first_byte_s = time.monotonic() - begun_s
        status = int(head.split(" ")[1])
        tally.statuses[status] += 1
        if status != 200:
            return tally.refused(status, await reader.read())
        tally.first_byte_s.append(first_byte_s)
        return await _ending(reader)
    finally:
        writer.close()


async def _ending(reader: asyncio.StreamReader) -> Outcome:
    """Read a chunked stream to its end; only the last events are kept."""
    last = b""
    while size := int(await reader.readuntil(b"\r\n"), 16):
        last = (last + await reader.readexactly(size))[-2000:]
        await reader.readexactly(2)
    if not last.endswith(b"data: [DONE]\n\n"):
        return "lost"
    return "told" if b'"code": "stream_interrupted"' in last or b'"error"' in last else "whole"
