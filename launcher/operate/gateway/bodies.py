"""The bodies of requests: held as a whole before the engine sees any of it, within bounds of size, time and memory."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from aiohttp import web

from launcher.operate.gateway.replies import BODIES, TIMEOUT, TOO_LARGE, Refusal


class Refused(Exception):
    """A request that ends with a refusal."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.code)
        self.refusal = refusal


class Bodies:
    """Counts the bytes of all bodies that are held."""

    def __init__(self, max_request_bytes: int, max_bytes: int, timeout_s: float) -> None:
        self.held_bytes = 0
        self._max_request_bytes = max_request_bytes
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s

    @contextmanager
    def place(self) -> Iterator["Place"]:
        """Give a place for one body; what it took is free again afterwards."""
        place = Place(self)
        try:
            yield place
        finally:
            place.free()

    async def read(self, request: web.Request, place: "Place") -> bytes:
        """Return the whole body.

        Raises:
            Refused: it is too large, too slow, or there is no memory for it now.
        """
        place.take(request.content_length or 0)
        pieces: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self._timeout_s):
                async for piece in request.content.iter_any():
                    size += len(piece)
                    place.take(size)
                    pieces.append(piece)
        except TimeoutError:
            raise Refused(TIMEOUT) from None
        return b"".join(pieces)

    def change(self, before: int, after: int) -> None:
        """Count a body that grows or goes.

        Raises:
            Refused: it may not be so large.
        """
        if after > self._max_request_bytes:
            raise Refused(TOO_LARGE)
        if after > before and self.held_bytes + after - before > self._max_bytes:
            raise Refused(BODIES)
        self.held_bytes += after - before


class Place:
    """What one body takes."""

    def __init__(self, bodies: Bodies) -> None:
        self._bodies = bodies
        self._bytes = 0

    def take(self, size: int) -> None:
        """Take so many bytes in all, or as many as are taken already."""
        if size > self._bytes:
            self._bodies.change(self._bytes, size)
            self._bytes = size

    def free(self) -> None:
        """Give them back."""
        self._bodies.change(self._bytes, 0)
        self._bytes = 0
