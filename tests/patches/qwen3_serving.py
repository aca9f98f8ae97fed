"""vLLM's real serving classes around a given model output: chat completions and responses, whole and streamed.

Import it where vLLM can be imported; only the engine, the tokenizer and the model's configuration are stand-ins.
"""

from __future__ import annotations

import asyncio
import json
import re
import warnings
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from vllm.entrypoints.generate.base.protocol import RequestResponseMetadata
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
    from vllm.entrypoints.openai.responses.context import SimpleContext
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
    from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
    from vllm.outputs import CompletionOutput, RequestOutput

CASES_FILE = Path(__file__).parents[1] / "data" / "tool_calls.json"
LONG_TEXT_CHARS = 2000
MARKERS = ("<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>")
_TOKEN = re.compile("|".join(map(re.escape, MARKERS)) + r"|\s*\w{1,5}|\s|.", re.DOTALL)

Deltas = Sequence[tuple[str, list[int]]]


@dataclass(frozen=True)
class Result:
    """What a client has received; arguments are the JSON text of each call."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Case:
    """One case of tool_calls.json."""

    id: str
    text: str
    tools: list[dict[str, Any]]
    thinking: bool
    accepted: tuple[dict[str, Any], ...]
    collapses: bool = False
    chunks: tuple[str, ...] = ()
    stock: Mapping[str, Any] = field(default_factory=dict)

    def accepts(self, result: Result) -> bool:
        """Whether a result is right, compared as the README of the cases says."""
        return any(self._matches(result, expected) for expected in self.accepted)

    def _matches(self, result: Result, expected: dict[str, Any]) -> bool:
        def plain(text: str | None) -> str:
            return " ".join((text or "").split()) if self.collapses else (text or "").strip()

        if plain(result.reasoning) != plain(expected["reasoning"]) or plain(result.content) != plain(
            expected["content"]
        ):
            return False
        if [name for name, _ in result.calls] != [call["name"] for call in expected["calls"]]:
            return False
        pairs = zip(result.calls, expected["calls"], strict=True)
        return all(same_json(parsed(arguments), call["arguments"]) for (_, arguments), call in pairs)


class Tokens:
    """A tokenizer of Qwen's markers and short pieces of text; an id is given when a piece is first seen."""

    def __init__(self) -> None:
        self._ids = {text: number for number, text in enumerate(MARKERS)}
        self.all_special_tokens = ["<|im_start|>", "<|im_end|>"]
        self.all_special_ids = [self._ids[text] for text in self.all_special_tokens]

    def get_vocab(self) -> dict[str, int]:
        """The ids by text."""
        return self._ids

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        """The text of ids."""
        texts = list(self._ids)
        return "".join(texts[number] for number in ids)

    def encode(self, text: str) -> list[int]:
        """The ids of a text."""
        return [self._ids.setdefault(piece, len(self._ids)) for piece in _TOKEN.findall(text)]


TOKENS = Tokens()


def load_cases() -> list[Case]:
    """The cases of tests/data/tool_calls.json."""
    return [
        Case(
            id=case["id"],
            text=case["text"],
            tools=case["tools"],
            thinking=case["thinking"],
            accepted=(case["expected"], *case.get("accept", [])),
            collapses=case.get("content_compare") == "collapse",
            chunks=tuple(case.get("chunks", ())),
            stock=case["stock"],
        )
        for case in json.loads(CASES_FILE.read_text(encoding="utf-8"))["cases"]
    ]


def parsed(arguments: str) -> Any:
    """The arguments as JSON; text that is none compares unequal to everything."""
    try:
        return json.loads(arguments)
    except json.JSONDecodeError:
        return float("nan")


