"""vLLM's TurboQuant attention with speculation as decode: draft verification is a batch of single-token decodes.

The cache layout, the store and the kernels are vLLM's.  What differs from vLLM's own backend:

- a request is a decode up to 1 + num_speculative_tokens query tokens, and its tokens become rows of the decode kernel
  whose lengths are computed on the device, so that a CUDA graph holds no length and no draft count of its capture;
- a mixed batch is cut into spans, each judged by the lengths of its own requests;
- scratch for all these rows is reserved when the builder is made.

The kernel behind `_decode_attention` sees rows only: another kernel can take its place without a change here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.turboquant_attn import (
    TurboQuantAttentionBackend,
    TurboQuantAttentionImpl,
    TurboQuantMetadata,
    TurboQuantMetadataBuilder,
)
from vllm.v1.worker.workspace import current_workspace_manager, is_workspace_manager_initialized

from vllm_graft.attention.rows import Attend, DecodeRows, Span, cut


@dataclass
class SpanMetadata(TurboQuantMetadata):  # type: ignore[misc]
    """Metadata of a batch with prefills: tokens (start, stop) of each span with the metadata of that span alone."""

    spans: tuple[tuple[int, int, TurboQuantMetadata], ...] = ()


class SpecDecodeMetadataBuilder(TurboQuantMetadataBuilder):  # type: ignore[misc]
    """Builds metadata in which each token of a decode or verification is a row of the decode kernel."""

    requires_block_table_width = True

    def __init__(
        self,
        kv_cache_spec: Any,
        layer_names: list[str],
        vllm_config: Any,
        device: torch.device,
        block_table_width: int,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        self._rows = DecodeRows(
            vllm_config.scheduler_config.max_num_seqs * self.reorder_batch_threshold, block_table_width, device
        )
        self._reserve_decode_scratch()

    def _reserve_decode_scratch(self) -> None:
        """Grow the shared workspace to what `_decode_attention` takes for all rows, before graphs hold its address."""
        if not is_workspace_manager_initialized():
            return
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
        if batch.max_query_len <= 1:  # the requests are the rows, in buffers that the model runner keeps
            lengths, block_table = batch.seq_lens, batch.block_table_tensor
        else:
            lengths, block_table = self._rows.expand(
                batch.seq_lens, batch.query_start_loc, batch.block_table_tensor, first_token=0, num_tokens=num_tokens
            )
        return self._rows_metadata(batch, (0, num_tokens), lengths, block_table)

    def _mixed(
        self, batch: CommonAttentionMetadata, bounds: torch.Tensor, spans: tuple[Span, ...]
    ) -> TurboQuantMetadata:
        parts = []
        row = 0
        for span in spans:
            if span.attend is Attend.CACHE:
                lengths, block_table = self._rows.expand(
                    batch.seq_lens,
                    batch.query_start_loc,
                    batch.block_table_tensor,
                    first_token=span.tokens[0],
                    num_tokens=span.num_tokens,
                    first_row=row,
                )
                row += span.num_tokens
                part = self._rows_metadata(batch, span.tokens, lengths, block_table)
            else:
                part = _prefill_metadata(batch, bounds, span)
            parts.append((*span.tokens, part))
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
        self,
        batch: CommonAttentionMetadata,
        tokens: tuple[int, int],
        lengths: torch.Tensor,
        block_table: torch.Tensor,
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


class SpecDecodeImpl(TurboQuantAttentionImpl):  # type: ignore[misc]
    """TurboQuant attention that serves a batch with prefills span by span."""

    def _prefill_attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: SpanMetadata,
        Pi: torch.Tensor,
        centroids: torch.Tensor,
        PiT: torch.Tensor | None = None,
        layer: Any = None,
    ) -> torch.Tensor:
        output = torch.zeros_like(query)
        for start, stop, part in attn_metadata.spans:
            if part.is_prefill:
                output[start:stop] = super()._prefill_attention(
                    query[start:stop],
                    key[start:stop],
                    value[start:stop],
                    kv_cache,
                    part,
                    Pi,
                    centroids,
                    PiT,
                    layer=layer,
                )
            else:
                output[start:stop] = self._decode_attention(
                    query[start:stop], kv_cache, part, Pi, centroids, PiT, layer
                )
        return output


class SpecDecodeBackend(TurboQuantAttentionBackend):  # type: ignore[misc]
    """The backend that vLLM finds under TURBOQUANT once the fix is in."""

    @staticmethod
    def get_impl_cls() -> type[SpecDecodeImpl]:
        return SpecDecodeImpl

    @staticmethod
    def get_builder_cls() -> type[SpecDecodeMetadataBuilder]:
        return SpecDecodeMetadataBuilder
