"""Proof of the fix tq-spec-decode on vLLM's own backend, builder and implementation, on CPU tensors.

The faults are shown by what reaches the attention kernels; the last tests run vLLM's Triton kernels in Triton's
interpreter and compare with dense attention.  Run with vLLM 0.33.0's or 0.32.0's Python.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

if "triton" not in sys.modules:
    os.environ.setdefault("TRITON_INTERPRET", "1")
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")  # with Triton but no GPU, vLLM replaces its kernels otherwise

torch = pytest.importorskip("torch", reason="needs an environment with vLLM; the launcher's has none")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    stock = pytest.importorskip(
        "vllm.v1.attention.backends.turboquant_attn", reason="needs an environment with vLLM; the launcher's has none"
    )
    from vllm.triton_utils import HAS_TRITON
    from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.kv_cache_interface import FullAttentionSpec
    from vllm.v1.worker import workspace
    from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers
    from vllm_graft.engine import Engine
    from vllm_graft.facts import vllm_version
    from vllm_graft.fixes.tq_spec_decode import PATCH
    from vllm_graft.patch import Outcome

HEADS, KV_HEADS, HEAD_SIZE, BLOCK_SIZE, MAX_BLOCKS, MAX_SEQS, DRAFTS, SPLITS = 4, 2, 64, 16, 12, 8, 3, 2
CPU = torch.device("cpu")
kernels = pytest.mark.skipif(
    not (HAS_TRITON and os.environ.get("TRITON_INTERPRET") == "1"),
    reason="needs Triton and its interpreter (TRITON_INTERPRET=1)",
)


@dataclass
class Calls:
    """What reached the kernels: the decode kernel's rows, and the token counts that flash attention was given."""

    lengths: list[Any] = field(default_factory=list)
    tables: list[Any] = field(default_factory=list)
    flash: list[int] = field(default_factory=list)


@dataclass
class Layer:
    """One attention layer with its builder, made by the backend that vLLM finds under TURBOQUANT."""

    backend: Any
    builder: Any
    impl: Any
    module: Any
    cache: Any


@pytest.fixture
def fixed() -> Iterator[None]:
    """The fix, put in by the engine and taken out again."""
    engine = Engine()
    attempt = engine.apply(PATCH, vllm_version() or "")
    assert attempt.outcome is Outcome.APPLIED, attempt.reason
    yield
    engine.undo_all()
    assert AttentionBackendEnum.TURBOQUANT.get_class() is stock.TurboQuantAttentionBackend


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Kernel launches replaced by records of their arguments; outputs are zero."""
    seen = Calls()

    def decode(query: Any, block_table: Any, seq_lens: Any, **_: Any) -> Any:
        assert query.shape[0] == seq_lens.shape[0] == block_table.shape[0]
        seen.lengths.append(seq_lens)
        seen.tables.append(block_table)
        return torch.zeros_like(query)

    def flash(_: Any, q: Any, **__: Any) -> Any:
        seen.flash.append(q.shape[0])
        return torch.zeros_like(q)

    monkeypatch.setattr(stock, "triton_turboquant_decode_attention", decode)
    monkeypatch.setattr(stock, "_HAS_FLASH_ATTN", True)
    monkeypatch.setattr(stock.TurboQuantAttentionImpl, "_flash_attn_varlen", flash)
    return seen


@pytest.fixture
def make_layer(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make a layer: `make_layer(kv_cache_dtype, drafts)`."""
    monkeypatch.setattr(workspace, "_manager", workspace.WorkspaceManager(CPU))
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)  # raises where there is no accelerator

    def make(dtype: str = "turboquant_k8v4", drafts: int = DRAFTS) -> Layer:
        speculation = SimpleNamespace(num_speculative_tokens=drafts, parallel_drafting=False) if drafts else None
        config = SimpleNamespace(
            speculative_config=speculation,
            use_v2_model_runner=True,
            parallel_config=SimpleNamespace(decode_context_parallel_size=1),
            attention_config=SimpleNamespace(tq_max_kv_splits_for_cuda_graph=SPLITS, flash_attn_version=2),
            scheduler_config=SimpleNamespace(
                max_num_seqs=MAX_SEQS, enable_chunked_prefill=True, max_num_batched_tokens=256
            ),
            model_config=SimpleNamespace(
                max_model_len=BLOCK_SIZE * MAX_BLOCKS, dtype=torch.float16, get_num_attention_heads=lambda _: HEADS
            ),
        )
        monkeypatch.setattr(stock, "get_current_vllm_config", lambda: config)
        backend = AttentionBackendEnum.TURBOQUANT.get_class()
        spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=KV_HEADS, head_size=HEAD_SIZE, dtype=torch.uint8)
        builder_class = backend.get_builder_cls()
        width = {"block_table_width": MAX_BLOCKS} if builder_class.requires_block_table_width else {}
        builder = builder_class(spec, ["layer"], config, CPU, **width)
        workspace.current_workspace_manager().lock()
        impl = backend.get_impl_cls()(HEADS, HEAD_SIZE, HEAD_SIZE**-0.5, KV_HEADS, kv_cache_dtype=dtype)
        cache = torch.zeros(
            MAX_SEQS * MAX_BLOCKS + 1, KV_HEADS, BLOCK_SIZE, impl.tq_config.slot_size_aligned, dtype=torch.uint8
        )
        return Layer(backend, builder, impl, torch.nn.Module(), cache)

    return make


