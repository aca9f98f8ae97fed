"""Every recorded failure gets its cause and remedy, whatever surrounds the lines that show it; a healthy log none."""

import random
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.diagnose import Diagnosis, diagnose, rules, shows_failure
from launcher.evidence import Context, Evidence, evidence_from_file

CASES_FOLDER = Path(__file__).parents[1] / "data" / "failures"


@dataclass(frozen=True)
class Case:
    """A file of tests/data/failures."""

    id: str
    text: str

    @cached_property
    def document(self) -> Any:
        return yaml.load(self.text, yaml.CSafeLoader)

    @property
    def cause(self) -> str | None:
        cause: str | None = self.document["expect"]["cause"]
        return cause

    @property
    def exact_lines(self) -> tuple[str, ...]:
        return tuple(self.document["exact_lines"])

    @property
    def log_lines(self) -> list[str]:
        lines: list[str] = self.document["log"].splitlines()
        return lines

    def is_exact(self, line: str) -> bool:
        return any(exact in line for exact in self.exact_lines)

    def evidence(self, log: str | None = None, context: dict[str, Any] | None = None) -> Evidence:
        document = self.document
        known = document["context"] if context is None else context
        return Evidence(
            document["log"] if log is None else log, Context.model_validate(known), document.get("kernel_log")
        )


CASES = [Case(path.stem, path.read_text(encoding="utf-8")) for path in sorted(CASES_FOLDER.glob("*.yaml"))]
CASES = [case for case in CASES if case.id != "hosts"]
HEALTHY = [case for case in CASES if case.cause is None]
FAILURES = [case for case in CASES if case.cause is not None]
FILLER = sorted({line for case in HEALTHY for line in case.log_lines if not case.is_exact(line)})

each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
each_failure = pytest.mark.parametrize("case", FAILURES, ids=lambda case: case.id)


def cause_of(evidence: Evidence) -> str | None:
    diagnosis = diagnose(evidence)
    return None if diagnosis is None else diagnosis.cause


def missing_mentions(diagnosis: Diagnosis, expected: list[str]) -> list[str]:
    printed = f"{diagnosis.cause} {diagnosis.remedy}".lower()
    return [entry for entry in expected if not any(word.strip().lower() in printed for word in entry.split(" | "))]


def test_the_cases_are_there() -> None:
    assert len(FAILURES) >= 56
    assert len(HEALTHY) >= 4


@each_case
def test_case_file_gets_its_cause_and_remedy(case: Case) -> None:
    diagnosis = diagnose(evidence_from_file(CASES_FOLDER / f"{case.id}.yaml"))
    expect = case.document["expect"]
    if case.cause is None:
        assert diagnosis is None
        return
    assert diagnosis is not None
    assert diagnosis.cause == case.cause
    assert diagnosis.cause != expect.get("not_cause")
    assert missing_mentions(diagnosis, expect["must_mention"]) == []
    assert diagnosis.restart_helps is expect["restart_helps"]
    assert diagnosis.message
    assert diagnosis.excerpt
    assert "None" not in diagnosis.remedy


@each_case
def test_excerpt_is_of_the_evidence(case: Case) -> None:
    diagnosis = diagnose(case.evidence())
    shown = diagnosis.excerpt if diagnosis else ()
    whole = "\n".join((case.document["log"], case.document.get("kernel_log") or ""))
    assert [line for line in shown if not line.startswith(("NVML: ", "container: ")) and line[:500] not in whole] == []


@each_failure
def test_cause_needs_no_filler(case: Case) -> None:
    exact = "\n".join(line for line in case.log_lines if case.is_exact(line))
    assert cause_of(case.evidence(exact)) == case.cause


@each_case
@pytest.mark.parametrize("seed", range(2))
def test_cause_does_not_follow_from_filler(case: Case, seed: int) -> None:
    chance = random.Random(f"{case.id} {seed}")
    lines = [line if case.is_exact(line) else chance.choice(FILLER) for line in case.log_lines]
    assert cause_of(case.evidence("\n".join(lines))) == case.cause


@each_case
def test_no_rule_matches_a_line_of_filler(case: Case) -> None:
    """Some reports show the same error once more in other words, which is no filler."""
    seen = {cause_of(Evidence(line)) for line in case.log_lines if not case.is_exact(line)}
    assert seen - {case.cause, None} == set()


@each_case
def test_more_filler_between_the_lines_changes_nothing(case: Case) -> None:
    chance = random.Random(case.id)
    lines = [part for line in case.log_lines for part in (*chance.sample(FILLER, 2), line)]
    assert cause_of(case.evidence("\n".join([*lines, *chance.sample(FILLER, 5)]))) == case.cause


