"""The command `quantize ternary`, with a stand-in for the engine's Python and its converter."""

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from launcher import bring, engine_env
from launcher.cli import base
from launcher.errors import CheckFailed, UsageError
from launcher.weights.ternary import CONVERTER, Request, Summary, convert

SUMMARY = {
    "ternary_modules": 210,
    "kept_modules": ["lm_head"],
    "source_bytes": 2_000_000_000,
    "target_bytes": 600_000_000,
    "relative_error": 0.53,
}
PROGRESS = {"detail": "model.layers.0.mlp.up_proj.weight", "done_bytes": 5, "total_bytes": 10}


def stand_in(folder: Path, *lines: object, fails: str = "") -> Path:
    """A program in Python's place that prints these lines, and its arguments into a file."""
    program = folder / "python"
    text = "".join(json.dumps(line) + "\n" for line in lines)
    program.write_text(
        f"#!{sys.executable}\nimport json, pathlib, sys\n"
        f"pathlib.Path({str(folder / 'argv')!r}).write_text(json.dumps(sys.argv[1:]))\n"
        f"sys.stdout.write({text!r})\nsys.exit({fails!r} or 0)\n"
    )
    program.chmod(0o755)
    return program


def test_a_conversion_tells_its_progress_and_its_summary(tmp_path: Path) -> None:
    told: list[tuple[float, float, str]] = []
    request = Request(tmp_path, tmp_path / "out", 128, "float32", ("*.layers.0.*",), lm_head=True)
    summary = convert(request, stand_in(tmp_path, PROGRESS, {"summary": SUMMARY}), lambda *event: told.append(event))
    assert summary == Summary.model_validate(SUMMARY)
    assert told == [(5, 10, "model.layers.0.mlp.up_proj.weight")]
    assert json.loads((tmp_path / "argv").read_text()) == [
        *("-m", CONVERTER, str(tmp_path), str(tmp_path / "out"), "--scale-dtype", "float32", "--group-size", "128"),
        *("--keep", "*.layers.0.*", "--lm-head"),
    ]


def test_what_the_converter_refuses_is_the_users_to_change(tmp_path: Path) -> None:
    python = stand_in(tmp_path, {"error": "config.json: quantized by awq already"}, fails="1")
    with pytest.raises(UsageError, match="quantized by awq already"):
        convert(Request(tmp_path, tmp_path / "out"), python, lambda *event: None)


@pytest.mark.parametrize("lines", [(), (PROGRESS,)])
def test_a_converter_that_breaks_says_how_and_that_it_can_go_on(tmp_path: Path, lines: tuple[object, ...]) -> None:
    python = stand_in(tmp_path, *lines, fails="Killed: no memory")
    with pytest.raises(CheckFailed, match=r"ended with 1; the same command goes on(.|\n)*Killed: no memory"):
        convert(Request(tmp_path, tmp_path / "out"), python, lambda *event: None)


def test_the_command_says_how_much_rounding_took(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text("{}")
    python = stand_in(tmp_path, {"summary": SUMMARY})
    monkeypatch.setattr(bring, "install", lambda env, report: None)
    monkeypatch.setattr(engine_env.EngineEnv, "python", property(lambda env: python))
    arguments = ["quantize", "ternary", str(tmp_path), str(tmp_path / "out")]
    result = CliRunner().invoke(base.app, arguments, catch_exceptions=False, standalone_mode=False)
    assert "210 layers in 2 bits, 2.00 GB became 0.60 GB; rounding took 53% of the weights' norm" in result.output
    assert "compare its answers" in result.output
    result = CliRunner().invoke(base.app, [*arguments, "--json"], catch_exceptions=False, standalone_mode=False)
    assert json.loads(result.output[result.output.index("{") :]) == SUMMARY


def test_folders_that_are_not_there_are_told(tmp_path: Path) -> None:
    def quantize(*arguments: str) -> None:
        command = ["quantize", "ternary", *arguments]
        CliRunner().invoke(base.app, command, catch_exceptions=False, standalone_mode=False)

    with pytest.raises(UsageError, match=r"no config\.json"):
        quantize(str(tmp_path), str(tmp_path / "out"))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UsageError, match="no such folder; make it first"):
        quantize(str(tmp_path), str(tmp_path / "no" / "out"))
