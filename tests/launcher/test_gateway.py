"""The gateway's pure parts: routes, admission, the ends of streams, keys, and the edge's configuration."""

import json
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.errors import UsageError
from launcher.gateway import edge, keys
from launcher.gateway.keys import Key, key_map
from launcher.operate.gateway import replies, routes
from launcher.operate.gateway.admission import Admission, Bounds, Sample, read_metrics
from launcher.operate.gateway.events import MOST_HELD_BYTES, EventStream
from launcher.state import ServiceState

BOUNDS = Bounds(max_waiting=8)
IDLE = Sample(kv_usage=0.1, waiting=0)
FULL = Sample(kv_usage=0.96, waiting=0)


def after(*samples: tuple[float, Sample]) -> Admission:
    state = Admission()
    for now_s, sample in samples:
        state = state.after(sample, now_s, BOUNDS)
    return state


def test_a_full_cache_closes_the_door_after_five_seconds_and_not_before() -> None:
    assert after((0, FULL), (4.9, FULL)).is_open
    assert after((0, FULL), (5.0, FULL)).closed_by == {"kv-cache"}


def test_a_cache_that_is_full_now_and_then_closes_nothing() -> None:
    assert after((0, FULL), (4, FULL), (4.5, IDLE), (5, FULL), (9.9, FULL)).is_open


def test_exactly_95_percent_is_not_above_it() -> None:
    at = Sample(kv_usage=0.95, waiting=0)
    assert after((0, at), (60, at)).is_open


def test_the_door_opens_again_well_below_where_it_closed() -> None:
    closed = ((0, FULL), (5, FULL))
    assert not after(*closed, (6, Sample(0.86, 0))).is_open
    assert after(*closed, (6, Sample(0.85, 0))).is_open
    assert after(*closed, (6, Sample(0.85, 0)), (7, FULL), (11, FULL)).is_open


def test_a_long_queue_closes_it_at_once_and_half_of_it_opens_it() -> None:
    assert after((0, Sample(0.1, 8))).is_open
    assert after((0, Sample(0.1, 9))).closed_by == {"queue"}
    assert after((0, Sample(0.1, 9)), (1, Sample(0.1, 5))).closed_by == {"queue"}
    assert after((0, Sample(0.1, 9)), (1, Sample(0.1, 4))).is_open


def test_both_pressures_must_go() -> None:
    both = after((0, Sample(0.99, 9)), (5, Sample(0.99, 9)))
    assert both.closed_by == {"kv-cache", "queue"}
    assert both.after(Sample(0.5, 9), 6, BOUNDS).closed_by == {"queue"}
    assert both.after(IDLE, 6, BOUNDS).is_open


@given(st.lists(st.tuples(st.floats(0, 1), st.integers(0, 20)), max_size=40))
def test_the_door_never_swings_without_its_gap(samples: list[tuple[float, int]]) -> None:
    state = Admission()
    for now_s, (usage, waiting) in enumerate(samples):
        before, state = state, state.after(Sample(usage, waiting), now_s, BOUNDS)
        if "kv-cache" in before.closed_by - state.closed_by:
            assert usage <= BOUNDS.kv_open
        if "kv-cache" in state.closed_by - before.closed_by:
            assert all(one[0] > BOUNDS.kv_close for one in samples[now_s - 5 : now_s + 1])
        if "queue" in before.closed_by - state.closed_by:
            assert waiting <= BOUNDS.waiting_open


def test_metrics_are_read_over_all_engines() -> None:
    text = (
        "# TYPE vllm:kv_cache_usage_perc gauge\n"
        'vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25\n'
        'vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.5\n'
        'vllm:num_requests_waiting{engine="0",model_name="m"} 3.0\n'
        'vllm:num_requests_waiting{engine="1",model_name="m"} 4.0\n'
        'vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 99.0\n'
    )
    assert read_metrics(text) == Sample(kv_usage=0.5, waiting=7)


@pytest.mark.parametrize(
    "text",
    ["", "<html>", "vllm:kv_cache_usage_perc 0.5\n", "vllm:kv_cache_usage_perc NaN\nvllm:num_requests_waiting 0"],
)
def test_metrics_that_lack_something_say_nothing(text: str) -> None:
    assert read_metrics(text) is None


@given(st.lists(st.binary(min_size=1, max_size=12), max_size=30))
def test_a_stream_in_whatever_pieces_is_the_same_stream(pieces: list[bytes]) -> None:
    events = EventStream("done")
    passed = b"".join(events.feed(piece) for piece in pieces)
    whole = b"".join(pieces)
    assert whole.startswith(passed)
    assert b"\n\n" not in whole[len(passed) :]
    assert passed == b"" or passed.endswith(b"\n\n")


def test_a_broken_stream_never_ends_inside_an_event() -> None:
    events = EventStream("done")
    passed = events.feed(b'data: {"a": 1}\n\ndata: {"b"')
    text = passed + events.broken_end("the engine ended")
    first, error, done, rest = text.decode().split("\n\n")
    assert (first, done, rest) == ('data: {"a": 1}', "data: [DONE]", "")
    assert json.loads(error.removeprefix("data: "))["error"]["message"] == "The answer broke off: the engine ended."


def test_an_endless_event_is_passed_on_in_bounded_pieces_and_closed() -> None:
    events = EventStream("done")
    passed = events.feed(b"data: " + b"x" * MOST_HELD_BYTES)
    assert len(passed) > MOST_HELD_BYTES
    assert events.broken_end("it ended").startswith(b"\n\ndata: ")


