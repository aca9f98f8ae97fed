"""The wheels that an install without network needs: the launcher's for each Python, the engine's for this one."""

import platform
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

from launcher import engine_env, pip_run
from launcher.errors import Refused
from launcher.state import CHECKOUT

PYTHONS = ("3.11", "3.12", "3.13", "3.14")
"""Releases that the launcher may be installed with."""


def this_python() -> str:
    """Return this Python's release, such as "3.11"."""
    return ".".join(platform.python_version_tuple()[:2])


def bring_launchers(folder: Path, listener: pip_run.Listener) -> tuple[str, ...]:
    """Download what the launcher's lock pins, and what builds its two distributions; return the Pythons it is for.

    Raises:
        Refused: not even this Python's can be had.
    """
    lock = ("--require-hashes", "-r", str(CHECKOUT / "requirements" / "launcher.txt"))
    served = []
    for python in dict.fromkeys((this_python(), *PYTHONS)):
        failure = _download(folder, listener, "--only-binary", ":all:", "--python-version", python, *lock)
        if failure is None:
            served.append(python)
        elif python == this_python():
            raise Refused(f"the launcher's wheels cannot be downloaded; pip says:\n{failure}")
    failure = _download(folder, listener, "--only-binary", ":all:", *dict.fromkeys(_build_requirements()))
    if failure is not None:
        raise Refused(f"what the launcher is built with cannot be downloaded; pip says:\n{failure}")
    return tuple(served)


def bring_engines(folder: Path, listener: pip_run.Listener) -> None:
    """Download what the CPU engine's lock pins, and torch, for this Python.

    Raises:
        Refused: pip cannot.
    """
    torch = (engine_env.TORCH, "--only-binary", ":all:")
    failure = _download(folder, listener, *torch)
    if failure is not None:
        failure = _download(folder, listener, *torch, "--extra-index-url", engine_env.TORCH_INDEX)
    failure = failure or _download(folder, listener, "--require-hashes", "-r", str(engine_env.ENGINE.lock))
    if failure is not None:
        raise Refused(f"the engine's wheels cannot be downloaded; pip says:\n{failure}")


def _download(folder: Path, listener: pip_run.Listener, *what: str) -> str | None:
    command = (sys.executable, "-m", "pip", "download", "--no-deps", "--progress-bar", "raw")
    return pip_run.run((*command, "--dest", str(folder), *what), listener)


def _build_requirements() -> Iterator[str]:
    for project in (CHECKOUT, CHECKOUT / "patches"):
        document = tomllib.loads((project / "pyproject.toml").read_text(encoding="utf-8"))
        yield from document["build-system"]["requires"]
