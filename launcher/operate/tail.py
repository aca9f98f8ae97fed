"""The last of an engine's output, in bounded memory and on disk once it has ended."""

import time
from pathlib import Path

KEPT_BYTES = 512 * 1024
KEPT_FILES = 5
_PATTERN = "last-words-*.log"


class Tail:
    """The last bytes that were added, from the beginning of a line on."""

    def __init__(self, kept_bytes: int = KEPT_BYTES) -> None:
        self._kept_bytes = kept_bytes
        self._bytes = bytearray()

    def add(self, data: bytes) -> None:
        self._bytes += data
        # In large steps: what is cut off at the front moves the rest.
        if len(self._bytes) > 2 * self._kept_bytes:
            cut = len(self._bytes) - self._kept_bytes
            line_end = self._bytes.find(b"\n", cut)
            del self._bytes[: line_end + 1 if line_end >= 0 else cut]

    def text(self) -> str:
        return self._bytes.decode("utf-8", errors="replace")


def save(tail: Tail, folder: Path) -> Path | None:
    """Write the last words to a file of their own, and delete all but the newest; None where the disk takes none."""
    path = folder / time.strftime("last-words-%Y%m%dT%H%M%SZ.log", time.gmtime())
    try:
        path.write_text(tail.text(), encoding="utf-8")
        path.chmod(0o644)
        for old in sorted(folder.glob(_PATTERN))[:-KEPT_FILES]:
            old.unlink()
    except OSError:
        return None
    return path
