"""Model files from a folder or a mirror, tokens from files, and what is there already."""

import json
import os
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from launcher.errors import Refused, UsageError
from launcher.profile import ModelFile
from launcher.weights import verify
from launcher.weights.events import FetchEvent, Origin
from launcher.weights.fetch import ensure_model, verify_model
from launcher.weights.hub_token import read_token, stored_token
from tests.launcher.weights.fake_hub import FILES, REPO, REVISION, Serve, ignore, model

WEIGHTS = "model.safetensors"


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    """A USB disk with the model's files, in a folder of the repository's name."""
    folder = tmp_path / "usb" / "tiny"
    folder.mkdir(parents=True)
    for name, content in {**FILES, "pytorch_model.bin": b"x", ".gitattributes": b"y"}.items():
        (folder / name).write_bytes(content)
    return tmp_path / "usb"


def test_files_come_from_a_folder_without_asking_anyone(disk: Path, tmp_path: Path, no_hub: None) -> None:
    for source in (disk, disk / "tiny"):
        models = tmp_path / f"models of {source.name}"
        folder = ensure_model(model(), models, ignore, source=str(source))
        assert {path.name for path in folder.iterdir()} == {*FILES, "graft-model.json"}
        assert [path.name for path in models.iterdir()] == ["tiny"]
        origin = Origin.read(folder)
        assert origin is not None
        assert {file.path for file in origin.files if file.sha256} == set(FILES)


def test_what_is_cut_short_on_the_disk_is_named_before_anything_is_copied(disk: Path, tmp_path: Path) -> None:
    (disk / "tiny" / WEIGHTS).write_bytes(FILES[WEIGHTS][:50_000])
    with pytest.raises(Refused, match=rf"usb/tiny: not whole.*\n.*{WEIGHTS}: cut short: 50000 bytes"):
        ensure_model(model(), tmp_path / "models", ignore, source=str(disk))
    assert not (tmp_path / "models" / "tiny").exists()


def test_a_shard_that_the_index_lists_and_the_disk_lacks_is_named(disk: Path, tmp_path: Path) -> None:
    index = {"weight_map": {"a": WEIGHTS, "b": "model-00002.safetensors"}}
    (disk / "tiny" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(Refused, match=r"model-00002\.safetensors: missing; model.safetensors.index.json lists it"):
        ensure_model(model(), tmp_path / "models", ignore, source=str(disk))


def test_wrong_bytes_on_the_disk_are_found_by_its_record(disk: Path, tmp_path: Path) -> None:
    folder = ensure_model(model(), tmp_path / "first", ignore, source=str(disk))
    right = FILES[WEIGHTS]
    (folder / WEIGHTS).write_bytes(right[:-1] + b"\x01")
    with pytest.raises(Refused, match=rf"{WEIGHTS}: sha256 .* its record says"):
        ensure_model(model(), tmp_path / "second", ignore, source=str(folder))
    assert not (tmp_path / "second" / "tiny").exists()
    (folder / WEIGHTS).write_bytes(right)
    ensure_model(model(), tmp_path / "second", ignore, source=str(folder))


def test_wrong_bytes_are_found_by_the_hash_in_the_models_yaml(disk: Path, tmp_path: Path) -> None:
    pinned = model(files=(ModelFile(path=WEIGHTS, sha256="0" * 64),))
    with pytest.raises(Refused, match=rf"fetched and not right.*\n.*{WEIGHTS}: sha256 .* its source says 000"):
        ensure_model(pinned, tmp_path / "models", ignore, source=str(disk))
    assert not (tmp_path / "models" / "tiny").exists()


def test_another_model_or_revision_is_not_taken(disk: Path, tmp_path: Path) -> None:
    record = Origin(repo="owner/other", revision=REVISION, files=())
    record.write(disk / "tiny")
    with pytest.raises(Refused, match=f"holds owner/other; tiny is {REPO}"):
        ensure_model(model(), tmp_path / "models", ignore, source=str(disk))
    record.model_copy(update={"repo": REPO}).write(disk / "tiny")
    with pytest.raises(Refused, match=f"revision {REVISION}; tiny says v2"):
        ensure_model(model(revision="v2"), tmp_path / "models", ignore, source=str(disk))
    assert ensure_model(model(revision=REVISION), tmp_path / "models", ignore, source=str(disk)).is_dir()


def test_a_cache_of_the_hugging_face_libraries_gives_its_snapshot_and_revision(disk: Path, tmp_path: Path) -> None:
    snapshots = tmp_path / "cache" / f"models--{REPO.replace('/', '--')}" / "snapshots"
    for at, revision in enumerate(("a" * 40, REVISION)):
        (snapshots / revision).mkdir(parents=True)
        for name in FILES:
            (snapshots / revision / name).symlink_to(disk / "tiny" / name)
        os.utime(snapshots / revision, (at, at))
    for wanted, revision in ((None, REVISION), ("a" * 40, "a" * 40)):
        models = tmp_path / f"models of {revision}"
        folder = ensure_model(model(revision=wanted), models, ignore, source=str(tmp_path / "cache"))
        origin = Origin.read(folder)
        assert origin is not None
        assert origin.revision == revision
        assert not (folder / "model.safetensors").is_symlink()


def test_a_copy_that_broke_off_goes_on_with_the_files_that_miss(disk: Path, tmp_path: Path) -> None:
    work = tmp_path / "models" / ".tiny.copied.partial"
    work.mkdir(parents=True)
    shutil.copy(disk / "tiny" / "README.md", work)
    (work / f".{WEIGHTS}.part").write_bytes(b"half")
    before = (work / "README.md").stat().st_ino
    folder = ensure_model(model(), tmp_path / "models", ignore, source=str(disk))
    assert (folder / "README.md").stat().st_ino == before
    assert {path.name for path in folder.iterdir()} == {*FILES, "graft-model.json"}


def test_a_disk_that_fills_up_during_a_copy_is_named_and_the_copy_goes_on_later(
    disk: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1 << 40))
    with pytest.raises(Refused, match=rf"{WEIGHTS}: cannot be copied to {small_disk}: No space left on device"):
        ensure_model(model(), small_disk, ignore, source=str(disk))
    assert not (small_disk / "tiny").exists()
    subprocess.run(["mount", "-o", "remount,size=1m", str(small_disk)], check=True)
    assert (ensure_model(model(), small_disk, ignore, source=str(disk)) / WEIGHTS).read_bytes() == FILES[WEIGHTS]


