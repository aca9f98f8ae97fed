"""The published geometries and requests that the fit tests share."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launcher.fit.geometry import Geometry, geometry_from_config
from launcher.fit.request import GIB, Card, FitRequest, Settings
from launcher.fit.weights import weights_from_sizes

KV_LOGS = Path(__file__).parents[2] / "data" / "kv_logs.json"


@pytest.fixture(scope="session")
def kv_logs() -> dict[str, Any]:
    document = json.loads(KV_LOGS.read_text(encoding="utf-8"))
    assert isinstance(document, dict)
    return document


def _published(kv_logs: dict[str, Any], name: str, vision: bool) -> Geometry:
    fields = kv_logs["models"][name]
    config: dict[str, object] = {"architectures": [fields["architecture"]], "text_config": fields}
    if vision:
        config["vision_config"] = {}
    return geometry_from_config(config, name)


@pytest.fixture(scope="session")
def geometry_27b(kv_logs: dict[str, Any]) -> Geometry:
    return _published(kv_logs, "qwen3.6-27b", vision=True)


@pytest.fixture(scope="session")
def geometry_35b(kv_logs: dict[str, Any]) -> Geometry:
    return _published(kv_logs, "qwen3.6-35b-a3b", vision=True)


@pytest.fixture(scope="session")
def dense() -> Geometry:
    """A small model of attention layers only."""
    config: dict[str, object] = {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "hidden_size": 576,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    }
    return geometry_from_config(config, "SmolLM2-135M/config.json")


Ask = Callable[..., FitRequest]


@pytest.fixture(scope="session")
def ask_27b(geometry_27b: Geometry) -> Ask:
    """Ask about the int4 checkpoint of 17.69 GiB on cards of the worked examples; keywords change the settings."""
    weights = weights_from_sizes(
        geometry_27b, round(17.69 * GIB), "listed", vision_bytes=round(0.86 * GIB), mtp_bytes=round(0.79 * GIB)
    )
    base = Settings("fp8", 4128, 1, 0.85, num_speculative_tokens=3, cudagraph_mode="PIECEWISE")

    def ask(
        total_gib: float = 23.52,
        capability: tuple[int, int] = (8, 9),
        cards: int = 1,
        free_gib: float | None = None,
        **changes: Any,
    ) -> FitRequest:
        free = None if free_gib is None else round(free_gib * GIB)
        card = Card(round(total_gib * GIB), capability, free, "test")
        settings = replace(base, tensor_parallel_size=cards, **changes)
        return FitRequest(geometry_27b, weights, settings, card, cards)

    return ask
