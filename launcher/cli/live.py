"""The live view of a start: phases with their times, a bar where there is something to count."""

import time
from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from launcher.weights.events import FileProgress

_NAMES = {
    "check": "check this machine",
    "install": "install the engine",
    "model": "model files",
    "verify": "compare every byte",
    "wheels": "wheels of the launcher",
    "images": "save the images",
    "pack": "write and hash",
    "pull": "pull the base image",
    "build": "build the image, prove the fixes",
    "start": "start vLLM",
    "engine": "start the engine",
    "load": "load weights",
    "compile": "compile",
    "warm-up": "warm up",
    "capture": "capture CUDA graphs",
    "serve": "serve",
    "canary": "ask a question",
    "monitoring": "start Prometheus and Grafana",
    "tool-calls": "call tools",
    "shared-prefix": "repeat with a shared prefix",
    "needles": "find needles",
    "round": "round to ternary weights",
    "equality": "compare with the reference",
}
_STEP_S = 10.0
"""Without a screen: seconds between two lines about one phase."""


class Live:
    """Prints one line a finished phase, and keeps the running one moving where there is a screen."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            TextColumn("{task.fields[count]}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task: TaskID | None = None
        self._files: dict[str, TaskID] = {}
        self._name = ""
        self._since_s = 0.0
        self._told_s = 0.0

    def __enter__(self) -> "Live":
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._finish("ok" if kind is None else "failed")
        self._progress.stop()

    def phase(self, name: str) -> None:
        """Begin a phase, which ends the one before."""
        self._finish("ok")
        self._name, self._since_s = _NAMES.get(name, name), time.monotonic()
        self._told_s = self._since_s
        self._task = self._progress.add_task(self._name, total=None, count="")

    def progress(self, done: float, total: float, unit: str, detail: str = "") -> None:
        """Say how far the phase is."""
        count = f"{done / 1e6:.0f} of {total / 1e6:.0f} MB" if unit == "bytes" else f"{done:g} of {total:g} {unit}"
        if self._task is not None:
            self._progress.update(self._task, completed=done, total=total, count=escape(f"{count} {detail}".rstrip()))
        now_s = time.monotonic()
        if not self._console.is_terminal and now_s - self._told_s >= _STEP_S:
            self._told_s = now_s
            self._console.print(f"     {self._name}: {count}", markup=False)

    def files(self, files: Sequence[FileProgress]) -> None:
        """Show one bar for each file that is under way, below the phase's own."""
        for name in self._files.keys() - {file.path for file in files}:
            self._progress.remove_task(self._files.pop(name))
        for file in files:
            if file.path not in self._files:
                self._files[file.path] = self._progress.add_task(
                    f"  {escape(file.path)}", total=file.total_bytes, count=""
                )
            total = f" of {file.total_bytes / 1e6:.0f}" if file.total_bytes else ""
            self._progress.update(
                self._files[file.path],
                completed=file.done_bytes,
                count=f"{file.done_bytes / 1e6:.0f}{total} MB",
            )

    def note(self, text: str) -> None:
        """Say something that stays."""
        self._console.print(f"     {text}", markup=False)

    def line(self, text: str) -> None:
        """Show the log's last line beside the phase, where there is nothing to count."""
        if self._task is not None and self._progress.tasks:
            task = next(one for one in self._progress.tasks if one.id == self._task)
            if task.total is None:
                shown = text.strip()[: max(20, self._console.width - 70)]
                self._progress.update(self._task, count=f"[dim]{escape(shown)}[/]")

    def _finish(self, mark: str) -> None:
        self.files(())
        if self._task is None:
            return
        self._progress.remove_task(self._task)
        self._task = None
        seconds = time.monotonic() - self._since_s
        style = "green" if mark == "ok" else "bold red"
        self._console.print(f"[{style}]{mark:>4}[/] {self._name} [dim]{seconds:.1f} s[/]")
