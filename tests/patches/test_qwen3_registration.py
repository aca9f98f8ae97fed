"""How the fix qwen3-arguments-lost gets in, and when it does not.

Run with vLLM 0.33.0's or 0.32.0's Python.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
from vllm_graft.engine import Engine
from vllm_graft.facts import vllm_version
from vllm_graft.fixes import qwen3_arguments_lost
from vllm_graft.fixes.qwen3_arguments_lost import PATCH
from vllm_graft.patch import Outcome
from vllm_graft.plugin import Plugin, RequiredFixError

pytest.importorskip("vllm", reason="needs an environment with vLLM; the launcher's has none")

from vllm.parser import ParserManager
from vllm.tool_parsers import ToolParserManager

from tests.patches.qwen3_serving import TOKENS, load_cases

VERSION = vllm_version() or ""


@pytest.fixture
def applied() -> Iterator[None]:
    """The fix, put in by the engine and taken out again."""
    engine = Engine()
    attempt = engine.apply(PATCH, VERSION)
    assert attempt.outcome is Outcome.APPLIED, attempt.reason
    yield
    engine.undo_all()
    assert qwen3_arguments_lost.current() is Engine().stock(PATCH.target.path)


@pytest.mark.usefixtures("applied")
def test_the_command_line_names_and_the_grammar_stay() -> None:
    original = Engine().stock(PATCH.target.path)
    for name in qwen3_arguments_lost.TOOL_PARSERS:
        parser = ParserManager.get_parser(name, "qwen3", enable_auto_tools=True)
        tool_parser, reasoning_parser = parser.tool_parser_cls, parser.reasoning_parser_cls
        assert (tool_parser.__name__, reasoning_parser.__name__) == ("Qwen3ToolParser", "Qwen3ReasoningParser")
        assert tool_parser.structural_tag_model == original.structural_tag_model
        assert tool_parser.supports_required_and_named == original.supports_required_and_named
        assert parser(TOKENS)._engine_based


@pytest.mark.usefixtures("applied")
def test_beside_another_tool_parser_or_none_reasoning_is_vllms_own() -> None:
    original = Engine().stock("vllm.reasoning.qwen3_engine_reasoning_parser:Qwen3ParserReasoningAdapter")
    alone = ParserManager.get_parser(None, "qwen3").reasoning_parser_cls
    assert alone is not original
    texts = [case.text for case in load_cases()] + [
        'I call.\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    ]
    for text in texts:
        ours, theirs = alone(TOKENS), original(TOKENS)
        assert ours.extract_reasoning(text, None) == theirs.extract_reasoning(text, None)
        ours, theirs = alone(TOKENS), original(TOKENS)
        for token in TOKENS.encode(text):
            arguments: tuple[Any, ...] = ("", "", TOKENS.decode([token]), [], [], [token])
            assert ours.extract_reasoning_streaming(*arguments) == theirs.extract_reasoning_streaming(*arguments)
            assert ours.has_engine_confirmed_reasoning_end() == theirs.has_engine_confirmed_reasoning_end()
        assert ours.finish_streaming() == theirs.finish_streaming()
        assert ours.count_reasoning_tokens([token]) == theirs.count_reasoning_tokens([token])


def test_the_rust_front_end_is_refused(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", "1")
    attempt = Engine().apply(PATCH, VERSION)
    assert attempt.outcome is Outcome.FAILED
    assert "VLLM_USE_RUST_FRONTEND" in attempt.reason
    with pytest.raises(RequiredFixError, match="VLLM_USE_RUST_FRONTEND"):
        Plugin((PATCH,), {"GRAFT_REQUIRE": PATCH.id}).register()


def test_another_parser_under_a_name_is_left_alone() -> None:
    original = Engine().stock(PATCH.target.path)
    ToolParserManager.register_module("qwen3_xml", module=type("Foreign", (original,), {}))
    try:
        attempt = Engine().apply(PATCH, VERSION)
    finally:
        ToolParserManager.tool_parsers.pop("qwen3_xml")
    assert attempt.outcome is Outcome.FAILED
    assert "Foreign" in attempt.reason
    assert qwen3_arguments_lost.current() is original


def test_the_parsers_take_what_vllm_passes() -> None:
    from vllm_graft.parsers.qwen3 import Qwen3ReasoningParser, Qwen3ToolParser

    for parser in (Qwen3ToolParser, Qwen3ReasoningParser):
        for name in ("extract_reasoning", "extract_reasoning_streaming", "extract_tool_calls", "finish_streaming"):
            if name in vars(parser):
                original = inspect.signature(getattr(parser.__base__, name))
                assert list(inspect.signature(getattr(parser, name)).parameters) == list(original.parameters)
