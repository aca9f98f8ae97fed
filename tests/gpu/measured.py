"""What the measurements of a served model share: options, results files, and the description of the host."""

from __future__ import annotations

import argparse
import datetime
import fcntl
import json
import os
import platform
import queue
import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import served
from paths import ROOT
from versions import versions

from launcher.errors import CheckFailed

__all__ = ["CheckFailed", "Job", "add_bench", "bench", "host", "keep", "name_of", "read", "run", "stop_cleanly"]


def add_bench(parser: argparse.ArgumentParser, model: Path, vllm: str) -> None:
    """Add the options that say where and how servers are started."""
    parser.add_argument("--model", type=Path, default=model, help="the checkpoint that is served")
    parser.add_argument("--engine", choices=("gpu", "cpu"), default="gpu", help="cpu: to try the script out")
    parser.add_argument("--vllm", default=vllm, help="the command before `serve`")
    parser.add_argument("--budget-s", type=float, default=3600, help="start nothing that would end later")
    parser.add_argument("--at-once", type=int, default=1, help="servers at a time, on ports one after the other")
    parser.add_argument("--port", type=int, default=served.Bench.port, help="loopback port of the server")
    parser.add_argument("--memory", type=float, default=served.Bench.memory, help="share of the GPU's memory")
    parser.add_argument("--dummy-weights", action="store_true", help="random weights: to try the script out")


@dataclass(frozen=True)
class Job:
    """One server's work, and the seconds that it is taken to need at most."""

    name: str
    expected_s: float
    run: Callable[[served.Bench], str]
    """Does it on a bench with a port of its own; returns what came of it in one line."""


def run(jobs: Sequence[Job], bench: served.Bench, at_once: int, budget_s: float) -> None:
    """Run jobs in their order, so many at a time, but none that would probably end behind the budget."""
    deadline = time.monotonic() + budget_s
    ports: queue.SimpleQueue[int] = queue.SimpleQueue()
    for number in range(at_once):
        ports.put(bench.port + number)

    def one(job: Job) -> None:
        port = ports.get()
        try:
            if time.monotonic() + job.expected_s > deadline:
                print(f"{job.name}: left, within the budget", flush=True)
                return
            print(f"{job.name} ...", flush=True)
            print(f"{job.name}: {job.run(replace(bench, port=port))}", flush=True)
        finally:
            ports.put(port)

    with ThreadPoolExecutor(at_once) as pool:
        for done in [pool.submit(one, job) for job in jobs]:
            done.result()


def bench(options: argparse.Namespace) -> served.Bench:
    """Return what the options of `add_bench` say."""
    return served.Bench(
        model=options.model,
        engine=options.engine,
        vllm=options.vllm,
        port=options.port,
        memory=options.memory,
        dummy_weights=options.dummy_weights,
    )


def stop_cleanly() -> None:
    """Have SIGTERM and SIGINT end the servers and this program."""

    def end(number: int, frame: object) -> None:
        served.stop_all()
        os._exit(128 + number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)


def read(path: Path, schema: int) -> dict[str, Any]:
    """Return the results so far.

    Raises:
        SystemExit: the file is of another schema.
    """
    if not path.exists():
        return {"schema": schema, "host": {}, "cases": {}}
    results: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if results.get("schema") != schema:
        raise SystemExit(f"{path}: schema {results.get('schema')}, not {schema}; move it away and run all cases again")
    return results


def keep(
    path: Path,
    schema: int,
    name: str,
    entry: Mapping[str, Any],
    host: Mapping[str, str],
    derived: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda cases: {},
) -> None:
    """Put one entry into the results file, which other processes may write too, and what follows from all entries."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        results = read(path, schema)
        results["cases"][name] = dict(entry)
        results["host"] = dict(host)
        results |= derived(results["cases"])
        text = json.dumps(results, indent=1, sort_keys=True, ensure_ascii=False)
        text = re.sub(r"\[\s+([-\d.,e\s]+?)\s+\]", lambda found: f"[{' '.join(found[1].split())}]", text)
        temporary = path.with_suffix(".part")
        temporary.write_text(f"{text}\n", encoding="utf-8")
        temporary.replace(path)


def host(engine: str, model: Path) -> dict[str, str]:
    """Return the card or the processor, the versions and the model."""
    found = {
        "model": name_of(model),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        **versions(),
    }
    if engine == "gpu":
        # The driver is asked, not torch: this process must not hold the card.
        query = ("nvidia-smi", "--query-gpu=name,compute_cap", "--format=csv,noheader")
        gpu = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()[0]
        found["gpu"], found["compute_capability"] = (part.strip() for part in gpu.split(","))
    else:
        found["cpu"] = f"{os.cpu_count()} cores, {_processor()}"
    return found


def _processor() -> str:
    """The processor's name, and which of the instructions for bfloat16 it has."""
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    name = re.search(r"^model name\s*: (.*)", text, re.MULTILINE)
    flags = [flag for flag in ("avx512_bf16", "amx_bf16") if re.search(rf"\b{flag}\b", text)]
    return ", ".join([name[1] if name else platform.machine(), *flags])


def name_of(model: Path) -> str:
    """Return a checkpoint's path, relative to the checkout where it lies in it."""
    resolved = model.resolve()
    return str(resolved.relative_to(ROOT)) if resolved.is_relative_to(ROOT) else resolved.name
