"""What a fit is asked about: the card, the settings of the start, and a correction from earlier boots."""

import re
from dataclasses import dataclass, replace
from typing import Literal

from launcher.fit.geometry import FitError, Geometry
from launcher.fit.weights import Weights

GIB = 2**30
Basis = Literal["exact", "fitted", "assumed", "measured"]
CudagraphMode = Literal["NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"]

VISIBLE_SHARE = 23.56 / 24
"""What CUDA reports of a card's memory: 23.56 of 24 GiB on an RTX 3090, 31.36-31.40 of 31.84 GiB (NVML)
and of 32 GiB (label) on an RTX 5090, by vLLM's own start-up lines."""
SHARE_ERROR = 0.01


@dataclass(frozen=True, slots=True)
class Card:
    """One GPU, all of `cards` alike; sizes as CUDA reports them to vLLM."""

    total_bytes: int
    compute_capability: tuple[int, int]
    free_bytes: int | None
    """None when the card is not in this machine: nothing else is taken to use it."""
    source: str
    total_basis: Basis = "measured"
    total_error_bytes: int = 0


@dataclass(frozen=True, slots=True)
class _KnownCard:
    name: str
    total_gib: float
    error_gib: float
    compute_capability: tuple[int, int]
    basis: Basis
    source: str


# Of cards of one size the first is taken for a size alone.
_KNOWN_CARDS = (
    _KnownCard("rtx4090", 23.56, 0.05, (8, 9), "assumed", "as an RTX 3090's 24 GiB; no start-up line at hand"),
    _KnownCard("rtx3090", 23.56, 0.01, (8, 6), "measured", "vLLM start-up lines of RTX 3090 boots"),
    _KnownCard(
        "rtx5090", 31.36, 0.04, (12, 0), "measured", "vLLM start-up lines of RTX 5090 boots, 31.36 to 31.40 GiB"
    ),
)
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:GiB|GB|G)?", re.IGNORECASE)


def known_cards() -> tuple[str, ...]:
    """Names that `card_from_name_or_size` knows."""
    return tuple(sorted(card.name for card in _KNOWN_CARDS))


def card_from_name_or_size(text: str, compute_capability: tuple[int, int] | None = None) -> Card:
    """Describe a card of another machine by its name (`rtx4090`) or its size on the label (`24GiB`).

    A size alone takes `compute_capability` (the profile's), else that of the known card nearest in size.

    Raises:
        FitError: neither a known name nor a size.
    """
    wanted = re.sub(r"[\s_-]", "", text).lower().removeprefix("nvidia").removeprefix("geforce")
    for known in _KNOWN_CARDS:
        if wanted in (known.name, known.name.removeprefix("rtx")):
            return Card(
                round(known.total_gib * GIB),
                known.compute_capability,
                None,
                f"{known.name}: {known.source}",
                known.basis,
                round(known.error_gib * GIB),
            )
    match = _SIZE.fullmatch(text.strip())
    if match is None or not 1 <= float(match[1]) <= 1024:
        raise FitError(f"--card: got {text!r}; write a size such as 24GiB, or one of {', '.join(known_cards())}")
    nominal_gib = float(match[1])
    nearest = min(_KNOWN_CARDS, key=lambda known: abs(known.total_gib - nominal_gib * VISIBLE_SHARE))
    return Card(
        round(nominal_gib * VISIBLE_SHARE * GIB),
        compute_capability or nearest.compute_capability,
        None,
        f"{match[1]} GiB on the label, of which CUDA shows about 98 %",
        "assumed",
        round(nominal_gib * SHARE_ERROR * GIB),
    )


def card_from_nvml(
    total_bytes: int,
    reserved_bytes: int | None,
    free_bytes: int,
    compute_capability: tuple[int, int],
    name: str,
) -> Card:
    """Describe a card of this machine from NVML's memory figures.

    NVML counts what driver and firmware keep (`reserved`, in its second memory call); CUDA, and so vLLM, does not.
    """
    if reserved_bytes:
        error = round(0.1 * GIB)
        return Card(
            total_bytes - reserved_bytes,
            compute_capability,
            free_bytes,
            f"{name}: NVML's total without its reserved memory",
            "measured",
            error,
        )
    visible = round(total_bytes * VISIBLE_SHARE)
    return Card(
        visible,
        compute_capability,
        min(free_bytes, visible),
        f"{name}: NVML's total, of which CUDA shows about 98 %",
        "assumed",
        round(total_bytes * SHARE_ERROR),
    )


@dataclass(frozen=True, slots=True)
class Settings:
    """How vLLM is started, as far as memory depends on it."""

    kv_cache_dtype: str
    max_num_batched_tokens: int
    max_num_seqs: int
    gpu_memory_utilization: float
    tensor_parallel_size: int = 1
    num_speculative_tokens: int = 0
    speculative_method: Literal["mtp", "ngram"] = "mtp"
    prefix_caching: bool = True
    max_model_len: int | None = None
    """None: the longest advisable context."""
    language_model_only: bool = True
    cudagraph_mode: CudagraphMode = "FULL_AND_PIECEWISE"
    gdn_prefill_backend: str = "auto"
    kv_cache_memory_bytes: int | None = None
    """A fixed pool; None: what is left under the utilization."""
    turboquant_fix: bool = False
    """Graft's kernels serve a TurboQuant cache: its fix is sure to be in."""

    @property
    def mtp(self) -> bool:
        """Whether the model's own MTP layers draft."""
        return self.num_speculative_tokens > 0 and self.speculative_method == "mtp"


@dataclass(frozen=True, slots=True)
class Calibration:
    """What earlier boots of the same configuration on the same machine say about the fitted part."""

    offset_bytes: int
    """Reported minus predicted KV memory: added to the prediction."""
    spread_bytes: int
    """Largest minus smallest offset of the boots."""
    boots: int
    source: str


@dataclass(frozen=True, slots=True)
class FitRequest:
    """One question to the memory model."""

    geometry: Geometry
    weights: Weights
    settings: Settings
    card: Card
    cards: int = 1
    calibration: Calibration | None = None
    vllm_version: str = "0.33.0"
    cuda_major: int = 13

    def with_settings(self, settings: Settings, cards: int | None = None) -> "FitRequest":
        """Ask the same with other settings; other settings have no calibration."""
        same = settings == self.settings and cards in (None, self.cards)
        return replace(
            self,
            settings=settings,
            cards=self.cards if cards is None else cards,
            calibration=self.calibration if same else None,
        )
