"""vLLM's adapters for Qwen3's tool calls and reasoning, with the text read by `Reader` instead of vLLM's engine.

Structural tags, required and named tool choice, token-id queries and the hand-over from reasoning to tool calls stay
vLLM's.  Token ids do not take part in reading: text alone decides, so that a stream equals the whole, also while text
lags behind its ids.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, cast

from vllm.entrypoints.generate.base.protocol import (
    DeltaMessage,
    ExtractedToolCallInformation,
    FunctionCall,
    ToolCall,
)
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionToolsParam
from vllm.reasoning.qwen3_engine_reasoning_parser import Qwen3ParserReasoningAdapter
from vllm.renderers.chat_utils import make_tool_call_id
from vllm.tool_parsers import utils
from vllm.tool_parsers.qwen3_engine_tool_parser import Qwen3EngineToolParser

from vllm_graft.parsers.events import Event, Kind
from vllm_graft.parsers.outbox import Outbox
from vllm_graft.parsers.reader import Reader
from vllm_graft.parsers.schema import Tool, Typing, make_tool

# vLLM builds the reasoning parser and then the tool parser of a request in one go, and gives the tools to the latter
# only; what is a call inside reasoning depends on them.
_BUILDING = threading.local()


def declared_tools(tools: Sequence[Any] | None) -> dict[str, Tool]:
    """The tools of a request by name, of the chat completions or the responses API."""
    found: dict[str, Tool] = {}
    for tool in tools or ():
        if isinstance(tool, ChatCompletionToolsParam):
            named = [(tool.function.name, tool.function.parameters)]
        else:
            named = utils.iter_response_function_tool_info(tool)
        for name, schema in named:
            found.setdefault(name, make_tool(name, schema))
    return found


def typing() -> Typing:
    """vLLM's rules as they are now: another fix may have changed them."""
    return Typing(utils.extract_types_from_schema, utils.coerce_to_schema_type)


