"""Proof of the fix qwen3-arguments-lost, through vLLM's serving classes of both APIs, whole and in every split.

Run with vLLM 0.33.0's or 0.32.0's Python.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from vllm_graft.engine import Engine
from vllm_graft.facts import vllm_version
from vllm_graft.fixes import none_not_null, qwen3_arguments_lost
from vllm_graft.fixes.qwen3_arguments_lost import PATCH
from vllm_graft.patch import Outcome

pytest.importorskip("vllm", reason="needs an environment with vLLM; the launcher's has none")

from tests.patches.qwen3_serving import (
    TOKENS,
    Case,
    Deltas,
    Result,
    Server,
    load_cases,
    parsed,
    same_json,
    text_chunkings,
    token_chunkings,
)
from tests.patches.test_qwen3_reader import OUTPUTS

VERSION = (vllm_version() or "").partition("+")[0]
CASES = load_cases()
LOST = next(case for case in CASES if case.id == "missing-close-last-string")


def apply(engine: Engine, *patches: Any) -> None:
    """Put fixes in."""
    for patch in patches:
        attempt = engine.apply(patch, VERSION)
        assert attempt.outcome is Outcome.APPLIED, attempt.reason


@pytest.fixture(scope="module")
def stock() -> Server:
    """The servers without the fix."""
    return Server()


@pytest.fixture(scope="module")
def stock_wholes(stock: Server) -> dict[str, Result]:
    """What vLLM itself makes of each case when it does not stream."""
    return {case.id: stock.whole(case) for case in CASES}


@pytest.fixture(scope="module")
def fixed(stock_wholes: dict[str, Result]) -> Iterator[Server]:
    """The servers with the fix, and with none-not-null, which some of the cases are about."""
    engine = Engine()
    apply(engine, PATCH, none_not_null.PATCH)
    yield Server()
    engine.undo_all()
    assert qwen3_arguments_lost.current() is Engine().stock(PATCH.target.path)


def same(one: Result, other: Result) -> bool:
    """Whether two results are the same to a client: outer white space aside."""
    return (
        one.reasoning.strip() == other.reasoning.strip()
        and one.content.strip() == other.content.strip()
        and [name for name, _ in one.calls] == [name for name, _ in other.calls]
        and all(same_json(parsed(a[1]), parsed(b[1])) for a, b in zip(one.calls, other.calls, strict=True))
    )


def test_fault_without_fix(stock: Server, stock_wholes: dict[str, Result]) -> None:
    recorded = {case.id for case in CASES if case.stock[VERSION]["nonstream"] == "fail"}
    assert {case.id for case in CASES if not case.accepts(stock_wholes[case.id])} == recorded
    assert len(recorded) == {"0.32.0": 25, "0.33.0": 24}[VERSION]
    assert stock_wholes[LOST.id].calls == (("run_shell", "{}"),)
    ((_, streamed),) = stock.stream(LOST, [(character, []) for character in LOST.text]).calls
    assert streamed.startswith('{"command": "ls')
    with pytest.raises(json.JSONDecodeError):
        json.loads(streamed)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_fixed_with_fix(case: Case, fixed: Server) -> None:
    whole = fixed.whole(case)
    assert case.accepts(whole), whole
    for deltas in (*text_chunkings(case.text, case.chunks), *token_chunkings(case.text)):
        streamed = fixed.stream(case, deltas)
        assert case.accepts(streamed), (deltas, streamed)
        assert same(streamed, whole), (deltas, streamed, whole)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_both_apis_send_it(case: Case, fixed: Server) -> None:
    deltas = list(token_chunkings(case.text))
    whole = fixed.whole_response(case)
    assert case.accepts(whole), whole
    for events in (deltas[0], deltas[7]):
        assert case.accepts(fixed.events(case, events))
        streamed, items = fixed.response_events(case, events)
        assert case.accepts(streamed)
        assert same(items, streamed)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_where_vllm_is_right_the_result_is_the_same_to_the_byte(
    case: Case, stock_wholes: dict[str, Result], fixed: Server
) -> None:
    stock_whole = stock_wholes[case.id]
    first = Case(case.id, case.text, case.tools, case.thinking, case.accepted[:1], case.collapses)
    if first.accepts(stock_whole):
        assert fixed.whole(case) == stock_whole
    else:
        assert fixed.whole(case) != stock_whole


TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="`"), max_size=12)
MENTIONS = st.sampled_from(
    [
        '"</parameter>"', "'</function>'", "</tool_call>.", '<tool_call>"', "f(<function=demo>)", "x <parameter=N> y",
        "<parameter=a>1</parameter>;", "a <b> <c", "<", "</", "</para", "<tool_", "<think>", "</think>", "&lt;",
        "\n", "\r\n", "\n\n", "    ", "\\n", '\\"', "# é 你好 🚀 👩\u200d💻", "None", "null", "{", "]",
    ]
)  # fmt: skip
CODE = st.lists(st.one_of(MENTIONS, TEXTS), max_size=12).map("".join)
JSON_VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), CODE),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXTS, inner, max_size=3)),
    max_leaves=5,
)
KEYS = st.from_regex(r"[a-z][a-z_ ]{0,8}[a-z]", fullmatch=True)
ARGUMENTS = {
    "string": CODE,
    "integer": st.integers(),
    "number": st.floats(allow_nan=False, allow_infinity=False),
    "boolean": st.booleans(),
    "object": st.dictionaries(TEXTS, JSON_VALUES, max_size=3),
    "array": st.lists(JSON_VALUES, max_size=3),
}
PARAMETERS = st.dictionaries(
    KEYS, st.sampled_from(list(ARGUMENTS)).flatmap(lambda kind: st.tuples(st.just(kind), ARGUMENTS[kind])), max_size=4
)


def rendered(name: str, parameters: dict[str, tuple[str, Any]]) -> str:
    """A call as the model's template writes it."""
    values = {key: value if kind == "string" else json.dumps(value) for key, (kind, value) in parameters.items()}
    body = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{body}</function>\n</tool_call>"


