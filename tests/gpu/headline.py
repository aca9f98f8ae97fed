#!/usr/bin/env python3
"""Measure what speculation on a TurboQuant KV cache does to tool calls and needles: vLLM as it is, and with the fixes.

    python3 tests/gpu/headline.py --at-once 5 --results tests/gpu/results/headline.json

Needs one NVIDIA GPU, vLLM 0.33.0 importable, and the reference model, whose replies are sharp: a corrupted KV cache
shows as a failed call.  Each case boots vLLM's OpenAI server with MTP, FULL CUDA graphs and async scheduling, asks one
request at a time and eight at once, and is added to the results file as soon as it is done.  Cases may run at once, on
one card: speed is not measured.  A case that is in the file is not run again, one that broke is.  The exit status is 0
when all cases are in the file and every case that must be right is, 3 when cases are left, 1 otherwise.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import measured
from served import (
    REFERENCE_MODEL,
    VLLM,
    Bench,
    Died,
    Serve,
    Server,
    Setup,
    acceptance_length,
    arguments_of,
    end_of_log,
    served,
)

from launcher.ask import Connection
from launcher.measure import ladder, tools
from launcher.measure.dialogues import Task
from launcher.measure.needles import needle
from launcher.measure.replies import Failure, How, Reply, Share, reply
from launcher.measure.target import Target, target_of, together

RESULTS = Path(__file__).parent / "results" / "headline.json"
SCHEMA = 1
SEED = 20_261_130
BATCHES = (1, 8)
REPLIES = {1: 60, 8: 240}
"""Replies asked for by requests under way at a time."""
PART_S = {1: 12.0, 8: 10.0}
"""No reply is begun later in its part: a corrupted cache makes replies that never end."""
LENGTHS = (512, 1024, 2048, 4096, 8192)
DEPTHS = (0.1, 0.5, 0.9)
KEPT_FAILURES = 4
"""Of each batch, with their raw text; all are counted."""
KEPT_CHARS = 600
"""Of a wrong reply's raw text."""
EXPECTED_S = {"gpu": 75.0, "cpu": 240.0}
RIGHT = 0.99
"""Share of right replies and found needles that a case must reach which is to be right."""

TURBOQUANT, UNQUANTIZED = "turboquant_k8v4", "auto"


@dataclass(frozen=True)
class Case:
    """One server; `must_be_right` is not said of vLLM as it is, whose faults the table shows."""

    id: str
    setup: Setup
    must_be_right: bool


CASES = (
    Case("graft-k8v4", Setup(graft=True, kv_cache_dtype=TURBOQUANT), True),
    Case("stock-k8v4", Setup(graft=False, kv_cache_dtype=TURBOQUANT), False),
    Case("control-bf16", Setup(graft=False, kv_cache_dtype=UNQUANTIZED), True),
    Case("graft-k8v4-older-card", Setup(graft=True, kv_cache_dtype=TURBOQUANT, older_card=True), True),
    Case("stock-k8v4-older-card", Setup(graft=False, kv_cache_dtype=TURBOQUANT, older_card=True), False),
)


@dataclass(frozen=True)
class Batch:
    """What came of so many requests at a time."""

    tools: Share
    kinds: dict[str, Share]
    hows: dict[str, Share]
    """By way of asking; `required` puts a strict grammar over the drafts."""
    twins: Share
    needles: Share
    needles_by_length: dict[str, Share]
    tokens_a_step: float | None
    """Mean tokens of a verification; None without drafts."""
    seconds: float
    failures: tuple[Failure, ...]


def main(arguments: Sequence[str] | None = None, serve: Serve = served) -> int:
    """Run what is left, print the table, and say whether all of it holds."""
    options = _options(arguments)
    if options.list:
        print("\n".join(case.id for case in CASES))
        return 0
    bench = measured.bench(options)
    host = measured.host(bench.engine, bench.model)

    def run(case: Case, bench: Bench) -> str:
        entry: dict[str, Any] = {}
        for entry in execute(case, bench, options.work / case.id, serve):
            measured.keep(options.results, SCHEMA, case.id, entry, host)
        return line(entry)

    left = _left(measured.read(options.results, SCHEMA), options.only)
    jobs = [measured.Job(case.id, EXPECTED_S[bench.engine], partial(run, case)) for case in left]
    measured.run(jobs, bench, options.at_once, options.budget_s)
    return status(measured.read(options.results, SCHEMA))


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS, help="the results file, which is gone on with")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "headline", help="logs of the cases")
    parser.add_argument("--only", help="run only cases whose id contains this")
    parser.add_argument("--list", action="store_true", help="print the ids of all cases and stop")
    measured.add_bench(parser, REFERENCE_MODEL, VLLM)
    return parser.parse_args(arguments)


def _left(results: Mapping[str, Any], only: str | None) -> list[Case]:
    done = {name for name, entry in results["cases"].items() if "error" not in entry}
    left = [case for case in CASES if case.id not in done and (only is None or only in case.id)]
    # the control takes longest to start where the driver compiles flash attention (flash_ready.py)
    return sorted(left, key=lambda case: case.setup.kv_cache_dtype != UNQUANTIZED)


