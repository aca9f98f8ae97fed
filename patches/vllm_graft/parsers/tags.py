"""Cuts streamed text into the tags of Qwen3's output format and the text between them."""

from __future__ import annotations

import re
from enum import Enum, auto
from typing import NamedTuple


class Tag(Enum):
    """What a piece of text is; PARTIAL is a tag that the end of the output cut off, END what follows the last piece."""

    TEXT = auto()
    PARTIAL = auto()
    END = auto()
    THINK = auto()
    END_THINK = auto()
    CALL = auto()
    END_CALL = auto()
    FUNCTION = auto()
    END_FUNCTION = auto()
    PARAMETER = auto()
    END_PARAMETER = auto()


class Piece(NamedTuple):
    """A piece of the output: `text` as generated; for an opener the `name` in it, and whether `>` closes it."""

    tag: Tag
    text: str
    name: str = ""
    closed: bool = True


# White space inside a parameter tag is what vLLM's own parser bears too.
_TAG = re.compile(
    r"<(?:(?P<THINK>think>)|(?P<END_THINK>/think>)|(?P<CALL>tool_call>)|(?P<END_CALL>/tool_call>)"
    r"|(?P<END_FUNCTION>/function>)|(?P<END_PARAMETER>\s{0,8}/\s{0,8}parameter\s{0,8}>)"
    r"|(?P<FUNCTION>function=)|(?P<PARAMETER>\s{0,8}parameter\s{0,8}=))"
)
_LITERALS = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<function=",
    "</function>",
    "<parameter=",
    "</parameter>",
)
_LONGEST_TAG = 40
_LONGEST_NAME = 1024
_NAME = re.compile(rf"[^<>\n]{{0,{_LONGEST_NAME}}}")


class Tagger:
    """Cuts text as it arrives; what may still become a tag is held back, at most one tag's length."""

    def __init__(self) -> None:
        self.held = ""

    def feed(self, text: str) -> list[Piece]:
        """The pieces that are certain once `text` has arrived."""
        if not self.held and "<" not in text:
            return [Piece(Tag.TEXT, text)] if text else []
        return self._cut(self.held + text, final=False)

    def finish(self) -> list[Piece]:
        """The rest, at the end of the output."""
        return self._cut(self.held, final=True)

    def _cut(self, text: str, *, final: bool) -> list[Piece]:
        pieces: list[Piece] = []
        done = 0
        search = 0
        while (start := text.find("<", search)) >= 0:
            piece = _tag_at(text, start, final=final)
            if piece is None:
                search = start + 1
                continue
            if start > done:
                pieces.append(Piece(Tag.TEXT, text[done:start]))
            if piece.tag is Tag.PARTIAL and not final:
                self.held = text[start:]
                return pieces
            pieces.append(piece)
            done = search = start + len(piece.text)
        if done < len(text):
            pieces.append(Piece(Tag.TEXT, text[done:]))
        self.held = ""
        return pieces


def _tag_at(text: str, start: int, *, final: bool) -> Piece | None:
    """The tag that begins at a `<`, PARTIAL when it may, None when it does not."""
    found = _TAG.match(text, start)
    if found is None:
        tail = text[start : start + _LONGEST_TAG + 1]
        grows = len(tail) <= _LONGEST_TAG and is_cut_tag(tail)
        return Piece(Tag.PARTIAL, tail) if grows else None
    tag = Tag[str(found.lastgroup)]
    if tag not in (Tag.FUNCTION, Tag.PARAMETER):
        return Piece(tag, found.group())
    named = _NAME.match(text, found.end())
    name = named.group() if named else ""
    end = found.end() + len(name)
    if end == len(text) and len(name) < _LONGEST_NAME:
        return Piece(Tag.PARTIAL, text[start:])
    if end < len(text) and text[end] == ">":
        return Piece(tag, text[start : end + 1], name)
    if len(name) == _LONGEST_NAME:
        return None
    return Piece(tag, text[start:end], name, closed=False)


def is_cut_tag(text: str) -> bool:
    """Whether text is the beginning of a tag, or of an opener with part of its name."""
    compact = "".join(text.split())
    return any(literal.startswith(compact) for literal in _LITERALS)
