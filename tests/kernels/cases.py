"""Batches over packed KV for tests of the kernels, and what attention over them should be."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from vllm_graft.attention.kernels import decode, store_reference
from vllm_graft.attention.kernels.attention_reference import attend
from vllm_graft.attention.kernels.codebook import prepare_codebook
from vllm_graft.attention.kernels.launch import Launch
from vllm_graft.attention.kernels.layout import SlotLayout, slot_layout


@dataclass(frozen=True)
class Batch:
    """Requests with their lengths and query tokens; `capacity` is the tokens of a request that a graph was made for."""

    preset: str
    head_size: int
    group: int
    kv_heads: int
    page_tokens: int
    lengths: tuple[int, ...]
    queries: tuple[int, ...]
    dtype: torch.dtype = torch.bfloat16
    capacity: int = 0
    padding: int = 0
    seed: int = 0

    @property
    def max_queries(self) -> int:
        return self.capacity or max(self.queries)

    @property
    def layout(self) -> SlotLayout:
        return slot_layout(self.preset, self.head_size)


@dataclass(frozen=True)
class Inputs:
    """The tensors of a batch; `wanted` is FP32 attention over the decoded keys and values, zero for padding."""

    query: torch.Tensor
    cache: torch.Tensor
    blocks: torch.Tensor
    lengths: torch.Tensor
    starts: torch.Tensor
    wanted: torch.Tensor


def launch(tokens: int = 32, *, hardware_fp8: bool = False, min_tiles: int = 1) -> Launch:
    return Launch(tokens, 4, 2, 2, min_tiles, hardware_fp8, None, False, "for a test")


def centroids(layout: SlotLayout) -> torch.Tensor:
    """Symmetric centroids near those of Lloyd and Max for N(0, 1/D)."""
    count = max(layout.num_centroids, 2)
    quantiles = torch.special.ndtri((torch.arange(count, dtype=torch.float64) + 0.5) / count)
    return (quantiles / math.sqrt(layout.head_size)).float()


def make(batch: Batch, *, key_size: float = 1.0, value_size: float = 1.0) -> Inputs:
    """Draw a batch over a cache whose other slots hold random bytes, NaN among them."""
    layout, table = batch.layout, centroids(batch.layout)
    generator = torch.Generator().manual_seed(batch.seed)
    requests, page = len(batch.lengths), batch.page_tokens
    width = max(1, -(-max(batch.lengths) // page))
    blocks = torch.randperm(requests * width, generator=generator).reshape(requests, width).int() + 1
    shape = (requests * width + 1, page, batch.kv_heads, layout.slot_bytes)
    cache = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    tokens = sum(batch.queries) + batch.padding
    query = torch.randn(tokens, batch.group * batch.kv_heads, batch.head_size, generator=generator).to(batch.dtype)
    wanted = torch.zeros(query.shape)
    starts = [0]
    for row, (length, queries) in enumerate(zip(batch.lengths, batch.queries, strict=True)):
        start = starts[-1]
        starts.append(start + queries)
        if length == 0:
            continue
        keys, values = torch.randn(2, length, batch.kv_heads, batch.head_size, generator=generator)
        slots = store_reference.slots(keys * key_size, values * value_size, (table[1:] + table[:-1]) / 2, layout)
        place = torch.arange(length)
        cache[blocks[row, place // page].long(), place % page] = slots
        keys, values = store_reference.contents(slots, table, layout)
        if not layout.key_is_fp8:
            keys = keys @ store_reference.hadamard(batch.head_size)
        if queries:
            rows = slice(start, start + queries)
            attend(query[rows], keys, values, causal=True, scale=batch.head_size**-0.5, out=wanted[rows])
    lengths = torch.tensor(batch.lengths, dtype=torch.int32)
    return Inputs(query, cache, blocks, lengths, torch.tensor(starts, dtype=torch.int32), wanted)


def run(batch: Batch, inputs: Inputs, how: Launch, programs: int) -> torch.Tensor:
    """The kernels' output, over a workspace and an output that held NaN."""
    floats = decode.workspace_floats(
        programs=programs,
        num_requests=len(batch.lengths),
        num_heads=batch.group * batch.kv_heads,
        num_kv_heads=batch.kv_heads,
        max_query_len=batch.max_queries,
        head_size=batch.head_size,
    )
    out = torch.full_like(inputs.query, math.nan)
    decode.verify_attention(
        inputs.query,
        inputs.cache,
        inputs.blocks,
        inputs.lengths,
        inputs.starts,
        max_query_len=batch.max_queries,
        layout=batch.layout,
        scale=batch.head_size**-0.5,
        codebook=None if batch.layout.key_is_fp8 else prepare_codebook(centroids(batch.layout)),
        workspace=decode.Workspace(torch.full((floats,), math.nan), programs),
        out=out,
        launch=how,
    )
    return out.float()


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())
