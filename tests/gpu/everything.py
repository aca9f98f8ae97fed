#!/usr/bin/env python3
"""Run all measurements of this folder on one GPU, within a time; what has been cut is gone on with by the next run.

    python3 tests/gpu/everything.py --budget-s 1500        # again until it ends with 0
    python3 tests/gpu/everything.py --only headline soak   # some of them
    python3 tests/gpu/everything.py --list

First what may share the card, PLACES at a time: correctness, with KV pools of a given size.  Then, one after the other
and alone, what measures speed or memory.  Each measurement keeps its own results file; the logs are in --work.  The
exit status is 0 when all holds, 3 when something is left, 1 otherwise.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
PLACES = 5
"""Programs that share the card at a time; each may start several engines, and those want processor cores."""
LEFT = 3
"""The exit status of a measurement that was cut."""
LEAST_S = 30.0
"""Nothing is begun with less."""
GRACE_S = 60.0
"""A measurement ends by itself soon behind its budget; later it is killed, and what it has written is kept."""


@dataclass(frozen=True)
class Step:
    """One program, the most seconds that it is given, and whether it may share the card."""

    name: str
    program: str
    most_s: float
    arguments: tuple[str, ...] = ()
    shares: bool = False
    budget: bool = True
    """Whether it takes --budget-s."""
    results: str = "--results"
    """The option that takes the results file; empty: it has none."""
    file: str = ""
    """The results file's name, where it is not the program's."""

    def command(self, results: Path, budget_s: float) -> list[str]:
        """Return what is run."""
        budget = ("--budget-s", f"{budget_s:.0f}") if self.budget else ()
        name = self.file or f"{Path(self.program).stem}.json"
        file = (self.results, str(results / name)) if self.results else ()
        return [sys.executable, str(HERE / self.program), *self.arguments, *file, *budget]


SOAK = ("--only", "soak", "--soak-s", "600", "--memory", "0.05", "--port", "8790")
STEPS = (
    Step("flash-ready", "flash_ready.py", 300, shares=True, budget=False, results=""),
    Step("store-and-prefix", "store_prefill_check.py", 60, shares=True),
    Step("soak", "prefix_probe.py", 700, SOAK, shares=True),
    Step("headline", "headline.py", 600, ("--at-once", "5"), shares=True),
    Step("prefix-probe", "prefix_probe.py", 600, ("--at-once", "4", "--port", "8780"), shares=True),
    Step(
        "reference-model",
        "../reference_model/score_in_vllm.py",
        600,
        ("--at-once", "2", "--port", "8775"),
        shares=True,
        file="reference_model.json",
    ),
    Step("spec-decode", "spec_decode.py", 900, ("--at-once", "4"), shares=True),
    Step("kv-dtypes", "reconcile_kv.py", 600, shares=True, budget=False),
    Step("ternary-kl", "ternary_engine.py", 300, ("--only", "kl"), shares=True),
    Step("attention-speed", "attention_speed.py", 150),
    Step("prefill-speed", "prefill_speed.py", 120),
    Step("end-to-end", "end_to_end.py", 560),
    Step("spec-attention", "spec_attention.py", 180, budget=False),
    Step("ternary-speed", "ternary_speed.py", 120),
    Step("ternary-engine", "ternary_engine.py", 560),
    Step("fit-boots", "fit_boots.py", 600, ("run",), results="--out"),
)


@dataclass(frozen=True)
class Ended:
    """What became of a step; the status None: there was no time for it."""

    status: int | None
    took_s: float = 0.0

    def __str__(self) -> str:
        said = {None: "no time left", 0: "done", LEFT: "some is left"}.get(self.status, f"exit status {self.status}")
        return f"{said}, {self.took_s:.0f} s"


def run(steps: Sequence[Step], results: Path, work: Path, budget_s: float) -> dict[str, Ended]:
    """Run steps, those that share the card first and PLACES at a time, and return how each ended."""
    deadline = time.monotonic() + budget_s
    together = [step for step in steps if step.shares]
    ended: dict[str, Ended] = {}
    with ThreadPoolExecutor(PLACES) as pool:
        for step, outcome in zip(
            together, pool.map(lambda one: _run(one, results, work, deadline), together), strict=True
        ):
            ended[step.name] = outcome
    for step in steps:
        if not step.shares:
            ended[step.name] = _run(step, results, work, deadline)
    return ended


def _run(step: Step, results: Path, work: Path, deadline: float) -> Ended:
    begun = time.monotonic()
    budget_s = min(step.most_s, deadline - begun)
    if budget_s < min(LEAST_S, step.most_s):
        return Ended(None)
    print(f"{step.name}: at most {budget_s:.0f} s", flush=True)
    with (work / f"{step.name}.log").open("wb") as log:
        process = subprocess.Popen(step.command(results, budget_s), stdout=log, stderr=subprocess.STDOUT)
        try:
            status = process.wait(budget_s + GRACE_S)
        except subprocess.TimeoutExpired:
            process.terminate()
            try:
                process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            status = LEFT
    outcome = Ended(status, time.monotonic() - begun)
    print(f"{step.name}: {outcome}", flush=True)
    return outcome


def status_of(ended: Mapping[str, Ended]) -> int:
    """Return the exit status of all: a failure counts for more than what is left."""
    statuses = [LEFT if one.status is None else one.status for one in ended.values()]
    return next((1 for status in statuses if status not in (0, LEFT)), max(statuses, default=0))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget-s", type=float, default=7200, help="begin nothing later, and cut what takes longer")
    parser.add_argument("--only", nargs="+", choices=[step.name for step in STEPS], help="run only these")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the folder of the results files")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "everything", help="logs")
    parser.add_argument("--list", action="store_true", help="print the names of all measurements and stop")
    options = parser.parse_args()
    steps = [step for step in STEPS if not options.only or step.name in options.only]
    if options.list:
        print(*(step.name for step in steps), sep="\n")
        return 0
    for folder in (options.results, options.work):
        folder.mkdir(parents=True, exist_ok=True)
    return status_of(run(steps, options.results, options.work, options.budget_s))


if __name__ == "__main__":
    sys.exit(main())
