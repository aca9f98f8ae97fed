#!/usr/bin/env python3
"""Speed and correctness of the ternary kernels on one GPU, beside cuBLAS in bfloat16.

    python3 tests/gpu/ternary_speed.py --tune --results tests/gpu/results/ternary_speed.json

Needs torch, Triton and one NVIDIA GPU, no network; where vLLM is there, its Marlin kernel is timed too.  Without
--tune only the configurations that `kernels.choose` gives are measured.  Each figure is written as soon as it is
there, and one that is in the results file is not measured again unless --again names its tokens, as it should where a
kernel was changed.  The exit status is 1 when a product is wrong, 3 when the budget ended first.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import importlib.util
import json
import multiprocessing
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import paths  # noqa: F401
import ternary_bench as bench
import torch
import triton
from clock import copy_bytes_per_s
from ternary_bench import Config, Shape
from vllm_graft.quantization.ternary import kernels
from vllm_graft.quantization.ternary.kernels import GemmConfig, GemvConfig

RESULTS = Path(__file__).parent / "results" / "ternary_speed.json"
SCHEMA = 1
TOLERANCE = {torch.bfloat16: 2.5e-3, torch.float16: 3.2e-4}  # the rounding of the output, with a margin
GEMV_SHAPES = tuple(
    Shape(*sizes) for sizes in ((4096, 4096), (6144, 4096), (28672, 4096), (4096, 14336), (17408, 5120), (5120, 17408))
)
GEMM_SHAPES = (Shape(4096, 4096), Shape(17408, 5120), Shape(5120, 17408))
PRODUCTS = tuple(
    (m, shape)
    for m in (1, 4, 8, 2048, 32, 64, 128, 256, 512, 16, 2, 1024, 4096)
    for shape in (GEMV_SHAPES if m <= kernels.GEMV_TOKENS else GEMM_SHAPES)
)
"""In the order in which they are measured: first decoding, verification of drafts, prefill, and small batches."""

ONE_TOKEN: tuple[Config, ...] = tuple(
    GemvConfig(*sizes)
    for sizes in (
        *((2, 1, 2, 3), (2, 1, 2, 4), (2, 1, 4, 2), (2, 1, 4, 3), (2, 2, 2, 3), (2, 1, 1, 6), (4, 1, 1, 3)),
        *((4, 1, 1, 5), (4, 1, 2, 2), (4, 1, 2, 3), (4, 1, 2, 4), (4, 1, 4, 2), (4, 1, 4, 3), (4, 2, 2, 2)),
        *((4, 2, 2, 3), (8, 1, 1, 5)),
        *((8, 1, 2, 3), (8, 1, 4, 3), (8, 2, 2, 2), (16, 1, 1, 3), (16, 1, 2, 2)),
        *((4, 1, 2, 3, True), (4, 1, 1, 5, True), (4, 2, 2, 2, True), (2, 1, 2, 4, True), (8, 1, 2, 3, True)),
    )
)
FEW_TOKENS: tuple[Config, ...] = (
    *(GemmConfig(64, 16, 4, 4), GemmConfig(64, 16, 4, 6)),
    *(
        GemvConfig(*sizes)
        for sizes in (
            *((2, 1, 1, 4), (2, 1, 1, 6), (2, 2, 1, 4), (4, 1, 1, 3), (4, 1, 1, 4), (4, 1, 1, 5), (4, 1, 1, 6)),
            *((4, 1, 2, 2), (4, 1, 2, 3), (4, 2, 1, 3), (4, 2, 1, 4), (4, 2, 2, 2), (4, 4, 1, 3)),
            *((8, 1, 1, 3), (8, 2, 1, 3), (4, 1, 1, 4, True), (4, 2, 1, 3, True)),
        )
    ),
)
MANY_TOKENS: dict[int, tuple[Config, ...]] = {
    32: (
        *(GemvConfig(8, 2, 1, 2), GemvConfig(4, 2, 1, 3), GemvConfig(8, 4, 1, 2), GemvConfig(4, 4, 1, 3)),
        *(GemmConfig(64, 32, 4, 4), GemmConfig(64, 32, 4, 6), GemmConfig(64, 16, 4, 6)),
    ),
    64: (
        *(GemvConfig(4, 2, 1, 2), GemvConfig(8, 2, 1, 2)),
        *(GemmConfig(64, 32, 4, 3), GemmConfig(64, 32, 4, 5), GemmConfig(64, 64, 4, 4), GemmConfig(64, 64, 4, 5)),
    ),
    128: (
        *(GemmConfig(64, 64, 4, 3), GemmConfig(64, 64, 4, 4), GemmConfig(128, 64, 8, 3), GemmConfig(128, 64, 8, 4)),
        *(GemmConfig(64, 128, 4, 3), GemmConfig(64, 32, 4, 5), GemmConfig(128, 64, 4, 3), GemmConfig(128, 128, 8, 3)),
    ),
    256: (
        *(GemmConfig(64, 64, 4, 3), GemmConfig(64, 64, 4, 4), GemmConfig(128, 64, 8, 3), GemmConfig(128, 64, 8, 4)),
        *(GemmConfig(64, 128, 4, 3), GemmConfig(128, 128, 8, 3), GemmConfig(128, 256, 8, 3)),
    ),
    512: (
        *(GemmConfig(64, 64, 4, 3), GemmConfig(128, 64, 8, 3), GemmConfig(128, 64, 8, 4), GemmConfig(64, 128, 4, 3)),
        *(GemmConfig(128, 128, 8, 3), GemmConfig(128, 256, 8, 3), GemmConfig(64, 256, 4, 2)),
    ),
}
LARGE: tuple[Config, ...] = (
    *(GemmConfig(128, 128, 8, 3), GemmConfig(128, 128, 8, 4), GemmConfig(128, 128, 4, 3), GemmConfig(128, 256, 8, 3)),
    *(GemmConfig(128, 256, 8, 2), GemmConfig(256, 128, 8, 3), GemmConfig(64, 256, 4, 3), GemmConfig(128, 64, 4, 3)),
)
CORRECTNESS: tuple[tuple[int, Shape, int | None, Config | None], ...] = (
    (1, Shape(4096, 4096), None, None),
    (1, Shape(33, 300), None, GemvConfig(8, 1, 4, 2)),
    (1, Shape(4096, 4096), None, GemvConfig(8, 1, 4, 2, early=True)),
    (1, Shape(1000, 4096), 128, None),
    (3, Shape(520, 4160), 64, None),
    (5, Shape(4096, 4096), None, None),
    (7, Shape(130, 1040), 16, GemvConfig(4, 2, 1, 3)),
    (8, Shape(5120, 17408), None, None),
    (16, Shape(77, 2500), None, None),
    (16, Shape(640, 3072), 32, None),
    (31, Shape(200, 1100), None, None),
    (65, Shape(1030, 4096), 128, None),
    (65, Shape(1030, 4096), 128, GemmConfig(128, 128, 8, 3)),
    (130, Shape(520, 1024), 64, GemmConfig(128, 128, 8, 3)),
    (257, Shape(1000, 777), None, None),
    (257, Shape(1000, 777), None, GemmConfig(128, 128, 8, 3)),
    (500, Shape(384, 768), 256, GemmConfig(64, 64, 4, 4)),
    (4096, Shape(4096, 4096), None, None),
)


@dataclass(frozen=True)
class Product:
    """One kernel to compile: sizes, groups and configuration."""

    m: int
    shape: Shape
    group: int | None
    config: Config


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what is missing, print the tables, and say whether all products are right."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--tune", action="store_true", help="measure all configurations, not only the chosen ones")
    parser.add_argument("--budget-s", type=float, default=85, help="start no measurement after this")
    parser.add_argument("--processes", type=int, default=14, help="processes that compile")
    parser.add_argument("--only", default="", help="measure only entries whose name contains this")
    parser.add_argument("--again", type=int, nargs="+", default=(), help="time products of so many tokens again")
    options = parser.parse_args(arguments)
    run = Run(options.results, time.monotonic() + options.budget_s, options.tune, options.only)
    run.forget(options.again)
    run.compile(options.processes)
    for step in (run.ceilings, run.correctness, run.products):
        step()
    print(run.table())
    return run.status()


class Run:
    """The results so far, and what is added to them."""

    def __init__(self, path: Path, deadline: float, tune: bool, only: str) -> None:
        self.path, self.deadline, self.tune, self.only = path, deadline, tune, only
        self.started = time.monotonic()
        self.left = False
        self.card = kernels.Card(0, 0)
        self.with_vllm = importlib.util.find_spec("vllm") is not None
        self.weights: dict[Shape, list[Any]] = {}
        parts = ("host", "ceilings", "correct", "chosen", "us")
        self.results: dict[str, Any] = {"schema": SCHEMA, **{part: {} for part in parts}}
        if path.exists():
            self.results |= json.loads(path.read_text(encoding="utf-8"))
            if self.results.get("schema") != SCHEMA:
                raise SystemExit(f"{path}: schema {self.results.get('schema')!r}; this script writes {SCHEMA}")

    def forget(self, tokens: Sequence[int]) -> None:
        """Drop the times of ternary products of so many tokens, whose kernel is another now, and what was right."""
        if tokens:
            self.results["correct"] = {}
        for m, shape in PRODUCTS:
            for name in self.of(m, shape) if m in tokens else ():
                del self.results["us"][f"{m} x {shape} {name}"]

    def configs(self, m: int, shape: Shape) -> tuple[Config, ...]:
        """The configurations to measure."""
        chosen = kernels.choose(m, shape.n, shape.k, shape.k, self.card)
        tried: tuple[Config, ...] = ()
        if self.tune:
            tried = ONE_TOKEN if m == 1 else FEW_TOKENS if m <= 16 else MANY_TOKENS.get(m, LARGE)
        return tuple(dict.fromkeys((chosen, *tried)))

    def compile(self, processes: int) -> None:
        """Compile in processes of their own, before this one starts CUDA: Triton's cache on disk brings them here."""
        with multiprocessing.get_context("fork").Pool(1) as pool:
            self.card = pool.apply(_card)
        wanted: dict[str, Product] = {}
        for m, shape in PRODUCTS:
            for config in self.configs(m, shape):
                if self._key(m, shape, config) not in self.results["us"]:
                    wanted.setdefault(_compiled_alike(m, shape, config), Product(m, shape, None, config))
        for m, shape, group, asked in CORRECTNESS:
            chosen = asked or kernels.choose(m, shape.n, shape.k, group or shape.k, self.card)
            wanted.setdefault(f"{m} {shape} {group} {chosen}", Product(m, shape, group, chosen))
        with multiprocessing.get_context("fork").Pool(processes) as pool:
            failures = [text for text in pool.imap_unordered(_compile, wanted.values()) if text]
        self.results["not_compiled"] = failures
        seconds = time.monotonic() - self.started
        print(f"{len(wanted)} kernels, {len(failures)} do not compile, {seconds:.0f} s", flush=True)

    def ceilings(self) -> None:
        """The card, the bandwidth of a copy, the time of an empty kernel."""
        major, minor = torch.cuda.get_device_capability()
        self.results["host"] = {
            "gpu": torch.cuda.get_device_name(),
            "compute_capability": f"{major}.{minor}",
            "torch": torch.__version__,
            "triton": triton.__version__,
            "cuda": torch.version.cuda,
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        }
        if self.with_vllm:
            self.results["host"]["vllm"] = importlib.metadata.version("vllm")
        if "copy_bytes_per_s" not in self.results["ceilings"]:
            copied = copy_bytes_per_s()
            self.results["ceilings"] = {"copy_bytes_per_s": copied, "launch_us": bench.launch_us()}
        self._write()

    def correctness(self) -> None:
        """Products of odd sizes against float64."""
        for m, shape, group, config in CORRECTNESS:
            for dtype in (torch.bfloat16, torch.float16):
                key = f"{m} x {shape} group {group} {str(dtype)[6:]} {bench.name(config) if config else 'chosen'}"
                if self._wanted(key) and key not in self.results["correct"]:
                    found = bench.error(m, shape, group, dtype, config, bias=shape.n % 2 == 1)
                    good = found < TOLERANCE[dtype]
                    self.results["correct"][key] = {"relative_error": found if found == found else None, "right": good}
                    if not good:
                        print(f"WRONG {key}: {found}", flush=True)
        self._write()

    def products(self) -> None:
        """All products; 2 tokens only as chosen and with the best configurations of 8."""
        for m, shape in PRODUCTS:
            configs = self.configs(m, shape)
            if m == 2:
                times = self.of(8, shape)
                best = sorted(times, key=lambda name: times[name])[:2]
                best.append(self.chosen(m, shape))
                configs = tuple(config for config in self.configs(8, shape) if bench.name(config) in best)
            self._measure(m, shape, configs)

    def _measure(self, m: int, shape: Shape, configs: Sequence[Config]) -> None:
        if self.left:
            return
        if shape not in self.weights:
            self.weights[shape] = bench.weights(shape, None)
        packed = self.weights[shape][: 48 if m < 512 else 4]
        self._time(f"{m} x {shape} bf16", partial(bench.dense_us, shape, m))
        if self.with_vllm:
            self._time(f"{m} x {shape} marlin", partial(bench.marlin_us, shape, m))
        if m == 1:
            self._time(f"{m} x {shape} copy", partial(bench.copy_us, shape))
        self.results["chosen"][f"{m} x {shape}"] = self.chosen(m, shape)
        for config in configs:
            self._time(self._key(m, shape, config), partial(bench.ternary_us, packed, m, config))
        self._write()

    def _time(self, key: str, measure: Any) -> None:
        if key in self.results["us"] or not self._wanted(key):
            return
        if time.monotonic() > self.deadline:
            self.left = True
            return
        try:
            self.results["us"][key] = round(measure(), 3)
        except (triton.runtime.errors.OutOfResources, ImportError, AttributeError) as refusal:
            self.results["us"][key] = None
            self.results["not_compiled"].append(f"{key}: {refusal}")

    def of(self, m: int, shape: Shape) -> dict[str, float]:
        """Times of the configurations of one product, in microseconds."""
        start = f"{m} x {shape} "
        found = {key.removeprefix(start): us for key, us in self.results["us"].items() if key.startswith(start)}
        return {key: us for key, us in found.items() if us is not None and key not in ("bf16", "marlin", "copy")}

    def chosen(self, m: int, shape: Shape) -> str:
        """The name of the configuration that a product runs with."""
        return bench.name(kernels.choose(m, shape.n, shape.k, shape.k, self.card))

    def table(self) -> str:
        """The best and the chosen configuration of each product."""
        ceilings = self.results["ceilings"]
        copy = ceilings["copy_bytes_per_s"]
        correct = self.results["correct"].values()
        lines = [
            f"{self.results['host']['gpu']}: copy {copy / 1e12:.2f} TB/s, empty kernel {ceilings['launch_us']:.2f} us; "
            f"{sum(not one['right'] for one in correct)} wrong of {len(correct)} products"
        ]
        for m, shape in sorted(PRODUCTS, key=lambda product: product[0]):
            times = self.of(m, shape)
            if not times:
                continue
            best = min(times, key=lambda key: times[key])
            chosen = self.chosen(m, shape)
            lines.append(self._line(m, shape, best, times[best], chosen, times.get(chosen), copy))
        lines += [f"not compiled: {text[:160]}" for text in self.results["not_compiled"]]
        return "\n".join(lines)

    def _line(
        self, m: int, shape: Shape, best: str, us: float, chosen: str, chosen_us: float | None, copy: float
    ) -> str:
        dense = self.results["us"].get(f"{m} x {shape} bf16")
        marlin = self.results["us"].get(f"{m} x {shape} marlin")
        ratio = f"{dense / us:.2f} x bf16" if dense else "no bf16"
        ratio += f", {marlin / us:.2f} x Marlin int4" if marlin else ""
        if m <= 16:
            rate = f"{shape.packed_bytes / us * 1e6 / copy:.0%} of copy"
        else:
            rate = f"{2 * m * shape.n * shape.k / us / 1e6:.0f} TFLOP/s"
        left = "" if chosen == best else f"; chosen {chosen} {chosen_us} us"
        return f"{m:>4} {shape}: {us:8.2f} us {rate}, {ratio}, {best}{left}"

    def status(self) -> int:
        """The exit status: 1 a product is wrong, 3 something is left, 0 otherwise."""
        if not all(one["right"] for one in self.results["correct"].values()):
            return 1
        return 3 if self.left else 0

    def _key(self, m: int, shape: Shape, config: Config) -> str:
        return f"{m} x {shape} {bench.name(config)}"

    def _wanted(self, key: str) -> bool:
        return self.only in key

    def _write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(self.results, indent=1) + "\n", encoding="utf-8")
        part.replace(self.path)


