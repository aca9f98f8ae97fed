"""What the reference model is trained on and judged by: dialogues of launcher/measure as rows of tokens.

Training adds to them what makes copying general: several tasks in one conversation, random text as values, and several
questions about one long text.
"""

from __future__ import annotations

import json
import math
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment
from reference_config import IM_END, IM_START, ROOT, TOKEN_IDS, WEIGHTS, encode

if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))

from launcher.measure import dialogues, needles
from launcher.measure.dialogues import Call, Task, Tool
from launcher.measure.words import Split, Words

PADDING, PROMPT, REPLY = range(3)
"""What a token of a row is."""

Messages = tuple[dict[str, Any], ...]


@dataclass(frozen=True)
class Row:
    """One conversation."""

    kind: str
    tokens: list[int]
    parts: list[int]
    """PROMPT or REPLY, for each token."""


def _template() -> jinja2.Template:
    """The checkpoint's chat template, in an environment like that of transformers."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment.from_string((WEIGHTS / "chat_template.jinja").read_text(encoding="utf-8"))


TEMPLATE = _template()
_REPLY_HEAD = [IM_START, *b"assistant\n", TOKEN_IDS["<think>"], *b"\n"]
"""Before what the model writes, when the client asks for thinking; it writes an empty thought."""
_EMPTY_THOUGHT = encode("\n</think>\n\n")


def reply(task: Task) -> dict[str, Any]:
    """Return the right reply to a task as a message."""
    calls = [{"type": "function", "function": {"name": call.name, "arguments": call.arguments}} for call in task.calls]
    return {"role": "assistant", "content": task.content, "tool_calls": calls}


def row(kind: str, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]], last_only: bool = False) -> Row:
    """Return a conversation that ends with a reply; with `last_only`, no other reply counts as one."""
    text = TEMPLATE.render(messages=[_readable(message) for message in messages], tools=list(tools) or None)
    tokens = encode(text)
    parts = [PROMPT] * len(tokens)
    starts = [at for at in range(len(tokens)) if tokens[at] == IM_START]
    replies = [at + len(_REPLY_HEAD) for at in starts if tokens[at : at + len(_REPLY_HEAD)] == _REPLY_HEAD]
    for start in replies[-1:] if last_only else replies:
        end = tokens.index(IM_END, start) + 1
        parts[start:end] = [REPLY] * (end - start)
    return Row(kind, tokens, parts)


def _readable(message: dict[str, Any]) -> dict[str, Any]:
    """The message with its calls' arguments as objects, as a server hands them to the template."""
    calls = []
    for call in message.get("tool_calls", ()):
        arguments = call["function"]["arguments"]
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        calls.append({**call, "function": {**call["function"], "arguments": arguments}})
    return {**message, "tool_calls": calls} if calls else message


# What it is judged by.


def judged(split: Split, seed: str, dialogues_of_a_kind: int, lengths: Sequence[int]) -> list[Task]:
    """Return tasks of every kind, and needles at each depth in texts of so many characters."""
    rng = random.Random(f"{split} {seed}")
    tasks = [
        task
        for _ in range(dialogues_of_a_kind)
        for kind in dialogues.KINDS
        for task in dialogues.tasks(kind, rng, split)
    ]
    depths = (0.05, 0.25, 0.5, 0.75, 0.95)
    return tasks + [needles.needle(rng, chars, depth, split) for chars in lengths for depth in depths]


@cache
def held_out() -> tuple[Task, ...]:
    """Return the whole set that scores are told of: 1,000 requests and 140 needles."""
    return tuple(judged("held-out", "final", 100, (250, 500, 1000, 2000, 4000, 6000, 8000) * 4))


def judged_row(task: Task) -> Row:
    return row(task.kind, (*task.messages, reply(task)), task.tools, last_only=True)


def prompt_and_reply(task: Task) -> tuple[list[int], list[int]]:
    """Return the prompt of a client that wants no thinking, and the right reply to its end-of-turn token."""
    one = judged_row(task)
    start = one.parts.index(REPLY) + len(_EMPTY_THOUGHT)
    return one.tokens[:start], one.tokens[start : one.tokens.index(IM_END, start) + 1]


# What it is trained on.


def training_rows(rng: random.Random, longest_text: Any) -> Iterator[Row]:
    """Yield rows for ever.

    Args:
        longest_text: `value` is the number of characters that a text with needles may have now.
    """
    makers = (
        _one_task,
        _one_task,
        _one_task,
        _many_tasks,
        _many_tasks,
        _random_text,
        _random_text,
        _after_a_text,
        _needles,
        _needles,
    )
    while True:
        yield rng.choice(makers)(Words(rng, "train"), longest_text.value)


def _one_task(words: Words, longest: int) -> Row:
    kind = words.rng.choice(dialogues.KINDS)
    task = dialogues.tasks(kind, words.rng, "train")[-1]
    return row(kind, (*task.messages, reply(task)), task.tools)


def _many_tasks(words: Words, longest: int) -> Row:
    """Several tasks in one conversation, under the tools of all."""
    count = words.rng.randint(2, 5)
    kinds = [words.rng.choice(dialogues.KINDS) for _ in range(count)]
    tasks = [
        dialogues.tasks(kind, words.rng, "train")[-1] if words.rng.random() < 0.8 else _scribble(words)
        for kind in kinds
    ]
    messages: list[dict[str, Any]] = [{"role": "system", "content": words.rng.choice(dialogues.SYSTEMS)}]
    tools: dict[str, dict[str, Any]] = {}
    for task in tasks:
        tools |= {tool["function"]["name"]: tool for tool in task.tools}
        messages += [message for message in task.messages if message["role"] != "system"]
        messages.append(reply(task))
        if task.calls and words.rng.random() < 0.4:
            messages += [{"role": "tool", "content": '{"ok": true}'} for _ in task.calls]
            messages.append({"role": "assistant", "content": "Done."})
    offered = list(tools.values())
    words.rng.shuffle(offered)
    return row("many", messages, offered)


