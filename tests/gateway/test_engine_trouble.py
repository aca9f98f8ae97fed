"""What clients are told while the engine is away, ill, or overloaded: errors of the API, never a cut socket."""

import json
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from launcher.operate.service_state import ServiceStatus, StateFile
from tests.gateway.fake_engine import FakeEngine
from tests.gateway.stack import Stack

pytestmark = pytest.mark.timeout(60)
CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"


def write(gateway: Stack, **status: Any) -> None:
    StateFile(gateway.shared_dir).change(lambda before: ServiceStatus(**status))


def events(text: str) -> list[str]:
    assert text.endswith("\n\n")
    return text.removesuffix("\n\n").split("\n\n")


def error_in(event: str) -> dict[str, Any]:
    document = json.loads(event.removeprefix("data: "))
    assert isinstance(document, dict)
    return document


@pytest.mark.parametrize("half_event", [False, True])
def test_a_stream_whose_engine_dies_ends_with_an_error_event(gateway: Stack, half_event: bool) -> None:
    with gateway.client() as client:
        answer = client.post(CHAT, json={"stream": True, "pieces": 9, "die_after": 3, "half_event": half_event})
    *pieces, error, done = events(answer.text)
    assert [json.loads(piece[6:])["choices"][0]["delta"]["content"] for piece in pieces] == ["0", "1", "2"]
    document = error_in(error)
    assert document["error"]["code"] == "stream_interrupted"
    assert (document["status"], document["reason"]) == ("degraded", "the engine ended while it answered")
    assert done == "data: [DONE]"


def test_a_stream_that_stops_before_its_end_is_no_whole_answer(gateway: Stack) -> None:
    with gateway.client() as client:
        answer = client.post(CHAT, json={"stream": True, "without_done": True})
    *_, error, done = events(answer.text)
    assert error_in(error)["reason"] == "the engine ended the answer too early"
    assert done == "data: [DONE]"


def test_a_stream_of_responses_ends_with_an_event_of_its_own_kind(gateway: Stack) -> None:
    with gateway.client() as client:
        answer = client.post(RESPONSES, json={"stream": True, "pieces": 9, "die_after": 1})
    last = events(answer.text)[-1]
    kind, data = last.split("\n")
    assert kind == "event: error"
    assert error_in(data)["type"] == "error"


def test_an_answer_whose_engine_dies_becomes_an_error(gateway: Stack) -> None:
    with gateway.client() as client:
        answer = client.post(CHAT, json={"die_after": 0})
    assert answer.status_code == httpx.codes.SERVICE_UNAVAILABLE
    assert answer.json()["error"]["code"] == "engine_unavailable"
    assert answer.json()["status"] == "degraded"
    assert int(answer.headers["retry-after"]) >= 1


def test_a_failure_of_a_dying_engine_is_told_as_its_end(engine: FakeEngine, gateway: Stack) -> None:
    engine.health = 503
    time.sleep(0.3)
    with gateway.client() as client:
        refused = client.post(CHAT, json={})
    assert (refused.status_code, refused.json()["status"]) == (503, "degraded")


def test_a_failure_of_a_healthy_engine_stays_the_engine_s(gateway: Stack) -> None:
    with gateway.client() as client:
        assert client.post(CHAT, json={"status": 500}).status_code == httpx.codes.INTERNAL_SERVER_ERROR


def test_an_engine_that_comes_back_is_used_within_a_second(engine: FakeEngine, gateway: Stack) -> None:
    engine.stop()
    with gateway.client() as client:
        away = client.post(CHAT, json={})
        assert (away.status_code, away.json()["error"]["code"]) == (503, "engine_unavailable")
        assert away.json()["reason"] == "the engine ended and is being restarted"
        assert client.get("/health").json() == {"status": "degraded", "reason": away.json()["reason"]}
        engine.start()
        begun_s = time.monotonic()
        gateway.until(lambda: client.post(CHAT, json={}).status_code == httpx.codes.OK)
        assert time.monotonic() - begun_s < 1
        assert client.get("/health").json() == {"status": "ready"}


def test_an_engine_that_never_answered_is_loading(engine: FakeEngine, tmp_path: Path) -> None:
    engine.stop()
    with Stack(tmp_path, engine.port) as gateway, gateway.client() as client:
        answer = client.post(CHAT, json={})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_loading")
        assert answer.headers["retry-after"] == "3"
        health = client.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "loading")


def test_the_watchdog_s_words_reach_the_client(engine: FakeEngine, gateway: Stack) -> None:
    engine.stop()
    write(gateway, phase="restarting", reason="The engine ran out of GPU memory.", since_s=time.time())
    with gateway.client() as client:
        answer = client.post(CHAT, json={})
        assert answer.json()["reason"] == "The engine ran out of GPU memory"
        assert 50 <= int(answer.headers["retry-after"]) <= 60
        write(gateway, phase="stopped", reason="The GPU is gone.", since_s=time.time())
        answer = client.post(CHAT, json={})
        assert (answer.status_code, answer.json()["reason"]) == (503, "The GPU is gone")


