"""The judge: one right reply, and each way in which a reply is wrong."""

from dataclasses import replace
from typing import Any

import pytest

from launcher.ask import Answer, ToolCall
from launcher.measure.dialogues import Call, Task
from launcher.measure.judge import differences, faults, number_fault

ARGUMENTS = {"city": "Bergen", "days": 3, "deep": {"on": True, "list": [1, 2.5, None]}}
TASK = Task("single", ({"role": "user", "content": "Call it."},), calls=(Call("get_rain", ARGUMENTS),))
TEXT = '{"city": "Bergen", "days": 3, "deep": {"on": true, "list": [1, 2.5, null]}}'


def answer(*calls: tuple[str, str], text: str = "", reason: str = "tool_calls") -> Answer:
    return Answer(text, "", "m", reason, 1, 1, None, 0.1, tuple(ToolCall(*call) for call in calls))


RIGHT = answer(("get_rain", TEXT))


def test_the_right_call_has_no_fault_whatever_is_said_before_it() -> None:
    assert faults(TASK, RIGHT) == ()
    assert faults(TASK, replace(RIGHT, text="I will look.")) == ()


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (answer(reason="stop", text="It rains."), "0 calls, not 1"),
        (answer(("get_rain", TEXT), ("get_rain", TEXT)), "2 calls, not 1"),
        (answer(("get_snow", TEXT)), "call 1 is of 'get_snow', not get_rain"),
        (answer(("get_rain", TEXT[:-1])), "arguments are not JSON"),
        (answer(("get_rain", "")), "arguments are not JSON"),
        (answer(("get_rain", "[]")), "arguments are no JSON object"),
        (answer(("get_rain", TEXT.replace("2.5", "NaN"))), "NaN is no JSON"),
        (answer(("get_rain", TEXT.replace('"days"', '"city": "Bergen", "days"'))), "a key comes twice"),
        (answer(("get_rain", TEXT.replace("Bergen", "bergen"))), "city: got 'bergen', not 'Bergen'"),
        (answer(("get_rain", TEXT.replace("3", '"3"'))), "days: got '3', not 3"),
        (answer(("get_rain", TEXT.replace("true", "1"))), "deep: got"),
        (answer(("get_rain", TEXT.replace("null", '"null"'))), "deep: got"),
        (answer(("get_rain", TEXT.replace(', "days": 3', ""))), "days: missing"),
        (answer(("get_rain", TEXT.replace("{", '{"more": 0, ', 1))), "more: not asked for, 0"),
        (replace(RIGHT, text="<tool_call>"), "<tool_call in the text"),
        (replace(RIGHT, text="x</parameter>"), "</parameter in the text"),
        (replace(RIGHT, text="<|im_end|>"), "<| in the text"),
        (replace(RIGHT, finish_reason="length"), "finish_reason is length, not tool_calls"),
    ],
)
def test_each_fault_is_found_and_named(wrong: Answer, said: str) -> None:
    assert any(said in fault for fault in faults(TASK, wrong)), faults(TASK, wrong)


def test_a_reply_without_calls_is_the_word_and_nothing_else() -> None:
    task = Task("no-call", (), content="tamoru")
    assert faults(task, answer(text=" tamoru.\n", reason="stop")) == ()
    assert faults(task, answer(text="tamoru tamoru", reason="stop"))
    assert faults(task, answer(("get_rain", "{}"), text="tamoru"))


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (answer(("get_rain", TEXT.replace(": 3", ":3"))), "call 1: "),
        (answer(("get_rain", TEXT), text="So:"), "text: "),
        (answer(), "1 calls and 0"),
        (replace(RIGHT, finish_reason="stop"), "finish_reason: "),
    ],
)
def test_replies_are_compared_byte_for_byte(other: Answer, said: str) -> None:
    assert differences(RIGHT, RIGHT) == ()
    assert any(said in one for one in differences(RIGHT, other))


@pytest.mark.parametrize(("text", "found"), [("482913", True), ("It is 482913.", True), ("482914", False), ("", False)])
def test_a_needle_is_its_number_and_no_other(text: str, found: bool) -> None:
    task: Any = Task("needle", (), content="482913")
    assert (number_fault(task, answer(text=text)) is None) == found
    assert number_fault(task, answer(text=f"{text} or 111111")) is not None
