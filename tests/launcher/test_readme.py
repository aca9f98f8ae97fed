"""README says what the code does."""

import re
from pathlib import Path

import pytest

from tests.launcher.readme import GPU_README, README, gpu_tables, tables, with_tables

ROOT = README.parent


def test_the_tables_are_those_of_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GRAFT_PROFILES", raising=False)
    text = README.read_text(encoding="utf-8")
    assert text == with_tables(text, tables()), "run: make generated"


def test_the_tables_of_measured_memory_are_those_of_the_result_file() -> None:
    text = GPU_README.read_text(encoding="utf-8")
    assert text == with_tables(text, gpu_tables()), "run: make generated"


def test_every_verb_that_readme_names_is_a_target() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = set(re.findall(r"(?:^|`)make ([a-z-]+)", README.read_text(encoding="utf-8"), re.MULTILINE))
    assert named <= targets


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_every_file_that_is_linked_exists(name: str) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", (ROOT / name).read_text(encoding="utf-8")):
        assert (ROOT / target).exists(), target


def test_every_path_in_backticks_of_contributing_exists() -> None:
    text = Path(ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    for path in re.findall(r"`((?:tests|patches|profiles|launcher|requirements)/[\w./-]+)`", text):
        if "NAME" not in path:
            assert (ROOT / path).exists(), path