def execute(case: Case, bench: Bench, work: Path, serve: Serve) -> Iterator[dict[str, Any]]:
    """Boot a case's server and ask; yield what is known after each batch. What broke or is not whole has `error`."""
    started = time.monotonic()
    entry: dict[str, Any] = {**asdict(case.setup), "arguments": arguments_of(case.setup, bench), "batches": {}}
    try:
        with serve(case.setup, bench, work) as server, Connection(server.url, timeout_s=120) as connection:
            target = target_of(connection, None)
            warm_up(target)
            entry |= {"boot_s": server.boot_s, "fixes": server.fixes(), **server.observed()}
            problems = unlike(case, bench, entry)
            for batch in BATCHES:
                entry["batches"] = {**entry["batches"], str(batch): asdict(ask(target, server, batch))}
                entry["total_s"] = round(time.monotonic() - started, 1)
                left = [] if batch == BATCHES[-1] else [f"ended behind batch {batch}"]
                yield {**entry, "error": "; ".join(problems + left)} if problems or left else entry
    except Died as error:
        yield {**entry, "error": str(error)}
    except measured.CheckFailed as error:
        yield {**entry, "error": f"{error}; {end_of_log(work / 'log')}"}


def unlike(case: Case, bench: Bench, entry: Mapping[str, Any]) -> list[str]:
    """Return how the server that ran is not the case's."""
    if bench.engine == "cpu":
        return []
    fix = entry["fixes"].get("tq-spec-decode", [])
    problems = []
    if case.setup.graft and "applied" not in fix:
        problems.append(f"the fix is {fix or 'not reported'}")
    if not case.setup.graft and entry["fixes"]:
        problems.append(f"fixes reported: {', '.join(entry['fixes'])}")
    if not str(entry["cudagraph_mode"]).startswith("FULL"):
        problems.append(f"graphs are {entry['cudagraph_mode']}")
    return problems


def warm_up(target: Target) -> None:
    """Have the kernels compiled that a first long prompt and a first full batch need."""
    rng = random.Random(f"{SEED} warm-up")
    asked: list[tuple[Task, How]] = [(needle(rng, LENGTHS[-2], 0.5), "whole"), *tools.requests(rng, max(BATCHES))]
    found = together(asked, lambda one: reply(target, *one), max(BATCHES), lambda done: None)
    if all(one.answer is None for one in found):
        raise measured.CheckFailed(f"no request was answered: {found[0].faults[0]}")


def ask(target: Target, server: Server, batch: int) -> Batch:
    """Ask for tool calls, then for needles, so many at a time; every case is asked the same."""
    started, before = time.monotonic(), server.metrics()
    deadline = started + PART_S[batch]
    asked = tools.requests(random.Random(f"{SEED} tools {batch}"), REPLIES[batch])

    def in_time(one: tuple[Task, How]) -> Reply | None:
        return reply(target, *one) if time.monotonic() < deadline else None

    found = [one for one in together(asked, in_time, batch, lambda done: None) if one is not None]
    calls = tools.report(found)
    climbed = ladder.climb(
        target,
        random.Random(f"{SEED} needles {batch}"),
        target.served.max_model_len or max(LENGTHS),
        lengths=LENGTHS,
        depths=DEPTHS,
        concurrency=batch,
        stops=False,
        on_done=lambda done, total, what: None,
    )
    by_length = {
        f"{length}": [cell.found for cell in climbed.cells if cell.step_tokens == length] for length in LENGTHS
    }
    return Batch(
        tools=calls.replies,
        kinds=calls.kinds,
        hows=calls.hows,
        twins=calls.twins,
        needles=Share(sum(cell.found for cell in climbed.cells), len(climbed.cells)),
        needles_by_length={length: Share(sum(cells), len(cells)) for length, cells in by_length.items()},
        tokens_a_step=acceptance_length(before, server.metrics()),
        seconds=round(time.monotonic() - started, 1),
        failures=tuple(
            replace(failed, raw=failed.raw[:KEPT_CHARS])
            for failed in (*calls.failures[:KEPT_FAILURES], *climbed.failures[:KEPT_FAILURES])
        ),
    )


def line(entry: Mapping[str, Any]) -> str:
    """Return one case in one line."""
    if "error" in entry:
        return f"ERROR: {entry['error'].strip().splitlines()[-1][:200]}"
    parts = [f"boot {entry['boot_s']} s, in all {entry['total_s']} s"]
    for name, batch in entry["batches"].items():
        calls, needles = batch["tools"], batch["needles"]
        parts.append(
            f"batch {name}: calls {calls['right']}/{calls['total']}, needles {needles['right']}/{needles['total']}, "
            f"{batch['tokens_a_step']} tokens a step, {batch['seconds']} s"
        )
    return "; ".join(parts)


def status(results: Mapping[str, Any]) -> int:
    """Return the exit status: 3 cases are left, 1 a case broke or is wrong that must be right, 0 all holds."""
    cases = results["cases"]
    if any("error" in entry for entry in cases.values()):
        return 1
    for case in CASES:
        if case.must_be_right and not all(
            is_right(batch) for batch in cases.get(case.id, {}).get("batches", {}).values()
        ):
            print(f"{case.id}: below {RIGHT:.0%}")
            return 1
    return 3 if any(case.id not in cases for case in CASES) else 0


def is_right(batch: Mapping[str, Any]) -> bool:
    """Whether a batch reaches what a right case must."""
    return all(batch[part]["right"] >= RIGHT * batch[part]["total"] > 0 for part in ("tools", "needles"))


if __name__ == "__main__":
    measured.stop_cleanly()
    sys.exit(main())
