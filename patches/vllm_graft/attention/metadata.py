"""Metadata of TurboQuant attention: a batch is cut into spans, each judged by the lengths of its own requests.

A request is a decode up to 1 + num_speculative_tokens query tokens, and the lengths of decodes are read on the device,
so that a CUDA graph holds no length and no draft count of its capture.  Graft's kernel takes requests as the model
runner describes them, in buffers that it keeps; vLLM's takes single tokens, which are made in buffers of ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm.logger import init_logger
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.turboquant_attn import TurboQuantMetadata, TurboQuantMetadataBuilder
from vllm.v1.worker.workspace import current_workspace_manager, is_workspace_manager_initialized

from vllm_graft.attention.rows import Attend, DecodeRows, Span, cut
from vllm_graft.attention.warmup import WARMUP

logger = init_logger(__name__)


@dataclass
class RequestsMetadata(TurboQuantMetadata):  # type: ignore[misc]
    """Decodes for Graft's kernel: `query_start_loc` counts from the first token of the batch, `max_query_len` is the
    bound for which the kernel is compiled, and `num_actual_tokens` is where the span ends."""


@dataclass
class SpanMetadata(TurboQuantMetadata):  # type: ignore[misc]
    """Metadata of a batch with prefills: each span with the metadata of that span alone."""

    spans: tuple[tuple[Span, TurboQuantMetadata], ...] = ()


class SpecDecodeMetadataBuilder(TurboQuantMetadataBuilder):  # type: ignore[misc]
    """Builds metadata in which verification is decoding."""

    requires_block_table_width = True

    def __init__(
        self,
        kv_cache_spec: Any,
        layer_names: list[str],
        vllm_config: Any,
        device: torch.device,
        block_table_width: int,
    ) -> None:
        super(TurboQuantMetadataBuilder, self).__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        layers = [vllm_config.compilation_config.static_forward_context[name] for name in layer_names]
        threshold, page_tokens = self.reorder_batch_threshold, kv_cache_spec.block_size
        reasons = {layer.impl.why_not_packed(threshold, page_tokens) for layer in layers} - {None}
        self._rows: DecodeRows | None = None
        for layer in layers:
            layer.impl.reserve_workspace()
        if reasons:
            logger.warning_once("TurboQuant decodes with vLLM's kernel: %s", "; ".join(sorted(reasons)))
            self._rows = DecodeRows(vllm_config.scheduler_config.max_num_seqs * threshold, block_table_width, device)
            self._reserve_decode_scratch()
        else:
            WARMUP.register_warmup(layers[0], threshold, vllm_config.scheduler_config.max_num_seqs)

    def _reserve_decode_scratch(self) -> None:
        """Grow the shared workspace to what vLLM's kernel takes for all rows, before graphs hold its address."""
        if not is_workspace_manager_initialized():
            return
        assert self._rows is not None
        config = self.vllm_config
        rows, head_size = self._rows.capacity, self.kv_cache_spec.head_size
        heads = config.model_config.get_num_attention_heads(config.parallel_config)
        splits = config.attention_config.tq_max_kv_splits_for_cuda_graph
        current_workspace_manager().get_simultaneous(
            ((rows, heads, splits, head_size + 1), torch.float32),
            ((rows, heads, head_size), config.model_config.dtype),
            ((rows, heads), torch.float32),
        )

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> TurboQuantMetadata:
        """Build the metadata of a batch; one of decodes alone is written where its CUDA graph reads it."""
        batch = common_attn_metadata
        if batch.max_query_len <= 1:
            return self._decodes(batch)
        bounds = batch.seq_lens_cpu_upper_bound
        if bounds is None:
            bounds = batch.seq_lens.cpu()
        spans = cut(batch.query_start_loc_cpu.tolist(), bounds.tolist(), self.reorder_batch_threshold)
        if all(span.attend is Attend.CACHE for span in spans):
            return self._decodes(batch)
        return self._mixed(batch, bounds, spans)

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> TurboQuantMetadata:
        """Build metadata to capture: always decodes, since a dummy batch looks like prompts with nothing cached."""
        return self._decodes(common_attn_metadata)

    def _decodes(self, batch: CommonAttentionMetadata) -> TurboQuantMetadata:
        num_tokens = batch.num_actual_tokens
        if self._rows is None:
            return self._requests(batch, (0, batch.seq_lens.shape[0]), num_tokens, batch.max_query_len)
        if batch.max_query_len <= 1:  # the requests are the rows
            lengths, block_table = batch.seq_lens, batch.block_table_tensor
        else:
            lengths, block_table = self._rows.expand(
                batch.seq_lens, batch.query_start_loc, batch.block_table_tensor, first_token=0, num_tokens=num_tokens
            )
        return _rows_metadata(batch, (0, num_tokens), lengths, block_table)

    def _requests(
        self, batch: CommonAttentionMetadata, requests: tuple[int, int], end_token: int, max_query_len: int
    ) -> RequestsMetadata:
        first, last = requests
        return RequestsMetadata(
            seq_lens=batch.seq_lens[first:last],
            slot_mapping=batch.slot_mapping,
            block_table=batch.block_table_tensor[first:last],
            query_start_loc=batch.query_start_loc[first : last + 1],
            num_actual_tokens=end_token,
            # one of two: each is a kernel of its own
            max_query_len=1 if max_query_len <= 1 else self.reorder_batch_threshold,
            max_seq_len=batch.max_seq_len,
            is_prefill=False,
        )

    def _mixed(
        self, batch: CommonAttentionMetadata, bounds: torch.Tensor, spans: tuple[Span, ...]
    ) -> TurboQuantMetadata:
        parts = []
        row = 0
        for span in spans:
            if span.attend is not Attend.CACHE:
                part = _prefill_metadata(batch, bounds, span)
            elif self._rows is None:
                part = self._requests(batch, span.requests, span.tokens[1], span.max_query_len)
            else:
                lengths, block_table = self._rows.expand(
                    batch.seq_lens,
                    batch.query_start_loc,
                    batch.block_table_tensor,
                    first_token=span.tokens[0],
                    num_tokens=span.num_tokens,
                    first_row=row,
                )
                row += span.num_tokens
                part = _rows_metadata(batch, span.tokens, lengths, block_table)
            parts.append((span, part))
        return SpanMetadata(
            seq_lens=batch.seq_lens,
            slot_mapping=batch.slot_mapping,
            block_table=batch.block_table_tensor,
            query_start_loc=batch.query_start_loc,
            num_actual_tokens=batch.num_actual_tokens,
            max_query_len=batch.max_query_len,
            max_seq_len=batch.max_seq_len,
            is_prefill=True,
            spans=tuple(parts),
        )


