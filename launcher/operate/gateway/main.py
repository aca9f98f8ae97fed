"""The relay as a program: `gateway SETTINGS.json`."""

import asyncio
import logging
import signal
from collections.abc import Sequence
from contextlib import AsyncExitStack

import aiohttp
import uvloop
from aiohttp import web

from launcher.operate import settings_file
from launcher.operate.gateway.relay import Relay
from launcher.operate.gateway.settings import Settings

STOP_GRACE_S = 5.0
"""Running answers get so long to end when the relay is told to stop."""
BACKLOG = 1024
MOST_READ_AHEAD_BYTES = 32 << 10
"""Of each answer: more stays with the engine while the client does not read."""


def main(argv: Sequence[str]) -> int:
    """Run until SIGTERM or SIGINT; return the exit code."""
    settings = settings_file.read("gateway", Settings, argv)
    if settings is None:
        return 2
    logging.basicConfig(
        level=logging.INFO, format='{"time":"%(asctime)s","level":"%(levelname)s","message":"%(message)s"}'
    )
    # vLLM's own server runs on it, so it is there.
    uvloop.run(_run(settings))
    return 0


async def _run(settings: Settings) -> None:
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(session_for(settings))
        relay = Relay(settings, session, settings_file.read_key(settings.api_key_file))
        await relay.engine.poll()
        watching = asyncio.create_task(relay.engine.watch())
        await _serve(stack, relay.application(), settings.host, settings.port)
        if settings.metrics_port is not None:
            await _serve(stack, relay.metrics_application(), settings.host, settings.metrics_port)
        logging.getLogger(__name__).info("relaying to %s", settings.upstream)
        stopping = asyncio.create_task(stopped.wait())
        # The watch never ends by itself: if it does, its error ends the program, and the runtime starts it again.
        await asyncio.wait({stopping, watching}, return_when=asyncio.FIRST_COMPLETED)
        if watching.done():
            watching.result()
        watching.cancel()


def session_for(settings: Settings) -> aiohttp.ClientSession:
    """Return the client of the engine: a new connection for each request, none of which can be stale."""
    # No limit on connections: `max_in_flight` is one. A short memory for names: a container may come back elsewhere.
    connector = aiohttp.TCPConnector(limit=0, force_close=True, ttl_dns_cache=1)
    timeout = aiohttp.ClientTimeout(
        total=None, sock_connect=settings.connect_timeout_s, sock_read=settings.silence_timeout_s
    )
    return aiohttp.ClientSession(
        connector=connector,
        timeout=timeout,
        auto_decompress=False,
        trust_env=False,
        read_bufsize=MOST_READ_AHEAD_BYTES,
    )


async def _serve(stack: AsyncExitStack, app: web.Application, host: str, port: int) -> None:
    # Cancelled with its client: the engine then stops computing for nobody.
    runner = web.AppRunner(
        app, access_log=None, handler_cancellation=True, shutdown_timeout=STOP_GRACE_S, keepalive_timeout=75
    )
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    await web.TCPSite(runner, host, port, backlog=BACKLOG).start()
