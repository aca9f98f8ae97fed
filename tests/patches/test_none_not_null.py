"""Proof of the fix none-not-null on vLLM's own function, and through its own Qwen3 parser.

Run with vLLM 0.33.0's or 0.32.0's Python.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from vllm_graft.engine import Engine
from vllm_graft.facts import vllm_version
from vllm_graft.fixes.none_not_null import PATCH
from vllm_graft.patch import Outcome

pytest.importorskip("vllm", reason="needs an environment with vLLM; the launcher's has none")

from vllm.parser.engine import parser_engine

from tests.patches.qwen3_serving import Server, load_cases

CASES = {case.id: case for case in load_cases()}
NULLABLE = ("none-for-nullable-object", "null-in-plain-string")
NOT_NULLABLE = ("none-in-plain-string", "null-and-number-anyof")
ORIGINAL = parser_engine.coerce_to_schema_type


@pytest.fixture
def fixed() -> Iterator[Any]:
    """The function that the parser engine calls, with the fix."""
    engine = Engine()
    attempt = engine.apply(PATCH, vllm_version() or "")
    assert attempt.outcome is Outcome.APPLIED, attempt.reason
    yield parser_engine.coerce_to_schema_type
    engine.undo_all()
    assert parser_engine.coerce_to_schema_type is ORIGINAL


def test_fault_without_fix() -> None:
    assert ORIGINAL("None", ["object", "null"]) == "None"
    assert ORIGINAL("null", ["object", "null"]) is None
    server = Server()
    assert not any(CASES[name].accepts(server.whole(CASES[name])) for name in NULLABLE)


def test_fixed_with_fix(fixed: Any) -> None:
    assert fixed("None", ["object", "null"]) is None
    assert fixed("None", "null") is None
    server = Server()
    for name in (*NULLABLE, *NOT_NULLABLE):
        case = CASES[name]
        assert case.accepts(server.whole(case))
        assert case.accepts(server.stream(case, [(character, []) for character in case.text]))


def test_none_stays_text_where_null_is_not_allowed(fixed: Any) -> None:
    for types in (["string"], ["integer"], ["array", "string"], "string"):
        assert fixed("None", types) == "None"


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(["none", "NONE", " None", "None ", "null", "1", "1.5", "true", "[1]", "{}", "x", ""]),
    st.lists(st.sampled_from(["null", "integer", "number", "boolean", "object", "array", "string"]), max_size=3),
)
def test_every_other_value_is_vllms(fixed: Any, value: str, types: list[str]) -> None:
    assert fixed(value, types) == ORIGINAL(value, types)
