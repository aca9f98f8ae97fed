"""A server's log as lines with what was said in each, searchable at once."""

import re
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

_LINE_END = re.compile(r"\r\n|\n|\r")
_COLOUR = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
_SERVICE = re.compile(r"^[\w.-]+ +\| ")
_TIMESTAMP = re.compile(r"^\d{4}-\d\d-\d\dT[\d:.]+(?:Z|[+-]\d\d:\d\d) ")
_PROCESS = re.compile(r"^\([\w -]+ pid=\d+\) ?")
_LOGGER = re.compile(r"^(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d [\d:.]+ \[[^\]]*\] ?")
_NOTICE = re.compile(r"^\[?(?:DEBUG|INFO|WARNING)\b")
_PROGRESS = re.compile(r"\| (?P<done>[\d.]+[kMGT]?)/(?P<total>[\d.]+[kMGT]?) \[(?P<elapsed>[\d:]+)<")
_TRACEBACK = "Traceback (most recent call last)"
_LONGEST_TRACEBACK = 150
"""Lines; looking further up would find the traceback of another error."""


@dataclass(frozen=True)
class LogLine:
    """One line of a log."""

    text: str
    """As it was shown, without colour codes and without what `docker compose` and `docker logs -t` put before it."""
    message: str
    """Without the prefixes of vLLM's processes and of its logger."""
    is_notice: bool
    """Logged at level DEBUG, INFO or WARNING: it does not show a failure by itself."""


@dataclass(frozen=True)
class Hit:
    """Where a pattern matched: the line's number and text, and the pattern's named groups."""

    line: int
    text: str
    groups: dict[str, str | None]


class LogText:
    """A log."""

    def __init__(self, raw: str) -> None:
        self.lines = tuple(_log_line(line) for line in _LINE_END.split(raw))
        self._starts: list[int] = []
        length = 0
        for line in self.lines:
            self._starts.append(length)
            length += len(line.message) + 1
        self._joined = "\n".join(line.message for line in self.lines)

    def hits(self, pattern: re.Pattern[str]) -> Iterator[Hit]:
        """Yield the pattern's matches in the messages of all lines."""
        for match in pattern.finditer(self._joined):
            number = bisect_right(self._starts, match.start()) - 1
            yield Hit(number, self.lines[number].text, match.groupdict())

    def errors(self, pattern: re.Pattern[str]) -> Iterator[Hit]:
        """Yield the matches outside of notices."""
        return (hit for hit in self.hits(pattern) if not self.lines[hit.line].is_notice)

    def nearest(self, pattern: re.Pattern[str], line: int) -> Hit | None:
        """Return the last match up to the line, else the first one behind it."""
        before: Hit | None = None
        for hit in self.hits(pattern):
            if hit.line > line:
                return before or hit
            before = hit
        return before

    def has_in_traceback(self, pattern: re.Pattern[str], line: int) -> bool:
        """Say whether the traceback that ends at the line has a match."""
        for number in range(line - 1, max(-1, line - _LONGEST_TRACEBACK), -1):
            message = self.lines[number].message
            if _TRACEBACK in message:
                return False
            if pattern.search(message):
                return True
        return False

    @cached_property
    def stalled_s(self) -> int:
        """Seconds that the download in the log's last line has brought nothing, by its own clock; else 0."""
        last_line = next((line.text for line in reversed(self.lines) if line.text.strip()), "")
        last = _PROGRESS.search(last_line)
        if last is None or last["done"] == last["total"]:
            return 0
        shown = (_PROGRESS.search(line.text) for line in self.lines)
        first = next(
            match for match in shown if match and (match["done"], match["total"]) == (last["done"], last["total"])
        )
        return _seconds(last["elapsed"]) - _seconds(first["elapsed"])


def _log_line(raw: str) -> LogLine:
    text = _TIMESTAMP.sub("", _SERVICE.sub("", _COLOUR.sub("", raw)))
    unprefixed = _PROCESS.sub("", text)
    return LogLine(text, _LOGGER.sub("", unprefixed), _NOTICE.match(unprefixed) is not None)


def _seconds(clock: str) -> int:
    """Return the seconds of tqdm's `[[h]:m]:s`."""
    total = 0
    for part in clock.split(":"):
        total = total * 60 + int(part or 0)
    return total
