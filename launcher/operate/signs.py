"""What tells how an engine does besides its exit code: its log and /health, the kernel's count, NVIDIA's own tool."""

import shutil
import subprocess
import time
import urllib.request
from collections.abc import Sequence
from http import HTTPStatus
from http.client import HTTPException
from pathlib import Path

SERVING_MARKS = (b"Application startup complete", b"Starting vLLM server on")
"""uvicorn's line, which an argument can switch off, and vLLM's own some seconds before it: then /health is asked."""
HEALTH_TIMEOUT_S = 1.0
HEALTH_EVERY_S = 0.5
NVIDIA_SMI_TIMEOUT_S = 20.0
_OOM_COUNTERS = (Path("/sys/fs/cgroup/memory.events"), Path("/sys/fs/cgroup/memory/memory.oom_control"))


class Start:
    """Whether an engine's start is over: its log says so, and /health does."""

    def __init__(self, health_url: str | None) -> None:
        self._health_url = health_url
        self._seen = b""
        self._is_announced = False
        self._is_told = False
        self._asked_s = float("-inf")

    def read(self, data: bytes) -> None:
        if not self._is_announced:
            self._seen = self._seen[-100:] + data
            self._is_announced = any(mark in self._seen for mark in SERVING_MARKS)

    def has_ended(self) -> bool:
        """Return True once."""
        if not self._is_announced or self._is_told or not self._is_healthy():
            return False
        self._is_told, self._seen = True, b""
        return True

    def _is_healthy(self) -> bool:
        if self._health_url is None:
            return True
        if time.monotonic() - self._asked_s < HEALTH_EVERY_S:
            return False
        self._asked_s = time.monotonic()
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(self._health_url, timeout=HEALTH_TIMEOUT_S) as answer:
                return bool(answer.status == HTTPStatus.OK)
        except (OSError, HTTPException):
            return False


def oom_kills(counters: Sequence[Path] = _OOM_COUNTERS) -> int:
    """Return how often the kernel killed a process of this control group for memory; 0 where it does not say."""
    for path in counters:
        try:
            lines = path.read_text(encoding="ascii").split("\n")
        except OSError:
            continue
        return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
    return 0


def nvidia_smi_error(uuids: Sequence[str]) -> str | None:
    """Return what NVIDIA's own tool says is wrong with these GPUs; None where nothing, or where there is no such tool.

    Args:
        uuids: empty for all of them.
    """
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    only = ("--id", ",".join(uuids)) if uuids else ()
    argv = (program, "--query-gpu=uuid", "--format=csv,noheader", *only)
    try:
        ended = subprocess.run(argv, capture_output=True, text=True, timeout=NVIDIA_SMI_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    said = " ".join(f"{ended.stdout} {ended.stderr}".split())
    return said[:500] if ended.returncode != 0 or "lost" in said.lower() else None
