"""Pseudo-words, of which some are kept apart: what a model was trained on is never what it is asked.

Standard library only: whoever generates training data imports it too.
"""

import hashlib
import random
from typing import Literal, get_args

Split = Literal["train", "held-out", "verify"]
"""Who may use a word; `verify` is what a running service is asked."""

_SHARES: dict[Split, range] = {"train": range(8), "held-out": range(8, 9), "verify": range(9, 10)}
_CONSONANTS = "bdfgklmnprstvz"
_VOWELS = "aeiou"
_ENDINGS = ("", "", "l", "n", "r", "s", "t", "k", "m")
_UNICODE = (
    "åäéèüñßøçğ",
    "αβγδεθλπστωΩ",
    "бвджиклмнпрю",
    "日本語文字東京中国水火山川",
    "한글서울사랑",
    "😀🚀🌍🔥🎉✅",
)


def split_of(word: str) -> Split:
    """Return the one split that a word belongs to, by its SHA-256."""
    residue = hashlib.sha256(word.encode()).digest()[0] % 10
    return next(split for split in get_args(Split) if residue in _SHARES[split])


class Words:
    """Draws words, names and values of one split; the same generator's state gives the same words."""

    def __init__(self, rng: random.Random, split: Split) -> None:
        self.rng = rng
        self.split = split

    def word(self, shortest: int = 2, longest: int = 3) -> str:
        """Return a word of so many syllables, such as `tamoru`."""
        while split_of(text := self._any_word(shortest, longest)) != self.split:
            pass
        return text

    def pool(self, count: int) -> tuple[str, ...]:
        """Return so many different words of any split: of what nobody is asked for."""
        found: dict[str, None] = {}
        while len(found) < count:
            found[self._any_word(2, 3)] = None
        return tuple(found)

    def _any_word(self, shortest: int, longest: int) -> str:
        syllables = self.rng.randint(shortest, longest)
        text = "".join(self.rng.choice(_CONSONANTS) + self.rng.choice(_VOWELS) for _ in range(syllables))
        return text + self.rng.choice(_ENDINGS)

    def distinct(self, count: int, shortest: int = 2, longest: int = 3) -> tuple[str, ...]:
        """Return so many different words."""
        found: dict[str, None] = {}
        while len(found) < count:
            found[self.word(shortest, longest)] = None
        return tuple(found)

    def text(self) -> str:
        """Return a string value that needs no escape in JSON: words, or something like an id."""
        if self.rng.random() < 0.3:
            return self.identifier()
        return " ".join(self.word() for _ in range(self.rng.randint(1, 3)))

    def identifier(self) -> str:
        """Return an id such as `k3x9-belkin`."""
        head = "".join(self.rng.choice("abcdefghkmnpqrstuvwxyz0123456789") for _ in range(self.rng.randint(3, 6)))
        return f"{head}-{self.word(1, 2)}"

    def unicode_text(self) -> str:
        """Return a string of characters outside ASCII, with a word beside it half of the time."""
        letters = self.rng.choice(_UNICODE)
        text = "".join(self.rng.choice(letters) for _ in range(self.rng.randint(2, 8)))
        return f"{text} {self.word()}" if self.rng.random() < 0.5 else text
