"""Ask the served model through its OpenAI-compatible API."""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any

from launcher.errors import CheckFailed

if TYPE_CHECKING:
    import httpx

CONNECT_TIMEOUT_S = 5.0
HEALTH_TIMEOUT_S = 1.0
COMPLETIONS = "/v1/chat/completions"


class AskFailed(CheckFailed):
    """The server gave no answer; the message names the URL and what it said."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        """HTTP status of a refusal; None where there was none."""


class Unreachable(AskFailed):
    """Nobody listens at the server's address."""


@dataclass(frozen=True)
class ToolCall:
    """A tool call as a client receives it."""

    name: str
    arguments: str
    """JSON text, byte for byte as the server wrote it."""


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
    """Seconds from the request to the first piece of text or of a call; None for an empty or an unstreamed answer."""
    elapsed_s: float
    calls: tuple[ToolCall, ...] = ()
    token_ids: tuple[int, ...] = ()
    """Only where the request asked for them, unstreamed."""
    margins: tuple[float, ...] = ()
    """Log-probability of the best less that of the second-best token at each place, where the request asked for it."""


@dataclass(frozen=True)
class ServedModel:
    """An entry of the server's list of models."""

    name: str
    max_model_len: int | None
    """Context in tokens; None where the server does not tell."""
    owner: str
    """`vllm` for vLLM's own server."""


