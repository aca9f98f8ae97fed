"""Greedy replies of two services that serve one model: with speculation they must equal those without."""

import random
from collections.abc import Callable
from dataclasses import dataclass

from launcher.ask import Answer
from launcher.measure.dialogues import Kind, Task, tasks
from launcher.measure.greedy import Difference, Generated, compare
from launcher.measure.replies import Failure
from launcher.measure.target import Target, together
from launcher.measure.words import Words

CALL_KINDS: tuple[Kind, ...] = ("single", "nested", "code", "parallel")
OPEN_TOKENS = 128
_OPEN_FRAMES = (
    "Write a short story about {a} and {b}.",
    "Explain in simple words how {a} differs from {b}.",
    "Write a Python function called {a} that returns the {b} of a list, and explain it.",
    "List ten things that one could do with a {a} in {b}.",
)


@dataclass(frozen=True)
class EqualityReport:
    """How the service's replies compare with the reference's; the reference runs without speculation."""

    reference: str
    """URL of the reference."""
    compared: int
    equal: int
    near_ties: int
    """First differences where the reference's two best tokens are less than 0.05 nats apart: rounding decides there."""
    wrong: int
    failures: tuple[Failure, ...]


def probe(
    target: Target,
    reference: Target,
    rng: random.Random,
    *,
    count: int,
    with_tools: bool,
    concurrency: int,
    on_done: Callable[[int, int], None],
) -> EqualityReport:
    """Ask both services the same, and compare token by token; both must be vLLM, which tells its token ids.

    Raises:
        AskFailed: one of them gives no answer.
    """
    asked = questions(rng, count, with_tools=with_tools)

    def both(task: Task) -> tuple[Task, Answer, Answer]:
        wanted = reference.connection.answer(reference.request(task, token_ids=True, margins=True))
        got = target.connection.answer(target.request(task, token_ids=True))
        return task, wanted, got

    found = together(asked, both, concurrency, lambda done: on_done(done, len(asked)))
    return report(target, reference, found)


def report(target: Target, reference: Target, found: list[tuple[Task, Answer, Answer]]) -> EqualityReport:
    """Judge each pair of answers, the reference's first."""
    judged = [(one, compare(_generated(one[1]), _generated(one[2]))) for one in found]
    verdicts = [difference.verdict for _, difference in judged]
    failures = [
        _failure(target, reference, *one, difference) for one, difference in judged if difference.verdict == "wrong"
    ]
    return EqualityReport(
        reference=reference.connection.base_url,
        compared=len(found),
        equal=verdicts.count("equal"),
        near_ties=verdicts.count("near-tie"),
        wrong=verdicts.count("wrong"),
        failures=tuple(failures),
    )


def questions(rng: random.Random, count: int, *, with_tools: bool) -> list[Task]:
    """Return requests whose replies go on for a while: open questions and, where the model can, calls."""
    words = Words(rng, "verify")
    found: list[Task] = []
    while len(found) < count:
        if with_tools and len(found) % 2:
            found.append(tasks(CALL_KINDS[len(found) // 2 % len(CALL_KINDS)], rng)[0])
            continue
        a, b = words.distinct(2)
        text = rng.choice(_OPEN_FRAMES).format(a=a, b=b)
        found.append(Task("open", ({"role": "user", "content": text},), max_tokens=OPEN_TOKENS))
    return found


def _generated(answer: Answer) -> Generated:
    return Generated(answer.token_ids, answer.margins)


def _failure(
    target: Target, reference: Target, task: Task, wanted: Answer, got: Answer, difference: Difference
) -> Failure:
    margin = "one of them stopped early" if difference.margin is None else f"margin {difference.margin:.3f} nats"
    return Failure(
        task.kind,
        "compared",
        (f"first difference at token {difference.common} of {difference.length}, {margin}",),
        str(task.messages[-1]["content"]),
        f"reference:\n{reference.raw_text(wanted)}\nservice:\n{target.raw_text(got)}",
    )
