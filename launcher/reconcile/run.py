"""Run a reconciliation: a process for each side, one after the other, then one that compares; files between them.

A side is recorded to disk, point by point as it is computed, and read back memory-mapped: two engines need not fit
beside each other, and what is in memory of activations is one point's.
"""

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.errors import CheckFailed, UsageError
from launcher.reconcile.sides import Side
from launcher.state import CHECKOUT

PROGRAM = "launcher.reconcile.program"
MOST_KL = 0.012
"""Mean KL in nats beyond which two sides do not count as the same model."""
_LAST_LINES = 12


@dataclass(frozen=True)
class Settings:
    """How much is compared: passages of `tokens` tokens, whose last `decoded` are decoded one by one."""

    tokens: int = 128
    passages: int = 2
    decoded: int = 16
    tolerance_scale: float = 1.0


@dataclass(frozen=True)
class Pair:
    """Two sides and what was found, as `program/compare.py` says it."""

    a: str
    b: str
    found: dict[str, Any]
    is_eager: bool
    """Whether the layers were seen on both sides."""

    @property
    def kl_is_small(self) -> bool:
        kl = self.found["logits"]["kl_mean"]
        return kl is not None and kl < MOST_KL

    @property
    def agree(self) -> bool:
        """Whether no point leaves its tolerance, and the distributions are close."""
        return self.found["first"] is None and self.kl_is_small


def reconcile(
    a: Side,
    others: Sequence[Side],
    prompts: Sequence[str | list[int]],
    settings: Settings,
    python: Path,
    phase: Callable[[str], None],
    work: Path | None = None,
) -> Iterator[Pair]:
    """Compare each of `others` with `a`, and yield each pair when it is compared.

    Args:
        a: what the others are measured against; recorded once.
        others: at least one.
        prompts: texts, or token ids.
        settings: how much.
        python: of an environment with vLLM, transformers and the launcher's dependencies or none.
        phase: told what is being done.
        work: folder for the activations, emptied afterwards; default: the system's for temporary files.

    Raises:
        UsageError: the sides are not of one model, or an engine refuses an option.
        CheckFailed: a process broke.

    """
    with tempfile.TemporaryDirectory(prefix="graft-reconcile-", dir=work) as name:
        folder = Path(name).absolute()
        phase(f"A: {a.name}")
        rows = _capture(a, folder / "a", None, prompts, settings, python)["rows"]
        for number, side in enumerate(others):
            phase(f"B: {side.name}")
            _capture(side, folder / "b", rows, prompts, settings, python)
            phase("compare")
            request = {"do": "compare", "a": str(folder / "a"), "b": str(folder / "b"), "rows": rows}
            found = _run(request | {"scale": settings.tolerance_scale}, folder / f"compare{number}.json", python)
            eager = any(point["layer"] is not None for point in found["points"])
            shutil.rmtree(folder / "b")
            yield Pair(a.name, side.name, found, eager)


def _capture(
    side: Side,
    out: Path,
    rows: list[list[int]] | None,
    prompts: Sequence[str | list[int]],
    settings: Settings,
    python: Path,
) -> dict[str, Any]:
    request = {
        "do": "capture",
        "side": side.name,
        "engine": side.engine,
        "model": str(side.model),
        "options": side.given(),
        "prompts": list(prompts),
        "rows": rows,
        "tokens": settings.tokens,
        "passages": settings.passages,
        "decoded": settings.decoded,
        "out": str(out),
    }
    return _run(request, out.with_suffix(".json"), python)


def _run(request: dict[str, Any], file: Path, python: Path) -> dict[str, Any]:
    """Do a request in vLLM's environment and return the answer."""
    file.write_text(json.dumps(request), encoding="utf-8")
    answer_file = file.with_suffix(".answer.json")
    answer_file.unlink(missing_ok=True)
    paths = (str(CHECKOUT), os.environ.get("PYTHONPATH", ""))
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    command = (str(python.absolute()), "-m", PROGRAM, str(file))
    log = file.with_suffix(".log")
    with log.open("w", encoding="utf-8") as said:
        done = subprocess.run(command, stdout=said, stderr=said, env=environ, cwd=file.parent, check=False)
    if not answer_file.is_file():
        last = "\n".join(log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-_LAST_LINES:])
        raise CheckFailed(
            f"{request.get('side', 'compare')}: the process ended with {done.returncode}. It said:\n{last}"
        )
    answer: dict[str, Any] = json.loads(answer_file.read_text(encoding="utf-8"))
    if "error" in answer:
        raise UsageError(answer["error"])
    return answer