class Connection:
    """A connection to a server, for many requests from many threads; close it, or use it in a `with` block.

    `timeout_s` bounds the silence between two pieces of an answer, not the whole of it.
    """

    def __init__(self, base_url: str, *, api_key: str | None = None, timeout_s: float = 120.0) -> None:
        self.base_url = base_url.rstrip("/").removesuffix("/v1")
        self._timeout_s = timeout_s
        self._client = _client(self.base_url, timeout_s, api_key)

    def __enter__(self) -> "Connection":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._client.close()

    def models(self) -> tuple[ServedModel, ...]:
        """Return the models that the server lists, at least one.

        Raises:
            AskFailed: it lists none.
        """
        with self._failures_named():
            response = self._client.get("/v1/models")
            _refuse_error(response)
        try:
            found = tuple(
                ServedModel(str(one["id"]), one.get("max_model_len"), str(one.get("owned_by")))
                for one in response.json()["data"]
            )
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise AskFailed(f"{response.url}: no list of models: {response.text[:200]}") from error
        if not found:
            raise AskFailed(f"{response.url}: an empty list of models")
        return found

    def answer(self, request: Mapping[str, Any], on_text: Callable[[str], None] | None = None) -> Answer:
        """Return the answer to a request of the chat API, streamed where it says so; `on_text` gets each piece of text.

        Raises:
            Unreachable: nobody listens.
            AskFailed: an HTTP error, or a broken answer.
        """
        with self._failures_named():
            if request.get("stream"):
                return self._streamed(request, on_text)
            started = time.monotonic()
            response = self._client.post(COMPLETIONS, json=request)
            _refuse_error(response)
            return _whole(response, str(request["model"]), time.monotonic() - started)

    def post(self, path: str, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the JSON object that the server answers on another route.

        Raises:
            AskFailed: as for `answer`.
        """
        with self._failures_named():
            response = self._client.post(path, json=request)
            _refuse_error(response)
            return _object(response)

    @contextmanager
    def _failures_named(self) -> Iterator[None]:
        import httpx

        try:
            yield
        except httpx.ConnectError as error:
            raise Unreachable(f"{self.base_url}: nobody listens there; start the server with `make up`") from error
        except httpx.TimeoutException as error:
            raise AskFailed(f"{self.base_url}: nothing came for {self._timeout_s:g} s; see `make logs`") from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise AskFailed(f"{self.base_url}: the answer broke off: {error}; see `make logs`") from error

    def _streamed(self, request: Mapping[str, Any], on_text: Callable[[str], None] | None) -> Answer:
        received = _Received()
        started = time.monotonic()
        with self._client.stream("POST", COMPLETIONS, json=request) as response:
            if response.is_error:
                response.read()
            _refuse_error(response)
            for chunk in _chunks(response):
                received.usage = chunk.get("usage") or received.usage
                for choice in chunk.get("choices", ()):
                    piece = received.add(choice, time.monotonic() - started)
                    if piece and on_text is not None:
                        on_text(piece)
        return received.answer(str(request["model"]), time.monotonic() - started)


@dataclass
class _Received:
    """The pieces of a streamed answer."""

    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: dict[int, list[str]] = field(default_factory=dict)
    """Name and pieces of the arguments of each call, by its index."""
    finish_reason: str | None = None
    usage: Mapping[str, int] = field(default_factory=dict)
    first_token_s: float | None = None

    def add(self, choice: Mapping[str, Any], elapsed_s: float) -> str:
        """Add one delta; return its text."""
        delta = choice.get("delta") or {}
        piece = delta.get("content") or ""
        thought = delta.get("reasoning") or delta.get("reasoning_content") or ""
        calls = delta.get("tool_calls") or ()
        if self.first_token_s is None and (piece or thought or calls):
            self.first_token_s = elapsed_s
        self.text.append(piece)
        self.reasoning.append(thought)
        for call in calls:
            function = call.get("function") or {}
            parts = self.calls.setdefault(int(call.get("index", 0)), [""])
            parts[0] += function.get("name") or ""
            parts.append(function.get("arguments") or "")
        self.finish_reason = choice.get("finish_reason") or self.finish_reason
        return str(piece)

    def answer(self, model: str, elapsed_s: float) -> Answer:
        return Answer(
            text="".join(self.text),
            reasoning="".join(self.reasoning),
            model=model,
            finish_reason=self.finish_reason,
            prompt_tokens=self.usage.get("prompt_tokens"),
            completion_tokens=self.usage.get("completion_tokens"),
            first_token_s=self.first_token_s,
            elapsed_s=elapsed_s,
            calls=tuple(ToolCall(name, "".join(pieces)) for _, (name, *pieces) in sorted(self.calls.items())),
        )


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
    with Connection(base_url, api_key=api_key, timeout_s=timeout_s) as connection:
        served = model or connection.models()[0].name
        return connection.answer(_request(served, question, max_tokens, thinking), on_text)


def is_healthy(base_url: str) -> bool:
    """Whether `/health` answers 200 within a second."""
    import httpx

    try:
        with _client(base_url, HEALTH_TIMEOUT_S) as client:
            return client.get("/health").status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False


def _client(base_url: str, timeout_s: float, api_key: str | None = None) -> "httpx.Client":
    import httpx

    return httpx.Client(
        base_url=base_url,
        timeout=httpx.Timeout(timeout_s, connect=min(timeout_s, CONNECT_TIMEOUT_S), pool=None),
        limits=httpx.Limits(max_connections=None),
        headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
        # Proxies from the environment are for the internet, not for a server on this machine.
        trust_env=False,
        # Certificates take 50 ms to load; without TLS none are looked at.
        verify=not base_url.startswith("http:"),
    )


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


def _whole(response: "httpx.Response", model: str, elapsed_s: float) -> Answer:
    document = _object(response)
    try:
        choice = document["choices"][0]
        message = choice["message"]
        calls = tuple(
            ToolCall(str(call["function"]["name"]), str(call["function"]["arguments"]))
            for call in message.get("tool_calls") or ()
        )
        usage = document.get("usage") or {}
        return Answer(
            text=message.get("content") or "",
            reasoning=message.get("reasoning") or message.get("reasoning_content") or "",
            model=model,
            finish_reason=choice.get("finish_reason"),
            prompt_tokens=usage.get("prompt_tokens"),
            completion_tokens=usage.get("completion_tokens"),
            first_token_s=None,
            elapsed_s=elapsed_s,
            calls=calls,
            token_ids=tuple(choice.get("token_ids") or ()),
            margins=tuple(_margin(place) for place in (choice.get("logprobs") or {}).get("content") or ()),
        )
    except (LookupError, TypeError, AttributeError) as error:
        raise AskFailed(f"{response.url}: not an answer of the chat API: {response.text[:200]}") from error


def _margin(place: Mapping[str, Any]) -> float:
    """How far the best token leads; infinite where no other was told."""
    best = sorted((float(one["logprob"]) for one in place["top_logprobs"]), reverse=True)
    return best[0] - best[1] if len(best) > 1 else float("inf")


def _object(response: "httpx.Response") -> dict[str, Any]:
    try:
        document = response.json()
    except ValueError as error:
        raise AskFailed(f"{response.url}: not JSON: {response.text[:200]}") from error
    if not isinstance(document, dict):
        raise AskFailed(f"{response.url}: a JSON object is needed: {response.text[:200]}")
    return document


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
    what = f"{response.url}: HTTP {response.status_code}: {said or response.reason_phrase}{hint}"
    raise AskFailed(what, response.status_code)


def _message(document: Any) -> str:
    error = document.get("error", document) if isinstance(document, dict) else document
    return str(error.get("message", error) if isinstance(error, dict) else error)
