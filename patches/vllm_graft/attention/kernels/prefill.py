"""Attention of a prompt's chunk to a packed cached prefix and to itself, in a workspace of fixed size.

The prefix is dequantized tile by tile into one small buffer and attended to without a mask; the chunk's own keys and
values are attended to as they are, causally; the parts are merged by their log-sum-exp in FP32.  A long chunk is cut
into blocks of queries, since partial outputs need memory too.  A prefix of one tile is dequantized once for all blocks;
a longer one again for each block, whose sum over the tiles stays in FP32.  Tiles are FP16 whatever the model's dtype
is: values and outputs over a tile then lose less than one bfloat16 does.  The attention itself is a parameter: flash
attention.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from vllm_graft.attention.kernels.dequantize import dequantize
from vllm_graft.attention.kernels.layout import SlotLayout
from vllm_graft.attention.kernels.merge import merge
from vllm_graft.attention.kernels.rotation import rotate, step
from vllm_graft.attention.kernels.workspace import WORKSPACE_BYTES

_ROWS = 64  # queries that one program of flash attention serves at head size 256
_MIN_TILE_TOKENS = 2048  # below it a tile takes longer to launch than to compute
_ALIGNMENT = 256
_ROOM = WORKSPACE_BYTES - 5 * _ALIGNMENT  # five tensors, each of which begins at an aligned address


class Attention(Protocol):
    """Attention of query [T, heads, D] to key and value [S, KV heads, D]; causal is aligned to the last of both.

    T > 1: flash attention has kernels of their own for a single query, which nothing else needs.  Writes the output
    [T, heads, D] to `out` and returns it with the natural logarithm of the softmax's denominator, FP32 [heads, T].
    """

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        causal: bool,
        scale: float,
        out: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


@dataclass(frozen=True)
class Shape:
    """What sizes the workspace: the heads of one rank, and whether tiles need another query than the model's."""

    heads: int
    kv_heads: int
    head_size: int
    query_is_copied: bool

    def query_bytes(self, *, one_tile: bool) -> int:
        """Bytes for one query: the output over one tile, its copy, and with several tiles the FP32 output so far."""
        return self.heads * self.head_size * (2 + (2 if self.query_is_copied else 0) + (0 if one_tile else 4))

    @property
    def token_bytes(self) -> int:
        """Bytes for one cached token in the tile: key and value of two bytes an element."""
        return 2 * 2 * self.kv_heads * self.head_size


def shape_of(layout: SlotLayout, heads: int, kv_heads: int, dtype: torch.dtype) -> Shape:
    """The shape of a layer; tiles need a query in FP16, rotated as their keys are."""
    return Shape(heads, kv_heads, layout.head_size, not layout.key_is_fp8 or dtype != torch.float16)


@dataclass(frozen=True)
class Tiling:
    """Queries of a block and cached tokens of a tile."""

    queries: int
    tokens: int


