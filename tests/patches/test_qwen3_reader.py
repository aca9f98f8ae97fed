"""The reader of Qwen3's output by itself: what is a tag and what is text, for every way to cut the output."""

import json
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from vllm_graft.parsers.events import Kind
from vllm_graft.parsers.reader import Reader
from vllm_graft.parsers.schema import Typing, json_value, make_tool

SCHEMA = {
    "properties": {
        "path": {"type": "string"},
        "content": {"type": "string"},
        "rows": {"type": "array"},
        "meta": {"$ref": "#/$defs/meta"},
        "limit": {"type": "number"},
    },
    "$defs": {"meta": {"type": "object"}},
}
TOOLS = {"write_file": make_tool("write_file", SCHEMA), "list_jobs": make_tool("list_jobs", None)}
FRAGMENTS = [
    "<tool_call>", "</tool_call>", "<function=write_file>", "<function=demo>", "<function=list_jobs", "</function>",
    "<parameter=path>", "<parameter=content>", "<parameter=rows>", "<parameter=x>", "<parameter=", "</parameter>",
    "<think>", "</think>", "\n", "\r\n", " ", "\n\n", "```", "`", "a.py", "text ", '"', "\\", "{", "[1]", "<", "</",
    "<tool_", "é", "你好", "🚀", "None", "= ", ">",
]  # fmt: skip
OUTPUTS = st.lists(st.sampled_from(FRAGMENTS), max_size=30).map("".join)


def types_of(schema: Any) -> list[str]:
    """The types in a schema, as far as these tests use them."""
    return [schema["type"]] if schema and "type" in schema else ["string"]


def coerce(text: str, types: list[str]) -> Any:
    """JSON where a type other than string is asked for."""
    try:
        return text if "string" in types else json.loads(text)
    except ValueError:
        return text


TYPING = Typing(types_of, coerce)


def read(
    deltas: Iterable[str], *, tools: Any = TOOLS, reasoning: bool = False
) -> tuple[str, str, list[tuple[str, str]]]:
    """Reasoning, content, and the calls with their arguments as streamed."""
    thinker = Reader(tools, TYPING, reasoning=True) if reasoning else None
    reader = Reader(tools, TYPING, reasoning=False)
    texts = {Kind.REASONING: "", Kind.CONTENT: ""}
    calls: list[list[str]] = []
    for event in _events(deltas, thinker, reader):
        if event.kind is Kind.CALL:
            calls.append([event.text, ""])
        elif event.kind is Kind.ARGUMENTS:
            calls[event.call][1] += event.text
        else:
            texts[event.kind] += event.text
    assert [json.loads(arguments) for _, arguments in calls] == [json.loads(call.arguments) for call in reader.calls]
    return texts[Kind.REASONING], texts[Kind.CONTENT], [(name, arguments) for name, arguments in calls]


def _events(deltas: Iterable[str], thinker: Reader | None, reader: Reader) -> Iterator[Any]:
    for delta in deltas:
        if thinker is None:
            yield from reader.feed(delta)
            continue
        yield from thinker.feed(delta)
        if thinker.rest is not None:
            yield from reader.feed(thinker.rest)
            thinker = None
    if thinker is not None:
        yield from thinker.finish()
        assert thinker.rest in (None, "")
    yield from reader.finish()


def call(content: str, key: str = "content") -> str:
    """A call in the form of the template."""
    return f"<tool_call>\n<function=write_file>\n<parameter={key}>\n{content}\n</parameter>\n</function>\n</tool_call>"


@settings(max_examples=300, deadline=None)
@given(OUTPUTS, st.lists(st.integers(1, 9), min_size=1, max_size=12), st.booleans(), st.sampled_from([TOOLS, {}]))
@example("<tool_call>\n<function=write_file>\n", [3], True, TOOLS)
@example("<tool_call>\n<function=write_file>\n<para", [3], True, TOOLS)
def test_the_result_is_the_same_for_every_way_to_cut_the_output(
    output: str, sizes: list[int], reasoning: bool, tools: Any
) -> None:
    deltas: list[str] = []
    start = 0
    while start < len(output):
        size = sizes[len(deltas) % len(sizes)]
        deltas.append(output[start : start + size])
        start += size
    whole = read([output], tools=tools, reasoning=reasoning)
    assert read(deltas, tools=tools, reasoning=reasoning) == whole
    assert read(output, tools=tools, reasoning=reasoning) == whole


