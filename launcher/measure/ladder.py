"""The needle ladder: longer and longer texts with one number in each, until one is not found."""

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

from launcher.ask import AskFailed, Unreachable
from launcher.measure import judge
from launcher.measure.dialogues import Task
from launcher.measure.needles import REPLY_TOKENS, needle
from launcher.measure.replies import Failure
from launcher.measure.target import Target, together

SHORTEST_TOKENS = 512
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
CLOSE_ENOUGH = 0.97
"""A prompt of this share of a step's tokens counts as one of the step."""
_FIRST_GUESS_CHARS = 1.0
"""Characters a token, before the first count: as few as there can be, so that the first text is not too long."""
_TRIES = 5


@dataclass(frozen=True)
class Cell:
    """One question: the step, the prompt's tokens as the server counts them, and whether the number came back."""

    step_tokens: int
    prompt_tokens: int
    depth: float
    found: bool
    fault: str | None


@dataclass(frozen=True)
class Ladder:
    """What the ladder found."""

    planned_tokens: int
    """Context of the service, the reply included."""
    recall_tokens: int | None
    """Longest prompt in which the model itself finds a needle reliably; None: any."""
    cells: tuple[Cell, ...]
    climbs_to_tokens: int
    """Longest step."""
    holds_tokens: int
    """Longest step up to which every number came back; 0 for none."""
    failures: tuple[Failure, ...]

    @property
    def climbed(self) -> bool:
        """Whether the longest step was reached and held."""
        return self.holds_tokens == self.climbs_to_tokens


def steps(longest_tokens: int, shortest_tokens: int = SHORTEST_TOKENS) -> tuple[int, ...]:
    """Return prompt lengths, each twice the one before, the last `longest_tokens`."""
    found = []
    step = shortest_tokens
    while step < longest_tokens:
        found.append(step)
        step *= 2
    # Two steps that are nearly one say nothing more.
    kept = [one for one in found if one <= 0.9 * longest_tokens]
    return (*kept, longest_tokens)


def climb(
    target: Target,
    rng: random.Random,
    planned_tokens: int,
    *,
    recall_tokens: int | None = None,
    lengths: Sequence[int] | None = None,
    depths: Sequence[float] = DEPTHS,
    concurrency: int = 1,
    stops: bool = True,
    on_done: Callable[[int, int, str], None],
) -> Ladder:
    """Ask at each length and depth; the length at which one is missed is the last, unless told otherwise.

    Args:
        target: the service.
        rng: what the texts are drawn from.
        planned_tokens: context of the service; a prompt and its reply fit into it.
        recall_tokens: longest prompt that the model itself can be asked about; None: any that the context holds.
        lengths: prompt lengths in tokens, ascending; None: doubling up to what can be asked.
        depths: where the number stands, 0 the beginning and 1 the end.
        concurrency: questions under way at a time.
        stops: end at a length where one is missed; else ask at every length.
        on_done: told how many of how many questions are done, and the length.

    Raises:
        Unreachable: the server is gone.
        AskFailed: it does not say how long a prompt is.
    """
    longest = min(planned_tokens - REPLY_TOKENS, recall_tokens or planned_tokens)
    lengths = steps(longest) if lengths is None else sorted({min(length, longest) for length in lengths})
    sizer = _Sizer(target, rng)
    cells: list[Cell] = []
    failures: list[Failure] = []
    holds_tokens = 0
    total = len(lengths) * len(depths)
    for number, length in enumerate(lengths):
        # Made one after the other: each count of tokens sharpens the guess of the next text's size.
        made = [sizer.task(length, depth) for depth in depths]
        asked = [(length, depth, *one) for depth, one in zip(depths, made, strict=True)]
        tell = partial(_tell, on_done, number * len(depths), total, f"{length} tokens")
        answered = together(asked, lambda one: _ask(target, *one), concurrency, tell)
        cells += [cell for cell, _ in answered]
        failures += [failed for _, failed in answered if failed is not None]
        if failures and stops:
            break
        if not failures:
            holds_tokens = length
    return Ladder(planned_tokens, recall_tokens, tuple(cells), lengths[-1], holds_tokens, tuple(failures))


def _tell(on_done: Callable[[int, int, str], None], before: int, total: int, what: str, done: int) -> None:
    on_done(before + done, total, what)


def _ask(target: Target, step: int, depth: float, task: Task, tokens: int) -> tuple[Cell, Failure | None]:
    raw = ""
    try:
        answer = target.ask(task)
        fault = judge.number_fault(task, answer)
        raw = answer.text
    except Unreachable:
        raise
    except AskFailed as error:
        fault = f"no answer: {error}"
    cell = Cell(step, tokens, depth, fault is None, fault)
    if fault is None:
        return cell, None
    asked = str(task.messages[-1]["content"]).rpartition("\n")[2]
    return cell, Failure("needle", f"{tokens} tokens, depth {depth:g}", (fault,), asked, raw)


@dataclass
class _Sizer:
    """Makes texts of a wanted number of tokens; learns how many characters the server's tokens have."""

    target: Target
    rng: random.Random
    chars_a_token: float = _FIRST_GUESS_CHARS

    def task(self, tokens: int, depth: float) -> tuple[Task, int]:
        """Return a question whose prompt has at most so many tokens and little less, and how many it has."""
        best: tuple[Task, int] | None = None
        aim = max(1.0, tokens * (1 + CLOSE_ENOUGH) / 2 - self._frame_tokens)
        state = self.rng.getstate()
        for tried in itertools.count(1):
            self.rng.setstate(state)
            chars = max(1, round(aim * self.chars_a_token))
            task = needle(self.rng, chars, depth)
            counted = self.target.count_tokens(task)
            if counted <= tokens and (best is None or counted > best[1]):
                best = task, counted
            # A text is of whole sentences: where none comes close, one that fits is enough.
            if CLOSE_ENOUGH * tokens <= counted <= tokens or (tried >= _TRIES and (best or chars == 1)):
                break
            self.chars_a_token *= aim / max(1, counted - self._frame_tokens)
        if best is None:
            raise AskFailed(f"{self.target.connection.base_url}: no text of {tokens} tokens could be made")
        return best

    @cached_property
    def _frame_tokens(self) -> int:
        """Tokens of a prompt with hardly any text: the chat template's, and those of the question."""
        return self.target.count_tokens(needle(random.Random(0), 1, 0.0))