def batch(
    query_lens: list[int], seq_lens: list[int], bounds: list[int] | None = None, num_tokens: int | None = None
) -> CommonAttentionMetadata:
    """A batch as the model runner describes it: `bounds` are the host's lengths, tokens beyond the sum are padding."""
    starts = torch.tensor([0, *torch.tensor(query_lens).cumsum(0).tolist()], dtype=torch.int32)
    total = int(starts[-1]) if num_tokens is None else num_tokens
    host = torch.tensor(seq_lens if bounds is None else bounds, dtype=torch.int32)
    blocks = torch.arange(1, len(query_lens) * MAX_BLOCKS + 1, dtype=torch.int32).view(-1, MAX_BLOCKS)
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts.clone(),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        seq_lens_cpu_upper_bound=host,
        num_reqs=len(query_lens),
        num_actual_tokens=total,
        max_query_len=max(query_lens),
        max_seq_len=int(host.max()),
        block_table_tensor=blocks,
        slot_mapping=torch.zeros(total, dtype=torch.int64),
    )


def attend(layer: Layer, metadata: Any, query: Any = None, key: Any = None, value: Any = None) -> Any:
    """Run the layer as vLLM does and return its output [tokens, heads, head size]."""
    count = metadata.num_actual_tokens
    query = torch.zeros(count, HEADS, HEAD_SIZE, dtype=torch.float16) if query is None else query
    key = torch.zeros(count, KV_HEADS, HEAD_SIZE, dtype=torch.float16) if key is None else key
    output = torch.zeros(count, HEADS * HEAD_SIZE, dtype=torch.float16)
    layer.impl.forward(layer.module, query, key, key if value is None else value, layer.cache, metadata, output)
    return output.view(count, HEADS, HEAD_SIZE)


def rows(calls: Calls) -> list[list[int]]:
    return [lengths.tolist() for lengths in calls.lengths]


# tq-spec-fullgraph: the dummy batch of a capture has host lengths equal to its query lengths, as first chunks have.


