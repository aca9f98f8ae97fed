"""Bundles: everything has its sum, what is not whole installs nothing, and what cannot be written leaves nothing."""

import hashlib
import json
import subprocess
import tarfile
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from launcher.bundle import layout, wheels
from launcher.bundle.install import install_bundle, verify
from launcher.bundle.layout import Manifest
from launcher.bundle.pack import Packed, pack
from launcher.errors import CheckFailed, Refused, UsageError
from launcher.prepare import Options
from launcher.profile import load_profile
from launcher.weights.events import FileProgress, Origin
from tests.launcher.weights.fake_hub import FILES

MODEL = "smollm2-135m-instruct"


class Quiet:
    """Takes progress and keeps the notes."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def phase(self, name: str) -> None: ...

    def progress(self, done: float, total: float, unit: str, detail: str = "") -> None:
        assert done <= total

    def files(self, files: Sequence[FileProgress]) -> None: ...

    def note(self, text: str) -> None:
        self.notes.append(text)

    def line(self, text: str) -> None: ...


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with the small model's folder, and a pip that downloads one small file."""
    monkeypatch.setenv("GRAFT_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("GRAFT_MODELS", str(tmp_path / "models"))
    monkeypatch.delenv("GRAFT_PROFILES", raising=False)
    folder = tmp_path / "models" / MODEL
    folder.mkdir(parents=True)
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    secrets = tmp_path / "state" / "cpu" / "secrets"
    secrets.mkdir(parents=True)
    (secrets / "hf_token").write_text("hf_secret")
    (tmp_path / "state" / "cpu" / "lock.json").write_text('{"locked": true}')

    def bring(folder: Path, listener: object) -> tuple[str, ...]:
        (folder / "carried-1.0-py3-none-any.whl").write_bytes(b"wheel")
        return wheels.PYTHONS[:-1]

    monkeypatch.setattr(wheels, "bring_launchers", bring)


def packed(out: Path, report: Quiet | None = None) -> Packed:
    return pack(out, Options("cpu"), load_profile("cpu"), report or Quiet(), with_engine=False)


def on_another_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GRAFT_STATE", str(tmp_path / "there" / "state"))
    monkeypatch.setenv("GRAFT_MODELS", str(tmp_path / "there" / "models"))
    return tmp_path / "there"


def files_of(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_a_bundle_holds_everything_with_its_sum_and_no_secret(tmp_path: Path) -> None:
    report = Quiet()
    packed(tmp_path / "out", report)
    files = files_of(tmp_path / "out")
    assert {
        "install.sh",
        "bundle.json",
        f"models/{MODEL}/model.safetensors",
        "wheels/carried-1.0-py3-none-any.whl",
    } <= files
    assert {"graft/launcher/cli/files.py", "graft/profiles/cpu.yaml", "graft/requirements/launcher.txt"} <= files
    summed = {line.split("  ")[1] for line in (tmp_path / "out" / "SHA256SUMS").read_text().splitlines()}
    assert summed == files - {"SHA256SUMS"}
    checked = subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=tmp_path / "out", check=False)
    assert checked.returncode == 0
    assert not any(b"hf_secret" in path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file())
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    assert any("No wheels of the launcher for Python 3.14" in note for note in report.notes)


def test_the_install_script_is_short_and_a_shell_accepts_it(tmp_path: Path) -> None:
    assert len(layout.INSTALL_SCRIPT.splitlines()) <= 20
    (tmp_path / "install.sh").write_text(layout.INSTALL_SCRIPT)
    subprocess.run(["sh", "-n", str(tmp_path / "install.sh")], check=True)


def test_a_bundle_installs_its_model_and_its_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed(tmp_path / "out")
    there = on_another_machine(tmp_path, monkeypatch)
    manifest = install_bundle(tmp_path / "out", Quiet())
    assert (manifest.profile, manifest.model, manifest.runtime) == ("cpu", MODEL, "host")
    folder = there / "models" / MODEL
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.name in FILES} == FILES
    assert json.loads((there / "state" / "cpu" / "lock.json").read_text()) == {"locked": True}
    assert install_bundle(tmp_path / "out", Quiet()) == manifest


