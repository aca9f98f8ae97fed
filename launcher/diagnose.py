"""Log, container state and facts in; one cause and one remedy out. The rules are data: `launcher/rules/*.yaml`.

Every rule that matches is a candidate. An error that names its own cause beats the state of the container, the kernel
and the GPUs, and that beats a symptom that has several possible causes; among equals the first in the log wins, since
what comes later is mostly its consequence. No rule matches vLLM's "Engine core initialization failed" and its like:
they follow from every cause.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Annotated, Any, Literal

from jinja2 import StrictUndefined, Template
from jinja2.sandbox import ImmutableSandboxedEnvironment
from pydantic import BaseModel, BeforeValidator, ConfigDict, model_validator

from launcher import yamltext
from launcher.evidence import Evidence
from launcher.logtext import Hit
from launcher.problems import Cause

RULES = resources.files("launcher") / "rules"
"""Also where the launcher lies in a zip file."""
_RANKS = ("error", "state", "symptom")
_LONGEST_SHOWN_LINE = 600
"""Characters."""


_FAILED = re.compile(
    r"^Traceback \(most recent call last\)|^Error response from daemon|: error: |exited with code [1-9]"
    r"|EngineCore (?:failed to start|encountered)|Engine core initialization failed"
)
UNKNOWN_CAUSE = (
    "unknown cause: no rule knows this failure. The last lines of the log follow; "
    "`graft report` writes a file to paste into an issue"
)


class Diagnosis(BaseModel):
    """One cause, one remedy, and the lines that show it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    cause: Cause
    rule: str
    """Id of the rule that matched."""
    message: str
    """The cause in words."""
    remedy: str
    """What was found, with its numbers, and what to do."""
    excerpt: tuple[str, ...]
    restart_helps: bool
    """Starting again unchanged can succeed."""


def _compiled(value: object) -> object:
    texts = [value] if isinstance(value, str) else value
    try:
        return tuple(re.compile(text, re.MULTILINE) for text in texts) if isinstance(texts, list) else value
    except re.error as error:
        raise ValueError(f"{error.pattern!r}: {error}") from error


Patterns = Annotated[tuple[re.Pattern[str], ...], BeforeValidator(_compiled)]


class Rule(BaseModel):
    """One way in which a failure shows; the head of `launcher/rules/docker.yaml` explains the fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    id: str
    cause: Cause
    source: str
    rank: Literal["error", "state", "symptom"] = "error"
    error: Patterns = ()
    kernel: Patterns = ()
    together: Patterns = ()
    traceback: Patterns = ()
    notes: Patterns = ()
    when: str = "true"
    shows: str = ""
    message: str
    remedy: str
    restart_helps: bool

    @model_validator(mode="after")
    def _decides_by_something(self) -> "Rule":
        if not self.error and not self.kernel and self.when == "true":
            raise ValueError(f"{self.id}: matches everything; give it error, kernel or when")
        if bool(self.error) != (self.rank != "state"):
            raise ValueError(f"{self.id}: rank state is for rules without error lines, and for these only")
        return self

    @cached_property
    def names(self) -> dict[str, None]:
        """The named groups of all patterns: what `when` and the texts may use; None until matched."""
        every = (*self.error, *self.kernel, *self.together, *self.notes)
        return dict.fromkeys(name for pattern in every for name in pattern.groupindex)


@dataclass(frozen=True)
class _Match:
    """A rule that matches, and what its texts need."""

    rule: Rule
    line: int
    excerpt: tuple[str, ...]
    values: dict[str, Any]


def diagnose(evidence: Evidence) -> Diagnosis | None:
    """Return the one cause that the evidence shows; None where nothing failed or no rule knows it."""
    found = [match for rule in rules() if (match := _match(rule, evidence)) is not None]
    if not found:
        return None
    first = min(found, key=lambda match: (_RANKS.index(match.rule.rank), match.line))
    return Diagnosis(
        cause=first.rule.cause,
        rule=first.rule.id,
        message=_rendered(first.rule.message, first.values),
        remedy=_rendered(first.rule.remedy, first.values),
        excerpt=first.excerpt,
        restart_helps=first.rule.restart_helps,
    )


def last_words(evidence: Evidence, most_lines: int = 12) -> tuple[str, ...]:
    """Return the log's last lines that are not notices: what to show where no cause is known."""
    said = (line for line in evidence.text.lines if line.text.strip() and not line.is_notice)
    lines = [
        _shortened(line.text) for line in said if "graft-event " not in line.text and "GRAFT-REPORT " not in line.text
    ]
    return tuple(lines[-most_lines:])


def shows_failure(evidence: Evidence) -> bool:
    """Say whether something failed, known to a rule or not: the container's state, else the log's last part, tells."""
    state = evidence.context.container
    if state is not None and (state.status in ("exited", "restarting", "dead") or state.oom_killed):
        return bool(state.exit_code) or bool(state.restart_count) or bool(state.oom_killed)
    if evidence.context.is_healthy:
        return False
    return any(_FAILED.search(line.message) for line in evidence.text.lines if not line.is_notice)


