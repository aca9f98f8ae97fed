"""The layer with Graft's kernels, run by Triton's interpreter, against dense attention over the cache's content."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs an environment with vLLM; the launcher's has none")
pytest.importorskip("vllm", reason="needs an environment with vLLM; the launcher's has none")

from vllm_graft.attention.kernels import attention_reference, store_reference  # noqa: E402

from tests.patches.tq_layer import (  # noqa: E402
    BLOCK_SIZE,
    HEAD_SIZE,
    HEADS,
    KV_HEADS,
    Layer,
    attend,
    batch,
    kernels,
    prefill,
    stock,
    turboquant,
)

pytestmark = kernels


def varlen(_: Any, query: Any, key: Any, value: Any, starts: Any, key_starts: Any, *others: Any) -> tuple[Any, Any]:
    """`SpecDecodeImpl._flash` by dense attention."""
    scale, causal, out = others[2:]
    parts = []
    for request in range(len(starts) - 1):
        rows, keys = slice(*starts[request : request + 2]), slice(*key_starts[request : request + 2])
        parts.append(
            attention_reference.attend(query[rows], key[keys], value[keys], causal=causal, scale=scale, out=out[rows])[
                1
            ]
        )
    return out, torch.cat(parts, dim=1)


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flash attention's place taken by dense attention, and two queries and a block the least of a tile."""
    monkeypatch.setattr(turboquant.SpecDecodeImpl, "_reads_prefix", True)
    monkeypatch.setattr(turboquant.SpecDecodeImpl, "_flash", varlen)
    monkeypatch.setattr(prefill, "tiling", lambda *_: prefill.Tiling(queries=7, tokens=16))


def content(layer: Layer, block_table: Any, length: int) -> tuple[Any, Any]:
    """Keys and values of one sequence from its packed slots, FP32 [length, KV heads, head size]."""
    token = torch.arange(length)
    slots = layer.cache.transpose(1, 2)[block_table[token // BLOCK_SIZE].long(), token % BLOCK_SIZE]
    keys, values = store_reference.contents(slots, layer.module._tq_centroids, layer.impl._layout)
    return keys if layer.impl.tq_config.key_fp8 else keys @ layer.module._tq_Pi, values


def filled(layer: Layer, described: Any) -> tuple[Any, Any, Any]:
    """Store random keys and values of all sequences by the layer; returns the batch's query, key and value."""
    generator = torch.Generator().manual_seed(3)
    query, new_keys, new_values = [], [], []
    starts = described.query_start_loc.tolist()
    for request, length in enumerate(described.seq_lens.tolist()):
        count = starts[request + 1] - starts[request]
        keys, values, queries = (
            torch.randn(max(length, 1), heads, HEAD_SIZE, generator=generator).half()
            for heads in (KV_HEADS, KV_HEADS, HEADS)
        )
        token = torch.arange(length)
        slots = described.block_table_tensor[request][token // BLOCK_SIZE].long() * BLOCK_SIZE + token % BLOCK_SIZE
        layer.impl.do_kv_cache_update(layer.module, keys[:length], values[:length], layer.cache, slots)
        query.append(queries[:count])
        new_keys.append(keys[length - count : length])
        new_values.append(values[length - count : length])
    padding = described.num_actual_tokens - starts[-1]
    pads = [torch.zeros(padding, heads, HEAD_SIZE).half() for heads in (HEADS, KV_HEADS, KV_HEADS)]
    return torch.cat([*query, pads[0]]), torch.cat([*new_keys, pads[1]]), torch.cat([*new_values, pads[2]])


def expected(layer: Layer, described: Any, request: int, cached: int, query: Any, key: Any, value: Any) -> Any:
    """Dense causal attention of a request's tokens; behind `cached` tokens its keys and values are used as they are."""
    tokens = slice(*described.query_start_loc[request : request + 2].tolist())
    keys, values = content(layer, described.block_table_tensor[request], int(described.seq_lens[request]))
    if cached < len(keys):
        keys[cached:], values[cached:] = key[tokens], value[tokens]
    out = torch.empty(query[tokens].shape)
    return attention_reference.attend(query[tokens], keys, values, causal=True, scale=layer.impl.scale, out=out)[0]


def check_verification(layer: Layer, tolerance: float) -> None:
    # lengths at, below and over block bounds, short rows, a row that is its own whole sequence, padding of a graph
    described = batch([4, 3, 1, 0], [17, 16, 1, 0], num_tokens=10)
    query, key, value = filled(layer, described)
    output = attend(layer, layer.builder.build_for_cudagraph_capture(described), query, key, value).float()
    assert torch.isfinite(output).all()
    for request, length in enumerate(described.seq_lens.tolist()):
        tokens = slice(*described.query_start_loc[request : request + 2].tolist())
        if tokens.start < tokens.stop:
            wanted = expected(layer, described, request, length, query, key, value)
            torch.testing.assert_close(output[tokens], wanted, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", stock.TurboQuantAttentionBackend.supported_kv_cache_dtypes)
def test_verification_equals_dense_attention_over_the_cache(dtype: str, make_layer: Any, fixed: None) -> None:
    check_verification(make_layer(dtype), 3e-3)


def test_vllms_kernel_verifies_what_is_not_served(make_layer: Any, fixed: None, without_our_decode: None) -> None:
    check_verification(make_layer("turboquant_4bit_nc"), 2e-3)


@pytest.mark.parametrize("dtype", ["turboquant_k8v4", "turboquant_3bit_nc"])
def test_a_mixed_batch_equals_each_request_alone(dtype: str, make_layer: Any, fixed: None, flash: None) -> None:
    layer = make_layer(dtype)
    # a verification, a first chunk, and continuations in one tile, in two, and in two blocks of queries
    lengths, cached = [18, 10, 20, 35, 50], [18, 0, 14, 29, 39]
    described = batch([4, 10, 6, 6, 11], lengths)
    query, key, value = filled(layer, described)
    output = attend(layer, layer.builder.build(0, described), query, key, value).float()
    for request in range(len(lengths)):
        tokens = slice(*described.query_start_loc[request : request + 2].tolist())
        wanted = expected(layer, described, request, cached[request], query, key, value)
        torch.testing.assert_close(output[tokens], wanted, atol=5e-3, rtol=5e-3)


def test_without_flash_attention_vllm_reads_the_prefix(make_layer: Any, fixed: None) -> None:
    assert not make_layer("turboquant_k8v4").impl._reads_prefix
