"""Rows of tokens as batches of one size."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
from reference_config import PAD
from reference_rows import PADDING, Row, training_rows

LENGTHS = (512, 768, 1024, 1536, 2304, 4608, 9216)
"""Tokens of a row; a row is padded to the next."""
BATCH_TOKENS = 73_728
"""Tokens of a batch, whatever its rows' length: 9216 x 8."""


@dataclass(frozen=True)
class Batch:
    """Rows of one length, (rows, length) each."""

    tokens: numpy.ndarray[Any, numpy.dtype[numpy.int16]]
    parts: numpy.ndarray[Any, numpy.dtype[numpy.uint8]]
    kinds: tuple[str, ...]


def fits(length: int) -> int | None:
    """Return the length of the shortest row that holds so many tokens."""
    return next((size for size in LENGTHS if length <= size), None)


def rows_of_a_batch(length: int) -> int:
    return BATCH_TOKENS // length


def batch(rows: Sequence[Row], length: int, count: int) -> Batch:
    """Return rows as a batch of `count`, the missing ones empty."""
    tokens = numpy.full((count, length), PAD, dtype=numpy.int16)
    parts = numpy.full((count, length), PADDING, dtype=numpy.uint8)
    for place, one in enumerate(rows):
        tokens[place, : len(one.tokens)] = one.tokens
        parts[place, : len(one.parts)] = one.parts
    return Batch(tokens, parts, tuple(one.kind for one in rows))


def training_batches(seed: str, longest_text: Any) -> Iterator[Batch]:
    """Yield full batches for ever, as rows of a length become enough."""
    pools: dict[int, list[Row]] = {length: [] for length in LENGTHS}
    for one in training_rows(random.Random(seed), longest_text):
        length = fits(len(one.tokens))
        if length is None:
            continue
        pools[length].append(one)
        if len(pools[length]) == rows_of_a_batch(length):
            yield batch(pools[length], length, rows_of_a_batch(length))
            pools[length] = []