@cache
def rules(folder: Traversable = RULES) -> tuple[Rule, ...]:
    """Return the rules of all files, in the order of the files' names.

    Raises:
        pydantic.ValidationError: a rule is wrong.
        ValueError: two rules share an id.
    """
    files = sorted((path for path in folder.iterdir() if path.name.endswith(".yaml")), key=lambda path: path.name)
    documents = [yamltext.parse(path.read_text(encoding="utf-8")) for path in files]
    loaded = tuple(Rule.model_validate(rule) for document in documents for rule in document["rules"])
    ids = [rule.id for rule in loaded]
    twice = sorted({name for name in ids if ids.count(name) > 1})
    if twice:
        raise ValueError(f"{folder}: given twice: {', '.join(twice)}; a rule's id is its own")
    return loaded


def _match(rule: Rule, evidence: Evidence) -> _Match | None:
    """Return the rule's first match for which all of its conditions hold."""
    text = evidence.text
    kernel = next((hit for pattern in rule.kernel for hit in evidence.kernel_text.hits(pattern)), None)
    together = [next(text.hits(pattern), None) for pattern in rule.together]
    if (rule.kernel and kernel is None) or None in together:
        return None
    for error in _errors(rule, evidence):
        line = len(text.lines) if error is None else error.line
        if rule.traceback and not any(text.has_in_traceback(pattern, line) for pattern in rule.traceback):
            continue
        notes = [text.nearest(pattern, line) for pattern in rule.notes]
        logged = [hit for hit in (*notes, *together, error) if hit is not None]
        values = _values(rule, evidence, [*logged, *([kernel] if kernel else [])])
        if _holds(rule.when, values):
            shown = [evidence.text.lines[number].text for number in sorted({hit.line for hit in logged})]
            besides = (kernel.text if kernel else "", _rendered(rule.shows, values))
            excerpt = tuple(_shortened(part) for part in (*shown, *besides) if part)
            return _Match(rule, line, excerpt, values)
    return None


def _errors(rule: Rule, evidence: Evidence) -> Iterator[Hit | None]:
    """Yield the rule's error lines, first to last; one None for a rule that asks for none."""
    if not rule.error:
        return iter((None,))
    hits = [hit for pattern in rule.error for hit in evidence.text.errors(pattern)]
    return iter(sorted(hits, key=lambda hit: hit.line))


def _values(rule: Rule, evidence: Evidence, hits: list[Hit]) -> dict[str, Any]:
    """Return what the rule's expression and texts may use; a later hit's group replaces an earlier one's."""
    values: dict[str, Any] = dict(rule.names)
    for hit in hits:
        values.update({name: value for name, value in hit.groups.items() if value is not None})
    known = {"context": evidence.context, "kernel_log": evidence.kernel_log, "stalled_s": evidence.text.stalled_s}
    return {**values, **known}


def _shortened(line: str) -> str:
    return line if len(line) <= _LONGEST_SHOWN_LINE else line[:_LONGEST_SHOWN_LINE] + " ..."


_BYTES = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_NEEDS_DRIVER = {"13": "580", "12.9": "575", "12.8": "570", "12.6": "560", "12.4": "550"}
"""Driver branch that runs a CUDA release; within 13 every release runs on the first one's.

https://docs.nvidia.com/cuda/cuda-toolkit-release-notes/index.html
"""


def _bytes(size: str) -> float:
    """Return the bytes of a size as PyTorch prints it, such as `136.00 MiB`."""
    number, unit = size.split()
    return float(number) * _BYTES[unit.replace("bytes", "B")]


def _size(size_bytes: float) -> str:
    return f"{size_bytes / 2**30:.2f} GiB" if size_bytes >= 2**30 else f"{size_bytes / 2**20:.0f} MiB"


def _number(value: float | str) -> str:
    """Return a number without digits that say nothing: 28 for 28.0, 0.97 for 0.9700000001."""
    return f"{float(value):.3f}".rstrip("0").rstrip(".")


def _capability(value: str) -> str:
    """Return `8.9` for vLLM's 89."""
    return f"{int(value) // 10}.{int(value) % 10}"


def _driver_for(cuda: str | None) -> str | None:
    """Return the oldest driver branch for a CUDA release; None where it is not known."""
    return None if cuda is None else _NEEDS_DRIVER.get(cuda, _NEEDS_DRIVER.get(cuda.partition(".")[0]))


def _share_steps(missing_bytes: float, total_bytes: float) -> int:
    """Return how many hundredths of a card cover what is missing, at least one."""
    return max(1, math.ceil(missing_bytes / (0.01 * total_bytes)))


@cache
def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined, autoescape=False)
    environment.filters |= {"bytes": _bytes, "size": _size, "number": _number, "capability": _capability}
    environment.globals |= {"driver_for": _driver_for, "share_steps": _share_steps, "floor": math.floor}
    return environment


@cache
def _expression(source: str) -> Any:
    return _environment().compile_expression(source, undefined_to_none=False)


def _holds(source: str, values: dict[str, Any]) -> bool:
    return bool(_expression(source)(**values))


@cache
def _template(source: str) -> Template:
    return _environment().from_string(source)


def _rendered(source: str, values: dict[str, Any]) -> str:
    return " ".join(_template(source).render(**values).split())