def captured(layer: Layer, calls: Calls) -> tuple[list[int], list[list[int]]]:
    """What a graph of 2 x 4 tokens holds, and the rows that it reads when replayed for a real batch of other lengths.

    vLLM captures attention of 4 tokens among themselves, twice.
    """
    dummy = InputBatch.make_dummy(2, 8, InputBuffers(MAX_SEQS, 64, CPU))
    assert dummy.seq_lens_cpu_upper_bound.tolist() == [4, 4]
    capture = batch([4, 4], [4, 4]).replace(
        query_start_loc=dummy.query_start_loc,
        seq_lens=dummy.seq_lens,
        seq_lens_cpu_upper_bound=dummy.seq_lens_cpu_upper_bound,
        max_seq_len=BLOCK_SIZE * MAX_BLOCKS,
    )
    attend(layer, layer.builder.build_for_cudagraph_capture(capture))
    real = batch([4, 4], [100, 37])
    for name in ("seq_lens", "query_start_loc", "block_table_tensor"):
        getattr(capture, name).copy_(getattr(real, name))  # the runner's buffers, which the graph also reads
    layer.builder.build(0, capture.replace(seq_lens_cpu_upper_bound=real.seq_lens_cpu_upper_bound, max_seq_len=100))
    return calls.flash, rows(calls)


# tq-optimistic-lengths: the host takes all drafts as accepted, the device knows that two were not.


def rows_after_rejection(layer: Layer, calls: Calls) -> list[list[int]]:
    attend(layer, layer.builder.build(0, batch([4], [100], bounds=[102])))
    return rows(calls)


# tq-mixed-batch: the longest query is also the longest sequence, yet the second request has 40 cached tokens.


def cached_tokens_seen(layer: Layer, calls: Calls) -> tuple[list[int], list[list[int]]]:
    attend(layer, layer.builder.build(0, batch([100, 50], [100, 90])))
    return calls.flash, rows(calls)


