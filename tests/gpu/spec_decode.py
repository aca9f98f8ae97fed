#!/usr/bin/env python3
"""Proof on a GPU that greedy output with speculation equals greedy output without, on a TurboQuant KV cache.

    python3 tests/gpu/spec_decode.py --results tests/gpu/results/spec_decode.json --budget-s 560

Needs one NVIDIA GPU and vLLM 0.33.0 importable; no weights and no network.  Runs the cases of spec_cases.py one after
the other, each in a process of its own, and adds each to the results file as soon as it is done.  A case that is in the
file is not run again, one that broke is, so the same command goes on where the last stopped.  No case is started that
would probably not end within the budget.  The exit status is 0 when all cases are in the file and every fixed and every
control case passes, 3 when cases are left, 1 otherwise.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import importlib.metadata
import json
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from multiprocessing.context import ForkContext, SpawnContext
from pathlib import Path
from typing import Any

import spec_cases
import spec_compare
import spec_engine
from spec_cases import Backend, Case
from spec_compare import Generated

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).parent / "results" / "spec_decode.json"
WORK = Path(tempfile.gettempdir()) / "spec-decode"
SCHEMA = 1
TIMEOUT_S = 300
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
    deadline = time.monotonic() + options.budget_s
    for number, case in enumerate(left):
        if time.monotonic() + _expected_s(case, first=not results["cases"]) > deadline:
            print(f"stopping within the budget: {len(left) - number} cases are left")
            break
        print(f"[{number + 1}/{len(left)}] {case.id}", flush=True)
        entry = execute(case, run or spec_engine.run, options.work)
        results["cases"][case.id] = entry
        results.setdefault("host", {}).update(entry.pop("host", {}))
        write(options.results, judged(results))
        print("    " + line(case, results["cases"][case.id]), flush=True)
    results = judged(results)
    print(table(results))
    return status(results)


def _expected_s(case: Case, *, first: bool) -> int:
    """What a case is taken to need at most: the first of all compiles the kernels, piecewise graphs the model."""
    return 240 if first else 120 if "PIECEWISE" in case.graph else 60


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS, help="the results file, which is gone on with")
    parser.add_argument(
        "--work", type=Path, default=Path(tempfile.gettempdir()) / "spec-decode", help="logs of the cases"
    )
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
    """The results with each case compared with its reference, and the ratios of speed of fixed to stock."""
    cases = results["cases"]
    for case in spec_cases.in_order():
        entry, reference = cases.get(case.id), cases.get(case.reference.id)
        if case.method is None or not entry or not reference or "error" in entry or "error" in reference:
            continue
        differences = spec_compare.compare_streams(_streams(reference), _streams(entry))
        entry["passes"] = spec_compare.passes(differences)
        entry["graphs_not_replayed"] = sorted(spec_engine.graphs_needed(case) - set(entry["graph_replays"]))
        entry["differences"] = {name: [asdict(one) for one in items] for name, items in differences.items()}
    results["speed_ratios"] = _ratios(cases)
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


def _ratios(cases: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Tokens per second of the fixed run of the same settings, and of the default profile, over each stock run."""
    ratios = {}
    for stock in spec_cases.STOCK:
        same = Case(Backend.FIXED, *[getattr(stock, name) for name in list(spec_cases.FACTORS)])
        for fixed in dict.fromkeys((same, spec_cases.DEFAULTS[0])):
            if all("speed" in cases.get(case.id, {}) for case in (stock, fixed)) and (
                fixed.kv_cache_dtype == stock.kv_cache_dtype
            ):
                one, other = cases[fixed.id]["speed"], cases[stock.id]["speed"]
                ratios[f"{fixed.id} / {stock.id}"] = {key: round(one[key] / other[key], 3) for key in one}
    return ratios


# Running one case.


class Cut(Exception):
    """A case was ended by the budget, before the time that it may take."""


def execute(case: Case, run: Run, work: Path, limit_s: float = TIMEOUT_S) -> dict[str, Any]:
    """Run a case in a process of its own, forked after the long imports unless CUDA refuses that.

    Raises:
        Cut: it was not done within `limit_s`, which is less than a case may take.

    """
    entry = _attempt(case, run, work, multiprocessing.get_context("fork"), limit_s)
    if any(refusal in entry.get("error", "") for refusal in ("forked subprocess", "CUDA error: initialization error")):
        entry = _attempt(case, run, work, multiprocessing.get_context("spawn"), limit_s)
    return entry


def _attempt(case: Case, run: Run, work: Path, context: ForkContext | SpawnContext, limit_s: float) -> dict[str, Any]:
    """Run a case; its output goes to a log, whose end is kept when it fails."""
    directory = work / case.id
    directory.mkdir(parents=True, exist_ok=True)
    outcome = directory / "record.json"
    outcome.unlink(missing_ok=True)
    start = time.monotonic()
    child = context.Process(target=_child, args=(case, run, directory, outcome))
    child.start()
    child.join(min(limit_s, TIMEOUT_S))
    if child.is_alive():
        child.kill()
        child.join()
        if limit_s < TIMEOUT_S:
            raise Cut
    seconds = round(time.monotonic() - start, 1)
    if outcome.exists():
        return {**asdict(case), **json.loads(outcome.read_text(encoding="utf-8")), "total_s": seconds}
    log = (directory / "log").read_text(encoding="utf-8", errors="replace") if (directory / "log").exists() else ""
    why = "ran past its time" if seconds >= TIMEOUT_S else f"ended with {child.exitcode}"
    return {**asdict(case), "error": f"{why}: {log[-3000:]}", "total_s": seconds}


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
    found = {"date": datetime.datetime.now(datetime.UTC).date().isoformat(), "python": sys.version.split()[0]}
    for name in ("vllm", "torch", "triton", "vllm-graft"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    if torch is not None and torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        found |= {
            "gpu": torch.cuda.get_device_name(),
            "compute_capability": f"{major}.{minor}",
            "cuda": torch.version.cuda,
        }
    return found


# Reading the results.


def line(case: Case, entry: Mapping[str, Any]) -> str:
    """One case in one line."""
    if "error" in entry:
        return f"ERROR after {entry['total_s']} s: {entry['error'].strip().splitlines()[-1][:200]}"
    parts = [f"{entry['total_s']} s (boot {entry['boot_s']})"]
    for name, items in entry.get("differences", {}).items():
        short = {"equal": "", "near-tie": "~", "wrong": "!"}
        parts.append(f"{name} {' '.join(str(one['common']) + short[one['verdict']] for one in items)}")
    if entry["acceptance_length"]:
        parts.append(f"acceptance {entry['acceptance_length']}")
    parts.append(f"{entry['speed']['single_tokens_per_s']} and {entry['speed']['batch_tokens_per_s']} tok/s")
    if "passes" in entry:
        parts.append("pass" if entry["passes"] else "WRONG")
    if entry.get("graphs_not_replayed"):
        parts.append(f"never replayed {', '.join(entry['graphs_not_replayed'])}")
    return "; ".join(parts)


def table(results: Mapping[str, Any]) -> str:
    """All cases, one a line, and the ratios."""
    lines = [f"near ties are below {results['epsilon']}; {json.dumps(results.get('host', {}))}"]
    for case in spec_cases.in_order():
        entry = results["cases"].get(case.id)
        lines.append(f"{case.id}: {line(case, entry) if entry else 'not run'}")
    lines += [f"{name}: {ratio}" for name, ratio in results["speed_ratios"].items()]
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
