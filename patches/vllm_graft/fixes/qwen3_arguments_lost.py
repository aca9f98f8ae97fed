"""Qwen3's tool calls: no argument is lost, none is invalid JSON, and a tag in prose or code is no call.

The names that users give on the command line stay: `qwen3_coder` and `qwen3_xml` for tool calls, `qwen3` for reasoning,
which has to know a call from a mention to say where reasoning ends.  Both parsers extend vLLM's adapters, so that the
pair is driven as one, without the history of the text.
"""

from __future__ import annotations

from typing import Any

from vllm_graft.patch import Extension, Patch, Process, Target

TOOL_PARSERS = ("qwen3_coder", "qwen3_xml")
REASONING_PARSER = "qwen3"
_ISSUES = "https://github.com/vllm-project/vllm/issues"


def build(original: Any) -> Any:
    """The subclass of vLLM's tool parser that takes its place.

    Raises:
        RuntimeError: the Rust front end is on, which has parsers of its own.
        TypeError: the parser in place is not the one that this subclass was written for.

    """
    from vllm import envs

    if envs.VLLM_USE_RUST_FRONTEND:
        raise RuntimeError("VLLM_USE_RUST_FRONTEND is set, and the Rust front end calls no parser in Python; unset it")
    from vllm_graft.parsers.qwen3 import Qwen3ToolParser

    if not issubclass(Qwen3ToolParser, original):
        raise TypeError(f"{Qwen3ToolParser.__qualname__} extends {Qwen3ToolParser.__base__}, not {original}")
    return Qwen3ToolParser


def current() -> Any:
    """The class that all the names give; where they disagree, one that is neither vLLM's nor this fix's pair."""
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    first, *others = (ToolParserManager.get_tool_parser(name) for name in TOOL_PARSERS)
    reasoning = ReasoningParserManager.get_reasoning_parser(REASONING_PARSER)
    strangers = [other for other in others if other is not first]
    if reasoning is not _reasoning_parser(first):
        strangers.append(reasoning)
    return strangers[0] if strangers else first


def _reasoning_parser(tool_parser: Any) -> Any:
    """The reasoning parser that goes with a tool parser."""
    from vllm.reasoning.qwen3_engine_reasoning_parser import Qwen3ParserReasoningAdapter

    return getattr(tool_parser, "reasoning_parser", Qwen3ParserReasoningAdapter)


def install(replacement: Any) -> None:
    """Register the pair under the names that users give."""
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    ToolParserManager.register_module(list(TOOL_PARSERS), module=replacement)
    ReasoningParserManager.register_module(REASONING_PARSER, module=_reasoning_parser(replacement))


def restore(original: Any) -> None:
    """Put the former pair back; vLLM's own comes back by its lazy registration."""
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    for name in TOOL_PARSERS:
        ToolParserManager.tool_parsers.pop(name, None)
    ReasoningParserManager.reasoning_parsers.pop(REASONING_PARSER, None)
    if current() is not original:
        install(original)


def reached() -> Any:
    """The tool parser of the pair that the API server composes; anything that is not one pair is returned as it is."""
    from vllm.parser import ParserManager

    found = [ParserManager.get_parser(name, REASONING_PARSER, enable_auto_tools=True) for name in TOOL_PARSERS]
    tool_parser = found[0].tool_parser_cls
    pairs = {(parser.tool_parser_cls, parser.reasoning_parser_cls) for parser in found}
    return tool_parser if pairs == {(tool_parser, _reasoning_parser(tool_parser))} else pairs


PATCH = Patch(
    id="qwen3-arguments-lost",
    title="Qwen3 tool calls keep every argument, byte for byte, streamed or not",
    symptom=(
        "tool calls lose an argument or arrive as broken JSON, code in an argument is cut at a tag, and an answer that "
        "mentions a tag of the format ends there"
    ),
    upstream=(f"{_ISSUES}/57699", f"{_ISSUES}/55495", f"{_ISSUES}/34919", f"{_ISSUES}/33965"),
    processes=(Process.API_SERVER,),
    affects=">=0.32.0,<=0.33.0",
    kind="register",
    target=Target(
        "vllm.tool_parsers.qwen3_engine_tool_parser:Qwen3EngineToolParser",
        reads=(
            "vllm.parser.qwen3",
            "vllm.parser.engine.adapters",
            "vllm.parser.abstract_parser:DelegatingParser",
            "vllm.parser.parser_manager:ParserManager",
            "vllm.tool_parsers.utils:extract_types_from_schema",
            "vllm.tool_parsers.utils:iter_response_function_tool_info",
        ),
    ),
    fingerprints={"0.32.0": "63ebba98ea1a20da", "0.33.0": "2d9b7a8bfaedef30"},
    build=build,
    extension=Extension(install=install, current=current, restore=restore),
    reached=reached,
    remove_when="vLLM's own parser passes tests/data/tool_calls.json in the oldest supported version",
    proof="tests/patches/test_qwen3_arguments_lost.py",
)
