"""Turns a reader's events into the messages of a stream."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from vllm.entrypoints.generate.base.protocol import DeltaFunctionCall, DeltaMessage, DeltaToolCall

from vllm_graft.parsers.events import Event, Kind


class Outbox:
    """Events that wait to be sent.

    A message carries content before calls, and the responses API reads it in this order: text behind a call waits for
    the next message.  White space before the first word waits too, and is dropped when a call comes first.
    """

    def __init__(self, make_id: Callable[[str], str]) -> None:
        self.drops_calls = False
        self._make_id = make_id
        self._events: deque[Event] = deque()
        self._space = ""
        self._has_words = False
        self._has_calls = False

    def add(self, events: list[Event]) -> None:
        """Take more events."""
        for event in events:
            if event.kind is Kind.CONTENT and not self._has_words:
                self._add_first(event)
            elif event.kind is Kind.CONTENT or not self.drops_calls:
                self._events.append(event)
                if event.kind is Kind.CALL:
                    self._has_calls, self._space = True, ""

    def _add_first(self, event: Event) -> None:
        self._space += event.text
        if self._space.strip():
            self._events.append(Event(Kind.CONTENT, self._space))
            self._has_words, self._space = True, ""

    def message(self, *, is_last: bool = False) -> DeltaMessage | None:
        """The next message, None when there is nothing to say; the last one has all that is left."""
        if is_last and self._space and not self._has_calls:
            self._events.append(Event(Kind.CONTENT, self._space))
            self._space = ""
        content: list[str] = []
        calls: dict[int, DeltaToolCall] = {}
        while self._events and (is_last or not calls or self._events[0].kind is not Kind.CONTENT):
            event = self._events.popleft()
            if event.kind is Kind.CONTENT:
                content.append(event.text)
            else:
                self._add_call(calls, event)
        fields: dict[str, Any] = {}
        if content:
            fields["content"] = "".join(content)
        if calls:
            fields["tool_calls"] = list(calls.values())
        return DeltaMessage(**fields) if fields else None

    def _add_call(self, calls: dict[int, DeltaToolCall], event: Event) -> None:
        if event.kind is Kind.CALL:
            function = DeltaFunctionCall(name=event.text)
            calls[event.call] = DeltaToolCall(
                index=event.call, id=self._make_id(event.text), type="function", function=function
            )
        elif event.call in calls:
            function = calls[event.call].function
            function.arguments = (function.arguments or "") + event.text
        else:
            calls[event.call] = DeltaToolCall(index=event.call, function=DeltaFunctionCall(arguments=event.text))
