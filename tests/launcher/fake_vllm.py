"""A stand-in for `vllm serve`: the log lines of a start, and the routes that the launcher asks.

As a program it takes vLLM's arguments and behaves as $FAKE says; in tests of clients it is a server in a thread.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

START_LOG = """\
(APIServer pid=1) INFO 11-30 02:39:06 [api_utils.py:286] non-default args: {'model': '/models/m'}
(EngineCore pid=2) INFO 11-30 02:39:22 [core.py:133] Initializing a V1 LLM engine (v0.32.0) with config: model='m'
(Worker pid=3) INFO 11-30 02:39:29 [cpu_model_runner.py:68] Starting to load model /models/m...
Loading safetensors checkpoint shards:   0% Completed | 0/2 [00:00<?, ?it/s]
Loading safetensors checkpoint shards: 100% Completed | 2/2 [00:00<00:00,  2.30it/s]
(Worker pid=3) INFO 11-30 02:39:32 [cpu_model_runner.py:87] Warming up model for the compilation...
(Worker pid=3) INFO 11-30 02:41:31 [cpu_model_runner.py:91] Warming up done.
(APIServer pid=1) INFO 11-30 02:41:33 [entry.py:140] Starting vLLM server on http://127.0.0.1:8000
"""
CRASH_LOG = """\
(EngineCore pid=2) ERROR 11-30 02:39:40 [core.py:1584] EngineCore failed to start.
(EngineCore pid=2) ERROR 11-30 02:39:40 [core.py:1584] Traceback (most recent call last):
(EngineCore pid=2) ERROR 11-30 02:39:40 [core.py:1584]   File "/vllm/v1/core/kv_cache_utils.py", line 77, in check
(EngineCore pid=2) ERROR 11-30 02:39:40 [core.py:1584]     raise ValueError(
(EngineCore pid=2) ERROR 11-30 02:39:40 [core.py:1584] ValueError: No available memory for the cache blocks.
Traceback (most recent call last):
  File "/bin/vllm", line 10, in <module>
    sys.exit(main())
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore': 1}
"""


class JsonHandler(BaseHTTPRequestHandler):
    """Answers in JSON and says nothing; `api_key` is wanted when it is set."""

    api_key: ClassVar[str | None] = None

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""

    def _is_allowed(self) -> bool:
        if self.api_key is None or self.headers.get("Authorization") == f"Bearer {self.api_key}":
            return True
        self._json(401, {"error": "Unauthorized"})
        return False

    def _json(self, status: int, document: dict[str, Any]) -> None:
        self._send(status, json.dumps(document).encode(), "application/json")

    def _send(self, status: int, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class Handler(JsonHandler):
    """Answers `answer`; `broken_after` cuts the stream after so many pieces."""

    answer: ClassVar[str] = "The capital of France is Paris."
    reasoning: ClassVar[str] = ""
    broken_after: ClassVar[int | None] = None
    dies_when_asked: ClassVar[bool] = False
    requests: ClassVar[list[dict[str, Any]]] = []

    def do_GET(self) -> None:
        if self.path == "/health":
            self._send(200, b"", "text/plain")
        elif self._is_allowed() and self.path == "/v1/models":
            self._json(200, {"data": [{"id": "small"}]})

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        type(self).requests.append(request)
        if self.dies_when_asked:
            os._exit(3)
        if not self._is_allowed():
            return
        if request["model"] != "small":
            self._json(404, {"error": {"message": f"The model `{request['model']}` does not exist."}})
            return
        chunks: list[dict[str, Any]] = [{"choices": [{"delta": {"role": "assistant", "content": ""}}]}]
        chunks += [{"choices": [{"delta": {"reasoning": self.reasoning}}]}] if self.reasoning else []
        chunks += [{"choices": [{"delta": {"content": word}}]} for word in self.answer.split(" ")]
        chunks += [{"choices": [{"delta": {}, "finish_reason": "stop"}]}]
        chunks += [{"choices": [], "usage": {"prompt_tokens": 37, "completion_tokens": 8}}]
        events = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
        kept = events if self.broken_after is None else events[: self.broken_after]
        end = ["data: [DONE]\n\n"] if kept == events else []
        self._send(200, "".join([*kept, *end]).encode(), "text/event-stream")


def unused_port() -> int:
    """Return a port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def main() -> None:
    """Start as $FAKE says: good, crash, wrong, hang, dies-when-asked, flag, or stubborn."""
    mode = os.environ.get("FAKE", "good")
    port = int(sys.argv[sys.argv.index("--port") + 1])
    if mode == "flag":
        print("usage: vllm [-h] ...\nvllm: error: unrecognized arguments: --no-such-flag", file=sys.stderr)
        sys.exit(2)
    if mode == "stubborn":
        # The engine's process: its own, and deaf to SIGTERM.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        subprocess.Popen(("sleep", "600"))
    print(START_LOG if mode != "crash" else "".join(START_LOG.splitlines(keepends=True)[:5]), end="", flush=True)
    if mode == "crash":
        print(CRASH_LOG, end="", flush=True)
        sys.exit(1)
    if mode == "hang":
        time.sleep(600)
    behaviour = {
        "answer": "London." if mode == "wrong" else Handler.answer,
        "dies_when_asked": mode == "dies-when-asked",
    }
    ThreadingHTTPServer(("127.0.0.1", port), type("Set", (Handler,), behaviour)).serve_forever()


if __name__ == "__main__":
    main()
