"""What goes through the gateway: requests and streams, unbuffered and unchanged, without the client's secrets."""

import json
import time
from pathlib import Path

import httpx
import pytest

from tests.gateway.fake_engine import FakeEngine
from tests.gateway.stack import CLIENT_KEY, INTERNAL_KEY, Stack

pytestmark = pytest.mark.timeout(60)
CHAT = "/v1/chat/completions"


def test_a_request_gets_the_engine_s_answer(engine: FakeEngine, gateway: Stack) -> None:
    with gateway.client() as client:
        answer = client.post(CHAT, json={"piece_bytes": 3})
    assert answer.status_code == httpx.codes.OK
    assert answer.json() == {"choices": [{"message": {"content": "xxx"}}]}
    assert answer.headers["content-type"] == "application/json"
    assert [seen.target for seen in engine.generations] == [CHAT]


def test_an_error_of_the_engine_is_passed_on_as_it_is(gateway: Stack) -> None:
    with gateway.client() as client:
        answer = client.post(CHAT, json={"status": 422})
    assert (answer.status_code, "choices" in answer.json()) == (422, True)


def test_the_engine_sees_the_service_s_key_and_nothing_of_the_client_s(engine: FakeEngine, gateway: Stack) -> None:
    own = {"X-Forwarded-For": "10.1.2.3", "Cookie": "secret=1", "X-Graft-Status": "degraded", "X-Request-Id": "mine"}
    with gateway.client() as client:
        answer = client.post(CHAT, json={}, headers=own)
    (seen,) = engine.generations
    assert seen.headers["authorization"] == f"Bearer {INTERNAL_KEY}"
    assert CLIENT_KEY not in str(seen)
    assert not {"x-forwarded-for", "cookie", "x-graft-status"} & set(seen.headers)
    assert seen.headers["x-request-id"] == answer.headers["x-request-id"] != "mine"


def test_the_access_log_is_json_and_knows_the_key_s_name_but_no_key_prompt_or_path(gateway: Stack) -> None:
    with gateway.client() as client:
        answer = client.post(f"{CHAT}?trace=sesame", json={"messages": [{"content": "a prompt"}]})
        client.get("/v1/what-is-a-prompt", headers={"X-Forwarded-For": "10.1.2.3"})
        httpx.get(f"{gateway.url}/v1/models", headers={"Authorization": "Bearer wrong-key"}, trust_env=False)
    gateway.until(lambda: len(gateway.log_lines()) == 3)
    passed, unknown, refused = gateway.log_lines()
    assert {name: passed[name] for name in ("key", "route", "status", "method")} == {
        "key": "client",
        "route": "chat-completions",
        "status": 200,
        "method": "POST",
    }
    assert passed["request_id"] == answer.headers["x-request-id"]
    assert (unknown["route"], unknown["status"], refused["key"], refused["status"]) == ("none", 404, "-", 401)
    text = gateway.log_file.read_text() + gateway.relay_log_file.read_text()
    for secret in (CLIENT_KEY, INTERNAL_KEY, "wrong-key", "prompt", "sesame", "10.1.2.3"):
        assert secret not in text


def test_a_stream_comes_piece_by_piece(gateway: Stack) -> None:
    arrived = []
    with gateway.client() as client:
        begun_s = time.monotonic()
        with client.stream("POST", CHAT, json={"stream": True, "pieces": 5, "interval_s": 0.2}) as answer:
            for line in answer.iter_lines():
                if line:
                    arrived.append((time.monotonic() - begun_s, line))
    assert len(arrived) == 6
    assert arrived[-1][1] == "data: [DONE]"
    for index, (after_s, _) in enumerate(arrived[:-1]):
        assert 0.2 * index <= after_s + 0.02 < 0.2 * index + 0.18


def test_a_stream_is_passed_on_byte_by_byte(gateway: Stack) -> None:
    with gateway.client() as client:
        text = client.post(CHAT, json={"stream": True, "pieces": 50, "piece_bytes": 5000}).text
    events = text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    for index, event in enumerate(events[:-2]):
        content = json.loads(event.removeprefix("data: "))["choices"][0]["delta"]["content"]
        assert content == str(index).ljust(5000, "x")


def test_an_answer_larger_than_what_is_held_arrives_whole(gateway: Stack) -> None:
    with gateway.client() as client:
        answer = client.post(CHAT, json={"piece_bytes": 9 << 20})
    assert len(answer.json()["choices"][0]["message"]["content"]) == 9 << 20


def test_the_engine_stops_when_the_client_goes(engine: FakeEngine, gateway: Stack) -> None:
    with (
        gateway.client() as client,
        client.stream("POST", CHAT, json={"stream": True, "pieces": 1000, "interval_s": 0.05}) as answer,
    ):
        next(answer.iter_lines())
        assert engine.running == 1
    gateway.until(lambda: engine.running == 0)


def test_the_engine_stops_when_a_client_goes_that_waits_for_a_whole_answer(engine: FakeEngine, gateway: Stack) -> None:
    with gateway.client(timeout_s=0.5) as client, pytest.raises(httpx.ReadTimeout):
        client.post(CHAT, json={"silent_s": 3})
    # The fake notices when it writes; the relay has let go of it at once.
    gateway.until(lambda: "graft_relay_in_flight 0.0" in metrics(gateway), timeout_s=2)


def metrics(gateway: Stack) -> str:
    return httpx.get(f"http://127.0.0.1:{gateway.metrics_port}/metrics", trust_env=False).text


def test_both_parts_count_for_prometheus(gateway: Stack) -> None:
    with gateway.client() as client:
        client.post(CHAT, json={})
    text = metrics(gateway)
    assert 'graft_relay_requests_total{route="chat-completions",status="200"} 1.0' in text
    assert "graft_relay_admission_open 1.0" in text
    assert "graft_relay_engine_ready 1.0" in text
    url = f"http://127.0.0.1:{gateway.edge_metrics_port}/metrics"
    assert 'haproxy_frontend_http_responses_total{proxy="edge",code="2xx"} 1' in httpx.get(url, trust_env=False).text


def test_a_client_that_waits_long_is_not_a_slow_client(engine: FakeEngine, tmp_path: Path) -> None:
    with Stack(tmp_path, engine.port, edge_settings={"client_timeout_s": 1}) as gateway, gateway.client() as client:
        assert client.post(CHAT, json={"silent_s": 3}).status_code == httpx.codes.OK
        answer = client.post(CHAT, json={"stream": True, "pieces": 2, "interval_s": 2.5})
        assert answer.text.endswith("data: [DONE]\n\n")
