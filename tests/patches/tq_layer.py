"""An attention layer of vLLM's TurboQuant backend on CPU tensors, and records of what reaches its kernels.

Import it where vLLM can be imported: only the engine's configuration is a stand-in.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

if "triton" not in sys.modules:
    os.environ.setdefault("TRITON_INTERPRET", "1")
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")  # with Triton but no GPU, vLLM replaces its kernels otherwise

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import vllm.v1.attention.backends.turboquant_attn as stock
    from vllm.triton_utils import HAS_TRITON
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.kv_cache_interface import FullAttentionSpec
    from vllm.v1.worker import workspace
    from vllm_graft.attention import turboquant
    from vllm_graft.attention.kernels import decode, prefill
    from vllm_graft.engine import Engine
    from vllm_graft.facts import vllm_version
    from vllm_graft.fixes.tq_spec_decode import PATCH
    from vllm_graft.patch import Outcome

__all__ = ["HAS_TRITON", "AttentionBackendEnum", "decode", "prefill", "stock", "turboquant", "workspace"]

HEADS, KV_HEADS, HEAD_SIZE, BLOCK_SIZE, MAX_BLOCKS, MAX_SEQS, DRAFTS, SPLITS = 4, 2, 64, 16, 12, 8, 3, 2
CPU = torch.device("cpu")
kernels = pytest.mark.skipif(
    not (HAS_TRITON and os.environ.get("TRITON_INTERPRET") == "1"),
    reason="needs Triton and its interpreter (TRITON_INTERPRET=1)",
)


@dataclass
class Calls:
    """What reached the kernels; a graph reads the same tensors again when it is replayed, and so do the records."""

    reads: list[Callable[[], list[int]]] = field(default_factory=list)
    lengths: list[Any] = field(default_factory=list)
    tables: list[Any] = field(default_factory=list)
    requests: list[Any] = field(default_factory=list)
    flash: list[int] = field(default_factory=list)

    @property
    def rows(self) -> list[list[int]]:
        """To how many tokens each query row attends, per call of a kernel that reads the cache."""
        return [read() for read in self.reads]


@dataclass
class Layer:
    """One attention layer with its builder, made by the backend that vLLM finds under TURBOQUANT."""

    backend: Any
    builder: Any
    impl: Any
    module: Any
    cache: Any


def apply_fix() -> Engine:
    """Put the fix in, as the engine does; `undo_all` of what is returned takes it out."""
    engine = Engine()
    attempt = engine.apply(PATCH, vllm_version() or "")
    assert attempt.outcome is Outcome.APPLIED, attempt.reason
    return engine


def record_calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Replace kernel launches by records of their arguments; outputs are zero."""
    seen = Calls()

    def stock_decode(query: Any, block_table: Any, seq_lens: Any, **_: Any) -> Any:
        assert query.shape[0] == seq_lens.shape[0] == block_table.shape[0]
        seen.reads.append(seq_lens.tolist)
        seen.lengths.append(seq_lens)
        seen.tables.append(block_table)
        return torch.zeros_like(query)

    def verify(
        query: Any, _: Any, block_table: Any, seq_lens: Any, query_start_loc: Any, *, max_query_len: int, **__: Any
    ) -> None:
        def rows() -> list[int]:
            found: list[int] = []
            for request, length in enumerate(seq_lens.tolist()):
                count = int(query_start_loc[request + 1] - query_start_loc[request])
                assert count <= max_query_len
                found += range(length - count + 1, length + 1)
            assert query_start_loc[-1] <= len(query)
            return found

        seen.reads.append(rows)
        seen.tables.append(block_table)
        seen.requests.append((seq_lens, query_start_loc, block_table, max_query_len))

    def to_prefix(
        query: Any, key: Any, value: Any, cache: Any, block_table: Any, cached: int, *_: Any, **__: Any
    ) -> None:
        seen.reads.append(torch.arange(cached + 1, cached + len(query) + 1).tolist)
        seen.tables.append(block_table)

    def flash(_: Any, q: Any, **__: Any) -> Any:
        seen.flash.append(q.shape[0])
        return torch.zeros_like(q)

    monkeypatch.setattr(stock, "triton_turboquant_decode_attention", stock_decode)
    monkeypatch.setattr(decode, "verify_attention", verify)
    monkeypatch.setattr(prefill, "attend_to_prefix", to_prefix)
    monkeypatch.setattr(stock, "_HAS_FLASH_ATTN", True)
    monkeypatch.setattr(stock.TurboQuantAttentionImpl, "_flash_attn_varlen", flash)
    monkeypatch.setattr(turboquant.SpecDecodeImpl, "_flash", lambda self, query, *_: (flash(self, query), None))
    return seen


