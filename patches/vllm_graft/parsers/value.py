"""Reads one parameter's value: which of the tags in it end it, and which are data."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from enum import Enum, auto
from types import MappingProxyType

from vllm_graft.parsers.events import Call
from vllm_graft.parsers.pieces import Next, Pieces
from vllm_graft.parsers.prose import Line
from vllm_graft.parsers.tags import Piece, Tag

_OUTER_CLOSERS = (Tag.END_FUNCTION, Tag.END_CALL)
_BODY = (Tag.PARAMETER, Tag.END_FUNCTION)
_KEY_AND_VALUE = re.compile(r"(.*?)\s*[:=]\s*(.*)")
_JSON_MARK = re.compile(r'\\.?|["\n]')


class Verdict(Enum):
    """What the first piece is: data, the end of the value, or not known yet."""

    DATA = auto()
    ENDS = auto()
    WAITS = auto()


class JsonString:
    """Whether the text so far ends inside a JSON string; a line break ends one, since JSON's strings have none."""

    def __init__(self) -> None:
        self.is_open = False
        self._escapes = False

    def add(self, text: str) -> None:
        """Read on."""
        if self._escapes and text:
            text, self._escapes = text[1:], False
        for mark in _JSON_MARK.finditer(text):
            found = mark.group()
            if found == '"':
                self.is_open = not self.is_open
            elif found == "\n":
                self.is_open = False
            elif found == "\\":
                self._escapes = mark.end() == len(text)


