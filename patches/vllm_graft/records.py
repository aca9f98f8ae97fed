"""Frozen dataclasses to JSON and back, with errors that name the field."""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Mapping
from enum import Enum
from typing import Any, Literal, TypeVar

T = TypeVar("T")


class RecordError(ValueError):
    """A JSON document that is not the record it should be."""


def to_json(record: Any, *, indent: int | None = None) -> str:
    """The record as JSON, compact unless an indent is given; the same record gives the same text."""
    separators = (",", ":") if indent is None else (",", ": ")
    return json.dumps(dataclasses.asdict(record), indent=indent, separators=separators)


def from_json(cls: type[T], text: str) -> T:
    """Read a `cls` from JSON text.

    Raises:
        RecordError: the text is no JSON, a key is missing or unknown, or a value has another type.

    """
    try:
        value = json.loads(text)
    except ValueError as error:
        raise RecordError(f"not JSON: {error}") from error
    return typing.cast(T, _read(cls, value, ""))


def _read(kind: Any, value: Any, where: str) -> Any:
    if dataclasses.is_dataclass(kind):
        return _read_dataclass(typing.cast(type, kind), value, where)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple:
        if isinstance(value, list):
            return _read_tuple(arguments, value, where)
    elif origin in (typing.Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        (inner,) = (argument for argument in arguments if argument is not type(None))
        return _read(inner, value, where)
    elif origin is Literal:
        if value in arguments:
            return value
    elif issubclass(kind, Enum):
        if value in tuple(member.value for member in kind):
            return kind(value)
    elif type(value) is kind:
        return value
    raise RecordError(f"{where}: got {json.dumps(value)}; expected {_wanted(kind)}")


def _read_tuple(kinds: tuple[Any, ...], values: list[Any], where: str) -> tuple[Any, ...]:
    return tuple(_read(kinds[0], value, f"{where}[{index}]") for index, value in enumerate(values))


def _read_dataclass(cls: type, value: Any, where: str) -> Any:
    dot = f"{where}." if where else ""
    if not isinstance(value, Mapping):
        raise RecordError(f"{where or 'document'}: got {json.dumps(value)}; expected an object")
    hints = typing.get_type_hints(cls)
    if unknown := sorted(set(value) - set(hints)):
        raise RecordError(f"{dot}{unknown[0]}: unknown key; known are {', '.join(hints)}")
    if missing := [name for name in hints if name not in value]:
        raise RecordError(f"{dot}{missing[0]}: missing")
    return cls(**{name: _read(hint, value[name], f"{dot}{name}") for name, hint in hints.items()})


def _wanted(kind: Any) -> str:
    if typing.get_origin(kind) is tuple:
        return "a list"
    if typing.get_origin(kind) is Literal:
        return " or ".join(json.dumps(choice) for choice in typing.get_args(kind))
    if issubclass(kind, Enum):
        return " or ".join(json.dumps(member.value) for member in kind)
    return {"str": "a string", "int": "an integer", "bool": "true or false"}[kind.__name__]
