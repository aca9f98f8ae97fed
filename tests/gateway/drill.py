"""The drills of the gateway: hundreds of streams while its parts and the engine are killed and while it is attacked.

    python -m tests.gateway.drill --minutes 10 --out tests/gateway/results/drill.json

Short ones run in the tests (`test_drills.py`); this program runs the long one and writes what came of it.
"""

import argparse
import asyncio
import contextlib
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from launcher.state import CHECKOUT
from tests.gateway import raw
from tests.gateway.flat import Flatness, flatness
from tests.gateway.load import Tally, one, streams
from tests.gateway.stack import Stack, free_port
from tests.gateway.test_refusing import TRICKS

CHAT = "/v1/chat/completions"
SAMPLE_S = 0.5
LEAST_SAMPLES = 30
"""Fewer since the last kill say nothing: a new process grows."""
PROBE_AFTER_S = 0.1
KILL_WINDOW_S = 10.0
"""Connections that a killed part of the gateway held may break within so long."""
SILENT_CONNECTIONS = 1000
SLOW_READERS = 20


class EngineProcess:
    """A fake engine as a process, which can be killed."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.start()

    def start(self) -> None:
        """Start it, and wait until it listens."""
        argv = [sys.executable, "-m", "tests.gateway.fake_engine", str(self.port)]
        self._process = subprocess.Popen(argv, cwd=CHECKOUT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline_s = time.monotonic() + 15
        while not answers(self.port):
            assert time.monotonic() < deadline_s, "the fake engine does not listen"
            time.sleep(0.05)

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        self._process.send_signal(number)

    def stop(self) -> None:
        """Kill it."""
        self._process.kill()
        self._process.wait()


def answers(port: int) -> bool:
    """Whether somebody listens."""
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0


@dataclass(frozen=True)
class Event:
    """One thing that was done to the gateway."""

    name: str
    at_s: float
    """Seconds since the drill began."""
    recovery_s: float | None
    """From its beginning until a new, short request was answered whole; None: none was within 60 s."""
    note: str = ""


@dataclass
class Report:
    """What a drill found."""

    streams: int
    duration_s: float
    tally: Tally
    events: list[Event] = field(default_factory=list)
    edge: Flatness | None = None
    relay: Flatness | None = None
    reached_without_key: int = 0
    """Requests that came through to the engine although they had no right to."""
    cut_outside_kills: int = 0

    def problems(self) -> list[str]:
        """Return what is not as it must be."""
        found = []
        if self.tally.outcomes["lost"]:
            found.append(f"{self.tally.outcomes['lost']} requests were lost without an error")
        if self.tally.not_openai:
            found.append(f"refusals that are no errors of the API: {self.tally.not_openai[:3]}")
        if self.cut_outside_kills:
            found.append(f"{self.cut_outside_kills} connections broke although no part of the gateway was killed")
        if self.reached_without_key:
            found.append(f"{self.reached_without_key} requests came through that had no right to")
        if not self.tally.outcomes["whole"]:
            found.append("no request was answered")
        for name, memory in (("edge", self.edge), ("relay", self.relay)):
            if memory is not None and not memory.is_flat:
                found.append(f"the memory of the {name} grew by {memory.growth_bytes / 1e6:.1f} MB")
        return found


class Drill:
    """One run: load, memory samples, and what is done meanwhile."""

    def __init__(self, stack: Stack, engine: EngineProcess, count: int, duration_s: float) -> None:
        self.stack = stack
        self.engine = engine
        self.report = Report(count, duration_s, Tally())
        self._begun_s = time.monotonic()
        self._memory: list[tuple[int, int]] = []
        self._kills_s: list[float] = []

    async def run(self, steps: Sequence[Callable[["Drill"], Awaitable[str]]]) -> Report:
        """Load the gateway, take the steps at equal distances, and judge."""
        report = self.report
        # A few hundred events a second in all, as from a card: it is the streams that are many.
        body = {"stream": True, "pieces": 20, "interval_s": max(0.1, report.streams / 400), "piece_bytes": 20}
        over = asyncio.Event()
        load = asyncio.create_task(streams(self.stack.port, report.streams, body, CHAT, report.tally, over.is_set))
        sampling = asyncio.create_task(self._sample())
        pause_s = report.duration_s / (len(steps) + 1)
        for index, step in enumerate(steps, 1):
            await asyncio.sleep(max(0.0, self._begun_s + index * pause_s - time.monotonic()))
            at_s = time.monotonic()
            probing = asyncio.create_task(self._recovery(at_s))
            note = await step(self)
            report.events.append(Event(step.__name__, round(at_s - self._begun_s, 1), await probing, note))
        await asyncio.sleep(max(0.0, self._begun_s + report.duration_s - time.monotonic()))
        over.set()
        await load
        report.duration_s = time.monotonic() - self._begun_s
        sampling.cancel()
        report.cut_outside_kills = sum(
            not any(0 <= cut_s - kill_s <= KILL_WINDOW_S for kill_s in self._kills_s) for cut_s in report.tally.cut_at_s
        )
        if len(self._memory) >= LEAST_SAMPLES:
            report.edge, report.relay = (flatness([sample[part] for sample in self._memory]) for part in (0, 1))
        return report

    def is_killing(self) -> None:
        """Note that a part of the gateway dies now, with the connections that it holds; its memory begins anew."""
        self._kills_s.append(time.monotonic())
        self._memory.clear()

    async def _sample(self) -> None:
        while True:
            with contextlib.suppress(psutil.NoSuchProcess):
                self._memory.append(self.stack.rss_bytes())
            await asyncio.sleep(SAMPLE_S)

    async def _recovery(self, since_s: float) -> float | None:
        # Long enough that what was done has begun to be felt.
        await asyncio.sleep(PROBE_AFTER_S)
        unwritten = Tally()
        body = json.dumps({"stream": True, "pieces": 1}).encode()
        while time.monotonic() - since_s < 60:
            if await one(self.stack.port, body, CHAT, unwritten) == "whole":
                return round(time.monotonic() - since_s, 2)
            await asyncio.sleep(0.05)
        return None


async def edge_killed(drill: Drill) -> str:
    drill.is_killing()
    await asyncio.to_thread(drill.stack.kill_edge)
    await asyncio.to_thread(drill.stack.start_edge)
    return "SIGKILL, started again at once"


async def relay_killed(drill: Drill) -> str:
    drill.is_killing()
    drill.stack.relay.kill()
    await asyncio.to_thread(drill.stack.relay.wait)
    await asyncio.to_thread(drill.stack.start_relay)
    return "SIGKILL, started again at once"


async def engine_killed(drill: Drill) -> str:
    before = drill.report.tally.outcomes["told"]
    drill.engine.stop()
    await asyncio.sleep(2)
    await asyncio.to_thread(drill.engine.start)
    return f"SIGKILL, back after 2 s; {drill.report.tally.outcomes['told'] - before} streams ended with an error event"


async def engine_stopped(drill: Drill) -> str:
    drill.engine.signal(signal.SIGSTOP)
    await asyncio.sleep(3)
    drill.engine.signal(signal.SIGCONT)
    return "SIGSTOP, SIGCONT after 3 s"


async def silent_connections(drill: Drill) -> str:
    """Open connections that send nothing, and see them all given up."""
    opened: list[socket.socket] = []
    try:
        for _ in range(SILENT_CONNECTIONS):
            connection = socket.create_connection(("127.0.0.1", drill.stack.port), timeout=5)
            connection.setblocking(False)
            opened.append(connection)
            if len(opened) % 50 == 0:
                await asyncio.sleep(0)
        begun_s, left = time.monotonic(), set(opened)
        while left and time.monotonic() - begun_s < 30:
            await asyncio.sleep(0.25)
            left = {connection for connection in left if not _is_closed(connection)}
        assert not left, f"{len(left)} silent connections are still open"
        return f"{SILENT_CONNECTIONS} given up after {time.monotonic() - begun_s:.1f} s"
    finally:
        for connection in opened:
            connection.close()


def _is_closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(4096) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


async def large_prompts(drill: Drill) -> str:
    body = json.dumps({"prompt": "x" * 10_000_000}).encode()
    head = raw.head(CHAT, "POST", headers=(f"Content-Length: {len(body)}",))
    for _ in range(20):
        reply = await asyncio.to_thread(raw.exchange, drill.stack.port, head + body)
        assert (reply.status, reply.json()["error"]["code"]) == (413, "request_too_large")
    return "20 prompts of 10 MB: 413"


async def wrong_keys(drill: Drill) -> str:
    for number in range(200):
        reply = await asyncio.to_thread(raw.exchange, drill.stack.port, raw.head(CHAT, "POST", f"wrong-{number}"))
        drill.report.reached_without_key += reply.status != 401
    return "200 wrong keys: 401"


async def path_tricks(drill: Drill) -> str:
    for trick in TRICKS:
        reply = await asyncio.to_thread(raw.exchange, drill.stack.port, raw.head(trick))
        drill.report.reached_without_key += reply.status not in (400, 404)
    return f"{len(TRICKS)} tricks: 400 or 404"


async def slow_readers(drill: Drill) -> str:
    """Ask for long streams and read nothing of them."""
    body = json.dumps({"stream": True, "pieces": 2000, "piece_bytes": 16_000}).encode()
    head = raw.head(CHAT, "POST", headers=(f"Content-Length: {len(body)}",))
    opened = []
    try:
        for _ in range(SLOW_READERS):
            connection = socket.create_connection(("127.0.0.1", drill.stack.port), timeout=5)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.sendall(head + body)
            opened.append(connection)
        await asyncio.sleep(min(20.0, drill.report.duration_s / 20))
        return f"{SLOW_READERS} streams of 32 MB, unread"
    finally:
        for connection in opened:
            connection.close()


STEPS = [
    edge_killed,
    relay_killed,
    # Twice: what its peak takes stays with the process, and the second must take no more.
    slow_readers,
    engine_killed,
    engine_stopped,
    silent_connections,
    large_prompts,
    wrong_keys,
    path_tricks,
    slow_readers,
    engine_killed,
]


def main() -> int:
    """Run the long drill and write its result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    engine = EngineProcess(free_port())
    try:
        with tempfile.TemporaryDirectory() as folder, Stack(Path(folder), engine.port) as stack:
            report = asyncio.run(Drill(stack, engine, asked.streams, asked.minutes * 60).run(STEPS))
    finally:
        engine.stop()
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    asked.out.write_text(json.dumps(document(report), indent=1) + "\n", encoding="utf-8")
    print(json.dumps(document(report), indent=1))
    return 1 if report.problems() else 0


