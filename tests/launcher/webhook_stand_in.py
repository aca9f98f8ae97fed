"""A webhook on this machine."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import pytest


class Hook(BaseHTTPRequestHandler):
    """A webhook that fails so many times first."""

    failures: ClassVar[int] = 0
    texts: ClassVar[list[str]] = []

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        cls = type(self)
        if cls.failures:
            cls.failures -= 1
            self.send_response_only(503)
        else:
            cls.texts.append(body["text"])
            self.send_response_only(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *arguments: Any) -> None:
        """Say nothing."""


@pytest.fixture
def hook() -> Iterator[str]:
    Hook.failures, Hook.texts = 0, []
    with ThreadingHTTPServer(("127.0.0.1", 0), Hook) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/secret-path"
        server.shutdown()
        thread.join()