class ValueReader:
    """Reads the value of one parameter from the pieces that follow its opener.

    Elements of the format that a value holds as data on lines of their own are followed in `_nested`: an example of a
    call in a document is data up to its own closing tags.
    """

    def __init__(self, call: Call, pieces: Pieces, opener: Piece, is_tool: Callable[[str], bool]) -> None:
        key, self._first = parameter_key(call, opener)
        self._call = call
        self._pieces = pieces
        self._is_tool = is_tool
        self._value = call.open_value(key)
        self._line = Line()
        self._nested: list[Tag] = []
        self._opened_in_line = 0
        self._json = None if self._value.streams else JsonString()

    def begin(self) -> str:
        """The JSON of the arguments after the opener."""
        return self._add(self._first) if self._first else ""

    def end(self, *, cut: bool) -> str:
        """The JSON of the arguments that ends the value."""
        return self._call.close_value(self._value, cut=cut)

    def step(self) -> tuple[Verdict, str]:
        """Decide on the first piece; the JSON of the arguments that has become certain goes with it."""
        piece = self._pieces.queue[0]
        if decide := _DECISIONS.get(piece.tag):
            verdict = decide(self, piece)
            if verdict is not Verdict.DATA:
                return verdict, ""
        self._pieces.queue.popleft()
        return Verdict.DATA, self._add(piece.text)

    def _add(self, text: str) -> str:
        self._line.add(text)
        if "\n" in text:
            self._opened_in_line = 0
        if self._json is not None:
            self._json.add(text)
        return self._call.add(self._value, text)

    def _end_parameter(self, _: Piece) -> Verdict:
        following, is_last = self._pieces.after(0), self._pieces.close_to_the_end()
        if following is None or is_last is None:
            return Verdict.WAITS
        if not is_last and not self._parameter_ends_before(following):
            return Verdict.DATA
        self._pieces.queue.popleft()
        return Verdict.ENDS

    def _parameter_ends_before(self, following: Next) -> bool:
        """Whether the format goes on behind `</parameter>`, and not that of an element in the value."""
        tag, on_next_line = following.piece.tag, "\n" in following.space
        is_declared = (
            tag is Tag.PARAMETER and parameter_key(self._call, following.piece)[0] in self._call.tool.parameters
        )
        if self._nested[-1:] == [Tag.PARAMETER]:
            self._nested.pop()
            return Tag.FUNCTION not in self._nested and (tag in _OUTER_CLOSERS or (is_declared and on_next_line))
        if self._opened_in_line:
            self._opened_in_line -= 1
            return on_next_line and (tag in _OUTER_CLOSERS or is_declared)
        if self._json is not None and self._json.is_open and not on_next_line:
            return False
        if tag in (Tag.CALL, Tag.FUNCTION):
            return on_next_line
        in_place = on_next_line or self._line.is_blank or not self._value.is_block
        return tag is Tag.PARTIAL or is_declared or (in_place and tag in (Tag.PARAMETER, *_OUTER_CLOSERS))

    def _end_function(self, _: Piece) -> Verdict:
        """Without `</parameter>` before it, `</function>` ends a value only where no more of a value can follow."""
        following, is_last = self._pieces.after(0), self._pieces.close_to_the_end()
        if following is None or is_last is None:
            return Verdict.WAITS
        if is_last:
            return Verdict.ENDS
        if following.piece.tag is Tag.END_CALL:
            behind = self._pieces.after(following.position)
            if behind is None:
                return Verdict.WAITS
            goes_on = "\n" in behind.space or behind.piece.tag is Tag.CALL
        else:
            goes_on = "\n" in following.space and following.piece.tag in (Tag.CALL, Tag.FUNCTION)
        if self._leave(Tag.FUNCTION):
            return Verdict.DATA
        in_place = self._line.is_blank or not self._value.is_block
        return Verdict.ENDS if goes_on and in_place else Verdict.DATA

    def _end_call(self, _: Piece) -> Verdict:
        """With the value still open, `</tool_call>` ends it at the end of the output or before another call."""
        following, is_last = self._pieces.after(0), self._pieces.close_to_the_end()
        if following is None or is_last is None:
            return Verdict.WAITS
        if is_last:
            return Verdict.ENDS
        if following.piece.tag is Tag.CALL and "\n" in following.space and not self._nested and self._line.is_blank:
            behind = self._pieces.after(following.position)
            if behind is None:
                return Verdict.WAITS
            if behind.piece.tag is Tag.FUNCTION and self._is_tool(behind.piece.name):
                return Verdict.ENDS
        self._leave(Tag.CALL)
        return Verdict.DATA

    def _leave(self, tag: Tag) -> bool:
        """Leave the innermost nested element of a kind, with all that is open in it."""
        if tag not in self._nested:
            return False
        while self._nested.pop() is not tag:
            pass
        return True

    def _parameter(self, piece: Piece) -> Verdict:
        """An opener on a line of its own opens the next parameter if it is declared; else it is data."""
        if not piece.closed:
            return Verdict.DATA
        if len(self._pieces.queue) == 1 and not self._pieces.is_complete:
            return Verdict.WAITS
        behind = self._pieces.queue[1].text if len(self._pieces.queue) > 1 else "\n"
        alone = self._line.is_blank and (behind.startswith(("\n", "\r")) or not self._value.is_block)
        if not alone:
            self._opened_in_line += 1
        elif self._nested:
            self._nested += [Tag.PARAMETER] * (self._nested[-1] is Tag.FUNCTION)
        elif parameter_key(self._call, piece)[0] in self._call.tool.parameters:
            return Verdict.ENDS
        else:
            self._nested.append(Tag.PARAMETER)
        return Verdict.DATA

    def _function(self, piece: Piece) -> Verdict:
        following = self._pieces.after(0)
        if following is None:
            return Verdict.WAITS
        if self._line.is_blank and following.piece.tag in _BODY:
            if not self._nested and self._is_tool(piece.name):
                return Verdict.ENDS
            self._nested.append(Tag.FUNCTION)
        return Verdict.DATA

    def _begin_call(self, _: Piece) -> Verdict:
        following = self._pieces.after(0)
        if following is None:
            return Verdict.WAITS
        if self._line.is_blank and following.piece.tag is Tag.FUNCTION:
            self._nested.append(Tag.CALL)
        return Verdict.DATA


_DECISIONS: Mapping[Tag, Callable[[ValueReader, Piece], Verdict]] = MappingProxyType(
    {
        Tag.END_PARAMETER: ValueReader._end_parameter,
        Tag.END_FUNCTION: ValueReader._end_function,
        Tag.END_CALL: ValueReader._end_call,
        Tag.PARAMETER: ValueReader._parameter,
        Tag.FUNCTION: ValueReader._function,
        Tag.CALL: ValueReader._begin_call,
    }
)


def parameter_key(call: Call, opener: Piece) -> tuple[str | None, str]:
    """The key that an opener names, and what of its value stands in the opener; None is a parameter without a name.

    Quotes, outer blanks and a stray `=` belong to a name only if it is declared so.  An opener without `>` names a
    declared parameter or none.
    """
    declared = call.tool.parameters
    if opener.closed and opener.name in declared:
        return opener.name, ""
    name = opener.name.strip().strip("\"'").strip()
    for candidate in (name, name.rstrip("= ")):
        if candidate in declared:
            return candidate, ""
    if opener.closed:
        return name or None, ""
    parts = _KEY_AND_VALUE.fullmatch(name)
    if parts and parts[1] in declared and parts[1] not in call.values:
        return parts[1], parts[2]
    return None, ""