def test_a_tar_holds_the_same_as_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed(tmp_path / "out")
    packed(tmp_path / "carry.tar")
    with tarfile.open(tmp_path / "carry.tar") as tar:
        tar.extractall(tmp_path / "unpacked", filter="data")
    assert files_of(tmp_path / "unpacked" / "carry") == files_of(tmp_path / "out")
    assert (tmp_path / "unpacked" / "carry" / "install.sh").stat().st_mode & 0o100
    on_another_machine(tmp_path, monkeypatch)
    assert install_bundle(tmp_path / "unpacked" / "carry", Quiet()).model == MODEL


@pytest.mark.parametrize("damage", ["cut", "changed", "gone"])
def test_what_is_not_whole_is_named_and_installs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    packed(tmp_path / "out")
    weights = tmp_path / "out" / "models" / MODEL / "model.safetensors"
    if damage == "gone":
        weights.unlink()
    else:
        content = weights.read_bytes()
        weights.write_bytes(content[:500] if damage == "cut" else content[:-1] + b"\x01")
    there = on_another_machine(tmp_path, monkeypatch)
    with pytest.raises(CheckFailed, match=rf"not whole.*Nothing was installed:\n  models/{MODEL}/model.safetensors"):
        install_bundle(tmp_path / "out", Quiet())
    assert not there.exists()


def test_a_bundle_that_was_not_written_to_its_end_is_none(tmp_path: Path) -> None:
    packed(tmp_path / "out")
    (tmp_path / "out" / "SHA256SUMS").unlink()
    with pytest.raises(UsageError, match="not written to its end"):
        install_bundle(tmp_path / "out", Quiet())
    with pytest.raises(UsageError, match=r"bundle\.json: No such file"):
        install_bundle(tmp_path, Quiet())


def test_a_sum_of_a_file_outside_is_refused(tmp_path: Path) -> None:
    packed(tmp_path / "out")
    sums = tmp_path / "out" / "SHA256SUMS"
    digest = hashlib.sha256(b"").hexdigest()
    for outside in ("../state/cpu/lock.json", "/etc/passwd", "graft/../../x"):
        sums.write_text(f"{digest}  {outside}\n")
        with pytest.raises(UsageError, match="line 1 is not a sum of a file in the bundle"):
            verify(tmp_path / "out")


def test_a_bundle_for_another_machine_or_python_is_refused(tmp_path: Path) -> None:
    packed(tmp_path / "out")
    path = tmp_path / "out" / "bundle.json"
    manifest = Manifest.read(tmp_path / "out")
    path.write_text(manifest.model_copy(update={"machine": "riscv64"}).model_dump_json())
    with pytest.raises(Refused, match="made for riscv64, this machine is"):
        install_bundle(tmp_path / "out", Quiet())
    path.write_text(manifest.model_copy(update={"engine_python": "3.9"}).model_dump_json())
    with pytest.raises(Refused, match=r"for Python 3\.9, .*PYTHON=python3\.9 sh install\.sh"):
        install_bundle(tmp_path / "out", Quiet())
    path.write_text('{"schema_version": 2}')
    with pytest.raises(UsageError, match="not a manifest of this launcher"):
        install_bundle(tmp_path / "out", Quiet())


def test_what_is_there_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(UsageError, match="is there already"):
        packed(tmp_path / "out")


def test_a_model_that_is_not_what_its_record_says_is_not_packed(tmp_path: Path) -> None:
    folder = tmp_path / "models" / MODEL
    files = [{"path": "config.json", "size_bytes": 2, "sha256": "0" * 64}]
    Origin.model_validate({"repo": "owner/name", "files": files}).write(folder)
    for out in ("out", "out.tar"):
        with pytest.raises(Refused, match=r"config\.json: sha256 .*its record says 000"):
            packed(tmp_path / out)
    assert {path.name for path in tmp_path.iterdir()} == {"state", "models"}


def test_a_disk_that_is_full_is_said_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1_000))
    with pytest.raises(Refused, match=r"0\.0 GB free, the bundle needs .*another disk"):
        packed(tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"state", "models"}


def test_profiles_of_the_users_own_come_along_unless_they_replace_shipped_ones(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    (own / "desk.yaml").write_text("extends: cpu\n")
    options = Options("desk", profiles_dir=own)
    pack(tmp_path / "out", options, load_profile("desk", own), Quiet(), with_engine=False)
    assert (tmp_path / "out" / "graft" / "profiles" / "desk.yaml").is_file()
    (own / "cpu.yaml").write_text("extends: cpu\n")
    with pytest.raises(UsageError, match=r"cpu\.yaml: has the name of a shipped one"):
        pack(tmp_path / "second", options, load_profile("desk", own), Quiet(), with_engine=False)
