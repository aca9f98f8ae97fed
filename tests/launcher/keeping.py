"""Keepers in processes of their own that start at once: forked from a server that has imported all they need."""

import multiprocessing
import os
import signal
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from launcher.diagnose import rules
from launcher.operate import keeper

# Read once, in the server.
rules()

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.launcher.keeping"])


def start(settings: Path, log: Path) -> ForkServerProcess:
    """Start a keeper whose output goes to the log's end."""
    process = CONTEXT.Process(target=_keep, args=(settings, log), daemon=False)
    process.start()
    return process


def _keep(settings: Path, log: Path) -> None:
    with log.open("ab") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    # What a process that was started by exec begins with.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.set_wakeup_fd(-1)
    os._exit(keeper.main([str(settings)]))
