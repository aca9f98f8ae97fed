"""What vLLM's log says about a start: the phase it is in, how far it is, and the first error.

The wording is that of vLLM 0.32.0 and 0.33.0. An unknown line changes nothing.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

Phase = Literal["pull", "build", "start", "engine", "load", "compile", "warm-up", "capture", "serve", "canary"]


@dataclass(frozen=True)
class PhaseRule:
    """A line that contains `pattern` belongs to `phase`."""

    phase: Phase
    pattern: re.Pattern[str]


@dataclass(frozen=True)
class Reading:
    """What one line tells."""

    phase: Phase
    done: int | None = None
    total: int | None = None


_PATTERNS: tuple[tuple[Phase, str], ...] = (
    # v1/engine/core.py
    ("engine", r"Initializing a V1 LLM engine"),
    # v1/worker/{gpu,cpu}_model_runner.py, model_executor/model_loader/weight_utils.py
    ("load", r"Starting to load model|Loading drafter model|Loading \w+ checkpoint shards"),
    # compilation/{monitor,backends,decorators}.py, v1/worker/cpu_model_runner.py
    (
        "compile",
        r"Starting torch\.compile|Dynamo bytecode transform|Compiling a graph for compile range|"
        r"Directly load (?:AOT compilation|the )|Warming up model for the compilation",
    ),
    # v1/worker/gpu_worker.py, model_executor/warmup/
    ("warm-up", r"Compile and warming up model for size|Running FlashInfer autotune|Warming up (?!done)"),
    # v1/worker/gpu_model_runner.py, v1/worker/gpu/cudagraph_utils.py, v1/worker/gpu/spec_decode/
    ("capture", r"Profiling CUDA graph memory|Capturing model for|Capturing [\w\- ]*CUDA graphs"),
    # entrypoints/launchers/api_server/entry.py
    ("serve", r"Starting vLLM server on"),
)
PHASE_RULES = tuple(PhaseRule(phase, re.compile(pattern)) for phase, pattern in _PATTERNS)
"""The first rule that matches a line wins."""

_COUNT = re.compile(r"\b(\d+)/(\d+) \[")
"""The counter of a tqdm bar."""
_PREFIX = re.compile(r"^(?:\([\w.\- ]+ pid=\d+\) )?(?:(?P<level>[A-Z]+) \d\d-\d\d \d\d:\d\d:\d\d \[[^\]]+\] ?)?")
_NO_PROGRESS = re.compile(r"No available shared memory broadcast block found|\"GET /(?:health|metrics)")
"""Lines that come by the clock, whether the engine works or hangs."""
_TRACEBACK = "Traceback (most recent call last):"
_CONSEQUENCE = re.compile(
    r"See (?:root cause|stack trace)|EngineDeadError|Engine core initialization failed|"
    r"WorkerProc initialization failed|EngineCore (?:failed to start|encountered a fatal error|encountered an issue)|"
    r"WorkerProc (?:failed to start|hit an exception)|AsyncLLM output_handler failed|leaked \w+ objects"
)
"""Errors that only pass on that another process failed, or that introduce a traceback."""
_PLAIN_ERROR = re.compile(r"^(?:\w[\w ]*: )?error: |^(?:\w+\.)*\w*(?:Error|Exception|Interrupt|Exit): ", re.ASCII)
_MAX_ERROR_LINES = 12


def read(line: str) -> Reading | None:
    """Return the phase that a line belongs to, with its counter where it has one; None where it tells nothing."""
    for rule in PHASE_RULES:
        if rule.pattern.search(line):
            count = _COUNT.search(line)
            return Reading(rule.phase, int(count[1]), int(count[2])) if count else Reading(rule.phase)
    return None


def is_progress(line: str) -> bool:
    """Whether the line shows that the start goes on."""
    return bool(line.strip()) and not _NO_PROGRESS.search(line)


def is_consequence(line: str) -> bool:
    """Whether the line only passes on that another process failed."""
    return _CONSEQUENCE.search(line) is not None


def message(line: str) -> str:
    """Return a line without vLLM's process, time and place."""
    return line[_prefix_end(line) :]


def first_error(lines: Sequence[str]) -> tuple[str, ...]:
    """Return the error that came first, without the errors that follow from it; empty where the log has none.

    Of a traceback the last frame and the exception are kept.
    """
    consequence: tuple[str, ...] = ()
    for error in _errors(lines):
        if not is_consequence(error[-1]) and not is_consequence(error[0]):
            return error[:_MAX_ERROR_LINES]
        consequence = consequence or error
    return consequence[:_MAX_ERROR_LINES]


def _errors(lines: Sequence[str]) -> Iterator[tuple[str, ...]]:
    index = 0
    while index < len(lines):
        said = message(lines[index])
        if said.startswith(_TRACEBACK):
            index, error = _traceback(lines, index)
            yield error
            continue
        level = _PREFIX.match(lines[index])
        is_error = (level is not None and level["level"] in ("ERROR", "CRITICAL")) or _PLAIN_ERROR.match(said)
        introduces_traceback = index + 1 < len(lines) and message(lines[index + 1]).startswith(_TRACEBACK)
        if is_error and said.strip() and not introduces_traceback:
            yield (said.rstrip(),)
        index += 1


def _traceback(lines: Sequence[str], start: int) -> tuple[int, tuple[str, ...]]:
    """Return the index after the traceback and its last frame with the exception."""
    speaker = _speaker(lines[start])
    frame: list[str] = []
    index = start + 1
    while index < len(lines):
        said = message(lines[index])
        # Processes write into one log: another one's line may stand between two of this traceback.
        if _speaker(lines[index]) != speaker:
            index += 1
            continue
        if said.startswith("  File "):
            frame = [said.rstrip()]
        elif said.startswith("    ") and frame:
            frame = [*frame[:1], said.rstrip()] if len(frame) == 1 else frame
        elif said.strip() and not said.startswith(" "):
            return index + 1, (*frame, *_exception(lines, index, speaker))
        index += 1
    return index, tuple(frame) or (_TRACEBACK,)


def _exception(lines: Sequence[str], start: int, speaker: str) -> Iterator[str]:
    """Yield the exception's line and the lines of its message that follow, from the same process."""
    yield message(lines[start]).rstrip()
    for line in lines[start + 1 : start + _MAX_ERROR_LINES]:
        said = message(line)
        if _speaker(line) != speaker or not said.strip() or said.startswith(("Traceback", "During", "The above")):
            return
        if not speaker and not said.startswith(" "):
            return
        yield said.rstrip()


def _speaker(line: str) -> str:
    """Return the prefix up to the place, by which the lines of one message belong together."""
    prefix = line[: _prefix_end(line)]
    process = re.match(r"^\([\w.\- ]+ pid=\d+\)", prefix)
    return process[0] if process else ""


def _prefix_end(line: str) -> int:
    match = _PREFIX.match(line)
    return match.end() if match else 0
