"""The relay: passes requests and streams on as they come, and says in the API's own words when the engine cannot.

No proxy ends a running stream with an event of its own when its upstream dies; that, and admission by vLLM's metrics,
is why it exists. Slow clients, TLS, keys and malformed requests are the edge's business, in front of it.
"""

import asyncio
import logging
import time
from collections.abc import Mapping

import aiohttp
from aiohttp import web
from yarl import URL

from launcher.operate.gateway import routes
from launcher.operate.gateway.bodies import Bodies, Refused
from launcher.operate.gateway.engine import Engine, Look
from launcher.operate.gateway.events import EventStream
from launcher.operate.gateway.meters import Meters
from launcher.operate.gateway.replies import DEGRADED, QUEUE, SILENT, UNKNOWN_ROUTE, Refusal
from launcher.operate.gateway.routes import Route
from launcher.operate.gateway.settings import Settings

PASSED_TO_ENGINE = ("Content-Type", "Accept", "X-Request-Id")
PASSED_TO_CLIENT = ("Content-Type", "Cache-Control", "Retry-After")
"""Headers that go through; all others end here, the client's key first of all."""
MOST_HELD_ANSWER_BYTES = 4 << 20
"""An answer that is no stream is held until it is whole, up to this size, so that a broken one becomes an error."""
DIED = "the engine ended while it answered"
DYING_S = 0.5
"""An engine that failed a request may need so long to be seen as dead."""

log = logging.getLogger(__name__)


