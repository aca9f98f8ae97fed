"""What a soak has seen so far: everything that its report needs, in bounded memory, kept in one file."""

import json
import os
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from launcher.errors import UsageError
from launcher.measure.load_mix import Size
from launcher.measure.load_sample import Sample, gained
from launcher.measure.load_stats import Spread, Timeline
from launcher.measure.replies import Share

SCHEMA = 1
MOST_EVENTS = 300
MOST_EXAMPLES = 20


@dataclass(frozen=True)
class Settings:
    """What a soak asks of which service; a resumed one asks the same."""

    url: str
    model: str
    profile: str | None
    duration_s: float
    concurrency: int
    context_tokens: int
    has_tools: bool
    no_tools_reason: str | None
    seed: int
    gpu_uuids: tuple[str, ...] = ()
    gpu_bound_bytes: int | None = None
    """Most memory that may be in use on each GPU; None: there is none to read."""


@dataclass(frozen=True)
class Event:
    """Something that a reader of the report wants to see at its time."""

    at_s: float
    kind: str
    """restart, outage, error, resumed."""
    said: str


@dataclass(frozen=True)
class Outcome:
    """What came of one request."""

    size: Size
    is_agent: bool
    is_call: bool
    """Whether its right reply is a tool call."""
    error: str | None
    """Kind of failure: `HTTP 500`, `broken off`; None for a reply."""
    said: str = ""
    first_token_s: float | None = None
    gaps_s: tuple[float, ...] = ()
    elapsed_s: float = 0.0
    prompt_tokens: int = 0
    reply_tokens: int = 0
    is_right: bool | None = None
    """None where there is no one right reply."""


@dataclass
class Record:
    """The sums, spreads and events of a soak."""

    settings: Settings
    elapsed_s: float = 0.0
    """Time under load, without the times between two runs."""
    is_finished: bool = False
    runs: int = 1
    sessions: int = 0
    asked: Counter[str] = field(default_factory=Counter)
    """Requests begun, by size, and `agent`."""
    done: Counter[str] = field(default_factory=Counter)
    """Replies, by size."""
    errors: Counter[str] = field(default_factory=Counter)
    turned_away: int = 0
    """Requests that a gateway refused for overload."""
    sums: Counter[str] = field(default_factory=Counter)
    """Tokens, right and judged replies, and the server's own counters."""
    spreads: dict[str, Spread] = field(default_factory=dict)
    timeline: Timeline = field(default_factory=Timeline)
    events: list[Event] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    """The first wrong replies."""
    restarts: int = 0
    outage_s: float = 0.0
    peaks: dict[str, float] = field(default_factory=dict)
    prompt_chars: int = 0
    down_since_s: float | None = None
    last_sample: Sample | None = None

    def add(self, outcome: Outcome, at_s: float, chars: int) -> None:
        """Take in what came of a request."""
        bucket = self.timeline.at(at_s)
        if outcome.error is not None:
            self.errors[outcome.error] += 1
            bucket.count("errors")
            self.tell(at_s, "error", f"{outcome.error}: {outcome.said}")
            return
        self.up(at_s)
        self.done[outcome.size] += 1
        self.sums["prompt_tokens"] += outcome.prompt_tokens
        self.sums["reply_tokens"] += outcome.reply_tokens
        self.prompt_chars += chars
        bucket.count("replies")
        bucket.count("reply_tokens", outcome.reply_tokens)
        times = {"request": [outcome.elapsed_s], "gap": outcome.gaps_s}
        if outcome.first_token_s is not None:
            times |= {"first_token": [outcome.first_token_s], f"first_token {outcome.size}": [outcome.first_token_s]}
        for name, values in times.items():
            self.spreads.setdefault(name, Spread()).add(values)
            if name in ("first_token", "gap"):
                bucket.spread(name, values)
        if outcome.is_right is not None:
            what = "calls" if outcome.is_call else "answers"
            self.sums[f"judged_{what}"] += 1
            self.sums[f"right_{what}"] += outcome.is_right
            if not outcome.is_right and len(self.wrong) < MOST_EXAMPLES:
                self.wrong.append(outcome.said)

    def unreachable(self, at_s: float) -> None:
        """Note that nobody listens."""
        if self.down_since_s is None:
            self.down_since_s = at_s
            self.tell(at_s, "outage", "the service does not answer")

    def up(self, at_s: float) -> None:
        """Note that the service answers."""
        if self.down_since_s is not None:
            self.outage_s += at_s - self.down_since_s
            self.tell(at_s, "outage", f"the service answers again after {at_s - self.down_since_s:.0f} s")
            self.down_since_s = None

    def resume(self) -> None:
        """Begin another run; what happened to the server between two runs was not under load, and does not count."""
        self.up(self.elapsed_s)
        self.last_sample = None
        self.runs += 1
        self.tell(self.elapsed_s, "resumed", "the soak goes on after an interruption")

    def sample(self, sample: Sample | None, gpu_bytes: dict[str, int], at_s: float) -> None:
        """Take in a look at the server and its GPUs."""
        bucket = self.timeline.at(at_s)
        for uuid, used in gpu_bytes.items():
            self._gauge(bucket.gauge, f"gpu {uuid}", used)
        if sample is None:
            return
        for name in ("kv_usage", "running", "waiting", "resident_bytes"):
            value = getattr(sample, name)
            if value is not None:
                self._gauge(bucket.gauge, name, value)
        before, self.last_sample = self.last_sample, sample
        if before is None:
            return
        if before.started_s is not None and sample.started_s is not None and before.started_s != sample.started_s:
            self.restarts += 1
            self.tell(at_s, "restart", "the server was started again")
        for name, value in gained(before, sample).items():
            self.sums[name] += int(value)
            bucket.count(name, value)

    def tell(self, at_s: float, kind: str, said: str) -> None:
        """Keep an event; of very many only the first."""
        if len(self.events) < MOST_EVENTS:
            self.events.append(Event(round(at_s, 1), kind, said[:300]))

    def _gauge(self, into: Any, name: str, value: float) -> None:
        into(name, value)
        self.peaks[name] = max(self.peaks.get(name, value), value)

    @property
    def chars_a_token(self) -> float | None:
        tokens = self.sums["prompt_tokens"]
        return self.prompt_chars / tokens if tokens else None

    @property
    def replies(self) -> int:
        return self.done.total()

    def right(self, what: str) -> Share:
        """Return how many `calls` or `answers` were right."""
        return Share(self.sums[f"right_{what}"], self.sums[f"judged_{what}"])

    def quantile(self, name: str, share: float) -> float | None:
        return self.spreads[name].quantile(share) if name in self.spreads else None


