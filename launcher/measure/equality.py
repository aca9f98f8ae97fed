"""Greedy replies of two services that serve one model: with speculation they must equal those without."""

import random
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from launcher.ask import Answer
from launcher.errors import UsageError
from launcher.measure.dialogues import Kind, Task, tasks
from launcher.measure.greedy import Difference, Generated, compare, near_tie
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
    """First differences where the reference has two tokens nearer than `near_tie_nats`: rounding decides there."""
    near_tie_nats: float
    wrong: int
    failures: tuple[Failure, ...]


Reference = Callable[[], AbstractContextManager[Target]]
"""Brings the reference, which may take the service's place while it is there."""


def probe(
    target: Target,
    reference: Reference,
    rng: random.Random,
    *,
    count: int,
    with_tools: bool,
    concurrency: int,
    on_done: Callable[[int, int], None],
) -> EqualityReport:
    """Ask the service, then the reference the same, and compare token by token; both tell their token ids.

    Raises:
        UsageError: the reference is no vLLM.
        AskFailed: one of them gives no answer.
    """
    asked = questions(rng, count, with_tools=with_tools)
    total = 2 * count
    got = _answers(target, asked, concurrency, lambda done: on_done(done, total))
    with reference() as other:
        if not other.is_vllm:
            raise UsageError(f"{other.connection.base_url}: is no vLLM, which alone tells the token ids to compare")
        wanted = _answers(other, asked, concurrency, lambda done: on_done(count + done, total), margins=True)
        return report(other, list(zip(asked, wanted, got, strict=True)))


def _answers(
    target: Target, asked: Sequence[Task], concurrency: int, on_done: Callable[[int], None], *, margins: bool = False
) -> list[Answer]:
    def answer(task: Task) -> Answer:
        return target.connection.answer(target.request(task, token_ids=True, margins=margins))

    return together(asked, answer, concurrency, on_done)


def report(reference: Target, found: list[tuple[Task, Answer, Answer]]) -> EqualityReport:
    """Judge each pair of answers, the reference's first; the reference has the tokens of both."""
    nats = near_tie(margin for _, wanted, _ in found for margin in wanted.margins)
    judged = [(one, compare(_generated(one[1]), _generated(one[2]), nats)) for one in found]
    verdicts = [difference.verdict for _, difference in judged]
    failures = [_failure(reference, *one, difference) for one, difference in judged if difference.verdict == "wrong"]
    return EqualityReport(
        reference=reference.connection.base_url,
        compared=len(found),
        equal=verdicts.count("equal"),
        near_ties=verdicts.count("near-tie"),
        near_tie_nats=nats,
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


def _failure(reference: Target, task: Task, wanted: Answer, got: Answer, difference: Difference) -> Failure:
    margin = "one of them stopped early" if difference.margin is None else f"margin {difference.margin:.3f} nats"
    return Failure(
        task.kind,
        "compared",
        (f"first difference at token {difference.common} of {difference.length}, {margin}",),
        str(task.messages[-1]["content"]),
        f"reference:\n{reference.raw_text(wanted)}\nservice:\n{reference.raw_text(got)}",
    )
