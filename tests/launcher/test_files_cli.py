"""The commands about files, as a user calls them."""

import io
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from launcher.cli import base
from launcher.cli.live import Live
from launcher.errors import Refused, UsageError
from launcher.weights.events import FileProgress
from tests.launcher.weights.fake_hub import FILES

MODEL = "smollm2-135m-instruct"


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GRAFT_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/no-docker.sock")
    for name in ("GRAFT_MODELS", "GRAFT_PROFILES", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    usb = tmp_path / "usb" / MODEL
    usb.mkdir(parents=True)
    for name, content in FILES.items():
        (usb / name).write_bytes(content)
    return tmp_path / "state"


def graft(*arguments: str) -> str:
    """Return what a command prints; its error is raised."""
    result = CliRunner().invoke(base.app, list(arguments), catch_exceptions=False, standalone_mode=False)
    return result.output


def test_a_model_is_fetched_from_a_disk_and_compared_when_asked_again(state: Path, tmp_path: Path) -> None:
    graft("fetch", MODEL, "--from", str(tmp_path / "usb"))
    weights = state / "cache" / "models" / MODEL / "model.safetensors"
    assert weights.read_bytes() == FILES["model.safetensors"]
    graft("fetch", MODEL)
    weights.write_bytes(FILES["model.safetensors"][:-1] + b"\x01")
    with pytest.raises(Refused, match=r"model\.safetensors: sha256"):
        graft("fetch", MODEL)


def test_wrong_arguments_are_told(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such model"):
        graft("fetch", "nothing")
    with pytest.raises(UsageError, match="the token cannot be read"):
        graft("fetch", MODEL, "--token-file", str(tmp_path / "nothing"))
    with pytest.raises(UsageError, match="give the folder that"):
        graft("bundle", "install", str(tmp_path))
    with pytest.raises(UsageError, match="is there already"):
        graft("bundle", str(tmp_path), "--profile", "cpu")


def test_cleaning_touches_nothing_unless_asked(state: Path, tmp_path: Path) -> None:
    half = state / "cache" / "models" / ".tiny.0123456789ab.partial"
    half.mkdir(parents=True)
    graft("fetch", MODEL, "--from", str(tmp_path / "usb"))
    graft("clean")
    graft("clean", f"models/{MODEL}")
    assert half.is_dir()
    graft("clean", "--yes")
    assert not half.exists()
    assert (state / "cache" / "models" / MODEL).is_dir()
    graft("clean", f"models/{MODEL}", "--yes")
    assert not (state / "cache" / "models" / MODEL).exists()


def test_each_file_has_a_bar_beside_the_total_while_it_is_under_way() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    with Live(console) as live:
        live.phase("model")
        live.progress(3e6, 9e6, "bytes")
        live.files((FileProgress("a.safetensors", 1_000_000, 4_000_000), FileProgress("b.json", 2_000_000, None)))
        shown = [(task.description.strip(), task.completed, task.total) for task in live._progress.tasks]
        assert shown == [("model files", 3e6, 9e6), ("a.safetensors", 1e6, 4e6), ("b.json", 2e6, None)]
        live.files((FileProgress("a.safetensors", 4_000_000, 4_000_000),))
        left = [(task.description.strip(), task.fields["count"]) for task in live._progress.tasks]
        assert left == [("model files", "3 of 9 MB"), ("a.safetensors", "4 of 4 MB")]
