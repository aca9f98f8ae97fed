"""How far two tensors of activations are apart: by row (token), by column (channel), and for logits by distribution."""

from dataclasses import dataclass
from typing import Any

import torch

BLOCK_ELEMENTS = 1 << 22
"""So many values of each side are in memory at a time, as float32."""
_TINY = 1e-30


@dataclass(frozen=True)
class Apart:
    """The difference of two tensors [rows, columns].

    `by_row` is |a - b| / |a| of each row, with the median row's |a| where a row has less. `by_column` is the same of
    columns, whose rows are first divided by the row's |a|: one huge row would hide the others.
    """

    max_abs: float
    relative: float
    cosine: float
    """The least of a row."""
    by_row: torch.Tensor
    by_column: torch.Tensor
    row_share: torch.Tensor
    """Each row's part of the squared error, relative to its |a|."""
    column_share: torch.Tensor


def apart(a: torch.Tensor, b: torch.Tensor) -> Apart:
    """Compare, a block of rows at a time; not-a-number on one side is an infinite difference."""
    rows, columns = a.shape
    row_error, row_size, row_dot = torch.zeros(rows), torch.zeros(rows), torch.zeros(rows)
    row_other = torch.zeros(rows)
    column_error, column_size = torch.zeros(columns), torch.zeros(columns)
    max_abs = 0.0
    step = max(1, BLOCK_ELEMENTS // columns)
    for start in range(0, rows, step):
        block = slice(start, start + step)
        one, other = a[block].float(), b[block].float()
        difference = (one - other).abs().nan_to_num(nan=float("inf"), posinf=float("inf"))
        difference[(one == other) | (one.isnan() & other.isnan())] = 0
        max_abs = max(max_abs, float(difference.max()))
        row_error[block] = difference.square().sum(1)
        row_size[block] = one.nan_to_num(0, 0, 0).square().sum(1)
        row_other[block] = other.square().sum(1)
        row_dot[block] = (one * other).sum(1)
        share = row_size[block].clamp(min=_TINY)[:, None]
        column_error += (difference.square() / share).sum(0)
        column_size += (one.nan_to_num(0, 0, 0).square() / share).sum(0)
    cosine = row_dot / (row_size * row_other).sqrt().clamp(min=_TINY)
    cosine[(row_size == 0) & (row_other == 0)] = 1
    relative_rows = row_error / row_size.clamp(min=_TINY)
    return Apart(
        max_abs=max_abs,
        relative=float((row_error.sum() / row_size.sum().clamp(min=_TINY)).sqrt()),
        cosine=float(cosine.min().clamp(-1, 1)),
        by_row=_ratio(row_error, row_size),
        by_column=_ratio(column_error, column_size),
        row_share=_share(relative_rows),
        column_share=_share(column_error),
    )


def _ratio(error: torch.Tensor, size: torch.Tensor) -> torch.Tensor:
    floor = size.median().clamp(min=_TINY)
    return (error / torch.maximum(size, floor)).sqrt()


def _share(error: torch.Tensor) -> torch.Tensor:
    if bool(error.isinf().any()):
        error = error.isinf().float()
    return error / error.sum().clamp(min=_TINY)


@dataclass(frozen=True)
class Distribution:
    """Next-token distributions of two sides, position by position: KL in nats of b from a."""

    kl: torch.Tensor
    same_top: torch.Tensor
    nll_a: torch.Tensor
    """Of the token that follows; not a number where a prompt ends."""
    nll_b: torch.Tensor


def distributions(a: torch.Tensor, b: torch.Tensor, following: torch.Tensor) -> Distribution:
    """Compare logits [rows, vocabulary]; `following` is each position's next token, -1 at a prompt's end."""
    parts: list[tuple[torch.Tensor, ...]] = []
    step = max(1, BLOCK_ELEMENTS // a.shape[1])
    for start in range(0, a.shape[0], step):
        block = slice(start, start + step)
        one, other = a[block].float().log_softmax(1), b[block].float().log_softmax(1)
        kl = (one.exp() * (one - other)).nan_to_num(nan=float("inf"), posinf=float("inf"))
        kl[one.exp() == 0] = 0
        tokens = following[block]
        at = tokens.clamp(min=0)[:, None]
        parts.append(
            (
                kl.sum(1).clamp(min=0),
                one.argmax(1) == other.argmax(1),
                *(-side.gather(1, at)[:, 0].masked_fill(tokens < 0, float("nan")) for side in (one, other)),
            )
        )
    return Distribution(*(torch.cat(column) for column in zip(*parts, strict=True)))


def runs(beyond: torch.Tensor, most: int = 8) -> str:
    """Write the places where a mask is true as "3, 16-31"; after so many runs an ellipsis."""
    places = beyond.nonzero()[:, 0].tolist()
    found: list[list[int]] = []
    for place in places:
        if found and place == found[-1][1] + 1:
            found[-1][1] = place
        else:
            found.append([place, place])
    written = [f"{first}" if first == last else f"{first}-{last}" for first, last in found]
    return ", ".join(written[:most]) + (", ..." if len(written) > most else "")


def finite(value: float) -> float | None:
    """A number that JSON has; None for an infinite one."""
    return value if abs(value) != float("inf") and value == value else None


def mean(values: torch.Tensor) -> Any:
    """The mean of what is a number."""
    return finite(float(values[~values.isnan()].mean()))