def test_a_folder_without_the_model_says_where_it_looked(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no files of tiny in it; looked for .*config.json, .*tiny/config.json"):
        ensure_model(model(), tmp_path / "models", ignore, source=str(tmp_path))
    with pytest.raises(UsageError, match="no such folder"):
        ensure_model(model(), tmp_path / "models", ignore, source=str(tmp_path / "nothing"))


def test_a_mirror_takes_the_hubs_place_and_sees_no_token_but_its_own(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handler = serve()
    mirror = os.environ["HF_ENDPOINT"]
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_TOKEN", "hf_of_the_hub")
    assert ensure_model(model(), tmp_path, ignore, source=mirror).is_dir()
    assert set(handler.shown) == {None}


@pytest.mark.parametrize(("source", "kind"), [("http://127.0.0.1:9", Refused), ("ftp://host/x", UsageError)])
def test_a_mirror_that_is_none_is_refused(tmp_path: Path, source: str, kind: type[Exception]) -> None:
    with pytest.raises(kind, match="mirror"):
        ensure_model(model(), tmp_path, ignore, source=source)


def test_every_byte_that_is_there_is_compared_with_its_record(disk: Path, tmp_path: Path) -> None:
    folder = ensure_model(model(), tmp_path, ignore, source=str(disk))
    events: list[FetchEvent] = []
    assert verify_model(model(), tmp_path, events.append) == len(FILES)
    assert events[-1].done_bytes == events[-1].total_bytes
    (folder / WEIGHTS).write_bytes(FILES[WEIGHTS][:-1] + b"\x01")
    assert verify.faults(folder) == ()
    with pytest.raises(Refused, match=rf"not whole.*\n.*{WEIGHTS}: sha256"):
        verify_model(model(), tmp_path, ignore)


def test_what_is_there_at_another_revision_than_pinned_is_refused(serve: Serve, tmp_path: Path) -> None:
    serve()
    ensure_model(model(), tmp_path, ignore)
    with pytest.raises(Refused, match=f"revision {REVISION}; tiny says v2; move the folder away"):
        ensure_model(model(revision="v2"), tmp_path, ignore)


def test_a_token_comes_from_a_file_that_holds_nothing_else(tmp_path: Path) -> None:
    assert stored_token(tmp_path) is None
    (tmp_path / "hf_token").write_text("hf_abc\n")
    assert stored_token(tmp_path) == "hf_abc"
    for wrong in ("", "hf_abc hf_def", "# my token\nhf_abc"):
        (tmp_path / "hf_token").write_text(wrong)
        with pytest.raises(UsageError, match="one token of the hub is needed") as caught:
            stored_token(tmp_path)
        assert "abc" not in str(caught.value)
    with pytest.raises(UsageError, match="No such file"):
        read_token(tmp_path / "nothing")
