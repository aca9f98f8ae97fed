"""What the gateway refuses, and how: in the words of the OpenAI API, and before the engine sees any of it."""

import json
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from launcher.gateway.keys import Key, key_map
from launcher.operate.gateway.routes import ROUTES
from tests.gateway.fake_engine import FakeEngine
from tests.gateway.raw import exchange, head, is_not_http, is_openai_error, read
from tests.gateway.stack import CLIENT_KEY, KEYS, LIMITED_KEY, Stack, free_port

pytestmark = pytest.mark.timeout(60)
CHAT = "/v1/chat/completions"

TRICKS = (
    "//v1/models",
    "/v1//models",
    "/v1/models/",
    "/v1/./models",
    "/v1/x/../models",
    "/v1/models/..;/metrics",
    "/v1/models/../../metrics",
    "/..;/metrics",
    "/v1/%2e%2e/metrics",
    "/v1/models%2f..%2f..%2fmetrics",
    "/v1/models/%2E%2E/%2E%2E/metrics",
    "/v1/%6dodels",
    "/v1/models%00",
    "/v1/models%20",
    "/v1/models;x=1",
    "/v1/models#x",
    "/v1\\models",
    "/V1/models",
    "/v1/Models",
    "/metrics",
    "/METRICS",
    "/invocations",
    "/ping",
    "/docs",
    "/redoc",
    "/openapi.json",
    "/version",
    "/load",
    "/server_info",
    "/sleep",
    "/is_sleeping",
    "/collective_rpc",
    "/v1/load_lora_adapter",
    "/v1/responses/",
    "/v1/responses/..",
    "/v1/responses/a%2fb",
    f"/v1/responses/{'x' * 129}",
    "/v1/responses/x/cancel/",
    "*",
    "http://127.0.0.1/metrics",
    "http://127.0.0.1/v1/models",
    "v1/models",
    "/v1/\tmodels",
    "/v1/mod\x01els",
    "/v1/modèls",
    f"/{'x' * 8000}",
    f"/{'x' * 20000}",
    "",
)


@pytest.fixture(scope="module")
def engine() -> Iterator[FakeEngine]:
    with FakeEngine() as engine:
        yield engine