def same_json(one: Any, other: Any) -> bool:
    """Whether two JSON values are the same: true is not 1, 3 is 3.0."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same_json(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same_json, one, other))
    numbers = isinstance(one, (int, float)) and isinstance(other, (int, float))
    return bool((numbers or type(one) is type(other)) and one == other)


class Server:
    """The two APIs as `vllm serve` makes them with both parsers and --enable-auto-tool-choice."""

    def __init__(self, tool_parser: str = "qwen3_coder", reasoning_parser: str = "qwen3") -> None:
        model = SimpleNamespace(
            model="qwen3",
            hf_config=SimpleNamespace(model_type="qwen3_next"),
            generation_config="auto",
            get_diff_sampling_param=dict,
        )
        engine = SimpleNamespace(
            model_config=model, renderer=SimpleNamespace(tokenizer=TOKENS), input_processor=None, vllm_config=None
        )
        renderer = SimpleNamespace(reasoning_effort_map=None)
        options: dict[str, Any] = {
            "online_renderer": renderer,
            "request_logger": None,
            "chat_template": None,
            "chat_template_content_format": "auto",
            "reasoning_parser": reasoning_parser,
            "enable_auto_tools": True,
            "tool_parser": tool_parser,
        }
        self.chat = OpenAIServingChat(engine, None, "assistant", **options)
        self.responses = OpenAIServingResponses(engine, None, **options)

    def whole(self, case: Case) -> Result:
        """The reply of the chat completions API, not streamed."""
        request, options, output = (
            _chat_request(case),
            _template_options(case),
            _outputs(case, [(case.text, TOKENS.encode(case.text))]),
        )
        parser = self.chat._make_parser(request, TOKENS, options)
        reply = asyncio.run(
            self.chat.chat_completion_full_generator(
                request, output, "chatcmpl-1", "qwen3", [], TOKENS, RequestResponseMetadata(request_id="1"), parser
            )
        )
        message = reply.choices[0].message
        calls = tuple((call.function.name, call.function.arguments) for call in message.tool_calls or ())
        return Result(message.reasoning or "", message.content or "", calls)

    def stream(self, case: Case, deltas: Deltas) -> Result:
        """What a stream's parser yields for deltas, as the serving class calls it."""
        request = _chat_request(case)
        parser = self.chat._make_parser(request, TOKENS, _template_options(case))
        prompt, last = _prompt(case), len(deltas) - 1
        return joined(
            parser.parse_delta(text, ids, request, prompt, finished=number == last)
            for number, (text, ids) in enumerate(deltas)
        )

    def events(self, case: Case, deltas: Deltas) -> Result:
        """The stream of the chat completions API, read from its server-sent events."""

        async def read() -> list[Any]:
            stream = self.chat.chat_completion_stream_generator(
                _chat_request(case), _outputs(case, deltas), "chatcmpl-1", "qwen3", [], TOKENS,
                RequestResponseMetadata(request_id="1"), _template_options(case),
            )  # fmt: skip
            return [json.loads(line[6:]) async for line in stream if not line.startswith("data: [DONE]")]

        received = asyncio.run(read())
        assert not any("error" in event for event in received), received
        return joined(_delta_of(choice["delta"]) for event in received for choice in event["choices"])

    def whole_response(self, case: Case) -> Result:
        """The output items of the responses API, not streamed."""
        request = _responses_request(case)
        parser = self.responses._make_response_parser(request, TOKENS, _template_options(case))
        output = _completion(case.text, TOKENS.encode(case.text), finished=True)
        return _items(self.responses._make_response_output_items(request, output, TOKENS, parser))

    def response_events(self, case: Case, deltas: Deltas) -> tuple[Result, Result]:
        """The stream of the responses API: what its deltas add up to, and its finished items."""
        request = _responses_request(case)
        context = SimpleContext(
            response_parser=self.responses._make_response_parser(request, TOKENS, _template_options(case))
        )

        async def contexts() -> AsyncIterator[Any]:
            async for output in _outputs(case, deltas):
                context.append_output(output)
                yield context

        async def read() -> list[Any]:
            events = self.responses._process_simple_streaming_events(
                request, None, contexts(), context, "qwen3", TOKENS, RequestResponseMetadata(request_id="1"), 0,
                lambda event: event,
            )  # fmt: skip
            return [event async for event in events]

        return _from_events(asyncio.run(read())), _items(context.streamed_output_items)


def _chat_request(case: Case) -> Any:
    return ChatCompletionRequest(
        model="qwen3", messages=[{"role": "user", "content": "x"}], tools=case.tools or None, stream=False
    )


def _responses_request(case: Case) -> Any:
    tools = [{"type": "function", **tool["function"]} for tool in case.tools]
    return ResponsesRequest(model="qwen3", input="x", tools=tools)


