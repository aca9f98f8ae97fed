"""The prefix-cache probe: requests with a long shared prefix, asked again and again, give the same right reply.

A hybrid model's cache holds attention blocks and recurrent states, which speculation moves back and forth; a state that
is restored wrongly shows as a reply that changes when its prefix comes from the cache (vLLM #53912, #47194).
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from launcher.measure import judge
from launcher.measure.dialogues import Kind, Task, tasks
from launcher.measure.needles import filler, prose
from launcher.measure.replies import Failure, Reply, Share, failure, replies, reply
from launcher.measure.target import Target, as_received
from launcher.measure.words import Words

REPEATS = 20
KINDS: tuple[Kind, ...] = ("single", "nested", "code")


@dataclass(frozen=True)
class PrefixReport:
    """What the probe found."""

    prefix_tokens: int
    right: Share
    """Replies with the right calls."""
    same: Share
    """Repetitions whose reply equals the first one to the request, byte for byte."""
    failures: tuple[Failure, ...]


def probe(
    target: Target,
    rng: random.Random,
    *,
    prefix_tokens: int,
    repeats: int = REPEATS,
    kinds: Sequence[Kind] = KINDS,
    concurrency: int = 1,
    on_done: Callable[[int, int], None],
) -> PrefixReport:
    """Ask each kind once, the first of all without a cached prefix, then again until each was asked `repeats` times.

    Args:
        target: the service.
        rng: what prefix and requests are drawn from.
        prefix_tokens: about how long the shared prefix is; a cache keeps whole blocks, of up to 4128 tokens on hybrids.
        repeats: how often each request is sent.
        kinds: one request of each.
        concurrency: requests under way at a time, but for the first of each, which comes alone.
        on_done: told how many of how many are done.

    Raises:
        Unreachable: the server is gone.
    """
    text = prefix_text(target, rng, prefix_tokens)
    asked = sharing(text, [tasks(kind, rng)[0] for kind in kinds])
    total = len(asked) * repeats
    first = []
    for number, task in enumerate(asked, 1):
        first.append(reply(target, task, "whole"))
        on_done(number, total)
    again = replies(
        target,
        [(task, "whole") for _ in range(repeats - 1) for task in asked],
        concurrency,
        lambda done: on_done(len(asked) + done, total),
    )
    return report(target.count_tokens(_counted(text)), first, again)


def report(prefix_tokens: int, first: Sequence[Reply], again: Sequence[Reply]) -> PrefixReport:
    """Compare repetitions with the first reply to their request, and count right ones."""
    by_task = {id(one.task): one for one in first}
    changed = [failed for one in again if (failed := _changed(by_task[id(one.task)], one)) is not None]
    every = (*first, *again)
    wrong = [one for one in every if one.faults]
    return PrefixReport(
        prefix_tokens=prefix_tokens,
        right=Share(len(every) - len(wrong), len(every)),
        same=Share(len(again) - len(changed), len(again)),
        failures=(*map(failure, wrong), *changed),
    )


def prefix_text(target: Target, rng: random.Random, tokens: int) -> str:
    """Return prose of about so many of the server's tokens."""
    words = Words(rng, "verify")
    sample = prose(filler(words, 2000))
    chars_a_token = len(sample) / target.count_tokens(_counted(sample))
    return prose(filler(words, round(tokens * chars_a_token)))


def sharing(text: str, asked: Sequence[Task]) -> list[Task]:
    """Return tasks that begin alike: each with the tools that any of them calls, and a system message of `text`."""
    called = {call.name for task in asked for call in task.calls}
    tools = {tool["function"]["name"]: tool for task in asked for tool in task.tools}
    shared = tuple(tool for name, tool in tools.items() if name in called)
    return [
        replace(
            task,
            messages=(*_system(text), *(one for one in task.messages if one["role"] != "system")),
            tools=shared,
        )
        for task in asked
    ]


def _counted(text: str) -> Task:
    """The text where every chat template takes it alone."""
    return Task("prefix", ({"role": "user", "content": text},))


def _system(text: str) -> tuple[dict[str, str], ...]:
    return ({"role": "system", "content": f"{text}\n\nYou call tools exactly as you are told."},)


def _changed(first: Reply, again: Reply) -> Failure | None:
    if first.answer is None or again.answer is None:
        return None
    found = judge.differences(first.answer, again.answer)
    if not found:
        return None
    text = f"first:\n{as_received(first.answer)}\nagain:\n{as_received(again.answer)}"
    return Failure(first.task.kind, "repeated", found, str(first.task.messages[-1]["content"]), text)