def _compiled_alike(m: int, shape: Shape, config: Config) -> str:
    """What Triton compiles one kernel for: the configuration, and which sizes are multiples of what."""
    tiles = -(-shape.k // 128)
    if isinstance(config, GemvConfig):
        even = tiles % (config.warps * config.tiles) == 0
        return f"{config} {max(8, 1 << (m - 1).bit_length())} {m == 1} {even} {tiles % 16}"
    return f"{config} {m % 16 == 0} {tiles % 16 == 0}"


def _card() -> kernels.Card:
    """Asked for in a process of its own: the one that compiles by forking must not start CUDA."""
    return kernels.card_of(torch.device("cuda", 0))


def _compile(product: Product) -> str:
    """Run a product once; the reason when it cannot be compiled, which another configuration may not have."""
    try:
        one = bench.weight(product.shape, product.group, 0)
        x = torch.randn(product.m, product.shape.k, device="cuda", dtype=torch.bfloat16)
        kernels.linear(x, one, None, product.config)
        torch.cuda.synchronize()
    except (triton.runtime.errors.OutOfResources, triton.compiler.errors.CompilationError, RuntimeError) as error:
        return f"{product.m} x {product.shape} {bench.name(product.config)}: {type(error).__name__}: {str(error)[:200]}"
    return ""


if __name__ == "__main__":
    sys.exit(main())
