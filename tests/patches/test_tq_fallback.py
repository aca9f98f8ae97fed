"""Where Graft's decode kernel does not serve a shape, verified tokens become rows of vLLM's, in buffers of our own."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs an environment with vLLM; the launcher's has none")
pytest.importorskip("vllm", reason="needs an environment with vLLM; the launcher's has none")


from tests.patches.tq_layer import (  # noqa: E402
    DRAFTS,
    HEAD_SIZE,
    HEADS,
    MAX_SEQS,
    SPLITS,
    Calls,
    attend,
    batch,
    workspace,
)

pytestmark = pytest.mark.usefixtures("fixed", "without_our_decode")


def test_a_graph_goes_on_reading_the_same_buffers(make_layer: Any, calls: Calls) -> None:
    layer = make_layer()
    attend(layer, layer.builder.build_for_cudagraph_capture(batch([4, 4], [4, 4])))
    attend(layer, layer.builder.build(0, batch([4, 4], [100, 37])))
    assert calls.lengths[0].data_ptr() == calls.lengths[1].data_ptr()
    assert calls.tables[0].data_ptr() == calls.tables[1].data_ptr()
    assert calls.tables[0].stride() == calls.tables[1].stride()


def test_padding_rows_of_a_graph_are_never_empty_and_never_stale(make_layer: Any, calls: Calls) -> None:
    layer = make_layer()
    attend(layer, layer.builder.build_for_cudagraph_capture(batch([4] * 4, [4] * 4)))
    attend(layer, layer.builder.build(0, batch([4] * 4, [90, 80, 70, 60])))
    padded = batch([4, 3, 0, 0], [50, 20, 0, 0], num_tokens=16)  # a short row and two requests of padding
    layer.builder.build(0, padded)
    assert calls.lengths[0].tolist() == [47, 48, 49, 50, 18, 19, 20, *[1] * 9]
    layer.builder.build(0, batch([4, 3], [51, 21]))  # unpadded: the drafter's graph may still replay 16 rows
    assert calls.lengths[0].tolist() == [48, 49, 50, 51, 19, 20, 21, *[1] * 9]


def test_the_drafters_single_token_graph_reads_the_runners_buffers(make_layer: Any, calls: Calls) -> None:
    layer = make_layer()
    capture = batch([1, 1, 1], [1, 1, 1])
    attend(layer, layer.builder.build_for_cudagraph_capture(capture))
    assert calls.lengths[0].data_ptr() == capture.seq_lens.data_ptr()
    assert calls.tables[0].data_ptr() == capture.block_table_tensor.data_ptr()
    assert capture.seq_lens.tolist() == [1, 1, 1]


def test_every_row_has_the_block_table_of_its_request(make_layer: Any, calls: Calls) -> None:
    described = batch([4, 1, 3], [60, 7, 9])
    layer = make_layer()
    attend(layer, layer.builder.build(0, described))
    assert calls.rows == [[57, 58, 59, 60, 7, 7, 8, 9]]
    request = [0, 0, 0, 0, 1, 2, 2, 2]
    assert torch.equal(calls.tables[0], described.block_table_tensor[request])


def test_the_largest_verification_fits_into_the_scratch_reserved_at_start(make_layer: Any) -> None:
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