def tool(name: str, parameters: dict[str, tuple[str, Any]]) -> dict[str, Any]:
    """The declaration of a tool that has these parameters."""
    properties = {key: {"type": kind} for key, (kind, _) in parameters.items()}
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


TYPES = {
    "s": "string", "i": "integer", "n": "number", "b": "boolean", "o": "object", "l": "array", "z": ["string", "null"],
}  # fmt: skip
PLAIN = st.sampled_from(
    [
        "x", "", "1", "1.0", "1e3", "-0", "007", " 5 ", "true", "True", "no", "null", "[1, 2]", "[", '{"a": 1}', "{",
        "a\nb", "\n\nx\n\n", "  y  ", "é🚀", "a < b > c", "</div>", "<br>", '"q"', "\\n", "1_000", "inf", "nan",
        '{"a": "\\u00e9"}',
    ]
)  # fmt: skip
LAYOUTS = st.tuples(st.sampled_from(["\n", ""]), st.sampled_from(["\n", "\n\n", ""]), st.sampled_from(["\n", ""]))
WELL_FORMED = st.lists(st.tuples(st.dictionaries(st.sampled_from([*TYPES, "undeclared"]), PLAIN), LAYOUTS), max_size=3)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(["", "Hi.", "\n\n", "Text\n\n", " \n"]), WELL_FORMED, st.booleans())
def test_what_is_well_formed_gives_what_vllm_gives_to_the_byte(
    fixed: Server, stock: Server, before: str, calls: list[Any], thinking: bool
) -> None:
    text = before
    for values, (inside, between, behind) in calls:
        body = "".join(
            f"<parameter={key}>{inside}{value}{inside}</parameter>{between}" for key, value in values.items()
        )
        text += f"<tool_call>{inside}<function=f>{inside}{body}</function>{behind}</tool_call>{behind}"
    declared = {"name": "f", "parameters": {"properties": {key: {"type": kind} for key, kind in TYPES.items()}}}
    tools = [{"type": "function", "function": declared}]
    case = Case("generated", ("I think.\n</think>\n\n" if thinking else "") + text, tools, thinking, ())
    assert fixed.whole(case) == stock.whole(case)