class Relay:
    """The relay's application and what it holds."""

    def __init__(self, settings: Settings, session: aiohttp.ClientSession, api_key: str | None) -> None:
        self.engine = Engine(settings, session)
        self.meters = Meters()
        self.in_flight = 0
        self._settings = settings
        self._session = session
        self._authorization = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._bodies = Bodies(settings.max_request_bytes, settings.max_body_bytes, settings.body_timeout_s)

    def application(self) -> web.Application:
        """Return the application that clients reach through the edge."""
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self.answer)
        return app

    def metrics_application(self) -> web.Application:
        """Return the application that Prometheus asks."""
        app = web.Application()
        app.router.add_get("/metrics", self._metrics)
        return app

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Answer one request."""
        raw_path = request.raw_path.partition("?")[0]
        route = routes.find(request.method, raw_path)
        if route is None:
            return self._refuse(UNKNOWN_ROUTE, "none")
        if route.name == "health":
            return self._health()
        try:
            response = await self._relayed(request, route)
        except Refused as error:
            return self._refuse(error.refusal, route.name)
        self.meters.requests.labels(route.name, str(response.status)).inc()
        return response

    async def _relayed(self, request: web.Request, route: Route) -> web.StreamResponse:
        self._refuse_closed(route)
        self.in_flight += route.generates
        self.meters.in_flight.set(self.in_flight)
        answer = None
        try:
            answer = await self._asked(request, route)
            if answer.content_type == "text/event-stream":
                return await self._stream(request, answer, route)
            return await self._whole(request, answer)
        finally:
            if answer is not None:
                # The engine stops computing for a client that is gone.
                answer.close()
            self.in_flight -= route.generates
            self.meters.in_flight.set(self.in_flight)

    def _refuse_closed(self, route: Route) -> None:
        state = self.engine.look()
        if not state.is_serving:
            raise Refused(state.refusal())
        if route.generates:
            refusal = self.engine.refusal()
            if refusal is None and self.in_flight >= self._settings.max_in_flight:
                refusal = QUEUE
            if refusal is not None:
                raise Refused(refusal)

    async def _asked(self, request: web.Request, route: Route) -> aiohttp.ClientResponse:
        """Send the request on, and return the engine's answer as soon as it begins."""
        headers = {name: request.headers[name] for name in PASSED_TO_ENGINE if name in request.headers}
        url = URL(self._settings.upstream + request.raw_path, encoded=True)
        with self._bodies.place() as place:
            body = await self._bodies.read(request, place) if request.can_read_body else None
            begun_s = time.monotonic()
            try:
                answer = await self._session.request(
                    request.method, url, data=body, headers={**headers, **self._authorization}, allow_redirects=False
                )
            except aiohttp.ConnectionTimeoutError:
                raise Refused(self._gone()) from None
            except TimeoutError:
                raise Refused(SILENT) from None
            except (aiohttp.ClientError, OSError):
                raise Refused(self._gone()) from None
            self.meters.first_byte.observe(time.monotonic() - begun_s)
            return answer

    def _gone(self) -> Refusal:
        """Return what to say after a request that found no engine, or lost it."""
        self.engine.was_ready = True
        self.engine.is_gone()
        return self.engine.look().refusal()

    async def _whole(self, request: web.Request, answer: aiohttp.ClientResponse) -> web.StreamResponse:
        """Pass an answer on that is no stream: whole, or as an error; a very long one piece by piece."""
        pieces: list[bytes] = []
        size = 0
        try:
            async for piece in answer.content.iter_any():
                pieces.append(piece)
                size += len(piece)
                if size > MOST_HELD_ANSWER_BYTES:
                    return await self._long(request, answer, b"".join(pieces))
        except TimeoutError:
            raise Refused(SILENT) from None
        except (aiohttp.ClientError, OSError):
            raise Refused(self._gone()) from None
        if answer.status >= 500 and await self._is_dead():
            raise Refused(self._gone())
        return web.Response(status=answer.status, headers=self._headers(answer), body=b"".join(pieces))

    async def _is_dead(self) -> bool:
        """Whether an engine that failed a request is going down with it: its /health says so, or nothing does."""
        deadline_s = time.monotonic() + DYING_S
        while time.monotonic() < deadline_s:
            await self.engine.poll()
            if self.engine.health != "ready":
                return True
            await asyncio.sleep(DYING_S / 8)
        return False

    async def _long(self, request: web.Request, answer: aiohttp.ClientResponse, begun: bytes) -> web.StreamResponse:
        response = web.StreamResponse(status=answer.status, headers=self._headers(answer))
        await response.prepare(request)
        await response.write(begun)
        async for piece in answer.content.iter_any():
            await response.write(piece)
        await response.write_eof()
        return response

    async def _stream(self, request: web.Request, answer: aiohttp.ClientResponse, route: Route) -> web.StreamResponse:
        """Pass events on as they come; where the engine breaks off, end them with an error."""
        response = web.StreamResponse(status=answer.status, headers=self._headers(answer))
        response.enable_chunked_encoding()
        await response.prepare(request)
        events = EventStream(route.ending)
        reason = "the engine ended the answer too early"
        while True:
            try:
                data = await answer.content.readany()
            except TimeoutError:
                reason = f"the engine was silent for {self._settings.silence_timeout_s:.0f} s"
                break
            except (aiohttp.ClientError, OSError):
                reason = DIED
                self.engine.is_gone()
                break
            if not data:
                break
            if passed := events.feed(data):
                # Waits while the client does not read: the engine's own socket fills, and nothing here grows.
                await response.write(passed)
        if not events.is_finished:
            self.meters.broken.inc()
            log.warning("a stream broke off: %s", reason)
            await response.write(events.broken_end(reason))
        await response.write_eof()
        return response

    def _headers(self, answer: aiohttp.ClientResponse) -> dict[str, str]:
        kept = {name: answer.headers[name] for name in PASSED_TO_CLIENT if name in answer.headers}
        return {**kept, **announcement(self.engine.look())}

    def _health(self) -> web.Response:
        state = self.engine.look()
        document = {"status": state.status, **({"reason": state.reason} if state.reason else {})}
        headers = {} if state.is_serving else {"Retry-After": str(state.retry_after_s)}
        return web.json_response(document, status=200 if state.is_serving else 503, headers=headers)

    def _refuse(self, refusal: Refusal, route: str) -> web.Response:
        self.meters.refused.labels(refusal.code).inc()
        self.meters.requests.labels(route, str(refusal.status)).inc()
        state = self.engine.look()
        document = refusal.body()
        if state.status == DEGRADED:
            document = {**document, "status": DEGRADED, "reason": refusal.reason or state.reason}
        headers = {**refusal.headers(), **announcement(state)}
        return web.json_response(document, status=refusal.status, headers=headers)

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=self.meters.text(self.engine), headers={"Content-Type": "text/plain; version=0.0.4"})


def announcement(state: Look) -> Mapping[str, str]:
    """Return the headers that tell every client of a degraded service."""
    if state.status != DEGRADED:
        return {}
    # A header holds Latin-1 without line ends.
    reason = " ".join(state.reason.split()).encode("ascii", "replace").decode()
    return {"X-Graft-Status": DEGRADED, "X-Graft-Reason": reason}
