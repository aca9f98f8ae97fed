"""What the gateway costs: the same requests to an engine directly and through it, in turns.

    python -m tests.gateway.bench --out tests/gateway/results/cost.json
    python -m tests.gateway.bench --engine URL --model NAME --key-file FILE --out ...

Without `--engine` a fake one streams 60 tokens a second to each of 16 clients, as a card does; first tokens are asked
for one at a time.
"""

import argparse
import asyncio
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx

from tests.gateway.drilling import CHAT
from tests.gateway.fake_engine import EngineProcess
from tests.gateway.stack import CLIENT_KEY, INTERNAL_KEY, Stack, free_port

MOST_ADDED_FIRST_TOKEN_S = 0.002
LEAST_THROUGHPUT = 0.97


@dataclass(frozen=True)
class Door:
    """One way to the engine."""

    name: str
    port: int
    key: str


@dataclass(frozen=True)
class Cost:
    """The gateway against the direct way, each a list of measurements taken in turns."""

    first_direct_s: tuple[float, ...]
    first_gateway_s: tuple[float, ...]
    rate_direct: tuple[float, ...]
    """Events a second over all clients."""
    rate_gateway: tuple[float, ...]

    @property
    def added_first_token_s(self) -> float:
        """Difference of the medians."""
        return statistics.median(self.first_gateway_s) - statistics.median(self.first_direct_s)

    @property
    def throughput(self) -> float:
        """Median of the ratios of neighbouring runs: what else the machine does meets both alike."""
        pairs = zip(self.rate_gateway, self.rate_direct, strict=True)
        return statistics.median(gateway / direct for gateway, direct in pairs)

    def problems(self) -> list[str]:
        """Return which bound is broken."""
        found = []
        if self.added_first_token_s >= MOST_ADDED_FIRST_TOKEN_S:
            found.append(f"the first token comes {self.added_first_token_s * 1e3:.2f} ms later")
        if self.throughput < LEAST_THROUGHPUT:
            found.append(f"throughput is {self.throughput:.3f} of the direct one")
        return found


async def _stream(door: Door, body: bytes) -> tuple[float, int]:
    """Return the seconds to the first event, and how many events came."""
    reader, writer = await asyncio.open_connection("127.0.0.1", door.port)
    begun_s = time.perf_counter()
    writer.write(
        f"POST {CHAT} HTTP/1.1\r\nHost: g\r\nAuthorization: Bearer {door.key}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode()
        + body
    )
    head = await reader.readuntil(b"\r\n\r\n")
    assert b" 200 " in head.split(b"\r\n")[0], head
    first_s, events = 0.0, 0
    while size := int(await reader.readuntil(b"\r\n"), 16):
        events += (await reader.readexactly(size)).count(b"\n\n")
        await reader.readexactly(2)
        first_s = first_s or time.perf_counter() - begun_s
    writer.close()
    return first_s, events


async def _rate(door: Door, body: bytes, clients: int) -> float:
    begun_s = time.perf_counter()
    events = sum(count for _, count in await asyncio.gather(*(_stream(door, body) for _ in range(clients))))
    return events / (time.perf_counter() - begun_s)


async def measure(direct: Door, gateway: Door, first: bytes, many: bytes, clients: int, rounds: int) -> Cost:
    """Measure both ways in turns.

    Args:
        first: body of a request whose first event is timed.
        many: body of a long stream, of which `clients` run at once.
    """
    first_s: dict[str, list[float]] = {direct.name: [], gateway.name: []}
    rates: dict[str, list[float]] = {direct.name: [], gateway.name: []}
    for number in range(rounds):
        # The first of a pair finds the caches cold: they take turns.
        doors = (direct, gateway) if number % 2 else (gateway, direct)
        for _ in range(20):
            for door in doors:
                first_s[door.name].append((await _stream(door, first))[0])
        for door in doors:
            rates[door.name].append(await _rate(door, many, clients))
    return Cost(*(tuple(one[door.name]) for one in (first_s, rates) for door in (direct, gateway)))


def document(cost: Cost, engine: str, clients: int) -> dict[str, Any]:
    """Return what the result file holds."""
    haproxy = subprocess.run(["haproxy", "-v"], capture_output=True, text=True, check=True).stdout.split("\n")[0]
    return {
        "what": f"HAProxy and relay in front of {engine}, against the same requests without them, on loopback",
        "date": datetime.now(UTC).date().isoformat(),
        "haproxy": haproxy,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "clients": clients,
        "first_token_p50_ms": {
            "direct": round(statistics.median(cost.first_direct_s) * 1e3, 3),
            "gateway": round(statistics.median(cost.first_gateway_s) * 1e3, 3),
            "added": round(cost.added_first_token_s * 1e3, 3),
            "requests": len(cost.first_direct_s),
        },
        "events_per_s": {
            "direct": [round(rate, 1) for rate in cost.rate_direct],
            "gateway": [round(rate, 1) for rate in cost.rate_gateway],
        },
        "throughput_ratio": round(cost.throughput, 4),
        "bounds": {"added_ms": MOST_ADDED_FIRST_TOKEN_S * 1e3, "throughput_ratio": LEAST_THROUGHPUT},
        "problems": cost.problems(),
    }


def main() -> int:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", help="address of a real engine, such as http://127.0.0.1:8000")
    parser.add_argument("--model", default="small")
    parser.add_argument("--key-file", type=Path)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    if asked.engine is None:
        with EngineProcess(free_port()) as fake:
            found = _measured(asked, fake)
    else:
        found = _measured(asked, None)
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    asked.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(found, indent=1))
    return 1 if found["problems"] else 0


def _measured(asked: argparse.Namespace, fake: EngineProcess | None) -> dict[str, Any]:
    key = asked.key_file.read_text(encoding="utf-8").strip() if asked.key_file else INTERNAL_KEY
    port = fake.port if fake is not None else int(asked.engine.rpartition(":")[2])
    first, many = _bodies(asked.model, is_fake=fake is not None)
    with tempfile.TemporaryDirectory() as folder, Stack(Path(folder), port, internal_key=key) as stack:
        doors = Door("direct", port, key), Door("gateway", stack.port, CLIENT_KEY)
        cost = asyncio.run(measure(*doors, first, many, asked.clients, asked.rounds))
    name = "a fake engine that streams 60 tokens a second to each client" if fake is not None else _named(asked)
    return document(cost, name, asked.clients)


def _named(asked: argparse.Namespace) -> str:
    version = httpx.get(f"{asked.engine}/version", trust_env=False).raise_for_status().json()["version"]
    return f"vLLM {version} with {asked.model}"


def _bodies(model: str, *, is_fake: bool) -> tuple[bytes, bytes]:
    if is_fake:
        one: dict[str, Any] = {"stream": True, "pieces": 1}
        long: dict[str, Any] = {"stream": True, "pieces": 180, "interval_s": 1 / 60, "piece_bytes": 4}
    else:
        messages = [{"role": "user", "content": "Count from one to a thousand."}]
        one = {"model": model, "messages": messages, "temperature": 0, "stream": True, "max_tokens": 2}
        long = {**one, "max_tokens": 200, "ignore_eos": True}
    return json.dumps(one).encode(), json.dumps(long).encode()


if __name__ == "__main__":
    sys.exit(main())