def _template_options(case: Case) -> dict[str, Any]:
    return {"enable_thinking": case.thinking}


def _prompt(case: Case) -> list[int]:
    return TOKENS.encode("<|im_start|>assistant\n<think>" + ("" if case.thinking else "\n\n</think>\n\n"))


def _completion(text: str, ids: list[int], *, finished: bool) -> Any:
    return CompletionOutput(
        index=0, text=text, token_ids=ids, cumulative_logprob=None, logprobs=None,
        finish_reason="stop" if finished else None,
    )  # fmt: skip


async def _outputs(case: Case, deltas: Deltas) -> AsyncIterator[Any]:
    for number, (text, ids) in enumerate(deltas, 1):
        finished = number == len(deltas)
        yield RequestOutput(
            request_id="1", prompt=None, prompt_token_ids=_prompt(case), prompt_logprobs=None,
            outputs=[_completion(text, ids, finished=finished)], finished=finished,
        )  # fmt: skip


def _delta_of(delta: Mapping[str, Any]) -> Any:
    calls = []
    for call in delta.get("tool_calls") or ():
        function = {"name": None, "arguments": None} | (call.get("function") or {})
        calls.append(SimpleNamespace(index=call["index"], function=SimpleNamespace(**function)))
    return SimpleNamespace(reasoning=delta.get("reasoning"), content=delta.get("content"), tool_calls=calls)


def joined(messages: Iterator[Any]) -> Result:
    """What a client makes of the messages of a stream."""
    reasoning, content = "", ""
    names: dict[int, str] = {}
    arguments: dict[int, str] = {}
    for message in messages:
        if message is None:
            continue
        reasoning += message.reasoning or ""
        content += message.content or ""
        for call in message.tool_calls or ():
            names[call.index] = names.get(call.index, "") + (call.function.name or "")
            arguments[call.index] = arguments.get(call.index, "") + (call.function.arguments or "")
    return Result(reasoning, content, tuple((names[index], arguments[index]) for index in sorted(names)))


def _items(items: Sequence[Any]) -> Result:
    def text(kind: str) -> str:
        return "".join(part.text for item in items if item.type == kind for part in item.content or ())

    calls = tuple((item.name, item.arguments) for item in items if item.type == "function_call")
    return Result(text("reasoning"), text("message"), calls)


def _from_events(events: Sequence[Any]) -> Result:
    reasoning, content = "response.reasoning_text.delta", "response.output_text.delta"
    texts = {reasoning: "", content: ""}
    names: dict[str, str] = {}
    arguments: dict[str, str] = {}
    for event in events:
        if event.type in texts:
            texts[event.type] += event.delta
        elif event.type == "response.output_item.added" and event.item.type == "function_call":
            names[event.item.id] = event.item.name
            arguments[event.item.id] = ""
        elif event.type == "response.function_call_arguments.delta":
            arguments[event.item_id] += event.delta
    return Result(texts[reasoning], texts[content], tuple((names[number], arguments[number]) for number in names))


def text_chunkings(text: str, chunks: Sequence[str] = ()) -> Iterator[list[tuple[str, list[int]]]]:
    """Whole, one character at a time, in two at every place (long texts: at 60), and as given; without token ids."""
    yield [(text, [])]
    yield [(character, []) for character in text]
    step = 1 if len(text) <= LONG_TEXT_CHARS else len(text) // 60
    for place in range(1, len(text), step):
        yield [(text[:place], []), (text[place:], [])]
    if chunks:
        yield [(chunk, []) for chunk in chunks]


def token_chunkings(text: str) -> Iterator[list[tuple[str, list[int]]]]:
    """Groups of 1 to 6 tokens with their ids, in step and with the text behind, as stop strings hold it back."""
    ids = TOKENS.encode(text)
    texts = [TOKENS.decode([number]) for number in ids]
    for size in range(1, 7):
        for lag in (0, 9):
            deltas, sent = [], 0
            for start in range(0, len(ids), size):
                group = ids[start : start + size]
                arrived = len("".join(texts[: start + size])) - lag
                is_last = start + size >= len(ids)
                until = len(text) if is_last else max(sent, arrived)
                deltas.append((text[sent:until], group))
                sent = until
            yield deltas
