"""What a service is asked: answerable, drawn anew, and of words that no training has seen."""

import json
import random
import re
from itertools import islice
from typing import get_args

import jsonschema
import pytest

from launcher.measure.dialogues import KINDS, Kind, Task, draw, tasks
from launcher.measure.needles import needle
from launcher.measure.words import Split, Words, split_of
from tests.launcher.fake_model import obedient

WORD = re.compile(r"[a-z]{4,}", re.ASCII)


def drawn(kind: Kind, count: int = 20, seed: int = 1) -> list[Task]:
    rng = random.Random(seed)
    return [task for _ in range(count) for task in tasks(kind, rng)]


@pytest.mark.parametrize("kind", KINDS)
def test_every_request_can_be_answered_from_its_own_words(kind: Kind) -> None:
    for task in drawn(kind):
        said = obedient(list(task.messages))
        assert [(name, json.loads(text)) for name, text in said.calls] == [
            (call.name, call.arguments) for call in task.calls
        ]
        assert said.text == task.content


@pytest.mark.parametrize("kind", KINDS)
def test_the_right_calls_are_of_offered_tools_and_valid_by_their_schemas(kind: Kind) -> None:
    for task in drawn(kind):
        schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in task.tools}
        assert len(schemas) == len(task.tools)
        for schema in schemas.values():
            jsonschema.Draft202012Validator.check_schema(schema)
        for call in task.calls:
            jsonschema.validate({**call.arguments}, {**schemas[call.name], "additionalProperties": False})


def test_the_same_seed_asks_the_same_and_another_asks_something_else() -> None:
    one, same, other = (list(islice(draw(random.Random(seed)), 20)) for seed in (1, 1, 2))
    assert one == same
    assert not {task.messages for task in map(_hashable, one)} & {task.messages for task in map(_hashable, other)}


def _hashable(task: Task) -> Task:
    return Task(task.kind, (json.dumps(task.messages),))  # type: ignore[arg-type]


def test_every_kind_comes_in_turn() -> None:
    kinds = [task.kind for task in islice(draw(random.Random(3)), 20)]
    assert set(kinds) == set(KINDS)


@pytest.mark.parametrize("split", get_args(Split))
def test_words_of_a_split_are_its_own(split: Split) -> None:
    words = Words(random.Random(4), split)
    for word in words.distinct(300):
        assert split_of(word) == split


def test_no_name_of_what_is_asked_may_be_trained_on() -> None:
    for task in islice(draw(random.Random(5)), 120):
        for call in task.calls:
            assert split_of(call.name.partition("_")[2]) == "verify"
            assert {split_of(key) for key in call.arguments} - {"verify"} == set() or task.kind == "code"


def test_strings_of_requests_need_no_escapes_but_code_does() -> None:
    plain: tuple[Kind, ...] = ("single", "unicode", "parallel")
    texts = [
        value
        for kind in plain
        for task in drawn(kind)
        for call in task.calls
        for value in call.arguments.values()
        if isinstance(value, str)
    ]
    assert len(texts) > 100
    assert all(json.dumps(text, ensure_ascii=False) == f'"{text}"' for text in texts)
    snippets = "".join(task.calls[0].arguments["code"] for task in drawn("code"))
    assert {"\n", '"', "<", "\\", "\t", "'"} <= set(snippets)


def test_null_is_asked_for_where_it_is_allowed_and_its_likeness_where_it_is_not() -> None:
    seen = set()
    for task in drawn("null"):
        (call,) = task.calls
        (tool,) = [one["function"] for one in task.tools if one["function"]["name"] == call.name]
        for key, schema in tool["parameters"]["properties"].items():
            if call.arguments[key] in (None, "None", "null"):
                seen.add(call.arguments[key])
                assert ("null" in schema["type"]) == (call.arguments[key] is None)
    assert seen == {None, "None", "null"}


@pytest.mark.parametrize("depth", [0.0, 0.3, 1.0])
def test_a_needle_stands_at_its_depth(depth: float) -> None:
    task = needle(random.Random(6), 20_000, depth)
    text = str(task.messages[0]["content"])
    assert 20_000 <= len(text) < 20_500
    assert abs(text.index(f"is {task.content}.") / len(text) - depth) < 0.02
    assert len(re.findall(r"The locker number of \w+ is \d{6}\.", text)) == 3
    assert obedient(list(task.messages)).text == task.content
