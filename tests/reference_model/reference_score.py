"""Judge weights without generating: a reply is right when every token of it is the best one after those before it.

That is what greedy decoding would write. A draft of the MTP layer counts as accepted as vLLM counts it: with all those
before it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import reference_parts
import torch
from reference_batches import LENGTHS, Batch, batch, fits, rows_of_a_batch
from reference_net import Network, Places
from reference_parts import losses_of
from reference_rows import REPLY, Row, judged_row
from torch import Tensor

from launcher.measure.dialogues import Task

DRAFTS = 3


def shifted(x: Tensor, by: int) -> Tensor:
    """Move a batch's rows (rows, length, ...) to the left, or to the right when negative; what enters is 0."""
    if by == 0:
        return x
    out = torch.zeros_like(x)
    if by > 0:
        out[:, :-by] = x[:, by:]
    else:
        out[:, -by:] = x[:, :by]
    return out


def passes(
    network: Network, tokens: Tensor, weight: Tensor, places: Places, drafts: int = DRAFTS
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield loss, hits and balancing loss of the model, then of each MTP step.

    Args:
        tokens, weight: (rows, length); a token's weight is that of predicting it.

    Yields:
        Sums weighted so, hits (rows, length) that stand where the predicted token stands, and the balancing loss. A
        step's input at a token is what the step before computed one token earlier, as when drafts follow one another.
    """
    head = network.weight("lm_head")
    hidden, balance = network.hidden(tokens, places)

    def judged(hidden: Tensor, ahead: int) -> tuple[Tensor, Tensor]:
        target, share = shifted(tokens, ahead).flatten(), shifted(weight, ahead).flatten()
        loss, hit = losses_of(hidden, head, target, share)
        return loss, shifted(hit.view_as(tokens), -ahead)

    yield *judged(hidden, 1), balance
    following = shifted(tokens, 1).flatten()
    memory = None
    for step in range(drafts):
        if step:
            hidden = shifted(hidden.view(*tokens.shape, -1), -1).flatten(0, 1)
        hidden, memory, balance = network.mtp(hidden, following, places, memory)
        yield *judged(hidden, 2), balance


def batches_of(rows: Sequence[Row]) -> Iterator[tuple[Batch, list[int]]]:
    """Yield rows as batches, each with the places of its rows in `rows`."""
    pools: dict[int, list[int]] = defaultdict(list)
    for place, one in enumerate(rows):
        length = fits(len(one.tokens))
        if length is None:
            raise ValueError(f"a row of {len(one.tokens)} tokens; the longest has {LENGTHS[-1]}")
        pools[length].append(place)
    for length, places in sorted(pools.items()):
        count = rows_of_a_batch(length)
        for start in range(0, len(places), count):
            chosen = places[start : start + count]
            # Compiled parts are made for a whole batch.
            size = count if reference_parts.compile_parts else len(chosen)
            yield batch([rows[place] for place in chosen], length, size), chosen


def score(network: Network, tasks: Iterable[Task], device: torch.device | str) -> dict[str, Any]:
    """Return how many replies are wholly right by kind, the first wrong ones, and the drafts' acceptance."""
    tasks = list(tasks)
    rows = [judged_row(task) for task in tasks]
    right: Counter[str] = Counter()
    wrong: list[int] = []
    accepted, drafted = torch.zeros(DRAFTS), 0
    for one, places in batches_of(rows):
        tokens = torch.from_numpy(one.tokens).long().to(device)
        is_reply = torch.from_numpy(one.parts).to(device) == REPLY
        where = Places(network.config, tokens.shape[0], tokens.shape[1], device)
        hits = [hit for _, hit, _ in passes(network, tokens, is_reply.float(), where)]
        exact = (hits[0] | ~is_reply).all(1).tolist()
        for row_place, place in enumerate(places):
            right[rows[place].kind] += exact[row_place]
            if not exact[row_place]:
                wrong.append(place)
        # Of draft runs that lie wholly in a reply, by the place of their first token.
        run = is_reply & (shifted(is_reply.float(), DRAFTS - 1) > 0)
        drafted += int(run.sum())
        for step in range(DRAFTS):
            run = run & (shifted(hits[1 + step].float(), step) > 0)
            accepted[step] += int(run.sum())
    asked = Counter(one.kind for one in rows)
    return {
        "exact": sum(right.values()) / len(rows),
        "by_kind": {kind: [right[kind], asked[kind]] for kind in sorted(asked)},
        "acceptance_by_position": [round(share, 4) for share in (accepted / max(drafted, 1)).tolist()],
        "wrong": sorted(wrong)[:20],
    }
