"""vLLM's TurboQuant attention with Graft's kernels: verification is decoding, and a prefix is read where it lies.

The cache layout is vLLM's.  What differs from vLLM's own backend: decodes and verifications go to one kernel that reads
each packed byte once (`kernels/decode.py`), e4m3 keys are e4m3 on every card (`kernels/store.py`), a chunk attends to
its cached prefix in a workspace of fixed size (`kernels/prefill.py`), which is reserved while the model loads, before
memory is profiled, and every kernel is compiled before the first request (`warmup.py`).  What a kernel does not serve
goes to vLLM's.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import vllm.v1.attention.backends.turboquant_attn as stock
from vllm.logger import init_logger
from vllm.triton_utils import HAS_TRITON
from vllm.v1.attention.backend import max_decode_query_len
from vllm.v1.attention.backends.turboquant_attn import TurboQuantAttentionBackend, TurboQuantAttentionImpl
from vllm.v1.worker.workspace import current_workspace_manager, is_workspace_manager_initialized

from vllm_graft.attention.card import card
from vllm_graft.attention.kernels.workspace import WORKSPACE_BYTES
from vllm_graft.attention.metadata import RequestsMetadata, SpanMetadata, SpecDecodeMetadataBuilder
from vllm_graft.attention.rows import Attend

if HAS_TRITON:  # without it this module is imported all the same, to prove that the fix applies
    from vllm_graft.attention.kernels import decode, prefill
    from vllm_graft.attention.kernels import store as storing
    from vllm_graft.attention.kernels.codebook import prepare_codebook
    from vllm_graft.attention.kernels.launch import Launch, decode_launch
    from vllm_graft.attention.kernels.layout import slot_layout

logger = init_logger(__name__)

_FLASH_MAJOR = 8
"""vLLM's FlashAttention 2 has machine code for compute capability 8.x alone."""


