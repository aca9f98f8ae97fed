"""Proof of the fix tq-spec-decode on vLLM's own backend, builder and implementation, on CPU tensors.

The faults are shown by what reaches the attention kernels, by what is stored and by what is allocated.  Run with vLLM
0.33.0's or 0.32.0's Python.
"""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs an environment with vLLM; the launcher's has none")
pytest.importorskip("vllm", reason="needs an environment with vLLM; the launcher's has none")

import vllm.v1.attention.backends.turboquant_attn as stock  # noqa: E402
from vllm.model_executor.warmup.jit_warmup import JitWarmupRegistry  # noqa: E402
from vllm.v1.attention.backend import AttentionCGSupport  # noqa: E402
from vllm.v1.attention.ops.triton_turboquant_decode import _FP8_E4B15  # noqa: E402
from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers  # noqa: E402
from vllm_graft.attention.card import card  # noqa: E402
from vllm_graft.attention.kernels.workspace import WORKSPACE_BYTES  # noqa: E402

from tests.patches.tq_layer import (  # noqa: E402
    BLOCK_SIZE,
    CPU,
    DRAFTS,
    HEAD_SIZE,
    HEADS,
    KV_HEADS,
    MAX_BLOCKS,
    MAX_SEQS,
    Allocated,
    Calls,
    Launches,
    Layer,
    attend,
    batch,
    kernels,
    prefill,
    workspace_bytes,
)

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
    return calls.flash, calls.rows


# tq-optimistic-lengths: the host takes all drafts as accepted, the device knows that two were not.


def rows_after_rejection(layer: Layer, calls: Calls) -> list[list[int]]:
    attend(layer, layer.builder.build(0, batch([4], [100], bounds=[102])))
    return calls.rows


# tq-mixed-batch: the longest query is also the longest sequence, yet the second request has 40 cached tokens.


def cached_tokens_seen(layer: Layer, calls: Calls) -> tuple[list[int], list[list[int]]]:
    attend(layer, layer.builder.build(0, batch([100, 50], [100, 90])))
    return calls.flash, calls.rows


# tq-workspace-unbudgeted: what is reserved after memory was profiled, for contexts of 1K and 256K tokens.


def reserved_for_prompts(layer: Layer, calls: Calls) -> bool:
    """Whether the builder, which is made after profiling, reserves more for a longer context."""
    before = workspace_bytes()
    layer.builder.vllm_config.model_config.max_model_len = 2**18
    layer.builder.__init__(*builder_arguments(layer))
    return workspace_bytes() > before


def builder_arguments(layer: Layer) -> tuple[Any, ...]:
    builder = layer.builder
    width = (MAX_BLOCKS,) if builder.requires_block_table_width else ()
    return builder.kv_cache_spec, ["layer"], builder.vllm_config, CPU, *width


# tq-continuation-copies: what a chunk of 200 tokens allocates behind 2048 cached tokens, and behind 6144.


def grows_with_the_prefix(layer: Layer, launches: Launches) -> bool:
    """Whether a chunk's memory, kernels aside, depends on the length of what is cached."""
    sizes = []
    for cached in (2048, 6144):
        metadata = layer.builder.build(0, batch([200], [cached + 200]))
        with Allocated() as allocated:
            attend(layer, metadata)
        sizes.append(allocated.size)
    return bool(sizes[1] > sizes[0])


# k8v4-key-clip: keys as they are read back below compute capability 8.9.  Triton's interpreter has another e4b15 than
# cards have (it keeps 3.0 as 1.5, where a card keeps 1.75), so the proof on a card is tests/gpu/store_prefill_check.py.