@settings(max_examples=200, deadline=None)
@given(OUTPUTS)
@example("`<tool_call>\n<function=write_file>\n<parameter=path>\n")
def test_without_tools_an_answer_is_returned_as_it_is(output: str) -> None:
    reader = Reader({}, TYPING, reasoning=False, think_is_text=True)
    assert "".join(event.text for event in reader.feed(output) + reader.finish()) == output


@settings(max_examples=200, deadline=None)
@given(OUTPUTS)
def test_nothing_is_invented_in_arguments_and_nothing_of_an_open_value_is_lost(output: str) -> None:
    *_, calls = read(["<tool_call>\n<function=write_file>\n<parameter=content>\nx" + output])
    values = [value for _, arguments in calls for value in json.loads(arguments).values()]
    assert all(isinstance(value, list) or value in "x" + output for value in values)
    if "<" not in output:
        assert values == [("x" + output).removesuffix("\n")]


@pytest.mark.parametrize(
    "mention",
    [
        "The opener is `<tool_call>` and it is one token.",
        "Write <tool_call><function=write_file> and the parameters.",
        "```xml\n" + call("x") + "\n```\nThat is all.",
        "It is `" + call("x") + "`.",
        "<function=write_file> is how it begins.",
        "A </tool_call> or </function> or </parameter> alone, and <parameter=path> too.",
        '<tool_call>\n{"name": "write_file", "arguments": {}}\n</tool_call>',
    ],
)
def test_a_tag_in_prose_or_code_is_no_call(mention: str) -> None:
    assert read(mention) == ("", mention, [])
    assert read(mention + "\n</think>\nYes.", reasoning=True)[2] == []


@pytest.mark.parametrize("code", ["```sh\nls\n```\n", "````md\n```sh\nls\n```\n````\n", "```a``` b\n", "`a`\n"])
def test_code_that_is_closed_does_not_hide_the_call_behind_it(code: str) -> None:
    assert read(code + call("x"))[2] == [("write_file", '{"content": "x"}')]


@pytest.mark.parametrize(
    "value",
    [
        "<config>\n<parameter=a>1</parameter>\n<parameter=b>2</parameter>\n</config>",
        "<parameter=a>1</parameter>",
        "Example:\n<parameter=x>\n1\n</parameter>\n<parameter=y>\n2\n</parameter>\nDone.",
        call("x").replace("write_file", "demo").replace("=content", "=x") + "\nThat was it.",
        call("x") + "\nThat was it.",
        "Spell it <parameter=NAME> here.",
        "Begin with\n<tool_call>\nand go on.",
        'print("</parameter></function></tool_call>")',
        "`</parameter>` `</function>` `</tool_call>`",
        "a <b </parameter",
        "  indented\n\n",
        "\r\nx\r\n",
        "</think><think>",
    ],
)
def test_a_value_keeps_its_tags_and_white_space(value: str) -> None:
    for deltas in ([call(value)], list(call(value))):
        assert [json.loads(arguments) for _, arguments in read(deltas)[2]] == [{"content": value}]


@pytest.mark.parametrize(
    ("output", "arguments"),
    [
        ("<tool_call>\n<function=write_file>\n<parameter=path>\na\n</function>\n</tool_call>\nDone.", {"path": "a"}),
        ("<tool_call>\n<function=write_file>\n<parameter=path>\na\n</parameter>\n</tool_call>\nDone.", {"path": "a"}),
        ("<tool_call>\n<function=write_file>\n<parameter=path>\na\n</tool_call>", {"path": "a"}),
        ("<tool_call>\n<function=write_file>\n<parameter=path>\na\n</parame", {"path": "a\n</parame"}),
        ("<tool_call>\n<function=write_file>\n<parameter=path>\na\n</parameter>\n</func", {"path": "a"}),
        ("<tool_call>\n<function=write_file>\n<parameter=path>\n", {}),
        ("<tool_call>\n<function=write_file>\n<parameter=path\na\n</parameter>\n</function>", {"path": "a"}),
    ],
)
def test_a_missing_or_cut_tag_costs_no_argument(output: str, arguments: dict[str, Any]) -> None:
    _, content, calls = read([output])
    assert [json.loads(text) for _, text in calls] == [arguments]
    assert content.strip() in ("", "Done.")


