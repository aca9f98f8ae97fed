#!/usr/bin/env python3
"""Score the reference model in vLLM as it is: held-out dialogues and needles, greedy, and what MTP's drafts are worth.

    python3 tests/reference_model/score_in_vllm.py --results tests/gpu/results/reference_model.json
    python3 tests/reference_model/score_in_vllm.py --engine cpu --results tests/reference_model/results/vllm_cpu.json

Needs vLLM importable, and one GPU or a CPU on which vLLM runs. Each case is a server of its own, without plugins and
with an unquantized KV cache, asked through its chat API: `plain` does not speculate, `mtp` drafts three tokens. A reply
is right when a client receives the right calls with their values, or the right text; `same_tokens` counts those whose
tokens are the expected ones too, to the end of the turn. A case in the results file is not run again, one that broke
is. The exit status is 0 when every case reaches RIGHT and more than ACCEPTED of the drafts are taken, 3 when cases are
left, 1 otherwise.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from reference_config import ROOT, WEIGHTS
from reference_rows import held_out, prompt_and_reply

sys.path.append(str(ROOT / "tests" / "gpu"))

import measured
from served import (
    DRAFTS,
    MAX_SEQS,
    VLLM,
    Bench,
    Died,
    Serve,
    Setup,
    acceptance_length,
    arguments_of,
    served,
)

from launcher.ask import Connection
from launcher.measure import tools
from launcher.measure.dialogues import Task
from launcher.measure.replies import Reply, replies
from launcher.measure.target import target_of

SCHEMA = 1
RIGHT = 0.99
ACCEPTED = 0.6
CASES = {
    "plain": Setup(graft=False, kv_cache_dtype="auto", speculates=False),
    "mtp": Setup(graft=False, kv_cache_dtype="auto", speculates=True),
}
EXPECTED_S = {"gpu": 120.0, "cpu": 1800.0}
AT_ONCE = 2 * MAX_SEQS
"""Requests under way: some wait in the server's queue, so that its batch is never short."""
TOLD_EVERY = 100
KEPT_FAILURES = 20


def main(arguments: Sequence[str] | None = None, serve: Serve = served) -> int:
    """Run what is left, and say whether all of it is good."""
    options = _options(arguments)
    bench = measured.bench(options)
    weights = hashlib.sha256((bench.model / "model.safetensors").read_bytes()).hexdigest()
    host = measured.host(bench.engine, bench.model) | {"weights_sha256": weights}
    tasks = held_out()[:: options.every]

    def run(case: str, bench: Bench) -> str:
        entry = execute(CASES[case], bench, options.work / case, tasks, serve)
        measured.keep(options.results, SCHEMA, case, entry, host)
        return entry.get("error") or f"{entry['right']}, {entry['same_tokens']} with the expected tokens"

    done = measured.read(options.results, SCHEMA)["cases"]
    left = [case for case in options.case if "error" in done.get(case, {"error": "not run"})]
    jobs = [measured.Job(case, EXPECTED_S[bench.engine], partial(run, case)) for case in left]
    measured.run(jobs, bench, options.at_once, options.budget_s)
    return status(measured.read(options.results, SCHEMA)["cases"], options.case)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, required=True, help="the results file, which is gone on with")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "score-in-vllm", help="logs")
    parser.add_argument("--case", action="append", choices=CASES, help="several; all when left out")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="ask every Nth request of the set")
    measured.add_bench(parser, WEIGHTS, VLLM)
    options = parser.parse_args(arguments)
    options.case = options.case or list(CASES)
    return options


def execute(setup: Setup, bench: Bench, work: Path, tasks: Sequence[Task], serve: Serve) -> dict[str, Any]:
    """Boot a case's server and ask everything; what broke is an entry with `error`."""
    entry: dict[str, Any] = {**asdict(setup), "arguments": arguments_of(setup, bench), "split": "held-out"}
    try:
        with serve(setup, bench, work) as server, Connection(server.url, timeout_s=600) as connection:
            started, before = time.monotonic(), server.metrics()
            found = replies(target_of(connection, None), [(task, "whole") for task in tasks], AT_ONCE, tell)
            length = acceptance_length(before, server.metrics())
            entry |= {"boot_s": server.boot_s, "asking_s": round(time.monotonic() - started, 1)}
            if fixes := server.fixes():
                return {**entry, "error": f"fixes reported: {', '.join(fixes)}"}
    except (Died, measured.CheckFailed) as error:
        return {**entry, "error": str(error)}
    report = tools.report(found)
    return {
        **entry,
        "right": asdict(report.replies),
        "by_kind": {kind: asdict(share) for kind, share in report.kinds.items()},
        "same_tokens": sum(map(has_the_expected_tokens, found)),
        "accepted_drafts": None if length is None else round((length - 1) / DRAFTS, 4),
        "failures": [asdict(one) for one in report.failures[:KEPT_FAILURES]],
    }


def tell(done: int) -> None:
    """Say how far a case is."""
    if done % TOLD_EVERY == 0:
        print(f"  {done} replies", flush=True)


def has_the_expected_tokens(one: Reply) -> bool:
    """Whether the model wrote what it was trained to write, token by token."""
    return one.answer is not None and list(one.answer.token_ids) == prompt_and_reply(one.task)[1]


def status(cases: Mapping[str, Any], asked: Sequence[str]) -> int:
    """Return the exit status: 3 cases are left, 1 one broke or is below what it must reach, 0 all is good."""
    found = [cases[case] for case in asked if case in cases]
    if any("error" in entry or not is_good(entry) for entry in found):
        return 1
    return 3 if len(found) < len(asked) else 0


def is_good(entry: Mapping[str, Any]) -> bool:
    """Whether a case reaches what it must."""
    right, accepted = entry["right"], entry["accepted_drafts"]
    if entry["speculates"] and (accepted is None or accepted <= ACCEPTED):
        return False
    return bool(right["right"] >= RIGHT * right["total"] > 0)


if __name__ == "__main__":
    measured.stop_cleanly()
    sys.exit(main())