def layers(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Layer]:
    """How to make a layer: `make(kv_cache_dtype, drafts, max_model_len)`."""
    monkeypatch.setattr(workspace, "_manager", workspace.WorkspaceManager(CPU))
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)  # raises where there is no accelerator

    def make(
        dtype: str = "turboquant_k8v4", drafts: int = DRAFTS, max_model_len: int = BLOCK_SIZE * MAX_BLOCKS
    ) -> Layer:
        speculation = SimpleNamespace(num_speculative_tokens=drafts, parallel_drafting=False) if drafts else None
        module = torch.nn.Module()
        config = SimpleNamespace(
            speculative_config=speculation,
            use_v2_model_runner=True,
            parallel_config=SimpleNamespace(decode_context_parallel_size=1),
            attention_config=SimpleNamespace(tq_max_kv_splits_for_cuda_graph=SPLITS, flash_attn_version=2),
            scheduler_config=SimpleNamespace(
                max_num_seqs=MAX_SEQS, enable_chunked_prefill=True, max_num_batched_tokens=256
            ),
            model_config=SimpleNamespace(
                max_model_len=max_model_len, dtype=torch.float16, get_num_attention_heads=lambda _: HEADS
            ),
            compilation_config=SimpleNamespace(static_forward_context={"layer": module}),
        )
        monkeypatch.setattr(stock, "get_current_vllm_config", lambda: config)
        backend = AttentionBackendEnum.TURBOQUANT.get_class()
        impl = backend.get_impl_cls()(HEADS, HEAD_SIZE, HEAD_SIZE**-0.5, KV_HEADS, kv_cache_dtype=dtype)
        cache = torch.zeros(
            MAX_SEQS * MAX_BLOCKS + 1, KV_HEADS, BLOCK_SIZE, impl.tq_config.slot_size_aligned, dtype=torch.uint8
        )
        module.impl, module.kv_cache = impl, cache
        spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=KV_HEADS, head_size=HEAD_SIZE, dtype=torch.uint8)
        builder_class = backend.get_builder_cls()
        width = {"block_table_width": MAX_BLOCKS} if builder_class.requires_block_table_width else {}
        builder = builder_class(spec, ["layer"], config, CPU, **width)
        return Layer(backend, builder, impl, module, cache)

    return make


def workspace_bytes() -> int:
    """The bytes of the shared workspace."""
    return sum(part.numel() for part in workspace.current_workspace_manager()._current_workspaces if part is not None)


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


@dataclass
class Launches:
    """The kernels that were launched, as Triton or, for flash attention, the driver would compile them; none ran.

    A variant is the module, the kernel's name and what it is compiled for.
    """

    variants: set[tuple[Any, ...]] = field(default_factory=set)

    def counts(self) -> dict[str, int]:
        """How many variants there are of each kernel, by the end of its module's name and its own."""
        names = [f"{module.rpartition('.')[2]}.{name}" for module, name, *_ in self.variants]
        return {name: names.count(name) for name in sorted(set(names))}


def record_launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    """Replace every Triton kernel by a record of its launch, and flash attention by zeros."""
    from triton.runtime.interpreter import InterpretedFunction

    seen = Launches()

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        given = dict(zip(kernel.arg_names, args, strict=False)) | options
        general = set(kernel.kwargs["do_not_specialize"] or ())
        annotations = kernel.fn.__annotations__
        key = [
            (name, _compiled_as(value, "constexpr" in str(annotations.get(name)), name in general))
            for name, value in sorted(given.items())
        ]
        seen.variants.add((kernel.fn.__module__, kernel.fn.__name__, *key))

    def flash(_: Any, query: Any, *others: Any) -> tuple[Any, Any]:
        max_query_len, causal, out = others[4], others[7], others[8]
        seen.variants.add(("flash", "flash_attention", query.dtype, max_query_len == 1, causal))
        return out.zero_(), torch.zeros(query.shape[1], query.shape[0])

    def stock_flash(_: Any, q: Any, max_seqlen_q: int, **__: Any) -> Any:
        seen.variants.add(("flash", "flash_attention", q.dtype, max_seqlen_q == 1, True))
        return torch.zeros_like(q)

    monkeypatch.setattr(InterpretedFunction, "run", run)
    monkeypatch.setattr(stock, "_HAS_FLASH_ATTN", True)
    monkeypatch.setattr(stock.TurboQuantAttentionImpl, "_flash_attn_varlen", stock_flash)
    monkeypatch.setattr(turboquant.SpecDecodeImpl, "_flash", flash)
    return seen


def _compiled_as(value: Any, constant: bool, general: bool) -> Any:
    """What of an argument decides about the compiled kernel: see triton/runtime/jit.py."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), general or value.data_ptr() % 16 == 0
    if constant or isinstance(value, bool | str | tuple | None):
        return value
    if isinstance(value, int) and not general:
        return "one" if value == 1 else "multiple of 16" if value % 16 == 0 else "integer"
    return type(value).__name__


class Allocated(TorchDispatchMode):  # type: ignore[misc]
    """Counts the bytes that operations allocate while it is entered: results that are no view of an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.size = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {_address(part) for part in tree_leaves((args, kwargs)) if isinstance(part, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for part in tree_leaves(result):
            if isinstance(part, torch.Tensor) and _address(part) not in before:
                self.size += part.untyped_storage().nbytes()
        return result


def _address(tensor: Any) -> int:
    return int(tensor.untyped_storage().data_ptr())