@pytest.mark.parametrize(
    ("ending", "last", "is_finished"),
    [
        ("done", b"data: [DONE]\n\n", True),
        ("done", b'data: {"choices": []}\n\n', False),
        ("done", b"data: [DONE]", False),
        ("events", b'event: response.completed\ndata: {"type": "response.completed"}\n\n', True),
        ("events", b'event: response.output_text.delta\ndata: {"delta": "event: error"}\n\n', False),
        ("events", b'event: error\ndata: {"type": "error"}\n\n', True),
    ],
)
def test_a_stream_is_finished_by_its_last_event(ending: routes.Ending, last: bytes, is_finished: bool) -> None:
    events = EventStream(ending)
    events.feed(b'data: {"a": 1}\n\n')
    events.feed(last)
    assert events.is_finished is is_finished


def test_a_route_is_its_bytes() -> None:
    assert routes.find("GET", "/v1/models") is not None
    assert routes.find("GET", "/v1/responses/resp_0a-Z") is not None
    for method, path in [
        ("POST", "/v1/models"),
        ("GET", "/v1/models/"),
        ("GET", "/V1/models"),
        ("GET", "/v1/responses/a/b"),
        ("GET", "/v1/responses/a\n"),
        ("GET", "/metrics"),
        ("POST", "/invocations"),
    ]:
        assert routes.find(method, path) is None, (method, path)


def test_every_refusal_is_an_error_of_the_api() -> None:
    found = [value for value in vars(replies).values() if isinstance(value, replies.Refusal)]
    assert len(found) > 10
    for refusal in (*found, replies.unavailable("it is away", 5)):
        document = json.loads(refusal.text())
        assert set(document["error"]) == {"message", "type", "param", "code"}
        assert ("status" in document) == (refusal.reason is not None)
        if refusal.status == 503:
            assert document["status"] == "degraded"
            assert int(refusal.headers()["Retry-After"]) >= 1


def example(**changed: object) -> str:
    values: dict[str, object] = {
        "bind": ":8000",
        "relay": "relay:8001",
        "keys_file": "/keys.map",
        "max_request_bytes": 1,
        "silence_timeout_s": 600,
    }
    return edge.configuration(edge.Edge(**{**values, **changed}), "heading")  # type: ignore[arg-type]


def test_tls_is_rendered_where_a_certificate_is() -> None:
    assert " ssl " not in example()
    text = example(tls_bind=":8443", tls_file="/run/graft/tls.pem")
    assert "bind :8443 ssl crt /run/graft/tls.pem alpn http/1.1" in text
    assert "ssl-min-ver TLSv1.2" in text


def test_a_word_of_the_configuration_stays_one_word() -> None:
    assert edge.word("it's $x") == r"'it'\''s $x'"
    with pytest.raises(ValueError, match="line end"):
        edge.word("a\nb")


@pytest.fixture
def state(tmp_path: Path) -> ServiceState:
    return ServiceState(tmp_path / "profile")


def test_a_key_is_kept_as_its_hash_alone(state: ServiceState) -> None:
    secret = keys.add(state, "ann", requests_per_minute=60, concurrency=4)
    assert secret.startswith(keys.PREFIX)
    assert len(secret) > 40
    (key,) = keys.read(state)
    assert (key.name, key.requests_per_minute, key.concurrency) == ("ann", 60, 4)
    assert key.sha256 == Key.of("ann", secret).sha256
    assert all(secret not in path.read_text() for path in state.root.rglob("*") if path.is_file())
    assert stat.S_IMODE(keys.keys_file(state).stat().st_mode) == 0o600
    assert stat.S_IMODE(state.secrets_dir.stat().st_mode) == 0o700


def test_two_keys_are_two_secrets(state: ServiceState) -> None:
    assert keys.add(state, "ann") != keys.add(state, "bob")
    keys.remove(state, "ann")
    assert [key.name for key in keys.read(state)] == ["bob"]


@pytest.mark.parametrize("name", ["", "Ann", "a b", "a:b", "../x", "-a", "x" * 65, "a\n"])
def test_a_name_that_would_break_the_map_is_refused(state: ServiceState, name: str) -> None:
    with pytest.raises(UsageError, match="no name of a key"):
        keys.add(state, name)


def test_a_name_is_taken_once(state: ServiceState) -> None:
    keys.add(state, "ann")
    for name in ("ann", keys.OWN):
        with pytest.raises(UsageError, match="there is a key of this name"):
            keys.add(state, name)
    with pytest.raises(UsageError, match="bob: no such key; there are ann"):
        keys.remove(state, "bob")
    with pytest.raises(UsageError, match="graft is the service's own key"):
        keys.remove(state, keys.OWN)


def test_a_broken_file_of_keys_is_named(state: ServiceState) -> None:
    keys.add(state, "ann")
    keys.keys_file(state).write_text("{", encoding="utf-8")
    with pytest.raises(UsageError, match=r"keys.json: not a file of keys"):
        keys.read(state)


def test_the_map_has_a_line_for_each_key() -> None:
    ann, bob = Key.of("ann", "a", requests_per_minute=60, concurrency=4), Key.of("bob", "b")
    assert key_map((ann, bob)).splitlines() == [
        f"{ann.sha256} ann:60:4",
        f"{bob.sha256} bob:1000000000:1000000000",
    ]
