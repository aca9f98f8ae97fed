"""The service under test: its requests, its count of tokens, and the raw text behind a reply."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Literal, TypeVar

from launcher.ask import Answer, AskFailed, Connection, ServedModel
from launcher.errors import UsageError
from launcher.measure.dialogues import Task

ToolChoice = Literal["auto", "required"]
_NO_SUCH_ROUTE = (HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED, HTTPStatus.FORBIDDEN, HTTPStatus.NOT_IMPLEMENTED)
_PROMPT_FIELDS = ("model", "messages", "tools", "chat_template_kwargs")
"""Fields of a chat request that its prompt is made from."""

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


@dataclass
class Target:
    """One model of one service, asked at temperature 0 and without reasoning."""

    connection: Connection
    served: ServedModel
    _has_tokenize: bool = field(default=True, init=False)

    @property
    def is_vllm(self) -> bool:
        """Whether the requests may use vLLM's own fields."""
        return self.served.owner == "vllm"

    def request(
        self,
        task: Task,
        *,
        stream: bool = False,
        tool_choice: ToolChoice = "auto",
        token_ids: bool = False,
        margins: bool = False,
    ) -> dict[str, Any]:
        """Return the body of a task's request."""
        body: dict[str, Any] = {
            "model": self.served.name,
            "messages": list(task.messages),
            "temperature": 0,
            "max_tokens": task.max_tokens,
            "stream": stream,
        }
        if task.tools:
            body |= {"tools": list(task.tools), "tool_choice": tool_choice}
        if stream:
            body["stream_options"] = {"include_usage": True}
        if margins:
            body |= {"logprobs": True, "top_logprobs": 2}
        if self.is_vllm:
            body["chat_template_kwargs"] = {"enable_thinking": False}
            body |= {"return_token_ids": True} if token_ids else {}
        return body

    def ask(self, task: Task, *, stream: bool = False, tool_choice: ToolChoice = "auto") -> Answer:
        """Return the reply to a task.

        Raises:
            AskFailed: there is none.
        """
        return self.connection.answer(self.request(task, stream=stream, tool_choice=tool_choice, token_ids=not stream))

    def count_tokens(self, task: Task) -> int:
        """Return the prompt's tokens as the server counts them: by /tokenize, else by a reply of one token.

        Raises:
            AskFailed: the server does not say.
        """
        if self._has_tokenize:
            body = self.request(task)
            asked: dict[str, Any] = {key: body[key] for key in _PROMPT_FIELDS if key in body}
            try:
                return int(self.connection.post("/tokenize", asked)["count"])
            except AskFailed as error:
                if error.status not in _NO_SUCH_ROUTE:
                    raise
                self._has_tokenize = False
        answer = self.connection.answer({**self.request(task), "max_tokens": 1})
        if answer.prompt_tokens is None:
            raise AskFailed(f"{self.connection.base_url}: has no /tokenize and reports no usage: no length is known")
        return answer.prompt_tokens

    def raw_text(self, answer: Answer) -> str:
        """Return what the model wrote before any parser where the server can tell, else the reply as it came."""
        if not (answer.token_ids and self._has_tokenize):
            return as_received(answer)
        try:
            body = {"model": self.served.name, "tokens": list(answer.token_ids)}
            return str(self.connection.post("/detokenize", body)["prompt"])
        except AskFailed:
            # A server that cannot tell, or no longer can, gave the reply all the same.
            return as_received(answer)


def as_received(answer: Answer) -> str:
    """Return a reply's text and calls in one string."""
    return "\n".join([answer.text, *(f"[call {call.name}] {call.arguments}" for call in answer.calls)]).strip()


def target_of(connection: Connection, model: str | None) -> Target:
    """Return the model of this name, or the first that the server lists.

    Raises:
        UsageError: it serves no model of this name.
    """
    models = connection.models()
    found = next((one for one in models if model in (None, one.name)), None)
    if found is None:
        served = ", ".join(one.name for one in models)
        raise UsageError(f"--model {model}: {connection.base_url} serves {served}; name one of these")
    return Target(connection, found)


def together(
    items: Sequence[_Item], work: Callable[[_Item], _Result], concurrency: int, on_done: Callable[[int], None]
) -> list[_Result]:
    """Return the result of each item, so many of them under way at a time; `on_done` is told how many are done."""
    with ThreadPoolExecutor(concurrency) as pool:
        futures = [pool.submit(work, item) for item in items]
        try:
            for count, future in enumerate(as_completed(futures), 1):
                future.result()
                on_done(count)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        return [future.result() for future in futures]
