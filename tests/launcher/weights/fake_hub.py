"""A hub on this machine for the real huggingface_hub client: its routes, and what goes wrong there."""

import contextlib
import hashlib
import json
import struct
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from typing import Any, ClassVar

from launcher.profile import Model
from launcher.weights import hub
from launcher.weights.events import FetchEvent

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


def ignore(event: FetchEvent) -> None:
    """Take an event and do nothing."""


def listing_of() -> hub.Listing:
    found = hub.look(hub.Hub(hub.endpoint()), REPO, None)
    assert isinstance(found, hub.Listing)
    return found


class FakeHub(BaseHTTPRequestHandler):
    """Attributes of a subclass say what is served, and what goes wrong."""

    files: ClassVar[dict[str, bytes]] = {**FILES, **OTHER_FORMS}
    sent: ClassVar[dict[str, bytes]] = {}
    """What is sent in place of a file's bytes."""
    newest: ClassVar[str] = REVISION
    error: ClassVar[tuple[int, str] | None] = None
    delay_s: ClassVar[float] = 0.0
    token: ClassVar[str | None] = None
    """What a request must show."""
    elsewhere: ClassVar[str | None] = None
    """URL of the server that the weights are at."""
    cut_after: ClassVar[list[int]] = []
    """Taken from the front: how many bytes of the weights are sent before the connection is closed."""
    stall_after: ClassVar[list[int]] = []
    """Taken from the front: how many bytes of the weights are sent before nothing more comes."""
    file_errors: ClassVar[list[int]] = []
    """Taken from the front: statuses that the weights are answered with."""
    asked: ClassVar[list[str]] = []
    shown: ClassVar[list[str | None]] = []
    """The authorization of each request about the repository."""

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        time.sleep(self.delay_s)
        if REPO in path:
            type(self).shown.append(self.headers.get("Authorization"))
        if self.token is not None and self.headers.get("Authorization") != f"Bearer {self.token}":
            self._send(401, b"{}", {"X-Error-Code": "GatedRepo"})
        elif self.error is not None:
            self._send(self.error[0], b"{}", {"X-Error-Code": self.error[1]})
        elif path in (f"/api/models/{REPO}", f"/api/models/{REPO}/revision/{REVISION}"):
            siblings = [self._sibling(name) for name in self.files]
            commit = REVISION if "/revision/" in path else self.newest
            self._send(200, json.dumps({"id": REPO, "sha": commit, "siblings": siblings}).encode(), {})
        elif path.startswith(f"/api/models/{REPO}/revision/"):
            self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        elif path.startswith(f"/{REPO}/resolve/{REVISION}/"):
            self._file(path.removeprefix(f"/{REPO}/resolve/{REVISION}/"))
        else:
            self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})

    def _file(self, name: str) -> None:
        start = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")[0])
        type(self).asked.append(f"{self.command} {name} {start}")
        body = self.sent.get(name, self.files[name])
        is_weights = name.endswith(".safetensors")
        if is_weights and self.file_errors:
            self._send(self.file_errors.pop(0), b"{}", {"Retry-After": "0"})
            return
        if is_weights and self.elsewhere is not None:
            self._send(302, b"", {"Location": f"{self.elsewhere}{self.path}"})
            return
        part = {"Content-Range": f"bytes {start}-{len(body) - 1}/{len(body)}"} if start else {}
        self._send(206 if start else 200, body[start:], {"X-Repo-Commit": REVISION, **part}, is_weights)

    def _sibling(self, name: str) -> dict[str, Any]:
        size = len(self.files[name])
        digest = hashlib.sha256(self.files[name]).hexdigest()
        is_lfs = name.endswith(".safetensors")
        lfs = {"lfs": {"size": size, "sha256": digest, "pointerSize": 130}} if is_lfs else {}
        return {"rfilename": name, "size": size, "blobId": "b" * 40, **lfs}

    def _send(self, status: int, body: bytes, headers: dict[str, str], can_break: bool = False) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), "Content-Type": "application/json", **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "GET":
            return
        # A client that gave up waiting, or was ended, is gone by now.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            if can_break and self.cut_after:
                self.wfile.write(body[: self.cut_after.pop(0)])
                self.close_connection = True
            elif can_break and self.stall_after:
                self.wfile.write(body[: self.stall_after.pop(0)])
                self.wfile.flush()
                # Until the client has had enough.
                self.connection.recv(1)
            else:
                self.wfile.write(body)


Serve = Callable[..., type[FakeHub]]
