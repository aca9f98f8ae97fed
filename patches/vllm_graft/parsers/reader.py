"""Reads Qwen3's output: reasoning, answer and tool calls, the same however the text is cut into deltas.

    <tool_call>
    <function=NAME>
    <parameter=KEY>
    VALUE
    </parameter>
    </function>
    </tool_call>

A model writes tags as data too, and leaves tags out.  A tag is decided on only when what follows it is known: a closing
tag ends a value where the format goes on behind it, an opening tag opens where what it names is declared and the format
goes on.  All else is text.  What waits for a decision is held back; white space that is longer than any layout decides.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from vllm_graft.parsers.events import Call, Event, Kind
from vllm_graft.parsers.pieces import Pieces
from vllm_graft.parsers.prose import Prose
from vllm_graft.parsers.schema import Tool, Typing
from vllm_graft.parsers.tags import Piece, Tag, Tagger
from vllm_graft.parsers.value import ValueReader, Verdict

_PLAUSIBLE_NAME = re.compile(r"[\w.:/-]{1,128}")
_BODY = (Tag.PARAMETER, Tag.END_FUNCTION)


class Reader:
    """Reads one output.

    `tools` are the declared tools by name; without any nothing is a call.  A reader that begins in reasoning stops
    where the reasoning ends; `rest` is what follows, for the next reader.
    """

    def __init__(
        self, tools: Mapping[str, Tool], typing: Typing, *, reasoning: bool, think_is_text: bool = False
    ) -> None:
        self.calls: list[Call] = []
        self.rest: str | None = None
        self._tools = tools
        self._typing = typing
        self._reasoning = reasoning
        self._think_is_text = think_is_text
        self._tagger = Tagger()
        self._pieces = Pieces()
        self._events: list[Event] = []
        self._prose = Prose()
        self._mentions_call = False
        self._step = self._read_prose
        self._value: ValueReader | None = None

    @property
    def has_ended_reasoning(self) -> bool:
        """Whether the reasoning is over, and `rest` follows it."""
        return self.rest is not None

    @property
    def held(self) -> str:
        """The text that has arrived and waits for a decision."""
        return "".join(piece.text for piece in self._pieces.queue) + self._tagger.held

    def feed(self, text: str) -> list[Event]:
        """The events that are certain once `text` has arrived."""
        return self._read(self._tagger.feed(text))

    def finish(self) -> list[Event]:
        """The remaining events, at the end of the output; an open call is closed."""
        self._pieces.is_complete = True
        events = self._read(self._tagger.finish())
        if self._step == self._read_value:
            self._close_value(cut=True)
        if self._step in (self._read_value, self._read_body):
            self._close_call()
        return events + self._take()

    def _read(self, pieces: list[Piece]) -> list[Event]:
        self._pieces.add(pieces)
        while self._pieces.queue and not self.has_ended_reasoning and self._step():
            pass
        return self._take()

    def _take(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def _drop(self) -> Piece:
        return self._pieces.queue.popleft()

    def _read_prose(self) -> bool:
        piece = self._pieces.queue[0]
        if piece.tag in (Tag.THINK, Tag.END_THINK):
            return self._read_think(piece)
        is_mentioned = self._prose.in_code or (self._mentions_call and piece.tag is Tag.FUNCTION)
        if piece.tag in (Tag.CALL, Tag.FUNCTION) and self._tools and not is_mentioned:
            is_call = self._begins_call(piece)
            if is_call is None:
                return False
            if is_call:
                return True
        self._mentions_call = piece.tag is Tag.CALL or (self._mentions_call and not piece.text.strip())
        self._say(self._drop().text)
        return True

    def _say(self, text: str) -> None:
        self._prose.add(text)
        self._events.append(Event(Kind.REASONING if self._reasoning else Kind.CONTENT, text))

    def _read_think(self, piece: Piece) -> bool:
        if self._reasoning and piece.tag is Tag.END_THINK:
            self._drop()
            self._end_reasoning()
            return True
        if self._think_is_text or self._prose.in_code or self._reasoning != (piece.tag is Tag.THINK):
            self._say(self._drop().text)
            return True
        is_stray = self._prose.is_empty
        if not is_stray and self._prose.is_blank and piece.tag is Tag.END_THINK:
            following = self._pieces.after(0)
            if following is None and len(self._pieces.queue) == 1:
                return False
            text = self._pieces.queue[1].text if len(self._pieces.queue) > 1 else "\n"
            is_stray = text.startswith(("\n", "\r"))
        if is_stray:
            self._drop()
        else:
            self._say(self._drop().text)
        return True

    def _end_reasoning(self) -> None:
        self.rest = self.held

    def _begins_call(self, piece: Piece) -> bool | None:
        """Begin the call at the first piece if it is one; None when that is not known yet."""
        wrapped = piece.tag is Tag.CALL
        index = 0
        following = self._pieces.after(0)
        if wrapped and following is not None:
            if following.piece.tag in (Tag.END, Tag.PARTIAL) and self._is_cut_opener(following.piece.text):
                self._pieces.queue.clear()
                return True
            if following.piece.tag is not Tag.FUNCTION:
                return False
            index = following.position
            following = self._pieces.after(index)
        if following is None:
            return None
        tool = self._called(index, following.piece.tag, wrapped=wrapped)
        if tool is None:
            return False
        if self._reasoning:
            self._end_reasoning()
            return True
        for _ in range(index + 1):
            self._drop()
        self._open_call(tool)
        return True

    def _is_cut_opener(self, text: str) -> bool:
        """Whether the output ends in the middle of a call's opening, which is no text for anybody."""
        if self._reasoning:
            return False
        name = text.removeprefix("<function=")
        if name == text:
            return "<function=".startswith(text)
        return any(declared.startswith(name) for declared in self._tools)

    def _called(self, index: int, behind: Tag, *, wrapped: bool) -> Tool | None:
        """The tool that the header at an index calls, None where it is text.

        In the wrapper, a declared name calls where the format goes on behind it, another name only in a call's full
        form; without the wrapper, a declared name does in the full form.  Reasoning ends at a declared name only, and
        not at the end of the output, where no reader is left for the call.
        """
        header = self._pieces.queue[index]
        tool = self._tool(header.name)
        begins_line = self._prose.is_blank or any("\n" in self._pieces.queue[i].text for i in range(index))
        in_form = behind in _BODY and (begins_line or self._step == self._read_wrapper)
        if tool is not None:
            goes_on = behind in (*_BODY, Tag.END_CALL) or (behind in (Tag.END, Tag.PARTIAL) and not self._reasoning)
            return tool if in_form or (wrapped and goes_on) else None
        name = header.name.strip()
        is_unknown_tool = wrapped and in_form and header.closed and not self._reasoning
        return Tool(name) if is_unknown_tool and _PLAUSIBLE_NAME.fullmatch(name) else None

    def _tool(self, name: str) -> Tool | None:
        return self._tools.get(name) or self._tools.get(name.strip().strip("\"'"))

    def _is_tool(self, name: str) -> bool:
        return self._tool(name) is not None

    def _open_call(self, tool: Tool) -> None:
        call = Call(len(self.calls), tool, self._typing)
        self.calls.append(call)
        self._events.append(Event(Kind.CALL, call.name, call.index))
        self._step = self._read_body

    def _send(self, text: str) -> None:
        if text:
            self._events.append(Event(Kind.ARGUMENTS, text, len(self.calls) - 1))

    def _read_body(self) -> bool:
        """Between the parameters of a call."""
        piece = self._pieces.queue[0]
        if piece.tag is Tag.PARAMETER:
            self._value = ValueReader(self.calls[-1], self._pieces, self._drop(), self._is_tool)
            self._step = self._read_value
            self._send(self._value.begin())
        elif piece.tag in (Tag.END_FUNCTION, Tag.END_CALL, Tag.CALL, Tag.FUNCTION):
            self._close_call()
            if piece.tag in (Tag.END_FUNCTION, Tag.END_CALL):
                self._drop()
            self._step = self._read_prose if piece.tag is Tag.END_CALL else self._read_wrapper
        elif piece.tag in (Tag.END_PARAMETER, Tag.PARTIAL) or not piece.text.strip():
            self._drop()
        else:
            self._say(self._drop().text)
        return True

    def _read_value(self) -> bool:
        assert self._value is not None
        verdict, text = self._value.step()
        self._send(text)
        if verdict is Verdict.ENDS:
            self._close_value(cut=False)
        return verdict is not Verdict.WAITS

    def _close_value(self, *, cut: bool) -> None:
        assert self._value is not None
        self._send(self._value.end(cut=cut))
        self._value = None
        self._step = self._read_body

    def _close_call(self) -> None:
        self._send(self.calls[-1].close())
        self._prose = Prose()
        self._prose.is_empty = False
        self._step = self._read_wrapper

    def _read_wrapper(self) -> bool:
        """Behind a function: its wrapper's end, another function, or the answer again."""
        piece = self._pieces.queue[0]
        if piece.tag in (Tag.END_CALL, Tag.PARTIAL):
            self._drop()
        elif piece.tag is Tag.FUNCTION:
            following = self._pieces.after(0)
            if following is None:
                return False
            if tool := self._called(0, following.piece.tag, wrapped=True):
                self._drop()
                self._open_call(tool)
                return True
        elif piece.tag is Tag.TEXT and not piece.text.strip():
            following = self._pieces.after(-1)
            if following is None:
                return False
            if following.piece.tag in (Tag.END_CALL, Tag.FUNCTION):
                self._drop()
                return True
        self._step = self._read_prose
        return True
