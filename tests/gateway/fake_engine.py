"""A stand-in for vLLM behind the gateway: it streams what a request's body asks for, and breaks off where it says so.

Fields of the body that it knows: `stream`, `pieces`, `interval_s`, `piece_bytes`, `die_after` (cut the connection after
so many pieces, in the middle of an event with `half_event`), `silent_s` (before the first byte), `status`.
"""

import asyncio
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from launcher.state import CHECKOUT

METRICS = """\
# HELP vllm:kv_cache_usage_perc KV-cache usage. 1 means 100 percent usage.
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{{engine="0",model_name="small"}} {kv_usage}
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{{engine="0",model_name="small"}} {waiting}
vllm:num_requests_waiting_by_reason{{engine="0",model_name="small",reason="capacity"}} 99.0
"""
DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True)
class Seen:
    """One request as it arrived."""

    method: str
    target: str
    headers: Mapping[str, str]
    body: bytes


@dataclass
class FakeEngine:
    """A server in a thread of its own; its fields may be changed while it runs."""

    port: int = 0
    kv_usage: float = 0.1
    waiting: float = 0.0
    health: int = 200
    seen: list[Seen] = field(default_factory=list)
    aborted: int = 0
    """Requests whose client went away before the end."""
    running: int = 0

    def __enter__(self) -> "FakeEngine":
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def start(self) -> None:
        """Listen; on the same port as before after a stop."""
        listening = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(listening)), daemon=True)
        self._thread.start()
        assert listening.wait(5)

    def stop(self) -> None:
        """Die: every connection is reset, and nobody listens."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._end.set)
            self._thread.join(5)

    @property
    def generations(self) -> list[Seen]:
        """The requests besides the relay's own looks at /health and /metrics."""
        return [one for one in self.seen if one.target not in ("/health", "/metrics")]

    async def _serve(self, listening: threading.Event) -> None:
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        self._writers: set[asyncio.StreamWriter] = set()
        server = await asyncio.start_server(self._connection, "127.0.0.1", self.port, backlog=2048)
        self.port = server.sockets[0].getsockname()[1]
        listening.set()
        await self._end.wait()
        server.close()
        for writer in list(self._writers):
            writer.transport.abort()
        await asyncio.sleep(0)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while await self._request(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            self.aborted += 1
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _request(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        except asyncio.IncompleteReadError:
            return False
        line, *fields = head.strip().split("\r\n")
        method, target, _ = line.split(" ", 2)
        headers = {name.strip().lower(): value.strip() for name, _, value in (each.partition(":") for each in fields)}
        body = await reader.readexactly(int(headers.get("content-length", "0")))
        self.seen.append(Seen(method, target, headers, body))
        del self.seen[:-20_000]
        if target == "/health":
            return await self._send(writer, self.health, b"", "text/plain")
        if target == "/metrics":
            text = METRICS.format(kv_usage=self.kv_usage, waiting=self.waiting)
            return await self._send(writer, 200, text.encode(), "text/plain; version=0.0.4")
        self.running += 1
        try:
            return await self._answer(writer, _document(body))
        finally:
            self.running -= 1

    async def _answer(self, writer: asyncio.StreamWriter, asked: dict[str, Any]) -> bool:
        await asyncio.sleep(asked.get("silent_s", 0))
        if not asked.get("stream"):
            if "die_after" in asked:
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{")
                await writer.drain()
                writer.transport.abort()
                return False
            document = {"choices": [{"message": {"content": "x" * asked.get("piece_bytes", 4)}}]}
            return await self._send(writer, asked.get("status", 200), json.dumps(document).encode(), "application/json")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        for index in range(asked.get("pieces", 3)):
            event = _event({"choices": [{"delta": {"content": f"{index}".ljust(asked.get("piece_bytes", 1), "x")}}]})
            if index == asked.get("die_after"):
                if asked.get("half_event"):
                    _chunk(writer, event[: len(event) // 2])
                    await writer.drain()
                    await asyncio.sleep(0.05)
                writer.transport.abort()
                return False
            _chunk(writer, event)
            await writer.drain()
            if asked.get("interval_s"):
                await asyncio.sleep(asked["interval_s"])
        if not asked.get("without_done"):
            _chunk(writer, DONE)
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return True

    async def _send(self, writer: asyncio.StreamWriter, status: int, body: bytes, content_type: str) -> bool:
        head = f"HTTP/1.1 {status} Said\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await writer.drain()
        return True


def _document(body: bytes) -> dict[str, Any]:
    try:
        document = json.loads(body)
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}


def _event(document: object) -> bytes:
    return f"data: {json.dumps(document)}\n\n".encode()


def _chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")


class EngineProcess:
    """A fake engine as a process, which can be killed and stopped: the `Engine` of a drill."""

    name = "a fake engine"
    away_s, stopped_s = 2.0, 3.0

    def __init__(self, port: int) -> None:
        self.port = port

    def __enter__(self) -> "EngineProcess":
        self._start()
        return self

    def __exit__(self, *error: object) -> None:
        self._end()

    def stream(self, count: int) -> Mapping[str, object]:
        # A few hundred events a second in all, as from a card: it is the streams that are many.
        return {"stream": True, "pieces": 20, "interval_s": max(0.1, count / 400), "piece_bytes": 20}

    def short(self) -> Mapping[str, object]:
        return {"stream": True, "pieces": 1}

    def long(self) -> Mapping[str, object]:
        return {"stream": True, "pieces": 2000, "piece_bytes": 16_000}

    def kill(self) -> None:
        self._end()
        time.sleep(self.away_s)
        self._start()

    def stop(self) -> None:
        self._process.send_signal(signal.SIGSTOP)
        time.sleep(self.stopped_s)
        self._process.send_signal(signal.SIGCONT)

    def rss_bytes(self) -> Mapping[str, int]:
        return {}

    def _start(self) -> None:
        argv = [sys.executable, "-m", "tests.gateway.fake_engine", str(self.port)]
        self._process = subprocess.Popen(argv, cwd=CHECKOUT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline_s = time.monotonic() + 15
        while not self._listens():
            assert time.monotonic() < deadline_s, "the fake engine does not listen"
            time.sleep(0.05)

    def _listens(self) -> bool:
        with socket.socket() as probe:
            probe.settimeout(1)
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def _end(self) -> None:
        self._process.kill()
        self._process.wait()


if __name__ == "__main__":
    engine = FakeEngine(port=int(sys.argv[1]))
    engine.start()
    threading.Event().wait()
