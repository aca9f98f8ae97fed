#!/usr/bin/env python3
"""Proof on a GPU that greedy output with speculation equals greedy output without, on a TurboQuant KV cache.

    python3 tests/gpu/spec_decode.py --results tests/gpu/results/spec_decode.json --at-once 4 --budget-s 560

Needs one NVIDIA GPU and vLLM 0.33.0 importable; no weights and no network.  Runs the cases of spec_cases.py, so many at
a time, each in a process of its own, and adds each to the results file as soon as it is done.  A case that is in the
file is not run again, one that broke is, so the same command goes on where the last stopped.  No case is started that
would probably not end within the budget.  Speed is not measured here: end_to_end.py does that.  The exit status is 0
when all cases are in the file and every fixed and every control case passes, 3 when cases are left, 1 otherwise.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import json
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import spec_cases
import spec_compare
import spec_engine
from spec_cases import Case
from spec_compare import Generated
from versions import versions

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).parent / "results" / "spec_decode.json"
WORK = Path(tempfile.gettempdir()) / "spec-decode"
SCHEMA = 2
TIMEOUT_S = 400
REFUSALS = ("forked subprocess", "CUDA error: initialization error")
"""What CUDA says in a forked process where it was started before the fork."""
_PR_SET_PDEATHSIG = 1

Run = Callable[[Case, Path], Any]


def main(arguments: Sequence[str] | None = None, run: Run | None = None) -> int:
    """Run what is left, print the table, and say whether all of it holds; `run` stands in for the engine in tests."""
    options = _options(arguments)
    if options.list:
        for case in spec_cases.in_order():
            print(case.id)
        return 0
    results = read(options.results)
    left = [case for case in spec_cases.in_order() if not _done(results, case)]
    if options.only:
        left = [case for case in left if options.only in case.id]
    begun = _begun(left, results, time.monotonic() + options.budget_s)
    for case, entry in outcomes(begun, run or spec_engine.run, options.work, options.at_once):
        results["cases"][case.id] = entry
        results.setdefault("host", {}).update(entry.pop("host", {}))
        write(options.results, judged(results))
        print(f"{case.id}: {line(entry)}", flush=True)
    results = judged(results)
    print(table(results))
    return status(results)


def _begun(left: Sequence[Case], results: Mapping[str, Any], deadline: float) -> Iterator[Case]:
    """Give the cases that are left, each when there is a place for it, until one would probably end too late."""
    for number, case in enumerate(left):
        if time.monotonic() + _expected_s(case, first=not results["cases"]) > deadline:
            print(f"stopping within the budget: {len(left) - number} cases are left", flush=True)
            return
        print(f"[{number + 1}/{len(left)}] {case.id}", flush=True)
        yield case


def _expected_s(case: Case, *, first: bool) -> int:
    """What a case is taken to need at most: the first of all compiles the kernels, piecewise graphs the model."""
    return 240 if first else 120 if "PIECEWISE" in case.graph else 60


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS, help="the results file, which is gone on with")
    parser.add_argument("--work", type=Path, default=WORK, help="logs of the cases")
    parser.add_argument("--at-once", type=int, default=1, help="cases at a time, which share the GPU")
    parser.add_argument("--budget-s", type=float, default=3600, help="start no case that would end later")
    parser.add_argument("--only", help="run only cases whose id contains this")
    parser.add_argument("--list", action="store_true", help="print the ids of all cases and stop")
    return parser.parse_args(arguments)


# The results file.


def read(path: Path) -> dict[str, Any]:
    """The results so far.

    Raises:
        SystemExit: the file is of another schema.

    """
    if not path.exists():
        return {"schema": SCHEMA, "epsilon": spec_compare.EPSILON, "host": {}, "cases": {}}
    results: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if results.get("schema") != SCHEMA:
        raise SystemExit(f"{path}: schema {results.get('schema')}, not {SCHEMA}; move it away and run all cases again")
    return results


def write(path: Path, results: Mapping[str, Any]) -> None:
    """Write the results whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".part")
    text = json.dumps(results, indent=1, sort_keys=True)
    text = re.sub(r"\[\s+([-\d.,e\s]+?)\s+\]", lambda found: f"[{' '.join(found[1].split())}]", text)
    temporary.write_text(text + "\n", encoding="utf-8")
    temporary.replace(path)


def _done(results: Mapping[str, Any], case: Case) -> bool:
    return "error" not in results["cases"].get(case.id, {"error": "not run"})