def with_other_prefixes(line: str, chance: random.Random) -> str:
    """Give the line another process id, time and place in vLLM's source, as another version on another day would."""
    line = re.sub(r"pid=\d+", f"pid={chance.randrange(1, 99999)}", line)
    line = re.sub(r"\b\d\d-\d\d \d\d:\d\d:\d\d\b", f"1{chance.randrange(3)}-2{chance.randrange(9)} 07:08:09", line)
    line = re.sub(r"\[(\w+\.py):\d+\]", lambda match: f"[{match[1]}:{chance.randrange(1, 4000)}]", line)
    return line.replace("(EngineCore pid", "(EngineCore_DP0 pid")


@each_case
@pytest.mark.parametrize(
    "prefix",
    ["", "vllm-1  | ", "graft-rtx4090-vllm-1  | ", "2026-11-30T02:37:17.123456789Z ", "\x1b[36mvllm-1  | \x1b[0m"],
)
def test_prefixes_change_nothing(case: Case, prefix: str) -> None:
    chance = random.Random(case.id)
    lines = [with_other_prefixes(line.removeprefix("vllm-1  | "), chance) for line in case.log_lines]
    assert cause_of(case.evidence("\n".join(prefix + line for line in lines))) == case.cause


ERROR_CODES = ("803",)


def numbers_of(case: Case) -> list[str]:
    """The numbers that a remedy must repeat from the lines that show the cause."""
    mentioned = {
        word.strip() for entry in case.document["expect"].get("must_mention", ()) for word in entry.split(" | ")
    }
    shown = "\n".join(case.exact_lines)
    return sorted(
        word
        for word in mentioned
        if re.fullmatch(r"\d+(\.\d+)?", word) and word not in ERROR_CODES and standing_alone(word).search(shown)
    )


def standing_alone(number: str) -> re.Pattern[str]:
    return re.compile(rf"(?<![\d.]){re.escape(number)}(?!\.?\d)")


@pytest.mark.parametrize("case", [case for case in FAILURES if numbers_of(case)], ids=lambda case: case.id)
def test_remedy_follows_the_numbers(case: Case) -> None:
    text = case.text
    for number in numbers_of(case):
        text = standing_alone(number).sub(number[:-1] + str((int(number[-1]) + 3) % 10), text)
    assert text != case.text
    changed = Case(case.id, text)
    # Numbers that the remedy computes from these are not the recorded ones any more.
    computed = {"0.97", "0.66", "0.93"}
    expected = [entry for entry in changed.document["expect"]["must_mention"] if entry not in computed]
    diagnosis = diagnose(changed.evidence())
    assert diagnosis is not None
    assert diagnosis.cause == case.cause
    assert missing_mentions(diagnosis, expected) == []


@each_case
def test_without_the_kernel_log_no_wrong_cause_is_named(case: Case) -> None:
    evidence = case.evidence()
    assert cause_of(Evidence(evidence.log, evidence.context)) in (case.cause, None)


@each_case
def test_with_the_log_alone_no_wrong_cause_is_named(case: Case) -> None:
    assert cause_of(Evidence(case.document["log"])) in (case.cause, None)


@each_case
def test_each_fact_may_be_unknown(case: Case) -> None:
    context = case.document["context"]
    for key in context:
        known = {name: value for name, value in context.items() if name != key}
        assert cause_of(case.evidence(context=known)) in (case.cause, None), key


def test_no_cause_is_seen_in_what_follows_from_every_cause() -> None:
    consequences = (
        "(EngineCore pid=88) ERROR 06-30 13:53:18 [core.py:1584] EngineCore failed to start.",
        "Exception: WorkerProc initialization failed due to an exception in a background process. "
        "See stack trace for root cause.",
        "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. "
        "See stack trace (above) for the root cause.",
        "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore': 1}",
        "vllm-1 exited with code 1",
    )
    evidence = Evidence("\n".join(consequences))
    assert diagnose(evidence) is None
    assert shows_failure(evidence)


@pytest.mark.parametrize("level", ["INFO", "WARNING", "DEBUG"])
@each_failure
def test_a_notice_that_quotes_an_error_is_not_a_failure(case: Case, level: str) -> None:
    """Rules of rank state need no line, so facts are left out here."""
    quoted = [
        f"(EngineCore pid=9) {level} 01-01 00:00:00 [a.py:1] retrying after: {exact}" for exact in case.exact_lines
    ]
    assert diagnose(Evidence("\n".join(quoted))) is None


@settings(max_examples=50, deadline=None)
@given(st.text(max_size=400))
def test_unknown_text_has_no_cause(text: str) -> None:
    assert diagnose(Evidence(text, kernel_log=text)) is None


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(FAILURES), st.sampled_from(CASES), st.data())
def test_facts_of_another_machine_never_break_a_rule(case: Case, other: Case, data: st.DataObject) -> None:
    foreign = other.document["context"]
    kept = data.draw(st.sets(st.sampled_from(sorted(foreign)))) if foreign else set()
    diagnose(case.evidence(context={key: foreign[key] for key in kept}))


FURTHER = yaml.load((CASES_FOLDER.parent / "diagnose_lines.yaml").read_text(encoding="utf-8"), yaml.CSafeLoader)

