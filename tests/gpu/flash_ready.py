#!/usr/bin/env python3
"""Have the CUDA driver compile FlashAttention 2's kernels for this card, all at once, into the cache that it keeps.

    python3 tests/gpu/flash_ready.py &      # before anything else: what needs the kernels then finds them

vLLM's FlashAttention 2 has machine code for compute capability 8.x alone.  On other cards the driver compiles a module
of it when one of its kernels is first launched, on one core, much longer for a paged cache than for a prompt.  Each
module is compiled by a process of its own here; vLLM itself is not imported.  Prints the seconds of each.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import multiprocessing
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

PAGE, HEADS, KV_HEADS = 16, 8, 2


@dataclass(frozen=True)
class Module:
    """What decides which module of FlashAttention's a call takes."""

    head_size: int
    dtype: str
    causal: bool
    paged: bool

    def __str__(self) -> str:
        return " ".join(
            (
                f"head size {self.head_size}",
                self.dtype,
                "causal" if self.causal else "full",
                "paged" if self.paged else "dense",
            )
        )


def modules(head_sizes: tuple[int, ...]) -> tuple[Module, ...]:
    """Those that the measurements take, the longest to compile first.

    Stock's and Graft's chunks are causal in the model's dtype, Graft's tiles full in FP16; a bfloat16 cache is paged,
    and one query is never causal.
    """
    kinds = (("bfloat16", True, True), ("bfloat16", False, True), ("float16", False, False), ("bfloat16", True, False))
    return tuple(Module(size, *kind) for kind, size in itertools.product(kinds, head_sizes))


def library() -> Path:
    """FlashAttention 2's library, found without importing vLLM.

    Raises:
        SystemExit: vLLM has none.

    """
    found = importlib.util.find_spec("vllm")
    folders = [Path(folder) for folder in (found.submodule_search_locations or ())] if found else []
    for folder in folders:
        for path in (folder / "vllm_flash_attn").glob("_vllm_fa2_C*.so"):
            return path
    raise SystemExit("vLLM with FlashAttention 2 (vllm/vllm_flash_attn/_vllm_fa2_C*.so) is not importable")


def compile_one(module: Module, path: Path) -> float:
    """Call a module once and return the seconds that it took."""
    import torch

    torch.ops.load_library(str(path))
    dtype = getattr(torch, module.dtype)
    count = 2  # a single query takes other kernels
    query = torch.zeros(count, HEADS, module.head_size, dtype=dtype, device="cuda")
    shape = (1, PAGE) if module.paged else (PAGE,)
    keys = torch.zeros(*shape, KV_HEADS, module.head_size, dtype=dtype, device="cuda")
    starts, lengths = (torch.tensor(numbers, dtype=torch.int32, device="cuda") for numbers in ([0, count], [0, PAGE]))
    table = torch.zeros(1, 1, dtype=torch.int32, device="cuda") if module.paged else None
    torch.cuda.synchronize()
    begun = time.perf_counter()
    torch.ops._vllm_fa2_C.varlen_fwd(
        query, keys, keys, torch.empty_like(query), starts, lengths, lengths[1:] if module.paged else None, None, table,
        None, count, PAGE, 0.0, 1.0, False, module.causal, -1, -1, 0.0, False, 0, None,
    )  # fmt: skip
    torch.cuda.synchronize()
    return time.perf_counter() - begun


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head-sizes", type=int, nargs="+", default=[256, 64], help="of the models to be measured")
    options = parser.parse_args()
    path, wanted = library(), modules(tuple(options.head_sizes))
    with ProcessPoolExecutor(len(wanted), mp_context=multiprocessing.get_context("spawn")) as pool:
        waiting = {pool.submit(compile_one, module, path): module for module in wanted}
        for done in as_completed(waiting):
            print(f"{waiting[done]}: {done.result():.1f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
