"""How batches are cut, and rows made of them: compared with a loop over tokens on random batches."""

from __future__ import annotations

import random
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs an environment with torch; the launcher's has none")

from vllm_graft.attention.rows import Attend, DecodeRows, cut  # noqa: E402


def starts_of(query_lens: list[int]) -> list[int]:
    starts = [0]
    for length in query_lens:
        starts.append(starts[-1] + length)
    return starts


def test_a_batch_is_cut_by_what_each_request_has_cached() -> None:
    spans = cut(starts_of([4, 2, 1, 4, 7, 7, 30, 0]), [40, 9, 5, 4, 7, 9, 60, 0], threshold=4)
    assert [(span.attend, span.requests, span.tokens, span.max_query_len) for span in spans] == [
        (Attend.CACHE, (0, 3), (0, 7), 4),
        (Attend.BATCH, (3, 5), (7, 18), 7),
        (Attend.BOTH, (5, 6), (18, 25), 7),
        (Attend.BOTH, (6, 7), (25, 55), 30),
    ]


def test_a_prompt_of_one_token_is_a_decode_and_padding_is_nothing() -> None:
    assert [span.attend for span in cut([0, 1, 1, 1], [1, 0, 0], threshold=1)] == [Attend.CACHE]
    assert cut([0, 0], [0], threshold=4) == ()


def test_decodes_out_of_order_are_cut_apart_but_all_served() -> None:
    spans = cut(starts_of([9, 2, 9, 2]), [20, 30, 9, 40], threshold=4)
    assert [span.attend for span in spans] == [Attend.BOTH, Attend.CACHE, Attend.BATCH, Attend.CACHE]
    assert [span.tokens for span in spans] == [(0, 9), (9, 11), (11, 20), (20, 22)]


@pytest.mark.parametrize("seed", range(20))
def test_rows_equal_a_loop_over_tokens(seed: int) -> None:
    draw = random.Random(seed)
    query_lens = [draw.randint(1, 4) for _ in range(draw.randint(1, 8))] + [0] * draw.randint(0, 3)
    seq_lens = [length + draw.randint(0, 50) if length else 0 for length in query_lens]
    starts = starts_of(query_lens)
    table = torch.arange(len(query_lens) * 5, dtype=torch.int32).view(-1, 5)
    rows = DecodeRows(capacity=48, block_table_width=6, device=torch.device("cpu"))
    num_tokens = starts[-1] + draw.randint(0, 3)
    lengths, tables = rows.expand(
        torch.tensor(seq_lens, dtype=torch.int32),
        torch.tensor(starts, dtype=torch.int32),
        table,
        first_token=0,
        num_tokens=num_tokens,
    )
    expected: list[tuple[int, Any]] = [
        (seq_len - query_len + 1 + j, request)
        for request, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True))
        for j in range(query_len)
    ]
    assert lengths.tolist() == [length for length, _ in expected] + [1] * (num_tokens - len(expected))
    assert torch.equal(tables[: len(expected)], table[[request for _, request in expected]])
    assert rows.lengths[num_tokens:].tolist() == [1] * (48 - num_tokens)


def test_rows_of_a_part_of_a_batch_start_where_they_are_told() -> None:
    rows = DecodeRows(capacity=8, block_table_width=1, device=torch.device("cpu"))
    seq_lens, starts = torch.tensor([10, 20, 30], dtype=torch.int32), torch.tensor([0, 2, 9, 12], dtype=torch.int32)
    table = torch.tensor([[7], [8], [9]], dtype=torch.int32)
    rows.expand(seq_lens, starts, table, first_token=0, num_tokens=2)
    rows.expand(seq_lens, starts, table, first_token=9, num_tokens=3, first_row=2)
    assert rows.lengths.tolist() == [9, 10, 28, 29, 30, 1, 1, 1]
    assert rows.block_table.flatten().tolist()[:5] == [7, 7, 9, 9, 9]


def test_more_rows_than_reserved_are_refused() -> None:
    rows = DecodeRows(capacity=3, block_table_width=1, device=torch.device("cpu"))
    one = torch.tensor([4], dtype=torch.int32)
    with pytest.raises(ValueError, match="4 decode rows over 1 blocks do not fit"):
        rows.expand(one, torch.tensor([0, 4], dtype=torch.int32), one.view(1, 1), first_token=0, num_tokens=4)
