"""Ask the served model one question through its OpenAI-compatible API."""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from launcher.errors import CheckFailed

if TYPE_CHECKING:
    import httpx

CONNECT_TIMEOUT_S = 5.0
HEALTH_TIMEOUT_S = 1.0


class AskFailed(CheckFailed):
    """The server gave no answer; the message names the URL and what it said."""


@dataclass(frozen=True)
class Answer:
    """What the model said, with the counts that the server reported."""

    text: str
    reasoning: str
    """Text that a reasoning parser split off; empty without one."""
    model: str
    finish_reason: str | None
    prompt_tokens: int | None
    completion_tokens: int | None
    first_token_s: float | None
    """Seconds from the request to the first piece of text; None for an empty answer."""
    elapsed_s: float


def ask(
    base_url: str,
    question: str,
    *,
    model: str | None = None,
    api_key: str | None = None,
    max_tokens: int = 512,
    timeout_s: float = 120.0,
    thinking: bool = True,
    on_text: Callable[[str], None] | None = None,
) -> Answer:
    """Return the answer at temperature 0; `on_text` gets each piece of it as it comes.

    `timeout_s` bounds the silence between two pieces, not the whole answer. `model` is a served name; None takes the
    first that the server lists. `thinking=False` asks the chat template for no reasoning, where it knows the switch.

    Raises:
        AskFailed: nobody listens, an HTTP error, or a broken answer.
    """
    import httpx

    timeout = httpx.Timeout(timeout_s, connect=CONNECT_TIMEOUT_S)
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    # Proxies from the environment are for the internet, not for a server on this machine.
    with httpx.Client(base_url=base_url, timeout=timeout, headers=headers, trust_env=False) as client:
        try:
            served = model or _first_model(client)
            return _stream(client, _request(served, question, max_tokens, thinking), on_text)
        except httpx.ConnectError as error:
            raise AskFailed(f"{base_url}: nobody listens there; start the server with `make up`") from error
        except httpx.TimeoutException as error:
            raise AskFailed(f"{base_url}: nothing came for {timeout_s:g} s; see `make logs`") from error
        except httpx.HTTPError as error:
            raise AskFailed(f"{base_url}: the answer broke off: {error}; see `make logs`") from error


def is_healthy(base_url: str) -> bool:
    """Whether `/health` answers 200 within a second."""
    import httpx

    try:
        with httpx.Client(base_url=base_url, timeout=HEALTH_TIMEOUT_S, trust_env=False) as client:
            return client.get("/health").status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False


def _request(model: str, question: str, max_tokens: int, thinking: bool) -> dict[str, Any]:
    return {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
        "max_tokens": max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
        **({} if thinking else {"chat_template_kwargs": {"enable_thinking": False}}),
    }


def _first_model(client: "httpx.Client") -> str:
    response = client.get("/v1/models")
    _refuse_error(response)
    try:
        return str(response.json()["data"][0]["id"])
    except (ValueError, LookupError, TypeError) as error:
        raise AskFailed(f"{response.url}: no list of models: {response.text[:200]}") from error


def _stream(client: "httpx.Client", request: dict[str, Any], on_text: Callable[[str], None] | None) -> Answer:
    text: list[str] = []
    reasoning: list[str] = []
    finish_reason: str | None = None
    usage: Mapping[str, int] = {}
    first_token_s: float | None = None
    started = time.monotonic()
    with client.stream("POST", "/v1/chat/completions", json=request) as response:
        if response.is_error:
            response.read()
        _refuse_error(response)
        for chunk in _chunks(response):
            usage = chunk.get("usage") or usage
            for choice in chunk.get("choices", ()):
                delta = choice.get("delta", {})
                piece = delta.get("content") or ""
                thought = delta.get("reasoning") or delta.get("reasoning_content") or ""
                if first_token_s is None and (piece or thought):
                    first_token_s = time.monotonic() - started
                text.append(piece)
                reasoning.append(thought)
                finish_reason = choice.get("finish_reason") or finish_reason
                if piece and on_text is not None:
                    on_text(piece)
    return Answer(
        text="".join(text),
        reasoning="".join(reasoning),
        model=request["model"],
        finish_reason=finish_reason,
        prompt_tokens=usage.get("prompt_tokens"),
        completion_tokens=usage.get("completion_tokens"),
        first_token_s=first_token_s,
        elapsed_s=time.monotonic() - started,
    )


def _chunks(response: "httpx.Response") -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of a server-sent event stream; a stream without its end mark is an error."""
    for line in response.iter_lines():
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        try:
            chunk = json.loads(data)
        except ValueError as error:
            raise AskFailed(f"{response.url}: not JSON in the stream: {data[:200]}") from error
        if "error" in chunk:
            raise AskFailed(f"{response.url}: {_message(chunk)}")
        yield chunk
    raise AskFailed(f"{response.url}: the answer broke off before its end; see `make logs`")


def _refuse_error(response: "httpx.Response") -> None:
    if not response.is_error:
        return
    try:
        said = _message(response.json())
    except ValueError:
        said = response.text[:200]
    hint = "; the server wants its API key" if response.status_code == 401 else ""
    raise AskFailed(f"{response.url}: HTTP {response.status_code}: {said or response.reason_phrase}{hint}")


def _message(document: Any) -> str:
    error = document.get("error", document) if isinstance(document, dict) else document
    return str(error.get("message", error) if isinstance(error, dict) else error)