def document(report: Report) -> dict[str, Any]:
    """Return a report as its result file holds it."""
    haproxy = subprocess.run(["haproxy", "-v"], capture_output=True, text=True, check=True).stdout.split("\n")[0]
    first_byte = sorted(report.tally.first_byte_s)
    return {
        "what": f"{report.streams} streams at once for {report.duration_s / 60:.1f} minutes through HAProxy and relay, "
        "in front of a fake engine",
        "date": datetime.now(UTC).date().isoformat(),
        "haproxy": haproxy,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "outcomes": dict(report.tally.outcomes),
        "statuses": {str(status): count for status, count in sorted(report.tally.statuses.items())},
        "cut_outside_kills": report.cut_outside_kills,
        "reached_without_key": report.reached_without_key,
        "first_byte_p50_s": round(first_byte[len(first_byte) // 2], 4),
        "first_byte_p99_s": round(first_byte[len(first_byte) * 99 // 100], 4),
        "events": [asdict(event) for event in report.events],
        "memory": {
            name: {**asdict(memory), "growth_bytes": memory.growth_bytes, "is_flat": memory.is_flat} if memory else None
            for name, memory in (("edge", report.edge), ("relay", report.relay))
        },
        "problems": report.problems(),
    }


if __name__ == "__main__":
    sys.exit(main())
