"""The mixed load: short, medium and long requests, half of them the turns of an agent whose history grows. Pure."""

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from launcher.measure import dialogues
from launcher.measure.dialogues import Task
from launcher.measure.needles import filler, needle, prose
from launcher.measure.words import Words

Size = Literal["short", "medium", "long"]
SIZES: tuple[Size, ...] = get_args(Size)
SHARES: Mapping[Size, float] = {"short": 0.3, "medium": 0.5, "long": 0.2}
"""Of all requests."""
CONTEXT_SHARES: Mapping[Size, tuple[float, float]] = {
    "short": (0.02, 0.05),
    "medium": (0.08, 0.25),
    "long": (0.45, 0.7),
}
"""Prompt, as a share of the context."""
MOST_TOKENS: Mapping[Size, int] = {"short": 512, "medium": 8192, "long": 65536}
"""However large the context is."""
AGENT_SHARE = 0.5
"""Of all requests."""
AGENT_ROUNDS = (2, 4)
REPLY_TOKENS: Mapping[Size, int] = {"short": 96, "medium": 192, "long": 256}
"""Longest text of a plain reply."""
FIRST_CHARS_A_TOKEN = 2.2
"""Of the made-up words, before the server has counted any: too few, so that nothing is too long."""
ESSAY = "\n\nRetell this text in your own words."


@dataclass(frozen=True)
class Turn:
    """One request of a session."""

    size: Size
    is_agent: bool
    task: Task
    is_judged: bool
    """Whether it has one right reply."""


def next_size(asked: Mapping[str, int]) -> Size:
    """Return the size of which the fewest were asked, measured by their shares."""
    total = sum(asked.values()) + 1
    return max(SIZES, key=lambda size: SHARES[size] * total - asked.get(size, 0))


def prompt_tokens(size: Size, context_tokens: int, rng: random.Random) -> int:
    """Return how long a prompt of this size is."""
    low, high = CONTEXT_SHARES[size]
    return min(MOST_TOKENS[size], int(context_tokens * rng.uniform(low, high)))


def session(
    size: Size, seed: str, context_tokens: int, chars_a_token: float, *, is_agent: bool, has_tools: bool
) -> Iterator[Turn]:
    """Yield the requests of one session; the same seed gives the same ones.

    Args:
        chars_a_token: characters a token as the server has counted so far.
        is_agent: many turns with a growing history, else one request.
        has_tools: whether the server reads tool calls.
    """
    rng = random.Random(seed)
    chars = int(prompt_tokens(size, context_tokens, rng) * chars_a_token)
    if not is_agent:
        yield _plain(size, rng, chars)
    elif has_tools:
        yield from _agent(size, rng, chars)
    else:
        yield from _conversation(size, rng, chars)


def _plain(size: Size, rng: random.Random, chars: int) -> Turn:
    """A text to retell, or a number to find in it."""
    if rng.random() < 0.3:
        return Turn(size, False, needle(rng, max(chars, 200), rng.random()), True)
    text = prose(filler(Words(rng, "verify"), max(chars, 80)))
    message = {"role": "user", "content": f"{text}{ESSAY}"}
    return Turn(size, False, Task("essay", (message,), max_tokens=REPLY_TOKENS[size]), False)


def _agent(size: Size, rng: random.Random, chars: int) -> Iterator[Turn]:
    """Rounds of calls, results and closing words, each behind all those before it."""
    words = Words(rng, "verify")
    system = {"role": "system", "content": f"You call tools exactly as you are told.\n\n{prose(filler(words, chars))}"}
    history: tuple[dict[str, Any], ...] = (system,)
    tools: dict[str, dict[str, Any]] = {}
    for _ in range(rng.randint(*AGENT_ROUNDS)):
        steps = dialogues.tasks("chain", rng)
        tools |= {tool["function"]["name"]: tool for step in steps for tool in step.tools}
        for step in steps:
            messages = tuple(message for message in step.messages if message["role"] != "system")
            task = replace(step, kind="agent", messages=(*history, *messages), tools=tuple(tools.values()))
            yield Turn(size, True, task, True)
        last = tuple(message for message in steps[-1].messages if message["role"] != "system")
        history = (*history, *last, {"role": "assistant", "content": steps[-1].content})


def _conversation(size: Size, rng: random.Random, chars: int) -> Iterator[Turn]:
    """What an agent's history is to a server without tools: each question behind all those before it."""
    words = Words(rng, "verify")
    history: tuple[dict[str, Any], ...] = ()
    text = prose(filler(words, max(chars, 80)))
    for number in range(rng.randint(*AGENT_ROUNDS)):
        asked = f"{text}{ESSAY}" if number == 0 else f"Go on: what did {words.word().title()} do next?"
        messages = (*history, {"role": "user", "content": asked})
        yield Turn(size, True, Task("conversation", messages, max_tokens=REPLY_TOKENS["short"]), False)
        said = " ".join(filler(words, 200))
        history = (*messages, {"role": "assistant", "content": said})
