"""Reading config.json, and what is refused there."""

from typing import Any

import pytest

from launcher.fit.geometry import Geometry, GeometryError, geometry_from_config

DENSE: dict[str, object] = {
    "architectures": ["Qwen3ForCausalLM"],
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_size": 1024,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "sliding_window": None,
}
HYBRID: dict[str, object] = {
    **DENSE,
    "architectures": ["Qwen3NextForCausalLM"],
    "num_hidden_layers": 8,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 2,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "num_experts": 512,
}


def without(config: dict[str, object], name: str) -> dict[str, object]:
    return {key: value for key, value in config.items() if key != name}


def test_a_dense_model_counts_every_layer_as_attention() -> None:
    geometry = geometry_from_config(DENSE, "config.json")
    assert (geometry.attention_layers, geometry.gdn_layers, geometry.is_hybrid) == (28, 0, False)
    assert geometry.tie_word_embeddings
    assert geometry.embedding_bytes == 151936 * 1024 * 2


def test_a_hybrid_model_counts_layers_by_kind_and_experts() -> None:
    geometry = geometry_from_config(HYBRID, "config.json")
    assert (geometry.attention_layers, geometry.gdn_layers) == (2, 6)
    assert geometry.num_experts == 512
    assert geometry.ssm_dtype_bytes == 2


def test_the_interval_stands_in_for_the_list_of_layers(geometry_27b: Geometry) -> None:
    assert (geometry_27b.attention_layers, geometry_27b.gdn_layers) == (16, 48)
    assert geometry_27b.ssm_dtype_bytes == 4
    assert geometry_27b.mtp_layers == 1
    assert geometry_27b.has_vision


def test_nested_text_config_is_read_and_named_in_errors() -> None:
    config: dict[str, object] = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "text_config": without(HYBRID, "linear_value_head_dim"),
        "vision_config": {"depth": 27},
    }
    with pytest.raises(GeometryError, match=r"some/config\.json: text_config\.linear_value_head_dim is missing"):
        geometry_from_config(config, "some/config.json")


@pytest.mark.parametrize(
    "field",
    ["num_hidden_layers", "num_attention_heads", "num_key_value_heads", "hidden_size", "vocab_size"],
)
def test_a_missing_field_is_refused_by_name(field: str) -> None:
    with pytest.raises(GeometryError, match=rf"config\.json: {field} is missing"):
        geometry_from_config(without(DENSE, field), "config.json")


def test_head_size_is_derived_for_dense_models_only() -> None:
    assert geometry_from_config(without(DENSE, "head_dim"), "config.json").head_dim == 64
    with pytest.raises(GeometryError, match="head_dim is missing"):
        geometry_from_config(without(HYBRID, "head_dim"), "config.json")


@pytest.mark.parametrize("value", ["64", 0, -1, True, 1.5])
def test_a_field_of_another_kind_is_refused_with_its_value(value: Any) -> None:
    with pytest.raises(GeometryError, match="num_hidden_layers: got"):
        geometry_from_config({**DENSE, "num_hidden_layers": value}, "config.json")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"kv_lora_rank": 512}, "kv_lora_rank says multi-head latent"),
        ({"mamba_d_state": 128}, "mamba_d_state says Mamba"),
        ({"sliding_window": 4096, "use_sliding_window": True}, "sliding_window is 4096"),
        ({"layer_types": ["sliding_attention"] * 28}, "sliding_attention is not modelled"),
        ({"layer_types": ["full_attention"] * 27}, "layer_types has 27 entries"),
        ({"torch_dtype": "int3"}, "torch_dtype: got 'int3'"),
        ({"architectures": []}, "architectures is missing"),
    ],
)
def test_a_cache_that_is_not_modelled_is_refused(change: dict[str, object], named: str) -> None:
    with pytest.raises(GeometryError, match=named):
        geometry_from_config({**DENSE, **change}, "config.json")


def test_a_window_that_is_switched_off_is_no_window() -> None:
    config = {**DENSE, "sliding_window": 4096, "use_sliding_window": False}
    assert geometry_from_config(config, "config.json").attention_layers == 28


def test_dtype_follows_vllms_rule() -> None:
    assert geometry_from_config({**DENSE, "torch_dtype": "float32"}, "config.json").model_dtype_bytes == 2
    assert geometry_from_config(DENSE, "config.json", dtype="float32").model_dtype_bytes == 4
    assert geometry_from_config(DENSE, "config.json", dtype="auto").model_dtype_bytes == 2
