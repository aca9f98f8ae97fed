"""The rules match what the two supported versions of vLLM print: their words stand where `source` says."""

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from launcher.diagnose import Rule, rules

ROOT = Path(__file__).parents[2]
SITE_PACKAGES = {
    "0.33.0": ROOT / ".venv-vllm-0.33",
    "0.32.0": ROOT / ".venv-engine",
}
PLACE = re.compile(
    r"(?P<file>vllm/[\w/]+\.py):(?P<line>\d+)(?: \(0\.32\.0: (?P<old_file>[\w/.]*):(?P<old_line>\d+)\))?"
)
SHORTEST_WORDING = 16
"""Characters; shorter literals of a pattern say little."""


def vllm_of(version: str) -> Path:
    found = next(SITE_PACKAGES[version].glob("lib/python3*/site-packages/vllm"), None)
    if found is None or not (found / "__init__.py").is_file():
        pytest.skip(f"{SITE_PACKAGES[version].name} has no vLLM {version}; run `graft engine install`")
    return found.parent


def places(rule: Rule, version: str) -> list[tuple[str, int]]:
    """Files and lines that the rule's source names for this version."""
    named = []
    for match in PLACE.finditer(rule.source):
        file, line = match["file"], int(match["line"])
        if version == "0.32.0" and match["old_line"]:
            file = file.rpartition("/")[0] + "/" + match["old_file"] if match["old_file"] else file
            line = int(match["old_line"])
        named.append((file, line))
    return named


def wordings(pattern: re.Pattern[str]) -> list[str]:
    """The literal runs of a pattern, without the class of the exception, which Python prints."""
    parser = importlib.import_module("re._parser")
    runs = (re.sub(r"^\w+Error: ", "", run) for run in _runs(parser.parse(pattern.pattern)))
    return [run for run in runs if len(run) >= SHORTEST_WORDING]


def _runs(parsed: Any) -> Iterator[str]:
    run = ""
    for code, argument in parsed:
        if str(code) == "LITERAL":
            run += chr(argument)
            continue
        yield run
        run = ""
        for part in argument if isinstance(argument, tuple | list) else ():
            inner = part if isinstance(part, list) else [part]
            for each in inner:
                if type(each).__name__ == "SubPattern":
                    yield from _runs(each)
    yield run


def printed_near(source: Path, line: int) -> str:
    """The strings of a statement's neighbourhood, values left out."""
    texts = []
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant | ast.JoinedStr) and abs(node.lineno - line) <= 4:
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            texts.append("\0".join(str(part.value) for part in parts if isinstance(part, ast.Constant)))
    return "\n".join(texts)


VLLMS_OWN = [rule for rule in rules() if rule.error and rule.source.startswith("vllm/") and PLACE.match(rule.source)]


@pytest.mark.parametrize("version", SITE_PACKAGES)
@pytest.mark.parametrize("rule", VLLMS_OWN, ids=lambda rule: rule.id)
def test_wording_is_vllms(rule: Rule, version: str) -> None:
    site_packages = vllm_of(version)
    printed = "\n".join(printed_near(site_packages / file, line) for file, line in places(rule, version))
    expected = [words for pattern in rule.error for words in wordings(pattern)]
    assert [words for words in expected if words in printed], (expected, printed)
