"""A results file of one script that is gone on with: every entry is written as it comes, and a budget ends the run."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import spec_decode


class OutOfTime(Exception):
    """The budget is used up; what is known is in the file."""


class Kept:
    """Parts of a results file, each a list of entries, and what follows from all of them."""

    def __init__(
        self,
        path: Path,
        about: Mapping[str, Any],
        parts: tuple[str, ...],
        derive: Callable[[Mapping[str, Any]], Mapping[str, Any]],
        budget_s: float,
    ) -> None:
        """Read what is there already; `about` says on what it ran, and may hold the day by the name of date.

        Raises:
            SystemExit: the file is of another card or of other versions.

        """
        self._path, self._derive, self._deadline = path, derive, time.monotonic() + budget_s
        self.report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        known = self.report or about
        unlike = [name for name in about if _dateless(known.get(name)) != _dateless(about[name])]
        if unlike:
            raise SystemExit(f"{path} is of another {' or '.join(unlike)}: move it away and run again")
        self.report = {**about, **self.report}
        self.report |= {part: self.report.get(part, []) for part in parts}

    def has(self, part: str, **key: Any) -> bool:
        """Whether an entry with these values is there."""
        return any(all(entry[name] == value for name, value in key.items()) for entry in self.report[part])

    def add(self, part: str, entry: Mapping[str, Any]) -> None:
        """Write an entry and print it.

        Raises:
            OutOfTime: the budget is used up.

        """
        self.report[part].append(dict(entry))
        self.report |= self._derive(self.report)
        spec_decode.write(self._path, self.report)
        print(part, *(f"{name}={value}" for name, value in entry.items()), flush=True)
        if time.monotonic() > self._deadline:
            raise OutOfTime


def _dateless(value: Any) -> Any:
    return {name: part for name, part in value.items() if name != "date"} if isinstance(value, dict) else value