def save(record: Record, path: Path) -> None:
    """Write the record as a whole or not at all, so that a machine that dies leaves the one before."""
    document = {"schema": SCHEMA, **_plain(record)}
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("w", encoding="utf-8") as file:
        json.dump(document, file)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def load(path: Path) -> Record | None:
    """Read a record; None where there is none.

    Raises:
        UsageError: it is not one of this launcher.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        return _record(document)
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{path}: not the record of a soak by this launcher ({error}); --new begins anew") from error


def _plain(record: Record) -> dict[str, Any]:
    named = {name: value for name, value in vars(record).items() if name not in ("spreads", "timeline")}
    return {
        **{name: _as_json(value) for name, value in named.items()},
        "spreads": {name: spread.to_json() for name, spread in record.spreads.items()},
        "timeline": record.timeline.to_json(),
    }


def _as_json(value: Any) -> Any:
    if isinstance(value, Settings | Sample | Event):
        return asdict(value)
    return [_as_json(item) for item in value] if isinstance(value, list) else value


def _record(document: dict[str, Any]) -> Record:
    if document.pop("schema") != SCHEMA:
        raise ValueError("another schema")
    settings, sample = document.pop("settings"), document.pop("last_sample")
    values = {
        **document,
        **{name: Counter(document[name]) for name in ("asked", "done", "errors", "sums")},
        "settings": Settings(**{**settings, "gpu_uuids": tuple(settings["gpu_uuids"])}),
        "last_sample": Sample(**sample) if sample else None,
        "spreads": {name: Spread.from_json(one) for name, one in document["spreads"].items()},
        "timeline": Timeline.from_json(document["timeline"]),
        "events": [Event(**one) for one in document["events"]],
    }
    return Record(**values)
