"""Texts in which one number is hidden, and the question that asks for it. Standard library only, as dialogues.py."""

import random
from collections.abc import Sequence

from launcher.measure.dialogues import Task
from launcher.measure.words import Split, Words

NEEDLE = "The locker number of {name} is {number}."
BEFORE = "Read this text.\n\n"
QUESTION = "\n\nWhat is the locker number of {name}? Reply with the number only."
SENTENCES_A_PARAGRAPH = 5
REPLY_TOKENS = 32
_POOL_WORDS = 80
_FRAMES = (
    "{A} walked from {B} to {C} and counted {n} {d}.",
    "In {B} the {d} are kept behind the {e}.",
    "{A} sold {n} {d} to {C} before noon.",
    "Nobody in {B} has seen the {d} since {A} left.",
    "The road to {C} passes {n} {d} and one {e}.",
    "{A} and {C} argued about a {d} for {n} hours.",
    "Every {d} in {B} is older than the {e}.",
    "When it rains, {A} counts the {d} of {C}.",
)


def filler(words: Words, chars: int) -> list[str]:
    """Return sentences of about so many characters in all, none of which names a locker."""
    pool = words.pool(_POOL_WORDS)
    sentences: list[str] = []
    length = 0
    while length < chars:
        a, b, c, d, e = (words.rng.choice(pool) for _ in range(5))
        number = words.rng.randint(2, 99)
        sentence = words.rng.choice(_FRAMES).format(A=a.title(), B=b.title(), C=c.title(), d=d, e=e, n=number)
        sentences.append(sentence)
        length += len(sentence) + 1
    return sentences


def prose(sentences: Sequence[str]) -> str:
    """Return sentences as paragraphs."""
    starts = range(0, len(sentences), SENTENCES_A_PARAGRAPH)
    return "\n\n".join(" ".join(sentences[at : at + SENTENCES_A_PARAGRAPH]) for at in starts)


def needle(rng: random.Random, chars: int, depth: float, split: Split = "verify") -> Task:
    """Return the question for a number that stands at `depth` (0 the beginning, 1 the end) of about `chars` characters.

    Texts of 2000 characters and more have two other numbers in them, of other names.
    """
    words = Words(rng, split)
    name, *others = (word.title() for word in words.distinct(3))
    numbers = rng.sample(range(100_000, 1_000_000), 3)
    sentences = filler(words, chars)
    if chars >= 2000:
        for other, number in zip(others, numbers[1:], strict=True):
            sentences.insert(rng.randint(0, len(sentences)), NEEDLE.format(name=other, number=number))
    hidden = NEEDLE.format(name=name, number=numbers[0])
    sentences.insert(round(depth * len(sentences)), hidden)
    text = f"{BEFORE}{prose(sentences)}{QUESTION.format(name=name)}"
    message = {"role": "user", "content": text}
    return Task("needle", (message,), content=str(numbers[0]), max_tokens=REPLY_TOKENS)