@pytest.fixture(scope="module")
def gateway(engine: FakeEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(tmp_path_factory.mktemp("refusing"), engine.port) as gateway:
        yield gateway


@pytest.fixture(autouse=True)
def nothing_seen(engine: FakeEngine) -> None:
    engine.seen.clear()


@pytest.mark.parametrize("method", ["GET", "POST", "HEAD", "OPTIONS", "CONNECT", "get", "TRACE", "PRI"])
def test_no_trick_with_the_path_reaches_the_engine(engine: FakeEngine, gateway: Stack, method: str) -> None:
    for trick in TRICKS:
        reply = exchange(gateway.port, head(trick, method))
        assert reply.status in (400, 404), (trick, reply)
        assert method == "HEAD" or is_not_http(reply) or is_openai_error(reply), (trick, reply)
    assert engine.generations == []


def test_a_method_is_allowed_on_its_own_path_only(engine: FakeEngine, gateway: Stack) -> None:
    for route in ROUTES:
        for method in ("GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS"):
            if not any(one.method == method and one.path == route.path for one in ROUTES):
                reply = exchange(gateway.port, head(route.path.replace("{id}", "x"), method))
                assert reply.status == 404, (method, route)
    assert engine.generations == []


@pytest.mark.parametrize(
    "header",
    [
        "X-HTTP-Method-Override: POST",
        "x-http-method: DELETE",
        "X-Method-Override: POST",
        "Authorization: Bearer other",
        "Host: other",
    ],
)
def test_a_request_that_says_two_things_is_refused(engine: FakeEngine, gateway: Stack, header: str) -> None:
    reply = exchange(gateway.port, head("/v1/models", headers=(header,)))
    assert reply.status == 400
    assert is_not_http(reply) or is_openai_error(reply)
    assert engine.generations == []


@pytest.mark.parametrize(
    "smuggled",
    [
        b"POST /v1/completions HTTP/1.1\r\nHost: g\r\nAuthorization: Bearer KEY\r\nContent-Length: 4\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /metrics HTTP/1.1\r\nHost: g\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: g\r\nAuthorization: Bearer KEY\r\nContent-Length: 4\r\n"
        b"Content-Length: 50\r\n\r\n{}{}GET /metrics HTTP/1.1\r\nHost: g\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: g\r\nAuthorization: Bearer KEY\r\nTransfer-Encoding: xchunked\r\n\r\n"
        b"0\r\n\r\nGET /metrics HTTP/1.1\r\nHost: g\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nHost: g\r\nAuthorization : Bearer KEY\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nHost: g\r\nX: a\nAuthorization: Bearer KEY\r\n\r\n",
        b"GET /v1/models\r\nHost: g\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ],
)
def test_nothing_is_smuggled_past_the_edge(engine: FakeEngine, gateway: Stack, smuggled: bytes) -> None:
    exchange(gateway.port, smuggled.replace(b"KEY", CLIENT_KEY.encode()) + b"\r\n\r\n", timeout_s=15)
    # Everything that arrives is one request of an allowed route: the relay writes it anew.
    assert {seen.target for seen in engine.generations} <= {"/v1/completions", "/v1/models"}
    assert all(b"GET" not in seen.body for seen in engine.generations)


@pytest.mark.parametrize(
    "authorization",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        "Bearer wrong",
        f"Basic {CLIENT_KEY}",
        CLIENT_KEY,
        f"Bearer {CLIENT_KEY}x",
        f"Bearer {CLIENT_KEY[:-1]}",
        f"Bearer {CLIENT_KEY.upper()}",
        f"Bearer {Key.of('client', CLIENT_KEY).sha256}",
        "Bearer client:1000000000:1000000000",
        f"Bearer {'x' * 5000}",
    ],
)
def test_without_a_known_key_every_route_but_health_is_closed(
    engine: FakeEngine, gateway: Stack, authorization: str | None
) -> None:
    headers = () if authorization is None else (f"Authorization: {authorization}",)
    for route in ROUTES:
        reply = exchange(gateway.port, head(route.path.replace("{id}", "x"), route.method, None, headers))
        if route.needs_key:
            assert (reply.status, reply.json()["error"]["code"]) == (401, "invalid_api_key"), route
    assert engine.generations == []


def test_health_is_told_to_everyone(gateway: Stack) -> None:
    reply = exchange(gateway.port, head("/health", key=None))
    assert (reply.status, reply.json()) == (200, {"status": "ready"})


def test_a_key_has_its_requests_of_a_minute_and_is_told_when_to_come_again(gateway: Stack) -> None:
    with gateway.client(LIMITED_KEY) as client:
        answers = [client.get("/v1/models") for _ in range(33)]
    assert [answer.status_code for answer in answers] == [200] * 30 + [429] * 3
    assert answers[-1].json()["error"]["code"] == "rate_limit_exceeded"
    assert 1 <= int(answers[-1].headers["retry-after"]) <= 60
    with gateway.client() as client:
        assert client.get("/v1/models").status_code == httpx.codes.OK


def test_a_key_has_so_many_requests_under_way_and_no_more(engine: FakeEngine, tmp_path: Path) -> None:
    asked = {"stream": True, "pieces": 200, "interval_s": 0.05}
    with (
        Stack(tmp_path, engine.port) as gateway,
        gateway.client(LIMITED_KEY) as client,
        client.stream("POST", CHAT, json=asked) as first,
        client.stream("POST", CHAT, json=asked) as second,
    ):
        third = client.post(CHAT, json=asked)
        assert (first.status_code, second.status_code, third.status_code) == (200, 200, 429)
        assert third.json()["error"]["code"] == "concurrency_limit_exceeded"
        assert third.headers["retry-after"] == "1"
        second.close()
        gateway.until(lambda: engine.running == 1)
        assert client.get("/v1/models").status_code == httpx.codes.OK


@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_prompt_of_10_mb_is_refused_in_words(engine: FakeEngine, gateway: Stack, is_chunked: bool) -> None:
    body = json.dumps({"prompt": "x" * 10_000_000}).encode()
    with gateway.client() as client:
        answer = client.post(CHAT, content=iter([body]) if is_chunked else body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")
    assert engine.generations == []


def test_large_bodies_together_take_bounded_memory(engine: FakeEngine, tmp_path: Path) -> None:
    # Three that may be one MiB each, of which two fit; all three stay unfinished.
    unfinished = head(CHAT, "POST", headers=(f"Content-Length: {1 << 20}",)) + b"{"
    with Stack(tmp_path, engine.port, relay_settings={"max_body_bytes": 2 << 20}) as gateway:
        connections = [socket.create_connection(("127.0.0.1", gateway.port), timeout=5) for _ in range(3)]
        for connection in connections[:2]:
            connection.sendall(unfinished)
        time.sleep(0.5)
        connections[2].sendall(unfinished)
        reply = read(connections[2])
        assert (reply.status, reply.json()["error"]["code"]) == (429, "overloaded_bodies")
        for connection in connections:
            connection.close()
        time.sleep(0.5)
        with gateway.client() as client:
            assert client.post(CHAT, content=b" " * (1 << 20)).status_code == httpx.codes.OK


def test_a_body_that_does_not_come_is_given_up(engine: FakeEngine, tmp_path: Path) -> None:
    slow = head(CHAT, "POST", headers=("Content-Length: 100",))
    with Stack(tmp_path, engine.port, relay_settings={"body_timeout_s": 1}) as gateway:
        with socket.create_connection(("127.0.0.1", gateway.port), timeout=10) as connection:
            connection.sendall(slow + b"{")
            begun_s = time.monotonic()
            # Something arrives all the time: no limit of silence would end it.
            for _ in range(4):
                time.sleep(0.2)
                connection.sendall(b" ")
            reply = read(connection)
        assert (reply.status, reply.json()["error"]["code"]) == (408, "request_timeout")
        assert time.monotonic() - begun_s < 3
    assert engine.generations == []


def test_headers_that_do_not_come_are_given_up(engine: FakeEngine, tmp_path: Path) -> None:
    with Stack(tmp_path, engine.port, edge_settings={"header_timeout_s": 1}) as gateway:
        with socket.create_connection(("127.0.0.1", gateway.port), timeout=10) as connection:
            connection.sendall(b"GET /v1/models HTTP/1.1\r\nX: ")
            for _ in range(8):
                time.sleep(0.1)
                connection.sendall(b"x")
            reply = read(connection)
        assert reply.status == 408


def test_keys_come_and_go_without_a_restart(engine: FakeEngine, tmp_path: Path) -> None:
    asked = {"stream": True, "pieces": 30, "interval_s": 0.1}
    with (
        Stack(tmp_path, engine.port) as gateway,
        gateway.client() as client,
        client.stream("POST", CHAT, json=asked) as running,
    ):
        gateway.keys_file.write_text(key_map((*KEYS[1:], Key.of("new", "new-key"))), encoding="utf-8")
        gateway.reload()
        with gateway.client("new-key") as other:
            assert other.get("/v1/models").status_code == httpx.codes.OK
        with gateway.client() as former:
            assert former.get("/v1/models").status_code == httpx.codes.UNAUTHORIZED
        # What runs goes on to its end.
        assert running.read().endswith(b"data: [DONE]\n\n")


def test_tls_is_one_option(engine: FakeEngine, tmp_path: Path) -> None:
    made = "req -x509 -newkey rsa:2048 -nodes -keyout key.pem -out cert.pem -days 1 -subj /CN=localhost -addext"
    argv = ["openssl", *made.split(), "subjectAltName=DNS:localhost"]
    subprocess.run(argv, cwd=tmp_path, capture_output=True, check=True)
    pem = tmp_path / "tls.pem"
    pem.write_bytes((tmp_path / "cert.pem").read_bytes() + (tmp_path / "key.pem").read_bytes())
    port = free_port()
    settings = {"tls_bind": f"127.0.0.1:{port}", "tls_file": str(pem)}
    context = ssl.create_default_context(cafile=str(tmp_path / "cert.pem"))
    with (
        Stack(tmp_path, engine.port, edge_settings=settings),
        httpx.Client(verify=context, trust_env=False, base_url=f"https://localhost:{port}") as client,
    ):
        assert client.get("/v1/models").status_code == httpx.codes.UNAUTHORIZED
        answer = client.get("/v1/models", headers={"Authorization": f"Bearer {CLIENT_KEY}"})
        assert answer.status_code == httpx.codes.OK
