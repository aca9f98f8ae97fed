"""Weights counted from shapes, against what published checkpoints weigh."""

from typing import Any

import pytest

from launcher.fit.geometry import FitError, Geometry, geometry_from_config
from launcher.fit.request import GIB
from launcher.fit.shapes import linear_bits, weights_from_shapes

INT4 = {"quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": True}
# Qwen/Qwen3.6-27B, config.json at revision 6a9e13bd6fc8f0983b9b99948120bc37f49c13e9.
VISION_27B = {
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "spatial_merge_size": 2,
    "out_hidden_size": 5120,
}


def gib(config: dict[str, Any], geometry: Geometry) -> dict[str, float]:
    return {part.part: part.size_bytes / GIB for part in weights_from_shapes(config, geometry, "config.json").parts}


def config_27b(kv_logs: dict[str, Any], **more: Any) -> dict[str, Any]:
    text = {**kv_logs["models"]["qwen3.6-27b"], "intermediate_size": 17408, "attn_output_gate": True}
    return {"text_config": text, "vision_config": VISION_27B, **more}


def test_27b_in_4_bits_weighs_what_it_does(kv_logs: dict[str, Any], geometry_27b: Geometry) -> None:
    sizes = gib(config_27b(kv_logs, quantization_config=INT4), geometry_27b)
    assert sizes["embeddings"] + sizes["lm_head"] == pytest.approx(4.74, abs=0.01)
    assert sizes["mtp"] == pytest.approx(0.79, abs=0.01)
    assert sizes["vision"] == pytest.approx(0.86, abs=0.02)
    assert sum(sizes.values()) == pytest.approx(17.69, rel=0.03)


def test_27b_in_fp8_weighs_what_it_does(kv_logs: dict[str, Any], geometry_27b: Geometry) -> None:
    sizes = gib(config_27b(kv_logs, quantization_config={"quant_method": "fp8"}), geometry_27b)
    assert sum(sizes.values()) == pytest.approx(28.75, rel=0.03)


def test_a_dense_model_weighs_its_parameters() -> None:
    """SmolLM2-135M has 134.5 million parameters, its embeddings shared with the head."""
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    }
    weights = weights_from_shapes(config, geometry_from_config(config, "config.json"), "config.json")
    assert weights.total_bytes == pytest.approx(2 * 134_515_008, rel=0.001)


def test_experts_are_counted_all_and_the_router_with_them() -> None:
    config: dict[str, Any] = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": False,
    }
    weights = weights_from_shapes(config, geometry_from_config(config, "config.json"), "config.json")
    # Qwen3-30B-A3B: 30.5 billion parameters.
    assert weights.total_bytes == pytest.approx(2 * 30.5e9, rel=0.01)


@pytest.mark.parametrize(
    ("quantization", "bits"),
    [
        (None, 16),
        (INT4, 4.125),
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}, 4 + 20 / 128),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1, "sym": True}, 8),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"num_bits": 8}}}},
            8,
        ),
        ({"quant_method": "modelopt_fp4"}, 4.5),
    ],
)
def test_bits_of_known_quantizations(quantization: Any, bits: float) -> None:
    assert linear_bits(quantization, "config.json")[0] == pytest.approx(bits)


@pytest.mark.parametrize("quantization", [{}, {"quant_method": "new"}, {"quant_method": "compressed-tensors"}, "int4"])
def test_an_unknown_quantization_is_refused(quantization: Any) -> None:
    with pytest.raises(FitError, match=r"config\.json: quantization_config"):
        linear_bits(quantization, "config.json")


def test_a_missing_width_is_refused_by_name(kv_logs: dict[str, Any], geometry_27b: Geometry) -> None:
    config = config_27b(kv_logs)
    del config["text_config"]["intermediate_size"]
    with pytest.raises(FitError, match=r"config\.json: intermediate_size: got None"):
        weights_from_shapes(config, geometry_27b, "config.json")
