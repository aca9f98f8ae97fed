"""Where in prose a tag can be meant as a tag: not in code, and some only at the start of a line."""

from __future__ import annotations

_LONGEST_LINE = 256
_FENCE = "```"


class Line:
    """The line that is being read, in prose or in a value."""

    def __init__(self) -> None:
        self.is_blank = True

    def add(self, text: str) -> None:
        """Read on."""
        line_break = text.rfind("\n")
        if line_break >= 0:
            self.is_blank = not text[line_break:].strip()
        elif self.is_blank:
            self.is_blank = not text.strip()


class Prose(Line):
    """Prose as far as it has been read: the current line and Markdown's code."""

    def __init__(self) -> None:
        super().__init__()
        self.is_empty = True
        self._fence_width = 0
        self._line = ""
        self._last = ""

    @property
    def in_code(self) -> bool:
        """Whether what comes next is in a code fence or right behind a backtick."""
        return bool(self._fence_width) or self._last == "`"

    def add(self, text: str) -> None:
        """Read on."""
        super().add(text)
        self.is_empty = self.is_empty and not text.strip()
        self._last = text[-1:] or self._last
        *whole, rest = text.split("\n")
        for line in whole:
            self._end_line(self._line + line)
            self._line = ""
        self._line = (self._line + rest)[:_LONGEST_LINE]

    def _end_line(self, line: str) -> None:
        line = line.strip()
        if not line.startswith(_FENCE):
            return
        info = line.lstrip("`")
        width = len(line) - len(info)
        if not self._fence_width:
            self._fence_width = 0 if "`" in info else width
        elif width >= self._fence_width and not info:
            self._fence_width = 0