class Qwen3ReasoningParser(Qwen3ParserReasoningAdapter):  # type: ignore[misc]
    """Ends reasoning at `</think>` or at a call, but not at a tag that is only mentioned.

    It knows a call by the tools that `Qwen3ToolParser` has; beside any other tool parser, or none, it is vLLM's own.
    """

    def __init__(self, tokenizer: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(tokenizer, *args, **kwargs)
        self.tools: Mapping[str, Tool] | None = None
        self._reader: Reader | None = None
        self._counter = TokenCounter(self._parser_engine)
        _BUILDING.reasoning = weakref.ref(self)

    def extract_reasoning(self, model_output: str, request: Any) -> tuple[str | None, str | None]:
        """Split a whole output into reasoning and the rest, which holds the calls."""
        if self.tools is None:
            return cast(tuple[str | None, str | None], super().extract_reasoning(model_output, request))
        self._counter.is_streaming = False
        engine = self._parser_engine
        if not engine.thinking_enabled or getattr(engine, "_prompt_closes_reasoning", False):
            return None, model_output
        reader = Reader(self.tools, typing(), reasoning=True)
        events = reader.feed(model_output)
        if not reader.has_ended_reasoning:
            events += reader.finish()
        return "".join(event.text for event in events) or None, reader.rest or None

    def extract_reasoning_streaming(
        self,
        previous_text: str,
        current_text: str,
        delta_text: str,
        previous_token_ids: Sequence[int],
        current_token_ids: Sequence[int],
        delta_token_ids: Sequence[int],
    ) -> DeltaMessage | None:
        """Take a delta; after the end of reasoning, its content is the text that follows it."""
        if self.tools is None:
            return super().extract_reasoning_streaming(
                previous_text, current_text, delta_text, previous_token_ids, current_token_ids, delta_token_ids
            )
        reader = self._reader = self._reader or Reader(self.tools, typing(), reasoning=True)
        events = reader.feed(delta_text)
        self._counter.add(delta_token_ids)
        return self._message(events, reader.rest)

    def has_engine_confirmed_reasoning_end(self) -> bool:
        """Whether the streamed reasoning is over."""
        if self.tools is None:
            return bool(super().has_engine_confirmed_reasoning_end())
        return self._reader is not None and self._reader.has_ended_reasoning

    def finish_streaming(self) -> DeltaMessage | None:
        """What was held back; nothing once the end has handed the rest over."""
        if self.tools is None:
            return super().finish_streaming()
        if self._reader is None or self._reader.has_ended_reasoning:
            return None
        return self._message(self._reader.finish(), None)

    def count_reasoning_tokens(self, token_ids: Sequence[int]) -> int:
        """The number of generated tokens that belong to the reasoning."""
        if not self._counter.is_streaming:
            return int(super().count_reasoning_tokens(token_ids))
        ended = self._reader is not None and self._reader.has_ended_reasoning
        return self._counter.count(ended=ended)

    def _message(self, events: list[Event], rest: str | None) -> DeltaMessage | None:
        fields: dict[str, Any] = {}
        if events:
            fields["reasoning"] = "".join(event.text for event in events)
        if rest:
            fields["content"] = rest
        return DeltaMessage(**fields) if fields else None


class TokenCounter:
    """Counts the tokens of streamed reasoning by vLLM's marker ids."""

    def __init__(self, engine: Any) -> None:
        self.is_streaming = False
        self._end_ids = frozenset({engine._reasoning_end_token_id})
        self._call_ids = engine.reasoning_end_token_ids - self._end_ids
        self._start_id = engine._reasoning_start_token_id
        self._seen = 0
        self._before_call: int | None = None
        self._is_over = False

    def add(self, token_ids: Sequence[int]) -> None:
        """Take the ids of a delta."""
        self.is_streaming = True
        for token_id in token_ids:
            self._is_over = self._is_over or token_id in self._end_ids
            if self._is_over or token_id == self._start_id:
                continue
            if token_id in self._call_ids:
                self._before_call = self._seen
            self._seen += 1

    def count(self, *, ended: bool) -> int:
        """The tokens so far; where a call has ended the reasoning, those before it."""
        if ended and not self._is_over and self._before_call is not None:
            return self._before_call
        return self._seen


class Qwen3ToolParser(Qwen3EngineToolParser):  # type: ignore[misc]
    """Reads tool calls with every byte of their values, and leaves what is no call in the answer."""

    reasoning_parser = Qwen3ReasoningParser

    def __init__(self, tokenizer: Any, tools: list[Any] | None = None, **kwargs: Any) -> None:
        super().__init__(tokenizer, tools, **kwargs)
        self._declared = declared_tools(tools)
        self._reader: Reader | None = None
        self._outbox = Outbox(self._make_id)
        built, _BUILDING.reasoning = getattr(_BUILDING, "reasoning", None), None
        if built is not None and (reasoning := built()) is not None:
            reasoning.tools = self._declared

    def extract_tool_calls(self, model_output: str, request: Any) -> ExtractedToolCallInformation:
        """Read a whole answer."""
        reader = self._new_reader(request)
        events = reader.feed(model_output) + reader.finish()
        content = "".join(event.text for event in events if event.kind is Kind.CONTENT)
        calls = []
        if not _suppresses_calls(request):
            calls = [
                ToolCall(id=self._make_id(call.name), function=FunctionCall(name=call.name, arguments=call.arguments))
                for call in reader.calls
            ]
        if calls:
            content = content.strip()
        return ExtractedToolCallInformation(tools_called=bool(calls), tool_calls=calls, content=content or None)

    def extract_tool_calls_streaming(
        self,
        previous_text: str,
        current_text: str,
        delta_text: str,
        previous_token_ids: Sequence[int],
        current_token_ids: Sequence[int],
        delta_token_ids: Sequence[int],
        request: Any,
    ) -> DeltaMessage | None:
        """Take a delta of an answer."""
        if self._reader is None:
            self._reader = self._new_reader(request)
            self._outbox.drops_calls = _suppresses_calls(request)
        self._outbox.add(self._reader.feed(delta_text))
        return self._outbox.message()

    def finish_streaming(self) -> DeltaMessage | None:
        """What was held back."""
        if self._reader is None:
            return None
        self._outbox.add(self._reader.finish())
        return self._outbox.message(is_last=True)

    def _new_reader(self, request: Any) -> Reader:
        tools = getattr(request, "tools", None)
        declared = declared_tools(tools) if tools else self._declared
        return Reader(declared, typing(), reasoning=False, think_is_text=self.skip_reasoning_parsing)

    def _make_id(self, name: str) -> str:
        state = self._parser_engine._stream_state
        made = make_tool_call_id(id_type=state.tool_call_id_type, func_name=name, idx=state.history_tool_call_cnt)
        state.history_tool_call_cnt += 1
        return str(made)


def _suppresses_calls(request: Any) -> bool:
    return getattr(request, "tool_choice", None) == "none"
