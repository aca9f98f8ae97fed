"""Judge a reply strictly: the right calls with the right values, and nothing of the call format in the text."""

import json
import re
from typing import Any

from launcher.ask import Answer, ToolCall
from launcher.measure.dialogues import Call, Task

MARKERS = ("<tool_call", "</tool_call", "<function=", "</function", "<parameter=", "</parameter", "<think>", "</think>")
"""Pieces of the call format, which no client may see."""
SPECIAL_TOKEN = "<|"
_LOCKER_NUMBER = re.compile(r"\d{6,}")


class _NotStrict(ValueError):
    """JSON that Python reads and other parsers do not."""


def faults(task: Task, answer: Answer) -> tuple[str, ...]:
    """Return what is wrong with a reply to a task; nothing for a right one.

    The values must equal those that were asked for, types included, and those are valid by the tool's schema; so a
    right call is too. A model may say something before it calls.
    """
    found = [*_call_faults(task.calls, answer.calls), *_text_faults(task, answer.text)]
    wanted = "tool_calls" if task.calls else "stop"
    if answer.finish_reason != wanted:
        found.append(f"finish_reason is {answer.finish_reason}, not {wanted}")
    return tuple(found)


def differences(one: Answer, other: Answer) -> tuple[str, ...]:
    """Return how two replies to one request differ, byte for byte."""
    found = []
    if one.text.strip() != other.text.strip():
        found.append(f"text: {one.text!r} and {other.text!r}")
    if len(one.calls) != len(other.calls):
        found.append(f"{len(one.calls)} calls and {len(other.calls)}")
    for number, (call, twin) in enumerate(zip(one.calls, other.calls, strict=False), 1):
        if call != twin:
            found.append(f"call {number}: {call.name}{call.arguments} and {twin.name}{twin.arguments}")
    if one.finish_reason != other.finish_reason:
        found.append(f"finish_reason: {one.finish_reason} and {other.finish_reason}")
    return tuple(found)


def number_fault(task: Task, answer: Answer) -> str | None:
    """Return what is wrong with a reply to a needle question; None for a right one."""
    numbers = _LOCKER_NUMBER.findall(answer.text)
    if numbers == [task.content]:
        return None
    return f"got {answer.text.strip()[:200]!r}, not {task.content}"


def parsed(arguments: str) -> Any:
    """Return the value of a call's arguments.

    Raises:
        ValueError: not JSON as every parser reads it.
    """
    return json.loads(arguments, object_pairs_hook=_object, parse_constant=_refuse_constant)


def same(one: Any, other: Any) -> bool:
    """Whether two JSON values are the same: true is not 1, 3 is not "3", 3 is 3.0."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, int | float) and isinstance(other, int | float):
        return one == other
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and bool(one == other)


def _call_faults(wanted: tuple[Call, ...], got: tuple[ToolCall, ...]) -> list[str]:
    if len(got) != len(wanted):
        return [f"{len(got)} calls, not {len(wanted)}"]
    found = []
    for number, (call, made) in enumerate(zip(wanted, got, strict=True), 1):
        if made.name != call.name:
            found.append(f"call {number} is of {made.name!r}, not {call.name}")
        try:
            arguments = parsed(made.arguments)
        except ValueError as error:
            found.append(f"call {number}: arguments are not JSON: {error}")
            continue
        if not isinstance(arguments, dict):
            found.append(f"call {number}: arguments are no JSON object")
            continue
        found += [f"call {number}: {key}: {said}" for key, said in _value_faults(call.arguments, arguments)]
    return found


def _value_faults(wanted: dict[str, Any], got: dict[str, Any]) -> list[tuple[str, str]]:
    found = [(key, f"not asked for, {value!r}") for key, value in got.items() if key not in wanted]
    for key, value in wanted.items():
        if key not in got:
            found.append((key, "missing"))
        elif not same(value, got[key]):
            found.append((key, f"got {got[key]!r}, not {value!r}"))
    return found


def _text_faults(task: Task, text: str) -> list[str]:
    found = [f"{marker} in the text" for marker in (*MARKERS, SPECIAL_TOKEN) if marker in text]
    if not found and not task.calls and _plain(text) != _plain(task.content):
        found.append(f"text is {text.strip()[:200]!r}, not {task.content!r}")
    return found


def _plain(text: str) -> str:
    """The text without the white space, quotes and full stop that may stand around a word."""
    return text.strip().strip("\"'`*.")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise _NotStrict("a key comes twice")
    return found


def _refuse_constant(name: str) -> None:
    raise _NotStrict(f"{name} is no JSON")
