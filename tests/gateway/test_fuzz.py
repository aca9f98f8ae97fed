"""Whatever is sent: the gateway itself never fails, answers in the API's words, and lets nothing through unasked."""

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from launcher.operate.gateway import routes
from launcher.operate.gateway.routes import ROUTES
from tests.gateway import raw
from tests.gateway.fake_engine import FakeEngine
from tests.gateway.stack import CLIENT_KEY, Stack

pytestmark = pytest.mark.timeout(300)
EXAMPLES = 150
PATHS = tuple(route.path.replace("{id}", "resp_1") for route in ROUTES)
HOSTILE = ("/metrics", "/invocations", "/docs", "/sleep", "/collective_rpc", "/v1/load_lora_adapter", "/version")
PIECES = (
    "/",
    "//",
    "..",
    ".",
    "%2e",
    "%2F",
    "%00",
    ";",
    "?",
    "#",
    "\\",
    "v1",
    "V1",
    "models",
    "metrics",
    "é",
    " ",
    "*",
)

targets = st.one_of(
    st.sampled_from(PATHS + HOSTILE),
    st.lists(st.sampled_from(PIECES), max_size=8).map("".join),
    st.tuples(st.sampled_from(PATHS), st.sampled_from(PIECES), st.sampled_from(HOSTILE)).map("".join),
    st.text(st.characters(exclude_characters="\r\n", codec="utf-8"), max_size=40).map(lambda text: f"/{text}"),
    st.sampled_from(PATHS).map(lambda path: f"{path}?a=/metrics"),
)
methods = st.sampled_from(("GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "get", "FOO"))
names = st.sampled_from(
    (
        *("X-Forwarded-For", "X-HTTP-Method-Override", "Transfer-Encoding", "Content-Length", "Cookie", "Expect"),
        *("Upgrade", "X-Original-URL", "X-Rewrite-URL", "Forwarded", "Accept-Encoding", "Content-Type", "X-Request-Id"),
    )
)
values = st.one_of(
    st.sampled_from(
        ("chunked", "gzip, chunked", "0", "5", "-1", "99999999999999999999", "100-continue", "GET", "/metrics")
    ),
    st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=30),
)
headers = st.lists(st.tuples(names, values).map(": ".join), max_size=4).map(tuple)
keys = st.one_of(
    st.none(),
    st.just(CLIENT_KEY),
    st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=60),
    st.just(CLIENT_KEY + " "),
)
bodies = st.one_of(
    st.just(b""), st.binary(max_size=200), st.just(b'{"stream": true}'), st.just(b"5\r\nhello\r\n0\r\n\r\n")
)


@pytest.fixture(scope="module")
def engine() -> Iterator[FakeEngine]:
    with FakeEngine() as engine:
        yield engine


@pytest.fixture(scope="module")
def gateway(engine: FakeEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    # What claims a body and sends none is waited for so long.
    brief = {"header_timeout_s": 1, "client_timeout_s": 1}
    folder = tmp_path_factory.mktemp("fuzz")
    with Stack(folder, engine.port, relay_settings={"body_timeout_s": 0.3}, edge_settings=brief) as gateway:
        yield gateway


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(target=targets, method=methods, key=keys, extra=headers, body=bodies)
@example("/v1/models", "GET", CLIENT_KEY, (), b"")
@example(
    "/v1/completions",
    "POST",
    CLIENT_KEY,
    ("Transfer-Encoding: chunked", "Content-Length: 5"),
    b"5\r\nhello\r\n0\r\n\r\n",
)
def test_no_request_breaks_the_gateway_or_gets_past_it(
    engine: FakeEngine, gateway: Stack, target: str, method: str, key: str | None, extra: tuple[str, ...], body: bytes
) -> None:
    engine.seen.clear()
    length = (
        ()
        if any(one.startswith(("Content-Length", "Transfer-Encoding")) for one in extra)
        else (f"Content-Length: {len(body)}",)
    )
    reply = raw.exchange(gateway.port, raw.head(target, method, key, (*extra, *length)) + body)
    seen = engine.generations
    assert all(routes.find(one.method, one.target.partition("?")[0]) for one in seen), seen
    if key is None or key.strip() != CLIENT_KEY:
        assert seen == []
    assert reply.status < 500, reply
    if reply.status >= 400:
        assert raw.is_not_http(reply) or raw.is_openai_error(reply), reply
    else:
        assert seen or target.partition("?")[0] == "/health" or reply.status in (0, 100), reply


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(max_size=400))
def test_no_bytes_break_the_gateway(engine: FakeEngine, gateway: Stack, data: bytes) -> None:
    engine.seen.clear()
    reply = raw.exchange(gateway.port, data + b"\r\n\r\n")
    assert engine.generations == []
    assert reply.status in (0, 400, 401, 408), reply
