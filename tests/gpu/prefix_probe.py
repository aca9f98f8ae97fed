#!/usr/bin/env python3
"""Probe whether prefix caching together with MTP corrupts a hybrid model, which vLLM up to 0.28 did after hours.

    python3 tests/gpu/prefix_probe.py --at-once 4 --results tests/gpu/results/prefix_probe.json
    python3 tests/gpu/prefix_probe.py --only soak --soak-s 600 --memory 0.1 --port 8790 &       # beside other work

Needs one NVIDIA GPU, vLLM 0.33.0 importable, and the reference model.  Prefix caching on and off, MTP on and off: the
same requests with shared prefixes, cold, warm, and several at once, each compared token by token with the run that has
neither (near ties apart), and judged.  The soak keeps agents talking to the server that has both for a given time.
What is done is added to the results file at once; the soak's intervals too.  The exit status is 0 when all is in the
file and holds, 3 when something is left, 1 otherwise.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import agents
import measured
from headline import EXPECTED_S
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

from launcher.ask import Answer, Connection
from launcher.measure import judge, prefix
from launcher.measure.dialogues import Task, tasks
from launcher.measure.greedy import Generated, compare
from launcher.measure.target import Target, target_of, together

RESULTS = Path(__file__).parent / "results" / "prefix_probe.json"
SCHEMA = 1
SEED = 20_261_130
PREFIX_TOKENS = (5200, 3100)
"""Of each shared prefix: more than two blocks of the cache, and more than one."""
REPEATS = 3
TOGETHER = 6
INTERVAL_S = 20.0
WRONG_SHARE = 0.01
"""Of a soak's replies, in all and in its last third: what the model itself may miss."""
SOAK = "soak"


@dataclass(frozen=True)
class Case:
    """One server of the comparison."""

    prefix_caching: bool
    speculates: bool

    @property
    def id(self) -> str:
        return f"caching-{'on' if self.prefix_caching else 'off'}-mtp-{'on' if self.speculates else 'off'}"


REFERENCE = Case(False, False)
HAZARD = Case(True, True)
CASES = (REFERENCE, HAZARD, Case(True, False), Case(False, True))


def main(arguments: Sequence[str] | None = None, serve: Serve = served) -> int:
    """Run what is left, and say whether all of it holds."""
    options = _options(arguments)
    names = [*(case.id for case in CASES), *([SOAK] if options.soak_s else [])]
    if options.list:
        print("\n".join([*(case.id for case in CASES), SOAK]))
        return 0
    bench = measured.bench(options)
    host = measured.host(bench.engine, bench.model)

    def run(name: str, bench: Bench) -> str:
        execute(name, options, bench, serve, partial(_keep, options.results, name, host))
        cases = measured.read(options.results, SCHEMA)["cases"]
        return line(cases[name], against_reference(cases).get(name))

    cases = measured.read(options.results, SCHEMA)["cases"]
    left = [
        name
        for name in names
        if (name not in cases or "error" in cases[name]) and (options.only is None or options.only in name)
    ]
    jobs = [
        measured.Job(name, EXPECTED_S[bench.engine] + (options.soak_s if name == SOAK else 0), partial(run, name))
        for name in left
    ]
    measured.run(jobs, bench, options.at_once, options.budget_s)
    return status(measured.read(options.results, SCHEMA), names)


def _keep(path: Path, name: str, host: Mapping[str, str], entry: Mapping[str, Any]) -> None:
    measured.keep(path, SCHEMA, name, entry, host, lambda cases: {"against_reference": against_reference(cases)})


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS, help="the results file, which is gone on with")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "prefix-probe", help="logs")
    parser.add_argument("--only", help="run only what has this in its name")
    parser.add_argument("--list", action="store_true", help="print the names of all parts and stop")
    parser.add_argument("--soak-s", type=float, default=0, help="seconds of the soak; 0: none")
    parser.add_argument("--agents", type=int, default=TOGETHER, help="agents of the soak")
    parser.add_argument(
        "--soak-kv-mib", type=int, default=192, help="KV pool of the soak: small, so that cached blocks are taken again"
    )
    parser.add_argument("--kv", default="turboquant_k8v4", help="KV cache; auto is bfloat16, without vllm_graft")
    measured.add_bench(parser, REFERENCE_MODEL, VLLM)
    return parser.parse_args(arguments)


