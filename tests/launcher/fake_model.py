"""A stand-in for a service whose model does what it is told: it reads the request's words and makes the calls in them.

Tests break it in one way each; `FakeModel.spoil` changes what it would say.
"""

import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from http.server import ThreadingHTTPServer
from typing import Any, ClassVar

from tests.launcher.fake_vllm import JsonHandler

CHARS_A_TOKEN = 4


@dataclass(frozen=True)
class Said:
    """What the model says."""

    text: str = ""
    calls: tuple[tuple[str, str], ...] = ()
    """Names and arguments, as JSON text."""
    finish_reason: str | None = None
    """None: the right one."""


@dataclass(frozen=True)
class Asked:
    """A request, and how often the same came before."""

    body: dict[str, Any]
    before: int

    @property
    def streams(self) -> bool:
        return bool(self.body["stream"])

    @property
    def prompt_tokens(self) -> int:
        return count(self.body)


def obedient(messages: list[dict[str, Any]]) -> Said:
    """Return the right reply to a dialogue of launcher.measure."""
    last = messages[-1]
    text = next(one["content"] for one in reversed(messages) if one["role"] == "user")
    if last["role"] == "tool":
        returned = json.loads(last["content"])
        if "id" not in returned:
            return Said("Done.")
        found = re.search(r"Then call (\w+) with (\w+) = the id", text)
        assert found is not None
        return Said(calls=((found[1], json.dumps({found[2]: returned["id"]})),))
    if found := re.search(r"What is the locker number of (\w+)\?", text):
        number = re.search(rf"The locker number of {found[1]} is (\d+)\.", text)
        return Said(number[1] if number else "I do not know.")
    if found := re.search(r"Reply with the word (\w+) and", text):
        return Said(found[1])
    if found := re.search(r"call (\w+) with path = (\"[^\"]*\") and code .*?\n```\n(.*)\n```", text, re.DOTALL | re.I):
        return Said(calls=((found[1], json.dumps({"path": json.loads(found[2]), "code": found[3]})),))
    chained = text.split(" Then call ")[0] if " = the id that " in text else text
    calls = [(found[1], _arguments(chained, found.end())) for found in re.finditer(r"[Cc]all (\w+) with ", chained)]
    if not calls:
        return Said("Once upon a time.")
    return Said(calls=tuple((name, json.dumps(arguments, ensure_ascii=False)) for name, arguments in calls))


def _arguments(text: str, at: int) -> dict[str, Any]:
    decoder = json.JSONDecoder()
    if text[at] == "{":
        value: dict[str, Any] = decoder.raw_decode(text, at)[0]
        return value
    found = {}
    while key := re.compile(r"(?:, | and )?(\w+) = ").match(text, at):
        found[key[1]], at = decoder.raw_decode(text, key.end())
    return found


def count(body: dict[str, Any]) -> int:
    """Return the tokens of a request's prompt."""
    return 20 + len(json.dumps([body["messages"], body.get("tools", [])])) // CHARS_A_TOKEN


class FakeModel(JsonHandler):
    """Serves one model; subclasses set what differs."""

    protocol_version = "HTTP/1.1"
    # Header and body in one packet: a second small one waits 40 ms for the first to be acknowledged.
    wbufsize = -1
    spoil: ClassVar[Callable[[Said, Asked], Said]] = staticmethod(lambda said, asked: said)
    refuse: ClassVar[Callable[[Asked], tuple[int, str] | None]] = staticmethod(lambda asked: None)
    max_model_len: ClassVar[int | None] = 16384
    owner: ClassVar[str] = "vllm"
    has_tokenize: ClassVar[bool] = True
    lead: ClassVar[float] = 3.99
    """Of the best token, in nats."""
    asked: ClassVar[list[Asked]] = []
    lock: ClassVar[threading.Lock] = threading.Lock()

    def do_GET(self) -> None:
        if self.path == "/health":
            self._send(200, b"", "text/plain")
        elif self._is_allowed():
            model = {"id": "obedient", "max_model_len": self.max_model_len, "owned_by": self.owner}
            self._json(200, {"data": [model]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self._is_allowed():
            return
        if self.path == "/v1/chat/completions":
            self._complete(body)
        elif self.has_tokenize and self.path == "/tokenize":
            self._json(200, {"count": count(body), "max_model_len": self.max_model_len})
        elif self.has_tokenize and self.path == "/detokenize":
            self._json(200, {"prompt": "".join(map(chr, body["tokens"]))})
        else:
            self._json(404, {"error": {"message": "Not Found"}})

    def _complete(self, body: dict[str, Any]) -> None:
        with self.lock:
            asked = Asked(body, sum(one.body == body for one in self.asked))
            self.asked.append(asked)
        if refusal := type(self).refuse(asked):
            self._json(refusal[0], {"error": {"message": refusal[1]}})
            return
        said = type(self).spoil(obedient(body["messages"]), asked)
        reason = said.finish_reason or ("tool_calls" if said.calls else "stop")
        usage = {"prompt_tokens": asked.prompt_tokens, "completion_tokens": 9}
        if body["stream"]:
            chunks = [
                *_deltas(said),
                {"choices": [{"delta": {}, "finish_reason": reason}]},
                {"choices": [], "usage": usage},
            ]
            events = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
            self._send(200, "".join([*events, "data: [DONE]\n\n"]).encode(), "text/event-stream")
            return
        calls = [{"type": "function", "function": {"name": name, "arguments": text}} for name, text in said.calls]
        choice: dict[str, Any] = {"message": {"content": said.text, "tool_calls": calls}, "finish_reason": reason}
        raw = said.text + "".join(f"<tool_call>{name}" for name, _ in said.calls)
        if body.get("return_token_ids"):
            choice["token_ids"] = [ord(one) for one in raw]
        if body.get("logprobs"):
            best = [{"logprob": -0.01}, {"logprob": -0.01 - self.lead}]
            choice["logprobs"] = {"content": [{"top_logprobs": best} for _ in raw]}
        self._json(200, {"choices": [choice], "usage": usage})


def _deltas(said: Said) -> Iterator[dict[str, Any]]:
    """The reply in small pieces, as a server streams it."""
    for start in range(0, len(said.text), 5):
        yield {"choices": [{"delta": {"content": said.text[start : start + 5]}}]}
    for index, (name, arguments) in enumerate(said.calls):
        yield {"choices": [{"delta": {"tool_calls": [{"index": index, "id": "c", "function": {"name": name}}]}}]}
        for start in range(0, len(arguments), 4):
            piece = {"index": index, "function": {"arguments": arguments[start : start + 4]}}
            yield {"choices": [{"delta": {"tool_calls": [piece]}}]}


def with_value(said: Said, key: str, value: Any) -> Said:
    """Return a reply whose first call has another value."""
    (name, arguments), *others = said.calls
    return replace(said, calls=((name, json.dumps({**json.loads(arguments), key: value})), *others))


@contextmanager
def served(**attributes: Any) -> Iterator[str]:
    """Serve a fake model with these attributes; the value is its URL."""
    handler = type("Set", (FakeModel,), {"asked": [], "lock": threading.Lock(), **attributes})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