def judged(results: dict[str, Any]) -> dict[str, Any]:
    """The results with each case compared with its reference."""
    cases = results["cases"]
    for case in spec_cases.in_order():
        entry, reference = cases.get(case.id), cases.get(case.reference.id)
        if case.method is None or not entry or not reference or "error" in entry or "error" in reference:
            continue
        differences = spec_compare.compare_streams(_streams(reference), _streams(entry))
        entry["passes"] = spec_compare.passes(differences)
        entry["graphs_not_replayed"] = sorted(spec_engine.graphs_needed(case) - set(entry["graph_replays"]))
        entry["differences"] = {name: [asdict(one) for one in items] for name, items in differences.items()}
    results["uncovered_pairs"] = sorted(
        " ".join(pair)
        for pair in spec_cases.uncovered_pairs(case for case in spec_cases.PAIRWISE if _done(results, case))
    )
    return results


def _streams(entry: Mapping[str, Any]) -> dict[str, tuple[Generated, ...]]:
    return {
        name: tuple(Generated(tuple(one["tokens"]), tuple(one["margins"])) for one in items)
        for name, items in entry["streams"].items()
    }


# Running cases.


class Cut(Exception):
    """A case was ended by the budget, before the time that it may take."""


@dataclass(frozen=True)
class _Attempt:
    """A case in a process of its own; its output goes to a log, whose end is kept when it fails."""

    case: Case
    process: BaseProcess
    forked: bool
    directory: Path
    begun: float
    """By time.monotonic, in seconds."""

    @classmethod
    def of(cls, case: Case, run: Run, work: Path, *, forked: bool) -> _Attempt:
        directory = work / case.id
        directory.mkdir(parents=True, exist_ok=True)
        outcome = directory / "record.json"
        outcome.unlink(missing_ok=True)
        context = multiprocessing.get_context("fork") if forked else multiprocessing.get_context("spawn")
        process = context.Process(target=_child, args=(case, run, directory, outcome))
        begun = time.monotonic()
        process.start()
        return cls(case, process, forked, directory, begun)

    def has_ended(self, limit_s: float) -> bool:
        """Whether it is done; one that ran past its time is ended.

        Raises:
            Cut: it ran past `limit_s`, which is less than a case may take.

        """
        if self.process.exitcode is not None:
            return True
        if time.monotonic() - self.begun < min(limit_s, TIMEOUT_S):
            return False
        self.end()
        if limit_s < TIMEOUT_S:
            raise Cut
        return True

    def end(self) -> None:
        self.process.kill()
        self.process.join()

    def entry(self) -> dict[str, Any]:
        seconds = round(time.monotonic() - self.begun, 1)
        outcome, log = self.directory / "record.json", self.directory / "log"
        if outcome.exists():
            return {**asdict(self.case), **json.loads(outcome.read_text(encoding="utf-8")), "total_s": seconds}
        text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
        why = "ran past its time" if seconds >= TIMEOUT_S else f"ended with {self.process.exitcode}"
        return {**asdict(self.case), "error": f"{why}: {text[-3000:]}", "total_s": seconds}


def outcomes(
    cases: Iterable[Case], run: Run, work: Path, at_once: int = 1, limit_s: float = TIMEOUT_S
) -> Iterator[tuple[Case, dict[str, Any]]]:
    """Run cases, so many at a time, and give each when it is done, with its entry.

    Each is forked after the long imports unless CUDA refuses that, and by this thread alone: a fork beside other
    threads may inherit their locks, and Linux ends a child with the thread that forked it.

    Raises:
        Cut: one was not done within `limit_s`, which is less than a case may take.

    """
    waiting = iter(cases)
    running: list[_Attempt] = []
    try:
        while True:
            places = at_once - len(running)
            running += [_Attempt.of(case, run, work, forked=True) for case in islice(waiting, places)]
            if not running:
                return
            connection.wait([attempt.process.sentinel for attempt in running], timeout=0.5)
            for attempt in [one for one in running if one.has_ended(limit_s)]:
                running.remove(attempt)
                entry = attempt.entry()
                if attempt.forked and any(text in entry.get("error", "") for text in REFUSALS):
                    running.append(_Attempt.of(attempt.case, run, work, forked=False))
                else:
                    yield attempt.case, entry
    finally:
        for attempt in running:
            attempt.end()


def execute(case: Case, run: Run, work: Path, limit_s: float = TIMEOUT_S) -> dict[str, Any]:
    """Run one case, and return its entry.

    Raises:
        Cut: it was not done within `limit_s`, which is less than a case may take.

    """
    ((_, entry),) = outcomes([case], run, work, limit_s=limit_s)
    return entry