def tiling(shape: Shape, queries: int, cached: int, slots: int) -> Tiling:
    """Cut a chunk of so many queries over so many cached tokens; `slots` programs of flash attention run at a time.

    Blocks of queries are as large as memory allows and fill whole waves of programs, since a last wave that is half
    empty costs as much as a full one.  What the block leaves of the workspace is the tile's; all cached tokens are one
    tile where that leaves enough for a whole wave or for all queries.
    """
    whole = _up(cached, _ROWS)
    block = _block(shape, queries, _ROOM - whole * shape.token_bytes, slots, one_tile=True)
    if block and (block >= queries or shape.heads * block // _ROWS >= slots):
        return Tiling(block, whole)
    memory = _ROOM - _MIN_TILE_TOKENS * shape.token_bytes
    block = _block(shape, queries, memory, slots, one_tile=False) or _ROWS
    left = _ROOM - _up(block, _ROWS) * shape.query_bytes(one_tile=False)
    return Tiling(block, min(whole, max(left // shape.token_bytes // _ROWS * _ROWS, _ROWS)))


def _block(shape: Shape, queries: int, memory: int, slots: int, *, one_tile: bool) -> int:
    """Queries of a block for which so many bytes suffice: all of them, or those that fill waves best; 0 if none do."""
    most = max(memory, 0) // shape.query_bytes(one_tile=one_tile) // _ROWS * _ROWS
    if queries <= most:
        return queries
    return max(
        range(_ROWS, most + 1, _ROWS), key=lambda rows: (_filled(shape.heads * rows // _ROWS, slots), rows), default=0
    )


def _filled(programs: int, slots: int) -> float:
    """The share of slots that are in use, over whole waves of programs."""
    return programs / _up(programs, slots)


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def supports(shape: Shape) -> str | None:
    """Why the workspace does not suffice for this shape, or None."""
    needed = _ROWS * (shape.query_bytes(one_tile=False) + shape.token_bytes)
    if needed > _ROOM:
        return f"{shape.heads} heads of {shape.head_size} need {needed} bytes for {_ROWS} tokens"
    return None


def attend_to_prefix(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    cached: int,
    centroids: torch.Tensor,
    layout: SlotLayout,
    *,
    scale: float,
    attention: Attention,
    workspace: torch.Tensor,
    slots: int,
    out: torch.Tensor,
) -> None:
    """Write to `out` [T, heads, D] the attention of a chunk to its prefix of `cached` > 0 tokens and to itself.

    `query` [T, heads, D], T > 1, `key` and `value` [T, KV heads, D] are the chunk's, `cache` and `block_table` as for
    `dequantize`.  `workspace` is uint8 of WORKSPACE_BYTES; `slots` is how many programs of `attention` run at a time.
    """
    tokens, heads, head_size = query.shape
    shape = shape_of(layout, heads, key.shape[1], query.dtype)
    cut = tiling(shape, tokens, cached, slots)
    room = _Carver(workspace)
    tile_shape, block_shape = (min(cut.tokens, cached), shape.kv_heads, head_size), (cut.queries, heads, head_size)
    tile_key, tile_value = room.take(tile_shape, torch.float16), room.take(tile_shape, torch.float16)
    partial = room.take(block_shape, torch.float16)
    copied = room.take(block_shape, torch.float16) if shape.query_is_copied else None
    tile_scale = scale if layout.key_is_fp8 else scale * head_size**-0.5 / step(head_size)
    blocks = _pieces(tokens, cut.queries, least=2)
    if cut.tokens >= cached:
        dequantize(cache, block_table, centroids, 0, tile_key, tile_value, layout)
        _, lse = attention(query, key, value, causal=True, scale=scale, out=out)
        for start, stop in blocks:
            block = _for_tiles(query[start:stop], copied, layout)
            part, part_lse = attention(
                block, tile_key, tile_value, causal=False, scale=tile_scale, out=partial[: stop - start]
            )
            merge(out[start:stop], lse[:, start:stop], part, part_lse, out[start:stop], lse[:, start:stop])
        return
    total = room.take(block_shape, torch.float32)
    for start, stop in blocks:
        here = out[start:stop]
        so_far, lse = attention(query[start:stop], key[:stop], value[:stop], causal=True, scale=scale, out=here)
        block = _for_tiles(query[start:stop], copied, layout)
        for first, last in _pieces(cached, cut.tokens):
            keys, values = tile_key[: last - first], tile_value[: last - first]
            dequantize(cache, block_table, centroids, first, keys, values, layout)
            part, part_lse = attention(block, keys, values, causal=False, scale=tile_scale, out=partial[: stop - start])
            merged = here if last == cached else total[: stop - start]
            merge(so_far, lse, part, part_lse, merged, lse)
            so_far = merged


def _for_tiles(query: torch.Tensor, copied: torch.Tensor | None, layout: SlotLayout) -> torch.Tensor:
    """The query [T, heads, D] as tiles take it: in FP16, rotated as their keys are; in `copied` where that differs."""
    if copied is None:
        return query
    block = copied[: len(query)]
    if layout.key_is_fp8:
        block.copy_(query)
    else:
        rotate(query, block)
    return block


def _pieces(total: int, size: int, least: int = 1) -> Iterator[tuple[int, int]]:
    """Bounds of pieces of `size` > `least` and a rest, which takes from the one before it what it lacks of `least`."""
    start = 0
    while start < total:
        stop = min(start + size, total)
        if 0 < total - stop < least:
            stop = total - least
        yield start, stop
        start = stop


class _Carver:
    """Takes tensors from one buffer, one after the other."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self._buffer = buffer
        self._at = 0

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        size = dtype.itemsize
        for length in shape:
            size *= length
        start = _up(self._at, _ALIGNMENT)
        if start + size > self._buffer.numel():
            raise ValueError(f"{start + size} bytes do not fit into a workspace of {self._buffer.numel()}")
        self._at = start + size
        return self._buffer[start : start + size].view(dtype).view(shape)