def _random_text(words: Words, longest: int) -> Row:
    task = _scribble(words)
    return row("random-text", (*task.messages, reply(task)), task.tools)


def _after_a_text(words: Words, longest: int) -> Row:
    """A task under a long system message."""
    kind = words.rng.choice(dialogues.KINDS)
    task = dialogues.tasks(kind, words.rng, "train")[-1]
    text = needles.prose(needles.filler(words, _length(words.rng, 300, min(longest, 6500))))
    text = "\n\n".join(filter(None, (text, words.rng.choice(dialogues.SYSTEMS))))
    messages = [message for message in task.messages if message["role"] != "system"]
    return row("after-a-text", ({"role": "system", "content": text}, *messages, reply(task)), task.tools)


def _needles(words: Words, longest: int) -> Row:
    """A text with several numbers, and questions for some of them, one after another."""
    rng = words.rng
    sentences = needles.filler(words, _length(rng, 200, longest))
    count = rng.randint(1, 8)
    names = [word.title() for word in words.distinct(count)]
    numbers = [str(rng.randrange(100_000, 1_000_000)) for _ in names]
    for name, number in zip(names, numbers, strict=True):
        sentences.insert(rng.randint(0, len(sentences)), needles.NEEDLE.format(name=name, number=number))
    asked = rng.sample(range(count), rng.randint(1, count))
    messages = []
    for place, index in enumerate(asked):
        question = needles.QUESTION.format(name=names[index])
        content = f"{needles.BEFORE}{needles.prose(sentences)}{question}" if place == 0 else question.strip()
        messages += [{"role": "user", "content": content}, {"role": "assistant", "content": numbers[index]}]
    return row("needles", messages, ())


def _length(rng: random.Random, shortest: int, longest: int) -> int:
    """A length whose logarithm is uniform."""
    return round(math.exp(rng.uniform(math.log(shortest), math.log(longest))))


def _scribble(words: Words) -> Task:
    """A call whose values are random text."""
    rng = words.rng
    name = f"{rng.choice(dialogues.VERBS)}_{words.word()}"
    key, other = words.distinct(2, 1, 3)
    if rng.random() < 0.6:
        value = _scrawl(rng, rng.randint(1, 8), 40)
        call = Call(name, {key: words.text(), other: value})
        asked = (
            f'{key} = "{call.arguments[key]}" and {other} = the text between the fences, exactly.\n```\n{value}\n```'
        )
    else:
        value = _scrawl(rng, 1, 60).replace('"', "'").replace("\\", "/")
        call = Call(name, {key: value, other: rng.randint(-999, 99999)})
        asked = f'{key} = "{value}" and {other} = {call.arguments[other]}.'
    tools = [Tool(name, {key: {"type": "string"}, other: {"type": "integer" if "```" not in asked else "string"}})]
    tools += [
        Tool(f"{rng.choice(dialogues.VERBS)}_{words.word()}", {words.word(1, 2): {"type": "string"}})
    ] * rng.randint(0, 1)
    rng.shuffle(tools)
    text = f"{rng.choice(dialogues.LEAD_INS)}Call {name} with {asked}"
    messages = ({"role": "user", "content": text},)
    return Task("random-text", messages, tuple(tool.document() for tool in tools), (call,))


_LETTERS = (
    "abcdefghijklmnopqrstuvwxyz",
    "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789",
    "0123456789",
    "".join(chr(code) for code in range(0x21, 0x7F) if chr(code) != "`"),
    "<>/=\"'(){}[];:.,!&|+-*#_",
    "ab",
    "".join(chr(code) for code in range(0xA1, 0x180)),
    "".join(chr(code) for code in range(0x391, 0x3CA) if chr(code).isalpha()),
    "".join(chr(code) for code in range(0x410, 0x450)),
    "".join(chr(code) for code in range(0x4E00, 0x5200)),
    "".join(chr(code) for code in range(0xAC00, 0xAF00)),
    "".join(chr(code) for code in range(0x1F300, 0x1F650)),
)
_MARKS = (
    "<b>",
    "</b>",
    "<parameter=x>",
    "</parameter>",
    "<function=f>",
    "</function>",
    "{}",
    "[]",
    "==",
    "->",
    "&&",
    "\\n",
)


def _scrawl(rng: random.Random, most_lines: int, most_letters: int) -> str:
    """Random lines, neither beginning nor ending with white space as a whole."""
    lines: list[str] = []
    for _ in range(most_lines):
        letters = rng.choice(_LETTERS)
        words = []
        left = rng.randint(1, most_letters)
        while left > 0:
            size = min(left, rng.randint(1, 12))
            words.append(rng.choice(_MARKS) if rng.random() < 0.1 else "".join(rng.choices(letters, k=size)))
            left -= size
        indent = rng.choice(("", "", "  ", "    ", "\t")) if lines else ""
        lines.append(indent + rng.choice((" ", " ", "", ", ")).join(words))
    return "\n".join(lines).strip()