class SpecDecodeImpl(TurboQuantAttentionImpl):  # type: ignore[misc]
    """TurboQuant attention that serves a batch with prefills span by span, by Graft's kernels where they can."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not HAS_TRITON:
            raise RuntimeError(
                "a TurboQuant KV cache needs Triton: vLLM's kernels for it and Graft's are written in it"
            )
        config = stock.get_current_vllm_config()
        self._dtype = config.model_config.dtype
        self._max_query_len = max_decode_query_len(config)
        self._max_requests = config.scheduler_config.max_num_seqs
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._card = card(self._device)
        self._layout = slot_layout(self.kv_cache_dtype, self.head_size)
        self._prefill_shape = prefill.shape_of(self._layout, self.num_heads, self.num_kv_heads, self._dtype)
        self._codebook = (
            None
            if self._layout.key_is_fp8
            else prepare_codebook(stock.get_centroids(self.head_size, self._layout.preset.key_bits))
        )
        self._starts: dict[str, tuple[torch.Tensor, int]] = {}
        self.reserve_workspace()

    # What Graft's kernels serve, and what they need for it.

    def why_not_packed(self, max_query_len: int, page_tokens: int) -> str | None:
        """Why decodes of this layer must go to vLLM's kernel, or None."""
        if self._soa_store:
            return "the cache is in ROCm's order"
        return decode.supports(
            self._layout,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            max_query_len=max_query_len,
            page_tokens=page_tokens,
            dtype=self._dtype,
            sliding_window=self.sliding_window,
            has_sinks=self.sinks is not None,
        )

    @functools.cached_property
    def _stores(self) -> bool:
        return not self._soa_store and storing.supports(self._layout) is None

    @functools.cached_property
    def _reads_prefix(self) -> bool:
        """Whether a chunk's prefix is read by Graft's kernels: they need flash attention for the products."""
        return stock._HAS_FLASH_ATTN and self._stores and prefill.supports(self._prefill_shape) is None

    def _launch(self, max_query_len: int, page_tokens: int) -> Launch:
        return decode_launch(
            self._card.capability,
            layout=self._layout,
            rows=self.num_kv_groups * max_query_len,
            page_tokens=page_tokens,
        )

    def reserve_workspace(self) -> None:
        """Grow the shared workspace to the most that any call takes of it.

        The layers call it while the model loads: what is reserved is there when vLLM profiles memory.
        """
        if not is_workspace_manager_initialized():
            return
        floats = max(
            self._decode_floats(queries, page_tokens, self._max_requests)
            for queries in {1, self._max_query_len}
            for page_tokens in TurboQuantAttentionBackend.get_supported_kernel_block_sizes()
        )
        manager = current_workspace_manager()
        manager.get_simultaneous(((floats,), torch.float32))
        if self._reads_prefix:
            manager.get_simultaneous(((WORKSPACE_BYTES,), torch.uint8))

    def _decode_floats(self, max_query_len: int, page_tokens: int, num_requests: int) -> int:
        return decode.workspace_floats(
            programs=self._launch(max_query_len, page_tokens).programs(self._card.multiprocessors),
            num_requests=num_requests,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            max_query_len=max_query_len,
            head_size=self.head_size,
        )

    def _scratch(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        if not is_workspace_manager_initialized():
            return torch.empty(count, dtype=dtype, device=self._device)
        (scratch,) = current_workspace_manager().get_simultaneous(((count,), dtype))
        return scratch

    # Storing.

    def _store_kv(
        self, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor, layer: Any
    ) -> None:
        if not self._stores:
            super()._store_kv(key, value, kv_cache, slot_mapping, layer)
            return
        storing.store(
            key,
            value,
            kv_cache,
            slot_mapping,
            layer._tq_midpoints,
            self._layout,
            hardware_fp8=self._card.hardware_fp8,
        )

    # Attending.

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor | None = None,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend and write to the output, which kernels do themselves."""
        if not isinstance(attn_metadata, RequestsMetadata | SpanMetadata) or output is None:
            return super().forward(
                layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale
            )
        self._ensure_on_device(layer, query.device)
        count = attn_metadata.num_actual_tokens
        query, key, value, out = (
            part[:count].view(count, heads, self.head_size)
            for part, heads in (
                (query, self.num_heads),
                (key, self.num_kv_heads),
                (value, self.num_kv_heads),
                (output, self.num_heads),
            )
        )
        kv_cache = kv_cache.transpose(1, 2)
        if isinstance(attn_metadata, RequestsMetadata):
            self._decode_requests(query, kv_cache, attn_metadata, out)
        else:
            self._attend_by_span(layer, query, key, value, kv_cache, attn_metadata, out)
        return output

    def _attend_by_span(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: SpanMetadata,
        out: torch.Tensor,
    ) -> None:
        tables = layer._tq_Pi, layer._tq_centroids, layer._tq_PiT
        for span, part in metadata.spans:
            start, stop = span.tokens
            here = slice(start, stop)
            if isinstance(part, RequestsMetadata):
                self._decode_requests(query[:stop], kv_cache, part, out[:stop])
            elif not part.is_prefill:
                out[here] = self._decode_attention(query[here], kv_cache, part, *tables, layer)
            elif span.attend is Attend.BOTH and self._reads_prefix:
                self._attend_to_prefix(
                    query[here],
                    key[here],
                    value[here],
                    kv_cache,
                    part.block_table[0],
                    part.max_seq_len - span.num_tokens,
                    layer._tq_centroids,
                    out[here],
                )
            elif span.attend is Attend.BATCH and self._reads_prefix:
                starts, longest = part.query_start_loc, part.max_query_len
                self._flash(
                    query[here], key[here], value[here], starts, starts, longest, longest, self.scale, True, out[here]
                )
            else:
                out[here] = self._prefill_attention(
                    query[here], key[here], value[here], kv_cache, part, *tables, layer=layer
                )

    def _decode_requests(
        self, query: torch.Tensor, kv_cache: torch.Tensor, metadata: RequestsMetadata, out: torch.Tensor
    ) -> None:
        num_requests, page_tokens = metadata.seq_lens.shape[0], kv_cache.shape[1]
        launch = self._launch(metadata.max_query_len, page_tokens)
        floats = self._decode_floats(metadata.max_query_len, page_tokens, num_requests)
        decode.verify_attention(
            query,
            kv_cache,
            metadata.block_table,
            metadata.seq_lens,
            metadata.query_start_loc,
            max_query_len=metadata.max_query_len,
            layout=self._layout,
            scale=self.scale,
            codebook=self._codebook,
            workspace=decode.Workspace(
                self._scratch(floats, torch.float32), launch.programs(self._card.multiprocessors)
            ),
            out=out,
            launch=launch,
        )

    def _attend_to_prefix(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        block_table: torch.Tensor,
        cached: int,
        centroids: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        prefill.attend_to_prefix(
            query,
            key,
            value,
            kv_cache,
            block_table,
            cached,
            centroids,
            self._layout,
            scale=self.scale,
            attention=self._flash_attention,
            workspace=self._scratch(WORKSPACE_BYTES, torch.uint8),
            slots=self._card.flash_slots,
            out=out,
        )

    def _flash_attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        causal: bool,
        scale: float,
        out: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`prefill.Attention` by vLLM's flash attention."""
        queries, keys = self._from_zero("queries", len(query)), self._from_zero("own" if causal else "tile", len(key))
        return self._flash(query, key, value, queries, keys, len(query), len(key), scale, causal, out)

    def _flash(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        query_starts: torch.Tensor,
        key_starts: torch.Tensor,
        max_query_len: int,
        max_key_len: int,
        scale: float,
        causal: bool,
        out: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        version = {} if self.fa_version is None else {"fa_version": self.fa_version}
        found, lse = stock.flash_attn_varlen_func(
            q=query,
            k=key,
            v=value,
            cu_seqlens_q=query_starts,
            cu_seqlens_k=key_starts,
            max_seqlen_q=max_query_len,
            max_seqlen_k=max_key_len,
            softmax_scale=scale,
            causal=causal,
            return_softmax_lse=True,
            out=out,
            **version,
        )
        if found is not out and found.data_ptr() != out.data_ptr():
            out.copy_(found)
        return out, lse

    def _from_zero(self, name: str, count: int) -> torch.Tensor:
        """[0, count] on the device, in a tensor that is kept: filling it needs no synchronization."""
        bounds, written = self._starts.get(name, (None, 0))
        if bounds is None:
            bounds = torch.zeros(2, dtype=torch.int32, device=self._device)
        if written != count:
            bounds[1:].fill_(count)
        self._starts[name] = bounds, count
        return bounds

    def warm_up(self, layer: Any, max_query_len: int, max_requests: int) -> None:
        """Compile what serving will launch, on the layer's cache: nothing is stored there, and little is read."""
        cache = layer.kv_cache.transpose(1, 2)
        self._ensure_on_device(layer, self._device)
        nowhere = torch.full((1,), -1, dtype=torch.int64, device=self._device)
        self._store_kv(self._zeros(1, self.num_kv_heads), self._zeros(1, self.num_kv_heads), cache, nowhere, layer)
        for requests in sorted({min(count, max_requests) for count in (*decode.REQUEST_CLASSES, max_requests)}):
            for queries in sorted({1, max_query_len}):
                tokens = requests * queries
                metadata = RequestsMetadata(
                    seq_lens=torch.full((requests,), queries, dtype=torch.int32, device=self._device),
                    slot_mapping=nowhere,
                    block_table=self._first_page(requests, queries, cache),
                    query_start_loc=torch.arange(0, tokens + 1, queries, dtype=torch.int32, device=self._device),
                    num_actual_tokens=tokens,
                    max_query_len=queries,
                )
                query = self._zeros(tokens, self.num_heads)
                self._decode_requests(query, cache, metadata, torch.empty_like(query))
        if self._reads_prefix:
            self._warm_up_prefix(layer, cache)

    def _warm_up_prefix(self, layer: Any, cache: torch.Tensor) -> None:
        """Attend to prefixes of one tile and of three: each mix of dtypes in a merge is a kernel.

        Two queries, as a chunk has at least: flash attention has other kernels for one, which serving never calls and
        which a driver that compiles them takes minutes for.
        """
        if self._device.type == "cuda" and torch.cuda.get_device_capability(self._device)[0] != _FLASH_MAJOR:
            logger.info_once(
                "FlashAttention 2 has no machine code for this card: the CUDA driver compiles it now, for a minute; "
                "later starts find it in CUDA's cache"
            )
        one_tile = prefill.tiling(self._prefill_shape, 2, 2**30, self._card.flash_slots).tokens
        for cached in (1, 2 * one_tile + 1):
            query = self._zeros(2, self.num_heads)
            self._attend_to_prefix(
                query,
                self._zeros(2, self.num_kv_heads),
                self._zeros(2, self.num_kv_heads),
                cache,
                self._first_page(1, cached, cache)[0],
                cached,
                layer._tq_centroids,
                torch.empty_like(query),
            )

    def _first_page(self, requests: int, tokens: int, cache: torch.Tensor) -> torch.Tensor:
        """A block table of so many tokens each, all of them in the cache's first page."""
        return torch.zeros(requests, -(-tokens // cache.shape[1]), dtype=torch.int32, device=self._device)

    def _zeros(self, tokens: int, heads: int) -> torch.Tensor:
        return torch.zeros(tokens, heads, self.head_size, dtype=self._dtype, device=self._device)


class SpecDecodeBackend(TurboQuantAttentionBackend):  # type: ignore[misc]
    """The backend that vLLM finds under TURBOQUANT once the fix is in."""

    @staticmethod
    def get_impl_cls() -> type[SpecDecodeImpl]:
        return SpecDecodeImpl

    @staticmethod
    def get_builder_cls() -> type[SpecDecodeMetadataBuilder]:
        return SpecDecodeMetadataBuilder
