"""The tool-call suite: calls of every kind, whole and streamed, which must be right and equal."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

from launcher.measure import judge
from launcher.measure.dialogues import KINDS, Kind, Task, draw
from launcher.measure.replies import Failure, How, Reply, Share, failure, replies
from launcher.measure.target import Target, as_received

REQUIRED_KINDS = ("single", "nested")
"""Kinds of one call, which `tool_choice: required` leaves no other way to answer."""


@dataclass(frozen=True)
class ToolReport:
    """What the suite found."""

    replies: Share
    kinds: dict[str, Share]
    """By kind of dialogue."""
    hows: dict[str, Share]
    """By way of asking: whole, streamed, required."""
    twins: Share
    """Tasks whose streamed reply equals the whole one, byte for byte."""
    failures: tuple[Failure, ...]


def suite(
    target: Target,
    rng: random.Random,
    *,
    count: int,
    concurrency: int,
    on_done: Callable[[int, int], None],
    kinds: tuple[Kind, ...] = KINDS,
) -> ToolReport:
    """Ask `count` times or a few more; `on_done` is told how many of how many are done.

    Raises:
        Unreachable: the server is gone.
    """
    asked = requests(rng, count, kinds)
    return report(replies(target, asked, concurrency, lambda done: on_done(done, len(asked))))


def report(found: list[Reply]) -> ToolReport:
    """Count the replies; those to one task, whole and streamed, are twins where both are there."""
    whole = {id(one.task): one for one in found if one.how == "whole"}
    pairs = [(whole[id(one.task)], one) for one in found if one.how == "streamed" and id(one.task) in whole]
    unlike = [failed for pair in pairs if (failed := _unlike(*pair)) is not None]
    return ToolReport(
        replies=_share(found),
        kinds=_shares(found, lambda one: one.task.kind),
        hows=_shares(found, lambda one: one.how),
        twins=Share(len(pairs) - len(unlike), len(pairs)),
        failures=(*(failure(one) for one in found if one.faults), *unlike),
    )


def requests(rng: random.Random, count: int, kinds: tuple[Kind, ...] = KINDS) -> list[tuple[Task, How]]:
    """Return `count` requests or a few more: each task whole and streamed, and required where that leaves one reply."""
    asked: list[tuple[Task, How]] = []
    source = draw(rng, kinds=kinds)
    while len(asked) < count:
        (task,) = islice(source, 1)
        asked += [(task, "whole"), (task, "streamed")]
        if task.kind in REQUIRED_KINDS:
            asked.append((task, "required"))
    return asked


def _unlike(whole: Reply, streamed: Reply) -> Failure | None:
    if whole.answer is None or streamed.answer is None:
        return None if whole.answer is streamed.answer else failure(streamed if streamed.answer is None else whole)
    found = judge.differences(whole.answer, streamed.answer)
    if not found:
        return None
    text = f"whole:\n{as_received(whole.answer)}\nstreamed:\n{as_received(streamed.answer)}"
    return Failure(whole.task.kind, "streamed unlike whole", found, str(whole.task.messages[-1]["content"]), text)


def _share(found: list[Reply]) -> Share:
    return Share(sum(not one.faults for one in found), len(found))


def _shares(found: list[Reply], key: Callable[[Reply], str]) -> dict[str, Share]:
    groups: dict[str, list[Reply]] = {}
    for one in found:
        groups.setdefault(key(one), []).append(one)
    return {name: _share(group) for name, group in groups.items()}