def drafted(text: str, sizes: list[int], lag: int) -> Deltas:
    """The text in deltas of some tokens each, as speculation delivers them, `lag` characters behind their ids."""
    ids = TOKENS.encode(text)
    deltas: list[tuple[str, list[int]]] = []
    start, arrived, sent = 0, 0, 0
    while start < len(ids):
        group = ids[start : start + sizes[len(deltas) % len(sizes)]]
        start += len(group)
        arrived += len(TOKENS.decode(group))
        until = len(text) if start == len(ids) else max(sent, arrived - lag)
        deltas.append((text[sent:until], group))
        sent = until
    return deltas


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(PARAMETERS, min_size=1, max_size=3),
    st.booleans(),
    st.lists(st.integers(1, 6), min_size=1, max_size=8),
    st.integers(0, 12),
)
def test_every_argument_of_every_call_arrives_whole(
    fixed: Server, calls: list[dict[str, tuple[str, Any]]], thinking: bool, sizes: list[int], lag: int
) -> None:
    names = [f"tool_{number}" for number in range(len(calls))]
    text = "\n".join(rendered(name, parameters) for name, parameters in zip(names, calls, strict=True))
    tools = [tool(name, parameters) for name, parameters in zip(names, calls, strict=True)]
    expected = [{key: value for key, (_, value) in parameters.items()} for parameters in calls]
    case = Case("generated", ("I think.\n</think>\n\n" if thinking else "") + "So:\n" + text, tools, thinking, ())
    for result in (fixed.whole(case), fixed.stream(case, drafted(case.text, sizes, lag))):
        assert (result.reasoning.strip(), result.content.strip()) == ("I think." if thinking else "", "So:")
        assert [name for name, _ in result.calls] == names
        for (_, arguments), values in zip(result.calls, expected, strict=True):
            assert same_json(json.loads(arguments), values)


@settings(max_examples=150, deadline=None)
@given(OUTPUTS, st.booleans(), st.lists(st.integers(1, 6), min_size=1, max_size=8), st.integers(0, 12))
def test_a_stream_equals_the_whole_whatever_a_model_writes(
    fixed: Server, output: str, thinking: bool, sizes: list[int], lag: int
) -> None:
    case = Case("generated", output or " ", [tool("write_file", {"path": ("string", "")})], thinking, ())
    whole = fixed.whole(case)
    for deltas in (drafted(case.text, sizes, lag), [(case.text, [])]):
        assert same(fixed.stream(case, deltas), whole)
    assert all(isinstance(json.loads(arguments), dict) for _, arguments in whole.calls)


def test_reasoning_knows_the_tools_of_its_own_request(fixed: Server) -> None:
    other = LOST.text.replace("run_shell", "undeclared")
    for call, tools, thought in (
        (LOST.text, LOST.tools, ""),
        (LOST.text, [], LOST.text),
        (other, LOST.tools, other),
    ):
        case = Case("thought", f"{call}\n</think>\nDone.", tools, True, ())
        for result in (fixed.whole(case), fixed.stream(case, [(character, []) for character in case.text])):
            assert result.reasoning.strip() == thought


def test_reasoning_tokens_are_counted_up_to_its_end(fixed: Server) -> None:
    ending = "So it is.\n</think>\nYes."
    calling = "So it is.\n" + LOST.text
    for text, count in ((ending, len(TOKENS.encode("So it is.\n"))), (calling, len(TOKENS.encode("So it is.\n")))):
        case = Case("counted", text, LOST.tools, True, ())
        parser = fixed.chat._make_parser(chat_request := _request(case), TOKENS, {"enable_thinking": True})
        deltas = drafted(text, [3], 0)
        for number, (delta, ids) in enumerate(deltas, 1):
            parser.parse_delta(delta, ids, chat_request, [2], finished=number == len(deltas))
        assert parser.count_reasoning_tokens(tuple(TOKENS.encode(text))) == count


def _request(case: Case) -> Any:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    return ChatCompletionRequest(model="qwen3", messages=[{"role": "user", "content": "x"}], tools=case.tools)
