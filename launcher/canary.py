"""The start's canary: a question and, where the model can, a tool call; each has one right answer."""

import random
from dataclasses import dataclass, replace

from launcher.ask import Answer, Connection, ServedModel, ask
from launcher.measure.dialogues import tasks
from launcher.measure.replies import How, Reply, reply
from launcher.measure.target import Target, as_received
from launcher.measure.tools import report
from launcher.plan import Plan
from launcher.problems import Problem

CALLED: tuple[How, ...] = ("whole", "streamed")


@dataclass(frozen=True)
class Canary:
    """What is asked: its answers show that the tokens are right, not only that there are some."""

    question: str = "What is the capital of France?"
    expected: str = "Paris"
    """Must stand in the answer, in any case."""
    max_tokens: int = 256
    timeout_s: float = 300.0
    """Longest silence: the first request may compile kernels."""
    calls_tools: bool = False
    """Ask for a tool call too, whole and streamed."""
    speculates: bool = False
    """The server speculates, which breaks calls first."""


def canary_of(plan: Plan) -> Canary:
    """Return the canary of a plan: its model's question, and calls only where the server reads them."""
    usual = Canary(calls_tools=plan.can_call_tools, speculates="--speculative-config" in plan.argv())
    if plan.canary is None:
        return usual
    return replace(usual, question=plan.canary.question, expected=plan.canary.expected)


def answer(base_url: str, served_name: str, api_key: str | None, canary: Canary) -> Answer:
    """Ask the question.

    Raises:
        AskFailed: there is no answer.
    """
    return ask(
        base_url,
        canary.question,
        model=served_name,
        api_key=api_key,
        max_tokens=canary.max_tokens,
        timeout_s=canary.timeout_s,
        thinking=False,
    )


def call(base_url: str, served_name: str, api_key: str | None, canary: Canary) -> tuple[Reply, ...]:
    """Ask for a tool call, drawn anew, in both ways; return the judged replies.

    Raises:
        AskFailed: the server is gone.
    """
    (task,) = tasks("single", random.Random())
    with Connection(base_url, api_key=api_key, timeout_s=canary.timeout_s) as connection:
        target = Target(connection, ServedModel(served_name, None, "vllm"))
        return tuple(reply(target, task, how) for how in CALLED)


def answer_problem(canary: Canary, given: Answer) -> Problem | None:
    """Return what is wrong with the answer to the question."""
    if canary.expected.casefold() in given.text.casefold():
        return None
    message = (
        f"wrong answer to {canary.question!r}: got {given.text!r}; it must contain {canary.expected!r}. "
        "The server runs and computes wrong tokens: do not use it"
    )
    return Problem(cause="wrong-answer", severity="refuse", message=message, remedy=_remedy(canary))


def call_problem(canary: Canary, replies: tuple[Reply, ...]) -> Problem | None:
    """Return what is wrong with the replies to a request for a tool call, with the raw text."""
    failures = report(list(replies)).failures
    if not failures:
        return None
    first = failures[0]
    raw = first.raw or "\n".join(as_received(one.answer) for one in replies if one.answer is not None)
    message = (
        f"wrong tool call, {first.how}: {'; '.join(first.faults)}. Asked: {first.asked!r}. The model wrote: {raw!r}. "
        "The server runs and breaks tool calls: do not use it for agents"
    )
    return Problem(cause="tool-call-broken", severity="refuse", message=message, remedy=_remedy(canary))


def _remedy(canary: Canary) -> str:
    if canary.speculates:
        return (
            "take `serve.speculation` out of a profile that extends this one and start again: where the answer is "
            "right then, speculation breaks it; `graft report` writes a file for an issue"
        )
    return "compare the model's files with `make fetch`, then write a file for an issue with `graft report`"
