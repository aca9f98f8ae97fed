"""Weights of a model that is known by its config.json alone: counted from its shapes, with quantization applied."""

from collections.abc import Mapping
from typing import Any, cast

from launcher.fit.geometry import FitError, Geometry
from launcher.fit.weights import Part, WeightPart, Weights

ERROR_SHARE = 0.05
"""Norms, biases, convolutions and what a checkpoint leaves unquantized are not counted."""
_FIXED_BITS = {"fp8": 8.0, "fbgemm_fp8": 8.0, "modelopt_fp4": 4.5, "nvfp4": 4.5, "mxfp4": 4.25}


def weights_from_shapes(config: Mapping[str, Any], geometry: Geometry, source: str) -> Weights:
    """Count the weights of a parsed config.json; embeddings, output head, MTP head and vision tower stay in 16 bits.

    Raises:
        FitError: a field that the count needs is missing, or the quantization is not known.
    """
    text = cast(Mapping[str, Any], config["text_config"]) if isinstance(config.get("text_config"), Mapping) else config
    bits, how = linear_bits(config.get("quantization_config", text.get("quantization_config")), source)
    ffn = _ffn(text, source)
    attention = _attention(text, geometry)
    quantized = geometry.num_hidden_layers * ffn
    quantized += geometry.attention_layers * attention + geometry.gdn_layers * _gdn(geometry)
    # The two projections of a number per head are too narrow for the 4-bit kernels.
    small = geometry.gdn_layers * geometry.hidden_size * 2 * geometry.linear_num_value_heads
    mtp = geometry.mtp_layers * (ffn + attention + 2 * geometry.hidden_size**2)
    vocabulary = geometry.vocab_size * geometry.hidden_size
    sizes: dict[Part, float] = {
        "linear": quantized * bits / 8 + 2 * small,
        "embeddings": 2 * vocabulary,
        "lm_head": 0 if geometry.tie_word_embeddings else 2 * vocabulary,
        "mtp": 2 * mtp,
        "vision": 2 * _vision(config.get("vision_config"), source),
    }
    notes = {"linear": f"counted from shapes, {how}"}
    return Weights(
        tuple(
            WeightPart(
                part,
                round(size),
                "assumed",
                round(size * ERROR_SHARE) if part in ("linear", "vision") else 0,
                notes.get(part, "counted from shapes, 16 bits"),
            )
            for part, size in sizes.items()
            if size
        ),
        f"{source}: shapes",
    )


def linear_bits(quantization: object, source: str) -> tuple[float, str]:
    """Return bits per weight of the linear layers, scales included, and how they were found."""
    if quantization is None:
        return 16.0, "16 bits"
    if not isinstance(quantization, Mapping):
        raise FitError(f"{source}: quantization_config: a mapping is needed, got {type(quantization).__name__}")
    method = str(quantization.get("quant_method", "")).lower()
    if method in _FIXED_BITS:
        return _FIXED_BITS[method], f"{method}, {_FIXED_BITS[method]:g} bits"
    scheme: Mapping[str, Any] = quantization
    if method == "compressed-tensors":
        groups = list(quantization.get("config_groups", {}).values())
        scheme = groups[0].get("weights") or {} if groups else {}
    bits = scheme.get("bits", scheme.get("num_bits", scheme.get("w_bit")))
    if not isinstance(bits, int):
        raise FitError(
            f"{source}: quantization_config: {method or 'a method without name'} does not say its bits; "
            "give the folder with the weights instead, their headers are read"
        )
    group = scheme.get("group_size", scheme.get("q_group_size"))
    # One 16-bit scale per group; asymmetric schemes add a zero point of the weights' width.
    grouped = isinstance(group, int) and group > 0
    symmetric = scheme.get("sym", scheme.get("symmetric", not scheme.get("zero_point", False)))
    overhead = (16 + (0 if symmetric else bits)) / group if grouped and isinstance(group, int) else 0.0
    return bits + overhead, f"{method}, {bits} bits" + (f" in groups of {group}" if grouped else "")


def _attention(text: Mapping[str, Any], geometry: Geometry) -> int:
    """Query, key, value and output; hybrid Qwen models have a gate as wide as the query."""
    gated = text.get("attn_output_gate", geometry.is_hybrid) is True
    heads = geometry.num_attention_heads * (3 if gated else 2) + 2 * geometry.num_key_value_heads
    return geometry.hidden_size * geometry.head_dim * heads


def _gdn(geometry: Geometry) -> int:
    """Query, key, value, gate and output of a Gated DeltaNet layer."""
    keys = geometry.linear_num_key_heads * geometry.linear_key_head_dim
    values = geometry.linear_num_value_heads * geometry.linear_value_head_dim
    return geometry.hidden_size * (2 * keys + 3 * values)


def _ffn(text: Mapping[str, Any], source: str) -> int:
    """Feed-forward part of one layer: gate, up and down; with experts, all of them, the shared one and the router."""
    hidden = _size(text, "hidden_size", source)
    counted = "num_experts" if "num_experts" in text else "num_local_experts"
    if not text.get(counted):
        return 3 * hidden * _size(text, "intermediate_size", source)
    width = "moe_intermediate_size" if "moe_intermediate_size" in text else "intermediate_size"
    shared = "shared_expert_intermediate_size"
    shared_width = _size(text, shared, source) if text.get(shared) else 0
    experts = _size(text, counted, source)
    return 3 * hidden * (experts * _size(text, width, source) + shared_width) + hidden * experts


def _vision(vision: object, source: str) -> int:
    """Encoder blocks and the merger of a Qwen vision tower; 0 without one."""
    if not isinstance(vision, Mapping):
        return 0
    where = f"{source}: vision_config"
    hidden = _size(vision, "hidden_size", where)
    merged = hidden * _size(vision, "spatial_merge_size", where) ** 2
    blocks = _size(vision, "depth", where) * (4 * hidden**2 + 2 * hidden * _size(vision, "intermediate_size", where))
    return blocks + merged * (merged + _size(vision, "out_hidden_size", where))


def _size(fields: Mapping[str, Any], name: str, source: str) -> int:
    value = fields.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise FitError(
            f"{source}: {name}: got {value!r}; the weights cannot be counted without it. "
            "Give the folder with the weights instead, their headers are read"
        )
    return value
