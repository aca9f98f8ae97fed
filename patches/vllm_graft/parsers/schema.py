"""What a tool's JSON Schema says about a parameter, and the JSON value of its text."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Schema = Mapping[str, Any]
Coerce = Callable[[str, list[str]], Any]
TypesOf = Callable[[Any], list[str]]

_INTEGER = re.compile(r"[+-]?[0-9]{1,4000}")


@dataclass(frozen=True)
class Typing:
    """vLLM's own rules: the types that a schema allows, and the value that a text has under given types."""

    types_of: TypesOf
    coerce: Coerce


@dataclass(frozen=True)
class Tool:
    """A declared tool: its parameters' schemas by name, references resolved."""

    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)


def make_tool(name: str, schema: Schema | None) -> Tool:
    """A tool from the JSON Schema of its arguments."""
    properties = (schema or {}).get("properties")
    if not isinstance(properties, Mapping):
        return Tool(name)
    return Tool(name, {key: _resolved(value, schema or {}, frozenset()) for key, value in properties.items()})


def _resolved(schema: Any, root: Schema, seen: frozenset[str]) -> Any:
    """The schema without references at the levels that decide the type of the whole value."""
    if not isinstance(schema, Mapping):
        return schema
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        return {} if reference in seen else _resolved(_pointed(reference[2:], root), root, seen | {reference})
    resolved = dict(schema)
    for key in ("anyOf", "oneOf", "allOf"):
        if isinstance(schema.get(key), list):
            choices = [choice for choice in schema[key] if not _repeats(choice, seen)]
            resolved[key] = [_resolved(choice, root, seen) for choice in choices]
    return resolved


def _repeats(schema: Any, seen: frozenset[str]) -> bool:
    return isinstance(schema, Mapping) and schema.get("$ref") in seen


def _pointed(pointer: str, root: Schema) -> Any:
    found: Any = root
    for part in pointer.split("/"):
        key = part.replace("~1", "/").replace("~0", "~")
        if not isinstance(found, Mapping) or key not in found:
            return {}
        found = found[key]
    return found


def json_value(text: str, types: list[str], typing: Typing) -> str:
    """The JSON of a parameter's text under the allowed types; text that fits none of them stays a string."""
    if {"integer", "number"} & set(types) and _INTEGER.fullmatch(text.strip()):
        return str(int(text))  # through a float, vLLM 0.32.0 loses digits above 2**53
    try:
        value = typing.coerce(text, types)
        if isinstance(value, str) and "string" not in types:
            value = _python_literal(value, types)
        return json.dumps(value, ensure_ascii=False)
    except RecursionError:  # vLLM lets nesting that is too deep for Python's parser through
        return json.dumps(text, ensure_ascii=False)


def _python_literal(text: str, types: list[str]) -> Any:
    """A list or dict in Python's notation, where the schema asks for an array or object."""
    kinds = {"array": list, "object": dict}
    wanted = tuple(kind for name, kind in kinds.items() if name in types)
    if not wanted:
        return text
    try:
        value = ast.literal_eval(text.strip())
        json.dumps(value, allow_nan=False)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return text
    return value if isinstance(value, wanted) and _is_json(value) else text


def _is_json(value: Any) -> bool:
    """Whether a value is made of JSON's own kinds; `json.dumps` would turn tuples to lists and keys to strings."""
    if isinstance(value, list):
        return all(map(_is_json, value))
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_json(inner) for key, inner in value.items())
    return value is None or isinstance(value, (str, int, float))