def execute(name: str, options: argparse.Namespace, bench: Bench, serve: Serve, keep: Any) -> None:
    """Run one part, and keep what it found; what broke is an entry with `error`."""
    case = HAZARD if name == SOAK else next(one for one in CASES if one.id == name)
    setup = Setup(options.kv != "auto", options.kv, case.speculates, case.prefix_caching)
    entry: dict[str, Any] = asdict(setup)
    try:
        bench = replace(bench, kv_mib=options.soak_kv_mib) if name == SOAK else bench
        with serve(setup, bench, options.work / name) as server, Connection(server.url, timeout_s=120) as connection:
            target = target_of(connection, None)
            entry |= {
                "boot_s": server.boot_s,
                "arguments": arguments_of(setup, bench),
                "fixes": server.fixes(),
                **server.observed(),
            }
            if name == SOAK:
                soak(target, server, options, entry, keep)
            else:
                keep({**entry, **compared(target, server, margins=case == REFERENCE)})
    except Died as error:
        keep({**entry, "error": str(error)})
    except measured.CheckFailed as error:
        keep({**entry, "error": f"{error}; {end_of_log(options.work / name / 'log')}"})


# The comparison.


def requests(target: Target) -> list[Task]:
    """Return the same requests for every server: each kind behind each of the prefixes."""
    rng = random.Random(f"{SEED} requests")
    texts = [prefix.prefix_text(target, rng, tokens) for tokens in PREFIX_TOKENS]
    return [task for text in texts for task in prefix.sharing(text, [tasks(kind, rng)[0] for kind in prefix.KINDS])]


def compared(target: Target, server: Server, *, margins: bool) -> dict[str, Any]:
    """Ask cold, warm, and several at once; return the tokens of each reply, and what was wrong."""
    asked = requests(target)
    before = server.metrics()
    rounds: list[list[Answer]] = []
    for number in range(1 + REPEATS):
        # The first round fills the cache one by one; the last asks several at once.
        width = TOGETHER if number == REPEATS else 1
        rounds.append(
            together(
                asked,
                lambda task: target.connection.answer(target.request(task, token_ids=True, margins=margins)),
                width,
                lambda done: None,
            )
        )
    after = server.metrics()
    replies = [(task, answer) for answers in rounds for task, answer in zip(asked, answers, strict=True)]
    changed = [
        judge.differences(rounds[0][place], again) for answers in rounds[1:] for place, again in enumerate(answers)
    ]
    wrong = [{"kind": task.kind, "faults": judge.faults(task, answer)} for task, answer in replies]
    return {
        "replies": len(replies),
        "wrong": [one for one in wrong if one["faults"]],
        "changed": [one for one in changed if one],
        "tokens": [[list(answer.token_ids) for answer in answers] for answers in rounds],
        "margins": [[[round(lead, 4) for lead in answer.margins] for answer in answers] for answers in rounds]
        if margins
        else None,
        "tokens_a_step": acceptance_length(before, after),
        "cached_share": cached_share(before, after),
    }


def cached_share(before: Mapping[str, float], after: Mapping[str, float]) -> float | None:
    """Return the share of the prompts' tokens that came from the prefix cache; None where none was asked for."""
    asked, hits = (
        after.get(name, 0.0) - before.get(name, 0.0)
        for name in ("vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total")
    )
    return round(hits / asked, 4) if asked else None


