"""One run of an engine: its process group, its output passed on whatever becomes of it, its end to the last byte."""

import ctypes
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

POLL_S = 0.3
DRAIN_S = 2.0
"""Longest wait for the last output of a group that was ended."""
GROUP_ENDS_S = 30.0
"""A process that holds a GPU may take so long to end."""
_CHUNK_BYTES = 1 << 16
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
"""prctl(2)"""
_LIBC = ctypes.CDLL(None)


class Engine:
    """A started engine; the leader of its process group, so that all of it can be signalled at once."""

    def __init__(self, argv: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            process_group=0,
            preexec_fn=end_with_parent,
        )
        assert self._process.stdout is not None
        self._output = self._process.stdout.fileno()
        os.set_blocking(self._output, False)

    @property
    def pid(self) -> int:
        return self._process.pid

    def follow(self, on_output: Callable[[bytes], None], on_tick: Callable[[], None]) -> int:
        """Pass on the output until the engine ended, end what it left behind, and return its exit code."""
        while self._process.poll() is None:
            select.select([self._output], [], [], POLL_S)
            self._pass_on(on_output)
            on_tick()
        self._pass_on(on_output)
        on_tick()
        # Processes that the leader left hold the GPU's memory, and the other end of the output.
        self.signal_group(signal.SIGKILL)
        deadline_s = time.monotonic() + DRAIN_S
        while not self._pass_on(on_output) and time.monotonic() < deadline_s:
            select.select([self._output], [], [], 0.05)
        self._await_group()
        assert self._process.stdout is not None
        self._process.stdout.close()
        return int(self._process.returncode)

    def signal_leader(self, number: signal.Signals) -> None:
        """Signal the leader, which ends the others itself."""
        if self._process.poll() is None:
            self._process.send_signal(number)

    def signal_group(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def _pass_on(self, on_output: Callable[[bytes], None]) -> bool:
        """Pass on what is there; return whether the other end is closed."""
        while True:
            try:
                data = os.read(self._output, _CHUNK_BYTES)
            except BlockingIOError:
                return False
            if not data:
                return True
            on_output(data)

    def _await_group(self) -> None:
        deadline_s = time.monotonic() + GROUP_ENDS_S
        while time.monotonic() < deadline_s:
            with suppress(ChildProcessError):
                os.waitpid(-self.pid, os.WNOHANG)
            try:
                os.killpg(self.pid, 0)
            except (ProcessLookupError, PermissionError):
                return
            time.sleep(0.02)


def end_with_parent() -> None:
    """Ask the kernel to end this process when its parent ends; between fork and exec of a child."""
    # An engine without its keeper would go on unwatched, and hold the GPU against the next one.
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def adopt_orphans() -> None:
    """Become the parent of what an engine leaves behind, so that its end can be waited for."""
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1)
