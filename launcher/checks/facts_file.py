"""Facts given by a file instead of this machine: `graft check --facts FILE`."""

from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from launcher import yamltext
from launcher.checks.demand import Demand
from launcher.errors import UsageError
from launcher.host.facts import HostFacts

_T = TypeVar("_T", bound=BaseModel)

_WRAPPER_KEYS = ("facts", "plan")
_CASE_KEYS = ("id", "sources", "evidence", "note", "expect")
"""What a recorded case holds besides; it is not looked at."""


def facts_from_file(path: Path) -> tuple[HostFacts, Demand | None]:
    """Read the facts of a machine, and the demand of a start where the file holds one.

    The file is JSON or YAML: the bare facts, or a mapping with `facts` and perhaps `plan`, such as a recorded case.

    Raises:
        UsageError: the file cannot be read, or a key or a value is wrong; the message names it.
    """
    document = _document(path)
    if "facts" not in document:
        return _validated(HostFacts, document, path, ()), None
    unknown = [str(key) for key in document if key not in (*_WRAPPER_KEYS, *_CASE_KEYS)]
    if unknown:
        raise UsageError(f"{path}: {unknown[0]}: no such key; there are {' and '.join(_WRAPPER_KEYS)}")
    facts = _validated(HostFacts, document["facts"], path, ("facts",))
    plan = document.get("plan")
    return facts, None if plan is None else _validated(Demand, plan, path, ("plan",))


def _document(path: Path) -> dict[str, Any]:
    try:
        # JSON is YAML, too.
        document = yamltext.parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(f"{path}: neither JSON nor YAML: {' '.join(str(error).split())}") from error
    if not isinstance(document, dict):
        raise UsageError(f"{path}: a mapping is needed, got {type(document).__name__}")
    return document


def _validated(kind: type[_T], value: Any, path: Path, prefix: tuple[str, ...]) -> _T:
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        lines = (_explain(prefix, kind, item) for item in error.errors())
        raise UsageError("\n".join(f"{path}: {line}" for line in lines)) from error


def _explain(prefix: tuple[str, ...], kind: type[BaseModel], item: Any) -> str:
    where = ".".join(str(part) for part in (*prefix, *item["loc"]))
    match item["type"]:
        case "extra_forbidden" if len(item["loc"]) == 1:
            return f"{where}: no such key; there are {', '.join(kind.model_fields)}"
        case "extra_forbidden":
            return f"{where}: no such key; remove it"
        case "missing":
            return f"{where}: missing; add it"
        case "model_type":
            return f"{where}: got {item['input']!r}; a mapping is needed"
    return f"{where}: got {item['input']!r}; {item['msg'][:1].lower()}{item['msg'][1:]}"