def against_reference(cases: Mapping[str, Any]) -> dict[str, dict[str, int]]:
    """Return how the replies of each server compare with the first ones of the reference, by verdict."""
    reference = cases.get(REFERENCE.id, {})
    found = {}
    for case in CASES:
        entry = cases.get(case.id, {})
        if "tokens" not in entry or "tokens" not in reference:
            continue
        verdicts = [
            compare(Generated(tuple(one), tuple(lead)), Generated(tuple(other))).verdict
            for answers in entry["tokens"]
            for one, lead, other in zip(reference["tokens"][0], reference["margins"][0], answers, strict=True)
        ]
        found[case.id] = {name: verdicts.count(name) for name in ("equal", "near-tie", "wrong")}
    return found


# The soak.


def soak(target: Target, server: Server, options: argparse.Namespace, entry: Mapping[str, Any], keep: Any) -> None:
    """Keep agents talking for the time given, and keep what happened after every interval."""
    rng = random.Random(f"{SEED} soak")
    texts = [prefix.prefix_text(target, rng, tokens) for tokens in PREFIX_TOKENS]
    before = server.metrics()
    load = agents.Agents(target, texts, f"{SEED} agents", agents=options.agents, interval_s=INTERVAL_S)
    begun = {**entry, "asked_s": options.soak_s, "error": "the soak is under way"}
    load.run(options.soak_s, lambda so_far: keep({**begun, "soak": so_far.document()}))
    after = server.metrics() if load.soak.ended is None else before
    keep(
        {
            **entry,
            "asked_s": options.soak_s,
            "soak": load.soak.document(),
            "tokens_a_step": acceptance_length(before, after),
            "cached_share": cached_share(before, after),
            "preemptions": after.get("vllm:num_preemptions_total", 0.0),
            **({"error": load.soak.ended} if load.soak.ended else {"done": True}),
        }
    )


def soak_holds(entry: Mapping[str, Any]) -> bool:
    """Whether a soak went to its end, and no more replies were wrong or changed than the model itself may miss."""
    buckets = entry["soak"]["buckets"]
    last = buckets[-max(1, len(buckets) // 3) :]
    return bool(entry.get("done")) and all(
        sum(one["asked"] for one in part) > 0
        and sum(one["wrong"] for one in part) + sum(one["changed"] for one in part)
        <= WRONG_SHARE * sum(one["asked"] for one in part)
        for part in (buckets, last)
    )


# Reading the results.


def line(entry: Mapping[str, Any], against: Mapping[str, int] | None) -> str:
    """Return one part in one line."""
    if "error" in entry:
        return f"ERROR: {entry['error'].strip().splitlines()[-1][:200]}"
    parts = [f"boot {entry['boot_s']} s, cached {entry['cached_share']}, {entry['tokens_a_step']} tokens a step"]
    if "soak" in entry:
        totals = entry["soak"]["totals"]
        parts.append(f"{totals['asked']} replies, {totals['wrong']} wrong, {totals['changed']} changed")
        parts.append("holds" if soak_holds(entry) else "DOES NOT HOLD")
    else:
        parts.append(f"{entry['replies']} replies, {len(entry['wrong'])} wrong, {len(entry['changed'])} changed")
        if against is not None:
            told = f"{against['equal']} equal, {against['near-tie']} near ties, {against['wrong']} wrong"
            parts.append(f"against the reference {told}")
    return "; ".join(parts)


def holds(entry: Mapping[str, Any], against: Mapping[str, int] | None) -> bool:
    """Whether a part is in order: a soak, or a comparison in which no more went wrong than the model may miss."""
    if "soak" in entry:
        return soak_holds(entry)
    worst = max(len(entry["wrong"]), len(entry["changed"]), against["wrong"] if against else 0)
    return bool(worst <= WRONG_SHARE * entry["replies"])


def status(results: Mapping[str, Any], names: Sequence[str]) -> int:
    """Return the exit status: 3 something is left, 1 something broke or does not hold, 0 all holds."""
    cases = results["cases"]
    against = against_reference(cases)
    if any("error" in entry or not holds(entry, against.get(name)) for name, entry in cases.items()):
        return 1
    return 3 if any(name not in cases for name in names) else 0


if __name__ == "__main__":
    measured.stop_cleanly()
    sys.exit(main())