FAULTS = {
    "tq-spec-fullgraph": (captured, ([4, 4], []), ([], [[97, 98, 99, 100, 34, 35, 36, 37]])),
    "tq-optimistic-lengths": (rows_after_rejection, [[99, 100, 101, 102]], [[97, 98, 99, 100]]),
    "tq-mixed-batch": (cached_tokens_seen, ([150], []), ([100], [list(range(41, 91))])),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_without_fix(fault: str, make_layer: Any, calls: Calls) -> None:
    observe, wrong, right = FAULTS[fault]
    assert wrong != right
    assert observe(make_layer(), calls) == wrong


@pytest.mark.parametrize("fault", FAULTS)
def test_fixed_with_fix(fault: str, make_layer: Any, calls: Calls, fixed: None) -> None:
    observe, _, right = FAULTS[fault]
    assert observe(make_layer(), calls) == right


def test_a_graph_goes_on_reading_the_same_buffers(make_layer: Any, calls: Calls, fixed: None) -> None:
    layer = make_layer()
    attend(layer, layer.builder.build_for_cudagraph_capture(batch([4, 4], [4, 4])))
    attend(layer, layer.builder.build(0, batch([4, 4], [100, 37])))
    assert calls.lengths[0].data_ptr() == calls.lengths[1].data_ptr()
    assert calls.tables[0].data_ptr() == calls.tables[1].data_ptr()
    assert calls.tables[0].stride() == calls.tables[1].stride()


def test_padding_rows_of_a_graph_are_never_empty_and_never_stale(make_layer: Any, calls: Calls, fixed: None) -> None:
    layer = make_layer()
    attend(layer, layer.builder.build_for_cudagraph_capture(batch([4] * 4, [4] * 4)))
    attend(layer, layer.builder.build(0, batch([4] * 4, [90, 80, 70, 60])))
    padded = batch([4, 3, 0, 0], [50, 20, 0, 0], num_tokens=16)  # a short row and two requests of padding
    layer.builder.build(0, padded)
    assert calls.lengths[0].tolist() == [47, 48, 49, 50, 18, 19, 20, *[1] * 9]
    layer.builder.build(0, batch([4, 3], [51, 21]))  # unpadded: the drafter's graph may still replay 16 rows
    assert calls.lengths[0].tolist() == [48, 49, 50, 51, 19, 20, 21, *[1] * 9]


def test_the_drafters_single_token_graph_reads_the_runners_buffers(make_layer: Any, calls: Calls, fixed: None) -> None:
    layer = make_layer()
    capture = batch([1, 1, 1], [1, 1, 1])
    attend(layer, layer.builder.build_for_cudagraph_capture(capture))
    assert calls.lengths[0].data_ptr() == capture.seq_lens.data_ptr()
    assert calls.tables[0].data_ptr() == capture.block_table_tensor.data_ptr()
    assert capture.seq_lens.tolist() == [1, 1, 1]


def test_every_row_has_the_block_table_of_its_request(make_layer: Any, calls: Calls, fixed: None) -> None:
    described = batch([4, 1, 3], [60, 7, 9])
    layer = make_layer()
    attend(layer, layer.builder.build(0, described))
    assert rows(calls) == [[57, 58, 59, 60, 7, 7, 8, 9]]
    request = [0, 0, 0, 0, 1, 2, 2, 2]
    assert torch.equal(calls.tables[0], described.block_table_tensor[request])


def test_verification_beside_prompts_uses_device_lengths_and_short_prompts_stay_prompts(
    make_layer: Any, calls: Calls, fixed: None
) -> None:
    layer = make_layer()
    # verify (bound 2 too high), a prompt of exactly 1+K tokens, a decode, a long first chunk, a continuation
    described = batch([4, 4, 1, 30, 20], [100, 4, 11, 30, 55], bounds=[102, 4, 12, 30, 55])
    attend(layer, layer.builder.build(0, described))
    assert calls.flash == [4, 30]
    assert rows(calls) == [[97, 98, 99, 100], [11], list(range(36, 56))]


def test_without_speculation_decodes_are_what_they_are_in_vllm(make_layer: Any, calls: Calls, fixed: None) -> None:
    layer = make_layer(drafts=0)
    described = batch([1, 1], [9, 8])
    attend(layer, layer.builder.build(0, described))
    attend(layer, layer.builder.build(0, batch([1, 5], [9, 5])))
    assert calls.lengths[0] is described.seq_lens
    assert rows(calls)[1:] == [[9]]
    assert calls.flash == [5]


def test_full_graphs_stay_supported_and_the_threshold_is_one_verification(make_layer: Any, fixed: None) -> None:
    layer = make_layer()
    assert layer.builder.reorder_batch_threshold == 1 + DRAFTS
    assert layer.builder.get_cudagraph_support(None, None) is AttentionCGSupport.UNIFORM_BATCH
    assert layer.backend.get_name() == "TURBOQUANT"
    assert issubclass(layer.backend, stock.TurboQuantAttentionBackend)


def test_the_largest_verification_fits_into_the_scratch_reserved_at_start(make_layer: Any, fixed: None) -> None:
    layer = make_layer()
    count = MAX_SEQS * (1 + DRAFTS)
    manager = workspace.current_workspace_manager()
    manager.get_simultaneous(
        ((count, HEADS, SPLITS, HEAD_SIZE + 1), torch.float32),
        ((count, HEADS, HEAD_SIZE), torch.float16),
        ((count, HEADS), torch.float32),
    )
    with pytest.raises(ValueError, match="33 decode rows"):
        layer.builder.build_for_cudagraph_capture(batch([4] * 8, [4] * 8, num_tokens=33))


# From here on vLLM's Triton kernels run, in Triton's interpreter.


def dequantized(layer: Layer, block_table: Any, length: int) -> tuple[Any, Any]:
    """Keys and values of one sequence from vLLM's packed slots, FP32 [length, KV heads, head size]."""
    config = layer.impl.tq_config
    token = torch.arange(length)
    slots = layer.cache.transpose(1, 2)[block_table[token // BLOCK_SIZE].long(), token % BLOCK_SIZE]

    def half(at: int) -> Any:
        return slots[..., at : at + 2].contiguous().view(torch.float16).float()

    def nibbles(at: int) -> Any:
        packed = slots[..., at : at + HEAD_SIZE // 2]
        return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)

    if config.key_fp8:
        keys = slots[..., :HEAD_SIZE].contiguous().view(torch.float8_e4m3fn).float()
    else:
        centroids = layer.module._tq_centroids[nibbles(0).long()]
        keys = half(HEAD_SIZE // 2) * (centroids / centroids.norm(dim=-1, keepdim=True)) @ layer.module._tq_Pi
    start = config.key_packed_size
    scale, zero = half(start + HEAD_SIZE // 2), half(start + HEAD_SIZE // 2 + 2)
    return keys, nibbles(start).float() * scale + zero


def dense(layer: Layer, query: Any, keys: Any, values: Any) -> Any:
    """Causal attention in FP32 of the last tokens of a sequence, [tokens, heads, head size]."""
    group = HEADS // KV_HEADS
    count, length = query.shape[0], keys.shape[0]
    scores = torch.einsum("qhd,khd->hqk", query.float(), keys.repeat_interleave(group, 1)) * layer.impl.scale
    future = torch.arange(length) > torch.arange(length - count, length).unsqueeze(1)
    weights = scores.masked_fill(future, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, values.repeat_interleave(group, 1))


def filled(layer: Layer, described: CommonAttentionMetadata) -> tuple[Any, Any, Any]:
    """Store random keys and values of all sequences with vLLM's kernel; returns the batch's query, key and value."""
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


@kernels
@pytest.mark.parametrize("dtype", ["turboquant_k8v4", "turboquant_4bit_nc"])
def test_verification_equals_dense_attention_over_the_dequantized_cache(
    dtype: str, make_layer: Any, fixed: None
) -> None:
    layer = make_layer(dtype)
    # lengths at, below and over block bounds, short rows, a row that is its own whole sequence, padding of a graph
    described = batch([4, 3, 2, 1, 0], [18, 16, 17, 1, 0], num_tokens=12)
    query, key, value = filled(layer, described)
    metadata = layer.builder.build_for_cudagraph_capture(described)
    output = attend(layer, metadata, query, key, value).float()
    assert torch.isfinite(output).all()
    starts = described.query_start_loc.tolist()
    for request, length in enumerate(described.seq_lens.tolist()):
        tokens = slice(starts[request], starts[request + 1])
        if tokens.start < tokens.stop:
            keys, values = dequantized(layer, described.block_table_tensor[request], length)
            torch.testing.assert_close(output[tokens], dense(layer, query[tokens], keys, values), atol=2e-3, rtol=2e-3)


@kernels
@pytest.mark.parametrize("dtype", ["turboquant_k8v4", "turboquant_4bit_nc"])
def test_a_mixed_batch_equals_each_request_alone(
    dtype: str, make_layer: Any, fixed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stock, "_CONTINUATION_DECODE_THRESHOLD", 8)  # 128 in vLLM: too slow to interpret
    layer = make_layer(dtype)
    # a verification, a first chunk, a short continuation (decode kernel) and a long one (dequantized prefix)
    lengths, cached = [18, 10, 20, 30], [18, 0, 20, 18]
    described = batch([4, 10, 6, 12], lengths)
    query, key, value = filled(layer, described)
    output = attend(layer, layer.builder.build(0, described), query, key, value).float()
    starts = described.query_start_loc.tolist()
    for request, length in enumerate(lengths):
        tokens, quantized = slice(starts[request], starts[request + 1]), cached[request]
        keys, values = dequantized(layer, described.block_table_tensor[request], length)
        if quantized < length:  # the batch's own keys and values are used as they are
            keys[quantized:], values[quantized:] = key[tokens], value[tokens]
        expected = dense(layer, query[tokens], keys, values)
        torch.testing.assert_close(output[tokens], expected, atol=5e-3, rtol=5e-3)