def test_smaller_settings_are_announced_in_every_reply(gateway: Stack) -> None:
    write(gateway, phase="serving", mode="degraded", reason="It ran out of memory twice: context of 8192 tokens.")
    with gateway.client() as client:
        for answer in (
            client.post(CHAT, json={}),
            client.post(CHAT, json={"stream": True}),
            client.get("/v1/models"),
            client.post(CHAT, content=iter([b"x" * (2 << 20)])),
        ):
            assert answer.headers["x-graft-status"] == "degraded", answer
            assert answer.headers["x-graft-reason"] == "It ran out of memory twice: context of 8192 tokens"
        assert answer.status_code == httpx.codes.REQUEST_ENTITY_TOO_LARGE
        assert answer.json()["status"] == "degraded"
        health = client.get("/health")
        assert (health.status_code, health.json()["status"]) == (200, "degraded")


def test_a_full_kv_cache_closes_the_door_after_five_seconds_and_opens_it_late(
    engine: FakeEngine, gateway: Stack
) -> None:
    with gateway.client() as client:
        engine.kv_usage, begun_s = 0.97, time.monotonic()
        gateway.until(lambda: client.post(CHAT, json={}).status_code == httpx.codes.TOO_MANY_REQUESTS)
        assert 4.9 <= time.monotonic() - begun_s < 6
        refused = client.post(CHAT, json={})
        assert refused.json()["error"]["code"] == "overloaded_kv_cache"
        assert int(refused.headers["retry-after"]) >= 1
        # What takes no place in the cache is answered, and above 85 % the door stays closed.
        assert client.get("/v1/models").status_code == httpx.codes.OK
        engine.kv_usage = 0.90
        time.sleep(0.5)
        assert client.post(CHAT, json={}).status_code == httpx.codes.TOO_MANY_REQUESTS
        engine.kv_usage = 0.80
        gateway.until(lambda: client.post(CHAT, json={}).status_code == httpx.codes.OK, timeout_s=1)


def test_a_long_queue_closes_the_door_at_once(engine: FakeEngine, gateway: Stack) -> None:
    with gateway.client() as client:
        engine.waiting = 21
        gateway.until(lambda: client.post(CHAT, json={}).status_code == httpx.codes.TOO_MANY_REQUESTS, timeout_s=1)
        engine.waiting = 11
        time.sleep(0.3)
        refused = client.post(CHAT, json={})
        assert refused.json()["error"]["code"] == "overloaded_queue"
        engine.waiting = 10
        gateway.until(lambda: client.post(CHAT, json={}).status_code == httpx.codes.OK, timeout_s=1)


def test_a_burst_between_two_looks_is_bounded_too(engine: FakeEngine, tmp_path: Path) -> None:
    asked = {"stream": True, "pieces": 100, "interval_s": 0.05}
    with Stack(tmp_path, engine.port, relay_settings={"max_in_flight": 2}) as gateway, gateway.client() as client:
        with client.stream("POST", CHAT, json=asked), client.stream("POST", CHAT, json=asked):
            refused = client.post(CHAT, json={})
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "overloaded_queue")
        gateway.until(lambda: client.post(CHAT, json={}).status_code == httpx.codes.OK)


def test_an_engine_that_says_nothing_is_given_up(engine: FakeEngine, tmp_path: Path) -> None:
    with Stack(tmp_path, engine.port, relay_settings={"silence_timeout_s": 1}) as gateway, gateway.client() as client:
        answer = client.post(CHAT, json={"silent_s": 4})
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "engine_timeout")
        stream = client.post(CHAT, json={"stream": True, "pieces": 2, "interval_s": 4})
        *_, error, done = events(stream.text)
        assert error_in(error)["reason"] == "the engine was silent for 1 s"
        assert done == "data: [DONE]"


def test_a_relay_that_is_killed_is_named_and_served_again(gateway: Stack) -> None:
    gateway.relay.kill()
    gateway.relay.wait()
    with gateway.client() as client:
        away = client.post(CHAT, json={})
        assert (away.status_code, away.json()["error"]["code"]) == (503, "gateway_restarting")
        assert (away.json()["status"], away.headers["retry-after"]) == ("degraded", "2")
        gateway.start_relay()
        assert client.post(CHAT, json={}).status_code == httpx.codes.OK


def test_an_edge_that_is_killed_serves_again_when_it_is_back(gateway: Stack) -> None:
    with gateway.client() as client:
        assert client.post(CHAT, json={}).status_code == httpx.codes.OK
        gateway.kill_edge()
        with pytest.raises(httpx.TransportError):
            client.post(CHAT, json={})
        gateway.start_edge()
        assert client.post(CHAT, json={}).status_code == httpx.codes.OK