OUT_OF_MEMORY = (
    "(EngineCore pid=9) ERROR 01-01 00:00:00 [core.py:1584] Traceback (most recent call last):\n"
    '(EngineCore pid=9) ERROR 01-01 00:00:00 [core.py:1584]   File "gpu_worker.py", line 1, in {frame}\n'
    "(EngineCore pid=9) ERROR 01-01 00:00:00 [core.py:1584] torch.OutOfMemoryError: CUDA out of memory. Tried to "
    "allocate 136.00 MiB. GPU 0 has a total capacity of 22.36 GiB of which 12.88 MiB is free. {rest}"
)
REST = (
    "Of the allocated memory 20.84 GiB is allocated by PyTorch, and 412.30 MiB is reserved by PyTorch but unallocated."
)


@pytest.mark.parametrize("further", FURTHER, ids=lambda further: further["rule"])
def test_further_failure_gets_its_cause(further: dict[str, Any]) -> None:
    context = Context.model_validate(further.get("context", {}))
    diagnosis = diagnose(Evidence(further["log"], context, kernel_log=""))
    assert diagnosis is not None
    assert (diagnosis.rule, diagnosis.cause) == (further["rule"], further["cause"])
    assert "None" not in diagnosis.remedy


@pytest.mark.parametrize(
    ("frame", "rest", "cause"),
    [
        ("capture_model", REST, "cudagraph-capture-oom"),
        ("_allocate_kv_cache_tensors", REST, "gpu-memory-tight"),
        ("profile_run", REST, "no-kv-cache-memory"),
        ("load_model", REST, "weights-do-not-fit"),
    ],
)
def test_traceback_tells_in_which_phase_memory_ran_out(frame: str, rest: str, cause: str) -> None:
    assert cause_of(Evidence(OUT_OF_MEMORY.format(frame=frame, rest=rest))) == cause


def test_a_cut_off_message_is_read_by_its_phase() -> None:
    log = "Available KV cache memory: 2.97 GiB\n" + OUT_OF_MEMORY.format(frame="forward", rest="")
    assert cause_of(Evidence(log)) == "cudagraph-capture-oom"


def test_free_memory_that_contradicts_the_error_is_no_failure_of_memory_outside_wsl() -> None:
    log = OUT_OF_MEMORY.format(frame="load_model", rest=REST).replace("12.88 MiB is free", "12.88 GiB is free")
    assert cause_of(Evidence(log, Context(wsl=True))) == "wsl-host-memory"
    assert diagnose(Evidence(log, Context(wsl=False))) is None


def test_every_rule_is_shown_by_a_test() -> None:
    shown = {diagnosis.rule for case in FAILURES if (diagnosis := diagnose(case.evidence()))} | {
        further["rule"] for further in FURTHER
    }
    phases = {rule.id for rule in rules() if rule.id.startswith("out-of-memory-")}
    assert {rule.id for rule in rules()} - shown - phases == set()


def test_an_old_kernel_message_says_nothing_about_a_healthy_server() -> None:
    healthy = HEALTHY[0].evidence()
    kernel_log = (
        "[12.5] NVRM: Xid (PCI:0000:09:00): 79, pid=0, GPU has fallen off the bus.\n"
        "[13.0] Out of memory: Killed process 61 (VLLM::Worker_TP) total-vm:1kB"
    )
    assert diagnose(Evidence(healthy.log, healthy.context, kernel_log)) is None


def test_another_program_killed_for_memory_is_not_the_server() -> None:
    kernel_log = "[13.0] Out of memory: Killed process 61 (chrome) total-vm:18109076kB, anon-rss:14095848kB"
    assert diagnose(Evidence("", kernel_log=kernel_log)) is None


def test_a_killed_worker_explains_the_busy_memory_of_the_next_start() -> None:
    busy = (
        "ValueError: Free memory on device cuda:0 (3.02/15.47 GiB) on startup is less than desired GPU memory "
        "utilization (0.8, 12.38 GiB)."
    )
    killed = "[13.0] Out of memory: Killed process 61 (VLLM::Worker_TP) total-vm:18109076kB"
    assert cause_of(Evidence(busy)) == "gpu-memory-busy"
    assert cause_of(Evidence(busy, kernel_log=killed)) == "host-oom-killed"


def test_a_download_that_stands_still_shows_in_the_log_alone() -> None:
    line = "Downloading (incomplete total...):   0%|          | 65.0M/17.7G [{}<?, ?B/s]"
    assert (
        cause_of(Evidence("\n".join(line.format(clock) for clock in ("00:10", "04:00", "1:00:10"))))
        == "model-download-stalled"
    )
    assert cause_of(Evidence("\n".join(line.format(clock) for clock in ("00:10", "04:00")))) is None
    assert cause_of(Evidence("\n".join((line.format("00:10"), line.format("59:00"), "Fetching done")))) is None