def _child(case: Case, run: Run, directory: Path, outcome: Path) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # not to hold the card when the run is ended
    sys.stdout = sys.stderr = (directory / "log").open("w", encoding="utf-8", buffering=1)
    os.dup2(sys.stdout.fileno(), 1)  # for what is written below Python
    os.dup2(sys.stdout.fileno(), 2)
    record = run(case, directory)
    temporary = outcome.with_suffix(".part")
    temporary.write_text(json.dumps({**asdict(record), "host": host()}), encoding="utf-8")
    temporary.replace(outcome)
    sys.stdout.flush()
    os._exit(0)  # an engine's threads may outlive it


def host() -> dict[str, str]:
    """The card and the versions that ran."""
    torch = sys.modules.get("torch")
    found = {"date": datetime.datetime.now(datetime.UTC).date().isoformat(), **versions("vllm-graft")}
    if torch is not None and torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        found |= {
            "gpu": torch.cuda.get_device_name(),
            "compute_capability": f"{major}.{minor}",
            "cuda": torch.version.cuda,
        }
    return found


# Reading the results.


def line(entry: Mapping[str, Any]) -> str:
    """One case in one line."""
    if "error" in entry:
        return f"ERROR after {entry['total_s']} s: {entry['error'].strip().splitlines()[-1][:200]}"
    parts = [f"{entry['total_s']} s (boot {entry['boot_s']})"]
    for name, items in entry.get("differences", {}).items():
        short = {"equal": "", "near-tie": "~", "wrong": "!"}
        parts.append(f"{name} {' '.join(str(one['common']) + short[one['verdict']] for one in items)}")
    if entry["acceptance_length"]:
        parts.append(f"acceptance {entry['acceptance_length']}")
    if "passes" in entry:
        parts.append("pass" if entry["passes"] else "WRONG")
    if entry.get("graphs_not_replayed"):
        parts.append(f"never replayed {', '.join(entry['graphs_not_replayed'])}")
    return "; ".join(parts)


def table(results: Mapping[str, Any]) -> str:
    """All cases, one a line."""
    lines = [f"near ties are below {results['epsilon']}; {json.dumps(results.get('host', {}))}"]
    for case in spec_cases.in_order():
        entry = results["cases"].get(case.id)
        lines.append(f"{case.id}: {line(entry) if entry else 'not run'}")
    return "\n".join(lines)


def status(results: Mapping[str, Any]) -> int:
    """The exit status: 3 cases are left, 1 a case failed or a fixed or control case is wrong, 0 all holds."""
    cases = results["cases"]
    if any("error" in entry for entry in cases.values()):
        return 1
    must_pass = [case for case in spec_cases.in_order() if case.method and case not in spec_cases.STOCK]
    found = [cases[case.id] for case in must_pass if case.id in cases]
    if any(not entry.get("passes", True) or entry.get("graphs_not_replayed") for entry in found):
        return 1
    return 3 if any(case.id not in cases for case in spec_cases.in_order()) else 0


def install_plugin(directory: Path) -> Path:
    """Make vllm-graft of this checkout a distribution with its entry point, as installing its wheel would, in a folder.

    vLLM finds plugins by the metadata of distributions on sys.path; the folder goes to PYTHONPATH for child processes.
    """
    project = tomllib.loads((ROOT / "patches" / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    sys.path.insert(0, str(ROOT / "patches"))
    import vllm_graft

    metadata = directory / f"vllm_graft-{vllm_graft.__version__}.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.4\nName: {project['name']}\nVersion: {vllm_graft.__version__}\n", encoding="utf-8"
    )
    groups = [
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in entries.items())
        for group, entries in project["entry-points"].items()
    ]
    (metadata / "entry_points.txt").write_text("\n".join(groups), encoding="utf-8")
    paths = [str(directory), str(ROOT / "patches"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    sys.path.insert(0, str(directory))
    return directory


def preload() -> None:
    """Import vLLM's engine once, for all cases to be forked from; nothing here starts CUDA."""
    import vllm.entrypoints.llm
    import vllm.v1.engine.llm_engine
    import vllm.v1.worker.gpu.model_runner
    import vllm.v1.worker.gpu_worker  # noqa: F401


if __name__ == "__main__":
    if not {"--list", "-h", "--help"} & set(sys.argv):
        install_plugin(WORK / "plugin")
        preload()
    sys.exit(main())
