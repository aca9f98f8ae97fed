"""The faults and attacks of a drill, each the same for a stand-in and for a real engine."""

import json
import os
import socket
import time
from pathlib import Path

from launcher.operate.gateway.routes import ROUTES
from tests.gateway import raw
from tests.gateway.drilling import CHAT, Drill, attack, fault
from tests.gateway.test_refusing import TRICKS

SILENT_CONNECTIONS = 1000
SILENT_FOR_S = 30.0
SLOW_READERS = 20
WRONG_KEYS = 200


@fault
def edge_killed(drill: Drill) -> str:
    drill.is_killing()
    drill.stack.kill_edge()
    drill.stack.start_edge()
    return "SIGKILL, started again at once"


@fault
def relay_killed(drill: Drill) -> str:
    drill.is_killing()
    drill.stack.kill_relay()
    drill.stack.start_relay()
    return "SIGKILL, started again at once"


@fault
def logs_on_a_full_disk(drill: Drill) -> str:
    """Start both parts with logs that take nothing, and see requests of each kind answered."""
    _restart(drill, Path(os.devnull).with_name("full"))
    with drill.stack.client(timeout_s=120) as client:
        for _ in range(5):
            assert client.get("/v1/models").is_success
            assert client.post("/no/such/route").status_code == 404
    _restart(drill, None)
    return "edge and relay killed and started with logs on /dev/full, answered, and started again with their own"


def _restart(drill: Drill, log: Path | None) -> None:
    drill.is_killing()
    drill.stack.kill_edge()
    drill.stack.kill_relay()
    drill.stack.start_relay(log)
    drill.stack.start_edge(log)


@fault
def engine_killed(drill: Drill) -> str:
    before = drill.tally.outcomes["told"]
    drill.engine.kill()
    return f"SIGKILL; {drill.tally.outcomes['told'] - before} streams ended with an error event"


@fault
def engine_stopped(drill: Drill) -> str:
    before = drill.tally.outcomes["told"]
    drill.engine.stop()
    return f"SIGSTOP; {drill.tally.outcomes['told'] - before} streams ended with an error event"


@attack
def silent_connections(drill: Drill) -> str:
    """Open connections that send nothing, and see them all given up."""
    opened: list[socket.socket] = []
    try:
        for _ in range(SILENT_CONNECTIONS):
            connection = socket.create_connection(("127.0.0.1", drill.stack.port), timeout=5)
            connection.setblocking(False)
            opened.append(connection)
        begun_s, left = time.monotonic(), set(opened)
        while left and time.monotonic() - begun_s < SILENT_FOR_S:
            time.sleep(0.25)
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


@attack
def large_prompts(drill: Drill) -> str:
    body = json.dumps({"prompt": "x" * 10_000_000}).encode()
    head = raw.head(CHAT, "POST", headers=(f"Content-Length: {len(body)}",))
    for _ in range(20):
        reply = raw.exchange(drill.stack.port, head + body)
        assert (reply.status, reply.json()["error"]["code"]) == (413, "request_too_large")
    return "20 prompts of 10 MB: 413"


@attack
def wrong_keys(drill: Drill) -> str:
    """Try every route that wants a key, without one and with others."""
    guarded = [route for route in ROUTES if route.needs_key]
    for number in range(WRONG_KEYS):
        route, key = guarded[number % len(guarded)], None if number < len(guarded) else f"wrong-{number}"
        reply = raw.exchange(drill.stack.port, raw.head(route.path.replace("{id}", "x"), route.method, key))
        drill.reached_without_key += reply.status != 401
    return f"{WRONG_KEYS} requests to {len(guarded)} routes without a key and with wrong ones: 401"


@attack
def path_tricks(drill: Drill) -> str:
    for trick in TRICKS:
        reply = raw.exchange(drill.stack.port, raw.head(trick))
        drill.reached_without_key += reply.status not in (400, 404)
    return f"{len(TRICKS)} tricks: 400 or 404"


@attack
def slow_readers(drill: Drill) -> str:
    """Ask for long streams and read nothing of them."""
    body = json.dumps(drill.engine.long()).encode()
    head = raw.head(CHAT, "POST", headers=("Content-Type: application/json", f"Content-Length: {len(body)}"))
    opened = []
    try:
        for _ in range(SLOW_READERS):
            connection = socket.create_connection(("127.0.0.1", drill.stack.port), timeout=5)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.sendall(head + body)
            opened.append(connection)
        time.sleep(drill.hold_s)
        return f"{SLOW_READERS} long streams, unread"
    finally:
        for connection in opened:
            connection.close()


ATTACKS = (silent_connections, large_prompts, wrong_keys, path_tricks, slow_readers)
ALL = (
    # Parts that are killed begin anew, and what watches the engine grows at the first end: memory is judged after them.
    engine_killed,
    logs_on_a_full_disk,
    edge_killed,
    relay_killed,
    # Twice: what its peak takes stays with the process, and the second must take no more.
    slow_readers,
    engine_stopped,
    silent_connections,
    large_prompts,
    wrong_keys,
    path_tricks,
    slow_readers,
    engine_killed,
)