def keys_read_back(layer: Layer, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Keys of 0.5, 3 and 100 after the store, read as the backend's own kernels read them."""
    monkeypatch.setitem(_FP8_E4B15, 0, 1)
    keys = torch.zeros(1, KV_HEADS, HEAD_SIZE, dtype=torch.float16)
    keys[0, 0, :3] = torch.tensor([0.5, 3.0, 100.0])
    layer.impl.do_kv_cache_update(layer.module, keys, keys, layer.cache, torch.tensor([BLOCK_SIZE]))
    stored = layer.cache[1, 0, 0, :3]
    if hasattr(layer.impl, "_layout"):
        return list(stored.view(torch.float8_e4m3fn).float().tolist())
    return list((stored.to(torch.int16) << 7).view(torch.float16).tolist())


# jit-on-first-use: a server that vLLM has warmed up meets prompts, drafts and long prompts of many sizes.


def start(layer: Layer) -> None:
    """What vLLM does before it takes requests: the registered warm-up, and steps of its own."""
    registry = JitWarmupRegistry(layer.builder.vllm_config)
    with registry.activate():
        layer.builder.__init__(*builder_arguments(layer))
    registry.warmup()
    for query_lens, seq_lens in (([5, 5], [5, 5]), ([4, 4], [9, 9]), ([4, 1], [13, 10]), ([4], [17]), ([1], [18])):
        step(layer, query_lens, seq_lens)


def serve(layer: Layer) -> None:
    """Batches of every size and number of drafts, prompts beside them, and prompts of many chunks."""
    for count in range(1, MAX_SEQS + 1):
        for drafts in range(1 + DRAFTS):
            step(layer, [1 + drafts] * count, [100 + count] * count)
        step(layer, [1 + (count + request) % (1 + DRAFTS) for request in range(count)], [100 + count] * count)
    # the last chunk is one query longer than a block of queries
    shape = prefill.Shape(HEADS, KV_HEADS, HEAD_SIZE, query_is_copied=not layer.impl.tq_config.key_fp8)
    rows = prefill.tiling(shape, 200_000, 1000, card(CPU).flash_slots).queries
    for query_lens, seq_lens in (
        ([200], [6000]),
        ([4, 150, 2], [90, 3000, 40]),
        ([30, 3, 129], [30, 20, 2129]),
        ([5], [5]),
        ([16, 1, 7], [16, 60, 300]),
        ([rows + 1], [rows + 1000]),
    ):
        step(layer, query_lens, seq_lens)


def compiled_while_serving(layer: Layer, launches: Launches) -> list[str]:
    """The kernels that would be compiled for requests, in a variant that the start has not compiled."""
    start(layer)
    started = set(launches.variants)
    serve(layer)
    return sorted({name for _, name, *_ in launches.variants - started})


def step(layer: Layer, query_lens: list[int], seq_lens: list[int]) -> None:
    """Store and attend, as vLLM does in each step."""
    described = batch(query_lens, seq_lens)
    query, key, value = (torch.zeros(sum(query_lens), heads, HEAD_SIZE).half() for heads in (HEADS, KV_HEADS, KV_HEADS))
    layer.impl.do_kv_cache_update(layer.module, key, value, layer.cache, described.slot_mapping)
    attend(layer, layer.builder.build(0, described), query, key, value)


FAULTS: dict[str, tuple[Any, ...]] = {
    "tq-spec-fullgraph": (captured, "calls", ([4, 4], []), ([], [[97, 98, 99, 100, 34, 35, 36, 37]])),
    "tq-optimistic-lengths": (rows_after_rejection, "calls", [[99, 100, 101, 102]], [[97, 98, 99, 100]]),
    "tq-mixed-batch": (cached_tokens_seen, "calls", ([150], []), ([100], [list(range(41, 91))])),
    "tq-workspace-unbudgeted": (reserved_for_prompts, "calls", True, False),
    "tq-continuation-copies": (grows_with_the_prefix, "launches", True, False),
    "k8v4-key-clip": (keys_read_back, "monkeypatch", [0.5, 1.5, 1.625], [0.5, 3.0, 96.0]),
    "jit-on-first-use": (
        compiled_while_serving,
        "launches",
        ["_fwd_kernel_stage2", "_tq_decode_stage1", "_tq_full_dequant_kv"],
        [],
    ),
}


@kernels
@pytest.mark.parametrize("fault", FAULTS)
def test_fault_without_fix(fault: str, make_layer: Any, request: pytest.FixtureRequest) -> None:
    observe, records, wrong, right = FAULTS[fault]
    assert wrong != right
    seen = request.getfixturevalue(records)
    assert observe(make_layer(), seen) == wrong


@kernels
@pytest.mark.parametrize("fault", FAULTS)
def test_fixed_with_fix(fault: str, make_layer: Any, fixed: None, request: pytest.FixtureRequest) -> None:
    observe, records, _, right = FAULTS[fault]
    seen = request.getfixturevalue(records)
    assert observe(make_layer(), seen) == right


@kernels
@pytest.mark.parametrize(
    ("dtype", "rotations"), [("turboquant_k8v4", {}), ("turboquant_3bit_nc", {"rotation._rotate": 1})]
)
def test_a_service_has_few_kernels(
    dtype: str, rotations: dict[str, int], make_layer: Any, launches: Launches, fixed: None
) -> None:
    layer = make_layer(dtype)
    launches.variants.clear()
    start(layer)
    serve(layer)
    assert launches.counts() == {
        "decode._attend": 2,  # one query token of each request, and up to 1 + DRAFTS
        "decode._merge": 2,
        "dequantize._dequantize": 1,
        "flash.flash_attention": 2,  # causal over the chunk, FP16 over a tile; never for a single query
        "merge._merge": 4,  # the chunk and a tile into the output or the FP32 sum; that and a tile, likewise
        "store._store": 1,
        **rotations,
    }


def test_a_graph_goes_on_reading_the_model_runners_buffers(make_layer: Any, calls: Calls, fixed: None) -> None:
    layer = make_layer()
    for query_lens in ([1, 1, 1], [4, 4, 4]):
        capture = batch(query_lens, query_lens)
        attend(layer, layer.builder.build_for_cudagraph_capture(capture))
        lengths, starts, table, max_query_len = calls.requests[-1]
        assert lengths.data_ptr() == capture.seq_lens.data_ptr()
        assert starts.data_ptr() == capture.query_start_loc.data_ptr()
        assert table.data_ptr() == capture.block_table_tensor.data_ptr()
        assert max_query_len == query_lens[0]
    assert capture.seq_lens.tolist() == [4, 4, 4]


def test_every_batch_of_drafts_takes_the_kernel_of_the_most_drafts(make_layer: Any, calls: Calls, fixed: None) -> None:
    layer = make_layer()
    for query_lens in ([2, 1], [4, 1, 3]):
        attend(layer, layer.builder.build(0, batch(query_lens, [60] * len(query_lens))))
        assert calls.requests[-1][3] == 1 + DRAFTS


def test_padding_of_a_graph_is_requests_without_tokens(make_layer: Any, calls: Calls, fixed: None) -> None:
    layer = make_layer()
    padded = batch([4, 3, 0, 0], [50, 20, 0, 0], num_tokens=16)  # a short row and two requests of padding
    attend(layer, layer.builder.build(0, padded))
    assert calls.rows == [[47, 48, 49, 50, 18, 19, 20]]


def test_verification_beside_prompts_uses_device_lengths_and_short_prompts_stay_prompts(
    make_layer: Any, calls: Calls, fixed: None
) -> None:
    layer = make_layer()
    # verify (bound 2 too high), a prompt of exactly 1+K tokens, a decode, a long first chunk, a continuation
    described = batch([4, 4, 1, 30, 20], [100, 4, 11, 30, 55], bounds=[102, 4, 12, 30, 55])
    attend(layer, layer.builder.build(0, described))
    assert calls.flash == [4, 30]
    assert calls.rows == [[97, 98, 99, 100], [11], list(range(36, 56))]
    assert [table.flatten()[0].item() for table in calls.tables] == [1 + request * MAX_BLOCKS for request in (0, 2, 4)]


def test_without_speculation_decodes_are_what_they_are_in_vllm(make_layer: Any, calls: Calls, fixed: None) -> None:
    layer = make_layer(drafts=0)
    attend(layer, layer.builder.build(0, batch([1, 1], [9, 8])))
    attend(layer, layer.builder.build(0, batch([1, 5], [9, 5])))
    assert calls.rows == [[9, 8], [9]]
    assert calls.flash == [5]
    assert {request[3] for request in calls.requests} == {1}


def test_full_graphs_stay_supported_and_the_threshold_is_one_verification(make_layer: Any, fixed: None) -> None:
    layer = make_layer()
    assert layer.builder.reorder_batch_threshold == 1 + DRAFTS
    assert layer.builder.get_cudagraph_support(None, None) is AttentionCGSupport.UNIFORM_BATCH
    assert layer.backend.get_name() == "TURBOQUANT"
    assert issubclass(layer.backend, stock.TurboQuantAttentionBackend)


def test_all_that_a_layer_takes_is_reserved_while_the_model_loads_and_below_64_mib(
    make_layer: Any, calls: Calls, fixed: None
) -> None:
    layer = make_layer()
    before = workspace_bytes()
    assert 0 < before < 64 * 2**20
    for query_lens in ([1] * MAX_SEQS, [1 + DRAFTS] * MAX_SEQS):
        layer.impl._scratch(layer.impl._decode_floats(query_lens[0], BLOCK_SIZE, MAX_SEQS), torch.float32)
    layer.impl._scratch(WORKSPACE_BYTES, torch.uint8)
    assert workspace_bytes() == before
