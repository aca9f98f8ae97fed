"""What a reader of the output reports, and a tool call as far as it has been read."""

from __future__ import annotations

import json
from enum import Enum, auto
from typing import NamedTuple

from vllm_graft.parsers.schema import Tool, Typing, json_value


class Kind(Enum):
    """The kinds of events, in the order in which one message of the API can carry them."""

    REASONING = auto()
    CONTENT = auto()
    CALL = auto()
    ARGUMENTS = auto()


class Event(NamedTuple):
    """Text of one kind; of a call, its place among the calls, with the name in CALL and JSON in ARGUMENTS."""

    kind: Kind
    text: str
    call: int = -1


class Value:
    """A parameter's value while it is read: one line break on each side is layout, everything else is data.

    A pair of CR and LF after the value is layout only where such a pair was before it.
    """

    def __init__(self, key: str | None, *, streams: bool) -> None:
        self.key = key
        self.streams = streams and key is not None
        self.is_block = False
        self._started = False
        self._break = "\n"
        self._held = ""
        self._parts: list[str] = []

    def add(self, text: str) -> str:
        """Take more text; what of it is certain to belong to the value is returned."""
        text = self._held + text
        if not self._started:
            if text in ("", "\r"):
                self._held = text
                return ""
            self._started = True
            for layout in ("\r\n", "\n"):
                if text.startswith(layout):
                    self._break, self.is_block, text = layout, True, text[len(layout) :]
                    break
        self._held = ""
        for layout in (self._break, self._break[:1]):
            if text.endswith(layout):
                self._held, text = layout, text[: -len(layout)]
                break
        if text:
            self._parts.append(text)
        return text

    def end(self) -> str:
        """What had been held back and is data after all."""
        rest = "" if self._held == self._break else self._held
        self._parts.append(rest)
        return rest

    @property
    def text(self) -> str:
        """All of the value."""
        return "".join(self._parts)

    @property
    def is_empty(self) -> bool:
        """Whether no character of data has come yet."""
        return not any(self._parts)


class Call:
    """A call while it is read: its arguments as JSON, piece by piece and as a whole."""

    def __init__(self, index: int, tool: Tool, typing: Typing) -> None:
        self.index = index
        self.tool = tool
        self.values: dict[str, str] = {}
        self._typing = typing
        self._sent_keys = 0
        self._key_is_open = False

    @property
    def name(self) -> str:
        """The name of the tool."""
        return self.tool.name

    @property
    def arguments(self) -> str:
        """The arguments as JSON; of a repeated key the last value."""
        return "{" + ", ".join(f"{_quoted(key)}: {value}" for key, value in self.values.items()) + "}"

    def open_value(self, key: str | None) -> Value:
        """Begin a parameter; without a key its text is read over."""
        return Value(key, streams=key is not None and set(self._types(key)) == {"string"})

    def add(self, value: Value, text: str) -> str:
        """Give text to a value; the JSON that is certain is returned."""
        certain = value.add(text)
        if not value.streams or not certain:
            return ""
        return self._open_string(value) + _escaped(certain)

    def close_value(self, value: Value, *, cut: bool = False) -> str:
        """End a parameter; the JSON that is left to send is returned, none if `cut` before its first character."""
        rest = value.end()
        if value.key is None or (cut and value.is_empty):
            return ""
        if value.streams:
            self.values[value.key] = _quoted(value.text)
            text = self._open_string(value) + _escaped(rest) + '"'
            self._key_is_open = False
            return text
        self.values[value.key] = json_value(value.text, self._types(value.key), self._typing)
        return self._key(value.key) + self.values[value.key]

    def close(self) -> str:
        """End the call."""
        return "}" if self._sent_keys else "{}"

    def _types(self, key: str) -> list[str]:
        schema = self.tool.parameters.get(key)
        return self._typing.types_of(schema)

    def _open_string(self, value: Value) -> str:
        if self._key_is_open:
            return ""
        self._key_is_open = True
        return self._key(str(value.key)) + '"'

    def _key(self, key: str) -> str:
        self._sent_keys += 1
        return ("{" if self._sent_keys == 1 else ", ") + f"{_quoted(key)}: "


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _escaped(text: str) -> str:
    return _quoted(text)[1:-1]
