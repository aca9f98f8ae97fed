"""How a batch is cut for attention, and single-token rows made from it on the device.

A decode kernel serves one query token per row: a row has a length (how many cached tokens it attends to, its own
included) and a row of the block table.  A request that verifies K drafts is 1+K such rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import torch


class Attend(Enum):
    """What the tokens of a span attend to."""

    CACHE = "the cache alone, token by token"
    BATCH = "the batch alone: nothing of these requests was cached before"
    BOTH = "a cached prefix and the batch"


@dataclass(frozen=True)
class Span:
    """Consecutive requests of a batch, and their tokens, that one attention call serves; ends are exclusive."""

    attend: Attend
    requests: tuple[int, int]
    tokens: tuple[int, int]
    max_query_len: int

    @property
    def num_tokens(self) -> int:
        return self.tokens[1] - self.tokens[0]


def cut(query_starts: Sequence[int], length_bounds: Sequence[int], threshold: int) -> tuple[Span, ...]:
    """Cut a batch into spans, judging every request by its own lengths.

    `query_starts` are the requests' first tokens and the end of the last one; `length_bounds` are the host's upper
    bounds of their lengths.  A request whose bound equals its query length has nothing cached, since its true length
    lies between the two.  Requests of at most `threshold` tokens are decodes, unless nothing of theirs is cached: a
    short prompt is computed as it would be without speculation.  The bound is not used for the length of a decode,
    which may have had drafts rejected that the host does not know of yet.
    """
    spans: list[Span] = []
    for request, bound in enumerate(length_bounds):
        start, stop = query_starts[request], query_starts[request + 1]
        query_len = stop - start
        if query_len == 0:
            continue
        if query_len > 1 and query_len == bound:
            attend = Attend.BATCH
        elif query_len <= threshold:
            attend = Attend.CACHE
        else:
            attend = Attend.BOTH
        last = spans[-1] if spans else None
        if last is not None and last.attend is attend is not Attend.BOTH and last.requests[1] == request:
            spans[-1] = Span(
                attend, (last.requests[0], request + 1), (last.tokens[0], stop), max(last.max_query_len, query_len)
            )
        else:
            spans.append(Span(attend, (request, request + 1), (start, stop), query_len))
    return tuple(spans)


class DecodeRows:
    """Rows in buffers of fixed size and place, which CUDA graphs go on reading after capture.

    `lengths` is int32 [capacity], `block_table` int32 [capacity, block_table_width].
    """

    def __init__(self, capacity: int, block_table_width: int, device: torch.device) -> None:
        self.capacity = capacity
        self.lengths = torch.ones(capacity, dtype=torch.int32, device=device)
        self.block_table = torch.zeros(capacity, block_table_width, dtype=torch.int32, device=device)
        self._count = torch.arange(capacity, dtype=torch.int32, device=device)

    def expand(
        self,
        seq_lens: torch.Tensor,
        query_start_loc: torch.Tensor,
        block_table: torch.Tensor,
        *,
        first_token: int,
        num_tokens: int,
        first_row: int = 0,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Make rows of the tokens from `first_token` on and return their lengths [T] and block table [T, W].

        Token t of a request whose query ends at e attends to seq_len - e + t + 1 tokens.  All lengths are read on the
        device (`seq_lens` int32 [R], `query_start_loc` int32 [R+1 or more], `block_table` int32 [R, W]) and nothing is
        read back.  Tokens behind the last request, the padding of a graph, get length 1: no row is empty, since softmax
        over nothing is NaN.  Every length from `first_row` to the end of the buffer is written, so that a graph which
        replays more rows than this batch has finds padding there.

        Raises:
            ValueError: the rows do not fit into the buffers.

        """
        end_row = first_row + num_tokens
        width = block_table.shape[1]
        if end_row > self.capacity or width > self.block_table.shape[1]:
            raise ValueError(
                f"{end_row} decode rows over {width} blocks do not fit into the {tuple(self.block_table.shape)} that "
                "were reserved from max_num_seqs, the number of speculative tokens and max_model_len"
            )
        tokens = self._count[: self.capacity - first_row] + first_token
        ends = query_start_loc[1 : seq_lens.shape[0] + 1]
        request = torch.searchsorted(ends, tokens, right=True).clamp_(max=ends.shape[0] - 1)
        lengths = (seq_lens - ends + 1)[request] + tokens
        lengths = torch.where(tokens < ends[-1], lengths, 1).clamp_(min=1)
        self.lengths[first_row:] = lengths
        self.block_table[first_row:end_row, :width] = block_table[request[:num_tokens]]
        return self.lengths[first_row:end_row], self.block_table[first_row:end_row, :width]
