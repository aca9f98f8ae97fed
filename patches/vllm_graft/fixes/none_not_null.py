"""A model that writes Python's `None` for a parameter that may be null means null."""

from __future__ import annotations

import functools
import importlib
from typing import Any

from vllm_graft.patch import Patch, Process, Target

_NAME = "coerce_to_schema_type"
_COPIES = ("vllm.parser.engine.parser_engine", "vllm.parser.minimax_m3", "vllm.tool_parsers.k2_horizon_tool_parser")


def build(original: Any) -> Any:
    """The function that gives null for `None` where the schema allows null, and vLLM's answer everywhere else."""
    for module in _COPIES:
        importlib.import_module(module)  # loaded after this, it would keep the replacement when the fix is taken out

    @functools.wraps(original)
    def coerce_to_schema_type(value: str, schema_type: str | list[str]) -> Any:
        if value != "None":
            return original(value, schema_type)
        types = [schema_type] if isinstance(schema_type, str) else schema_type
        if "null" in (name.strip().lower() for name in types):
            return None
        return original(value, schema_type)

    return coerce_to_schema_type


def reached() -> Any:
    """The function that the parser engine calls for each parameter."""
    from vllm.parser.engine import parser_engine

    return parser_engine.coerce_to_schema_type


PATCH = Patch(
    id="none-not-null",
    title="None is null for a parameter that may be null",
    symptom='a tool is called with the text "None" where its schema allows null',
    upstream=(
        "https://github.com/vllm-project/vllm/issues/38885",
        "https://github.com/vllm-project/vllm/pull/47643",
    ),
    processes=(Process.API_SERVER,),
    affects=">=0.32.0,<=0.33.0",
    kind="wrap",
    target=Target(
        f"vllm.tool_parsers.utils:{_NAME}",
        also=tuple(f"{module}:{_NAME}" for module in _COPIES),
    ),
    fingerprints={"0.32.0": "6d0bfc77fc5e8d08", "0.33.0": "0a29f00ebeedb6f9"},
    build=build,
    reached=reached,
    remove_when="vLLM #47643 is in the oldest supported version",
    proof="tests/patches/test_none_not_null.py",
)
