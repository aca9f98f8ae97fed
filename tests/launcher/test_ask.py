"""One question to a server that speaks OpenAI's API."""

import sys
import threading
from collections.abc import Callable, Iterator
from http.server import ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import pytest

from launcher import cli, service
from launcher.ask import AskFailed, ask, is_healthy
from tests.launcher.fake_vllm import Handler, unused_port

Serve = Callable[..., str]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Start a server whose handler has these attributes; return its URL."""
    servers: list[ThreadingHTTPServer] = []

    def start(**attributes: Any) -> str:
        server = ThreadingHTTPServer(("127.0.0.1", 0), type("Set", (Handler,), attributes))
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_an_answer_carries_the_text_and_the_servers_counts(serve: Serve) -> None:
    requests: list[dict[str, Any]] = []
    pieces: list[str] = []
    answer = ask(
        serve(requests=requests, reasoning="Hm."), "Where?", model="small", thinking=False, on_text=pieces.append
    )
    assert answer.text == "".join(pieces) == "ThecapitalofFranceisParis."
    assert answer.reasoning == "Hm."
    assert (answer.prompt_tokens, answer.completion_tokens, answer.finish_reason) == (37, 8, "stop")
    assert answer.first_token_s is not None
    assert answer.first_token_s <= answer.elapsed_s
    (request,) = requests
    assert request["temperature"] == 0
    assert request["messages"] == [{"role": "user", "content": "Where?"}]
    assert request["chat_template_kwargs"] == {"enable_thinking": False}


def test_without_a_model_the_first_served_one_is_asked(serve: Serve) -> None:
    assert ask(serve(), "Where?").model == "small"


def test_a_proxy_for_the_internet_is_not_used_for_this_machine(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    url = serve()
    assert is_healthy(url)
    assert "Paris" in ask(url, "Where?").text


def test_an_unknown_model_is_named(serve: Serve) -> None:
    with pytest.raises(AskFailed, match=r"HTTP 404: The model `large` does not exist"):
        ask(serve(), "Where?", model="large")


def test_a_missing_api_key_is_told(serve: Serve) -> None:
    url = serve(api_key="secret")
    with pytest.raises(AskFailed, match=r"HTTP 401.*API key"):
        ask(url, "Where?")
    assert "Paris" in ask(url, "Where?", api_key="secret").text


def test_a_stream_that_ends_early_is_no_answer(serve: Serve) -> None:
    with pytest.raises(AskFailed, match="broke off"):
        ask(serve(broken_after=3), "Where?")


def test_an_error_inside_the_stream_is_told(serve: Serve) -> None:
    class Failing(Handler):
        def do_POST(self) -> None:
            self._send(200, b'data: {"error": {"message": "EngineCore died"}}\n\n', "text/event-stream")

    with pytest.raises(AskFailed, match="EngineCore died"):
        ask(serve(do_POST=Failing.do_POST), "Where?", model="small")


def test_nobody_listening_says_what_to_do() -> None:
    url = f"http://127.0.0.1:{unused_port()}"
    assert not is_healthy(url)
    with pytest.raises(AskFailed, match="make up"):
        ask(url, "Where?")


# The command.


def asked(url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """Return what `graft ask` prints of a service at this URL."""
    running = SimpleNamespace(base_url=url, plan=SimpleNamespace(served_name="small"))
    monkeypatch.setattr(service, "find", lambda name: running)
    monkeypatch.setattr(sys, "argv", ["graft", "ask", "Where?", "--profile", "cpu"])
    cli.main()
    return capsys.readouterr().out


def test_the_command_prints_the_text_without_the_blank_lines_before_it(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert asked(serve(answer="\n\n In Paris.\n\n On the Seine."), monkeypatch, capsys) == "InParis.\n\nOntheSeine.\n"


def test_a_reply_without_text_is_told_as_one(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert asked(serve(answer="\n"), monkeypatch, capsys) == "No text: it ended (stop) after 8 tokens.\n"