def _rows_metadata(
    batch: CommonAttentionMetadata, tokens: tuple[int, int], lengths: torch.Tensor, block_table: torch.Tensor
) -> TurboQuantMetadata:
    num_rows = tokens[1] - tokens[0]
    return TurboQuantMetadata(
        seq_lens=lengths,
        slot_mapping=batch.slot_mapping[slice(*tokens)],
        block_table=block_table,
        query_start_loc=batch.query_start_loc,
        num_actual_tokens=num_rows,
        max_query_len=1,
        max_seq_len=batch.max_seq_len,
        is_prefill=False,
        num_decodes=num_rows,
        num_decode_tokens=num_rows,
    )


def _prefill_metadata(batch: CommonAttentionMetadata, bounds: torch.Tensor, span: Span) -> TurboQuantMetadata:
    """Metadata of prefilling requests alone; the host's lengths are exact for these.

    vLLM takes max_query_len == max_seq_len as "nothing is cached": true of a span even where it is not of a batch.
    """
    requests, tokens = slice(*span.requests), slice(*span.tokens)
    starts = slice(span.requests[0], span.requests[1] + 1)
    lengths = bounds[requests]
    return TurboQuantMetadata(
        seq_lens=batch.seq_lens[requests],
        slot_mapping=batch.slot_mapping[tokens],
        block_table=batch.block_table_tensor[requests],
        query_start_loc=batch.query_start_loc[starts] - span.tokens[0],
        num_actual_tokens=span.num_tokens,
        max_query_len=span.max_query_len,
        max_seq_len=int(lengths.max()),
        is_prefill=True,
        query_start_loc_cpu=batch.query_start_loc_cpu[starts] - span.tokens[0],
        seq_lens_cpu=lengths,
    )
