"""What is run: engines by their settings, in the order of their worth, and the settings that every pair must cover.

Each engine run serves one prompt at a time and mixed batches, so the load is covered within every case.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class Backend(StrEnum):
    """Which attention code runs: vLLM's, or the fix's in its place."""

    STOCK = "stock"
    FIXED = "fixed"


class Graph(StrEnum):
    """vLLM's cudagraph_mode; EAGER is enforce_eager."""

    EAGER = "EAGER"
    PIECEWISE = "PIECEWISE"
    FULL_DECODE_ONLY = "FULL_DECODE_ONLY"
    FULL_AND_PIECEWISE = "FULL_AND_PIECEWISE"


FACTORS: dict[str, tuple[str, ...]] = {
    "kv_cache_dtype": ("turboquant_k8v4", "turboquant_4bit_nc"),
    "method": ("mtp", "ngram"),
    "graph": (Graph.FULL_DECODE_ONLY, Graph.FULL_AND_PIECEWISE, Graph.EAGER),
    "scheduling": ("async", "sync"),
    "prefix_caching": ("on", "off"),
}


@dataclass(frozen=True)
class Case:
    """One engine: `method` None is without speculation, kv_cache_dtype 'auto' is the model's bfloat16."""

    backend: Backend
    kv_cache_dtype: str
    method: str | None
    graph: Graph
    scheduling: str
    prefix_caching: str

    @property
    def id(self) -> str:
        prefix = "prefix" if self.prefix_caching == "on" else "noprefix"
        return "-".join(
            (self.backend, self.kv_cache_dtype, self.method or "plain", self.graph.lower(), self.scheduling, prefix)
        )

    @property
    def reference(self) -> Case:
        """The run that this one must equal: no speculation, synchronous, the fixed backend, the same cache.

        A compiled model rounds differently from an eager one, so a compiled case has a compiled reference.
        """
        backend = Backend.STOCK if self.kv_cache_dtype == "auto" else Backend.FIXED
        graph = Graph.PIECEWISE if self.graph in (Graph.PIECEWISE, Graph.FULL_AND_PIECEWISE) else Graph.EAGER
        return Case(backend, self.kv_cache_dtype, None, graph, "sync", self.prefix_caching)


def _fixed(kv: str, method: str, graph: Graph, scheduling: str, prefix: str) -> Case:
    return Case(Backend.FIXED, kv, method, graph, scheduling, prefix)


K8V4, NC4 = FACTORS["kv_cache_dtype"]

# Every pair of settings occurs in the first six; the others are what a profile serves by default.
PAIRWISE = (
    _fixed(K8V4, "mtp", Graph.FULL_DECODE_ONLY, "async", "on"),
    _fixed(NC4, "ngram", Graph.FULL_DECODE_ONLY, "sync", "off"),
    _fixed(K8V4, "mtp", Graph.FULL_AND_PIECEWISE, "sync", "off"),
    _fixed(NC4, "ngram", Graph.FULL_AND_PIECEWISE, "async", "on"),
    _fixed(K8V4, "ngram", Graph.EAGER, "async", "off"),
    _fixed(NC4, "mtp", Graph.EAGER, "sync", "on"),
)
DEFAULTS = (
    _fixed(K8V4, "mtp", Graph.FULL_DECODE_ONLY, "async", "off"),
    _fixed(NC4, "mtp", Graph.FULL_AND_PIECEWISE, "async", "off"),
)
# The faults on vLLM's own backend, and the flags-only safe mode.
STOCK = (
    Case(Backend.STOCK, K8V4, "mtp", Graph.FULL_DECODE_ONLY, "async", "off"),
    Case(Backend.STOCK, K8V4, "mtp", Graph.EAGER, "async", "off"),
    Case(Backend.STOCK, NC4, "mtp", Graph.FULL_AND_PIECEWISE, "async", "off"),
    Case(Backend.STOCK, K8V4, "mtp", Graph.PIECEWISE, "sync", "off"),
)
CONTROL = (
    Case(Backend.STOCK, "auto", "mtp", Graph.FULL_DECODE_ONLY, "async", "off"),
    Case(Backend.STOCK, "auto", "ngram", Graph.FULL_AND_PIECEWISE, "async", "off"),
)


def in_order() -> tuple[Case, ...]:
    """All cases, the most telling first, each behind its reference."""
    first = (DEFAULTS[0], STOCK[0], CONTROL[0], PAIRWISE[1], PAIRWISE[2], DEFAULTS[1], STOCK[1])
    rest = (*PAIRWISE, CONTROL[1], *STOCK)
    ordered: dict[Case, None] = {}
    for case in (*first, *rest):
        ordered[case.reference] = None
        ordered[case] = None
    return tuple(ordered)


def uncovered_pairs(cases: Iterable[Case]) -> set[tuple[str, str, str, str]]:
    """The pairs of settings (factor, value, factor, value) that no case has."""
    pairs = {
        (one, a, other, b)
        for one, other in itertools.combinations(FACTORS, 2)
        for a in FACTORS[one]
        for b in FACTORS[other]
    }
    for case in cases:
        pairs -= {
            (one, str(getattr(case, one)), other, str(getattr(case, other)))
            for one, other in itertools.combinations(FACTORS, 2)
        }
    return pairs
