"""The pieces of the output that are not decided on yet, and what follows them."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from vllm_graft.parsers.tags import Piece, Tag

_LONGEST_LAYOUT = 4096
_END = Piece(Tag.END, "")
_CLOSERS = (Tag.END_PARAMETER, Tag.END_FUNCTION, Tag.END_CALL)


class Next(NamedTuple):
    """What follows a piece: white space, then another piece at `position` in the queue."""

    space: str
    piece: Piece
    position: int


class Pieces:
    """The pieces that are not decided on yet."""

    def __init__(self) -> None:
        self.queue: deque[Piece] = deque()
        self.is_complete = False

    def add(self, pieces: list[Piece]) -> None:
        """Take more; text that follows text becomes one piece."""
        for piece in pieces:
            if piece.tag is Tag.TEXT and self.queue and self.queue[-1].tag is Tag.TEXT:
                piece = Piece(Tag.TEXT, self.queue.pop().text + piece.text)
            self.queue.append(piece)

    def after(self, index: int) -> Next | None:
        """What follows the piece at an index, None when that has not arrived yet."""
        space = ""
        index += 1
        if index < len(self.queue) and self.queue[index].tag is Tag.TEXT:
            text = self.queue[index].text
            if text.strip() or len(text) > _LONGEST_LAYOUT:
                return Next(text[: len(text) - len(text.lstrip())], self.queue[index], index)
            space = text
            index += 1
        if index < len(self.queue):
            return Next(space, self.queue[index], index)
        return Next(space, _END, index) if self.is_complete else None

    def close_to_the_end(self) -> bool | None:
        """Whether the first piece and its outer closing tags, in order, are all that is left; None: not known yet."""
        rank, index = _CLOSERS.index(self.queue[0].tag), 0
        while (following := self.after(index)) is not None:
            tag, index = following.piece.tag, following.position
            if tag is Tag.END or (tag is Tag.PARTIAL and following.piece.text.startswith("</")):
                return True
            if tag not in _CLOSERS[rank + 1 :]:
                return False
            rank = _CLOSERS.index(tag)
        return None
