"""Replies to tasks, judged, and how sure a share of right ones is."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from launcher.ask import Answer, AskFailed, Unreachable
from launcher.measure import judge
from launcher.measure.dialogues import Task
from launcher.measure.target import Target, ToolChoice, together

How = Literal["whole", "streamed", "required"]
"""How a task was asked; `required` is whole, with tool_choice required."""
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Reply:
    """One reply and what is wrong with it."""

    task: Task
    how: How
    answer: Answer | None
    """None where the server gave none."""
    faults: tuple[str, ...]
    raw: str
    """What the model wrote; only of a wrong reply."""


@dataclass(frozen=True)
class Failure:
    """A wrong reply, as reports list it."""

    kind: str
    how: str
    faults: tuple[str, ...]
    asked: str
    """The last message of the request."""
    raw: str


@dataclass(frozen=True)
class Share:
    """How many of so many were right."""

    right: int
    total: int

    @property
    def rate(self) -> float:
        return self.right / self.total if self.total else 0.0

    @property
    def at_least(self) -> float:
        """Lower bound of the true rate, with 95 % confidence."""
        return lower_bound(self.right, self.total)


def reply(target: Target, task: Task, how: How) -> Reply:
    """Ask a task and judge its reply.

    Raises:
        Unreachable: the server is gone.
    """
    tool_choice: ToolChoice = "required" if how == "required" else "auto"
    try:
        answer = target.ask(task, stream=how == "streamed", tool_choice=tool_choice)
        wrong = judge.faults(task, answer)
        return Reply(task, how, answer, wrong, target.raw_text(answer) if wrong else "")
    except Unreachable:
        raise
    except AskFailed as error:
        return Reply(task, how, None, (f"no answer: {error}",), "")


def replies(
    target: Target, asked: Sequence[tuple[Task, How]], concurrency: int, on_done: Callable[[int], None]
) -> list[Reply]:
    """Ask tasks, so many at a time, and judge their replies."""
    return together(asked, lambda one: reply(target, *one), concurrency, on_done)


def failure(one: Reply) -> Failure:
    """Return a wrong reply as reports list it."""
    return Failure(one.task.kind, one.how, one.faults, str(one.task.messages[-1]["content"]), one.raw)


def lower_bound(right: int, total: int, confidence: float = CONFIDENCE) -> float:
    """Return the smallest true rate at which so many right ones of `total` are not surprising (Clopper and Pearson).

    Without a failure it is `(1 - confidence) ** (1 / total)`, about 1 - 3 / total.
    """
    if right == 0 or total == 0:
        return 0.0
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _at_least(right, total, middle) < 1 - confidence else (low, middle)
    return low


def needed_without_failure(rate: float, confidence: float = CONFIDENCE) -> int:
    """Return how many right replies, and none wrong, show that the true rate is at least `rate`."""
    return math.ceil(math.log(1 - confidence) / math.log(rate))


def _at_least(right: int, total: int, rate: float) -> float:
    """Probability of `right` or more of `total` at a rate between 0 and 1, exclusive."""

    def one(count: int) -> float:
        ways = math.lgamma(total + 1) - math.lgamma(count + 1) - math.lgamma(total - count + 1)
        return math.exp(ways + count * math.log(rate) + (total - count) * math.log1p(-rate))

    return math.fsum(one(count) for count in range(right, total + 1))