def test_calls_that_are_left_open_do_not_swallow_the_next_one() -> None:
    first = "<tool_call>\n<function=write_file>\n<parameter=path>\na\n</tool_call>\n"
    assert read([first + call("x")])[2] == [("write_file", '{"path": "a"}'), ("write_file", '{"content": "x"}')]


def test_a_tool_that_is_not_declared_is_called_in_full_form_only() -> None:
    for before in ("", "So:\n", "So: "):
        assert read([before + call("x").replace("write_file", "unknown")])[2] == [("unknown", '{"content": "x"}')]
    mention = "Say <tool_call><function=unknown>\n<parameter=x> then."
    assert read([mention]) == ("", mention, [])


def test_reasoning_ends_at_a_call_but_not_at_an_example_of_another_tool() -> None:
    assert read(["So.\n" + call("x")], reasoning=True) == ("So.\n", "", [("write_file", '{"content": "x"}')])
    example = "The form is `" + call("x") + "`.\n"
    assert read([example + "</think>Yes."], reasoning=True) == (example, "Yes.", [])


def test_references_that_run_in_circles_end() -> None:
    circle = {"$ref": "#/$defs/a"}
    schema = {"properties": {"x": circle}, "$defs": {"a": {"anyOf": [circle, {"type": "object"}, circle]}}}
    assert make_tool("t", schema).parameters["x"] == {"anyOf": [{"type": "object"}]}


@pytest.mark.parametrize(
    ("text", "types", "value"),
    [
        ("9007199254740993", ["number"], "9007199254740993"),
        ("['a', None, {'b': 1}]", ["array"], '["a", null, {"b": 1}]'),
        ("('a', 'b')", ["array"], json.dumps("('a', 'b')")),
        ("{1: 2}", ["object"], json.dumps("{1: 2}")),
        ("['a']", ["array", "string"], json.dumps("['a']")),
        ("[" * 5000, ["array"], json.dumps("[" * 5000)),
    ],
)
def test_a_text_has_the_value_that_its_schema_allows(text: str, types: list[str], value: str) -> None:
    assert json_value(text, types, TYPING) == value


LONG_OUTPUTS = {
    "text": "x" * 4,
    "code": 'if a < b and c << 2: print("<b>")\n',
    "blanks behind a closing tag": "</parameter>" + " " * 5000 + "x",
    "openers": "<parameter=" + "n" * 1000 + " ",
    "tags": "<tool_call>\n<function=demo>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>\n.\n",
}


@pytest.mark.parametrize("unit", LONG_OUTPUTS.values(), ids=LONG_OUTPUTS)
@pytest.mark.parametrize("in_value", [True, False], ids=["value", "prose"])
def test_work_and_memory_per_delta_do_not_grow_with_the_output(unit: str, in_value: bool) -> None:
    def cost(repeats: int) -> tuple[int, int]:
        text = unit * (repeats * 6000 // len(unit) + 1)
        reader = Reader(TOOLS, TYPING, reasoning=False)
        reader.feed(call("")[: -len("\n\n</parameter>\n</function>\n</tool_call>")] + "\n" if in_value else "")
        calls = held = 0

        def count(*_: Any) -> None:
            nonlocal calls
            calls += 1

        sys.setprofile(count)
        try:
            for start in range(0, len(text), 4):
                reader.feed(text[start : start + 4])
                held = max(held, len(reader.held))
        finally:
            sys.setprofile(None)
        return calls, held

    (calls, held), (calls_twice, held_twice) = cost(2), cost(4)
    assert calls_twice < 2.3 * calls
    assert held_twice == held < 6000
