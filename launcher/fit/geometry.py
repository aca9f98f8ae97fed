"""The shape of a model as far as memory depends on it, read from its config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

DTYPE_BYTES = {
    "float32": 4,
    "float": 4,
    "bfloat16": 2,
    "float16": 2,
    "half": 2,
}

# Layer kinds of `layer_types` and what the memory model makes of them.
_ATTENTION_KINDS = frozenset({"full_attention", "attention"})
_GDN_KINDS = frozenset({"linear_attention"})
_WINDOW_KINDS = frozenset({"sliding_attention", "chunked_attention"})
# Fields that only configurations with another kind of cache have.
_FOREIGN_FIELDS = {
    "kv_lora_rank": "multi-head latent attention (MLA)",
    "layers_block_type": "Mamba-1/Mamba-2 hybrid layers",
    "hybrid_override_pattern": "Mamba-1/Mamba-2 hybrid layers",
    "mamba_d_state": "Mamba-1/Mamba-2 hybrid layers",
    "ssm_state_size": "Mamba-1/Mamba-2 hybrid layers",
    "attn_type_list": "lightning attention layers",
}


class FitError(ValueError):
    """Base of what the memory model refuses; the message says what, where and by which rule."""


class GeometryError(FitError):
    """A config.json that lacks a field, or describes a cache that is not modelled."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """What memory depends on; sizes in elements, dtypes in bytes per element."""

    source: str
    architecture: str
    num_hidden_layers: int
    attention_layers: int
    gdn_layers: int
    hidden_size: int
    vocab_size: int
    tie_word_embeddings: bool
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int
    ssm_dtype_bytes: int
    model_dtype_bytes: int
    mtp_layers: int
    num_experts: int
    max_position_embeddings: int
    has_vision: bool

    @property
    def is_hybrid(self) -> bool:
        """Whether Gated DeltaNet layers stand beside attention layers."""
        return self.gdn_layers > 0

    @property
    def embedding_bytes(self) -> int:
        """Bytes of one vocabulary matrix (the embedding, or the output head when untied)."""
        return self.vocab_size * self.hidden_size * self.model_dtype_bytes


@dataclass(frozen=True, slots=True)
class _Fields:
    """One level of a config.json, with errors that name the field and the file."""

    values: Mapping[str, object]
    source: str
    path: str

    def integer(self, name: str, default: int | None = None, least: int = 1) -> int:
        value = self.values.get(name)
        if value is None:
            if default is not None:
                return default
            raise GeometryError(
                f"{self.source}: {self.path}{name} is missing; the memory of this model cannot "
                f"be computed without it. Add it to the config.json, or use the original one."
            )
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise GeometryError(
                f"{self.source}: {self.path}{name}: got {value!r}; it must be an integer of at least {least}"
            )
        return value


def geometry_from_config(config: Mapping[str, object], source: str, dtype: str | None = None) -> Geometry:
    """Read a parsed config.json (`text_config` when it is nested).

    `dtype` overrides the model's own, as vLLM's `--dtype` does. A float32 checkpoint counts as
    16 bits without it, because vLLM's `auto` halves it (config/model.py, `_resolve_auto_dtype`).
    """
    nested = config.get("text_config")
    text = cast(Mapping[str, object], nested) if isinstance(nested, Mapping) else config
    fields = _Fields(text, source, "text_config." if isinstance(nested, Mapping) else "")
    _refuse_foreign(text, source)
    layers = fields.integer("num_hidden_layers")
    attention, gdn = _layers_by_kind(fields, layers)
    heads = fields.integer("num_attention_heads")
    hidden = fields.integer("hidden_size")
    model_bytes = _model_dtype_bytes(text, config, dtype, source)
    linear = {name: fields.integer(name) if gdn else 0 for name in _LINEAR_FIELDS}
    return Geometry(
        source=source,
        architecture=_architecture(config, source),
        num_hidden_layers=layers,
        attention_layers=attention,
        gdn_layers=gdn,
        hidden_size=hidden,
        vocab_size=fields.integer("vocab_size"),
        tie_word_embeddings=_flag(text, config, "tie_word_embeddings"),
        num_attention_heads=heads,
        num_key_value_heads=fields.integer("num_key_value_heads"),
        head_dim=_head_dim(fields, hidden, heads, is_hybrid=gdn > 0),
        ssm_dtype_bytes=_ssm_dtype_bytes(text, model_bytes, source) if gdn else 0,
        model_dtype_bytes=model_bytes,
        mtp_layers=_mtp_layers(fields),
        num_experts=fields.integer(
            "num_experts", default=fields.integer("num_local_experts", default=0, least=0), least=0
        ),
        max_position_embeddings=fields.integer("max_position_embeddings"),
        has_vision=isinstance(config.get("vision_config"), Mapping),
        **linear,
    )


_LINEAR_FIELDS = (
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
)


def _refuse_foreign(text: Mapping[str, object], source: str) -> None:
    for name, kind in _FOREIGN_FIELDS.items():
        if text.get(name) is not None:
            raise GeometryError(
                f"{source}: {name} says {kind}; only full attention and Gated DeltaNet layers "
                "are modelled, so no figure would be true. Start vLLM once and read its log."
            )
    window = text.get("sliding_window")
    if window is not None and text.get("use_sliding_window") is not False:
        kinds = text.get("layer_types")
        if not (isinstance(kinds, list) and not _WINDOW_KINDS.intersection(kinds)):
            raise GeometryError(
                f"{source}: sliding_window is {window!r}: layers that keep only a window of the "
                "KV cache are not modelled, so no figure would be true."
            )


def _layers_by_kind(fields: _Fields, layers: int) -> tuple[int, int]:
    kinds = fields.values.get("layer_types")
    if isinstance(kinds, list):
        unknown = sorted({str(kind) for kind in kinds} - _ATTENTION_KINDS - _GDN_KINDS)
        if unknown:
            raise GeometryError(
                f"{fields.source}: {fields.path}layer_types: {', '.join(unknown)} is not modelled; "
                f"known kinds: {', '.join(sorted(_ATTENTION_KINDS | _GDN_KINDS))}"
            )
        if len(kinds) != layers:
            raise GeometryError(
                f"{fields.source}: {fields.path}layer_types has {len(kinds)} entries, "
                f"{fields.path}num_hidden_layers is {layers}"
            )
        attention = sum(kind in _ATTENTION_KINDS for kind in kinds)
    elif any(fields.values.get(name) is not None for name in _LINEAR_FIELDS):
        # Every full_attention_interval-th layer is attention (transformers' Qwen3-Next).
        attention = layers // fields.integer("full_attention_interval", default=4)
    else:
        return layers, 0
    if attention == 0:
        raise GeometryError(
            f"{fields.source}: {fields.path}layer_types names no attention layer; "
            "a model without a KV cache needs no plan"
        )
    return attention, layers - attention


def _head_dim(fields: _Fields, hidden: int, heads: int, is_hybrid: bool) -> int:
    if is_hybrid:
        return fields.integer("head_dim")
    # transformers' rule for configurations that do not list it.
    return fields.integer("head_dim", default=hidden // heads)


def _mtp_layers(fields: _Fields) -> int:
    listed = fields.integer("mtp_num_hidden_layers", default=0, least=0)
    return listed or fields.integer("num_nextn_predict_layers", default=0, least=0)


def _architecture(config: Mapping[str, object], source: str) -> str:
    names = config.get("architectures")
    if isinstance(names, list) and names and isinstance(names[0], str):
        return names[0]
    raise GeometryError(f"{source}: architectures is missing; vLLM picks the model class by it")


def _flag(text: Mapping[str, object], config: Mapping[str, object], name: str) -> bool:
    value = text.get(name, config.get(name))
    return value is True


def _dtype_bytes(name: object, where: str) -> int:
    short = str(name).removeprefix("torch.")
    if short not in DTYPE_BYTES:
        raise GeometryError(f"{where}: got {name!r}; known: {', '.join(sorted(DTYPE_BYTES))}")
    return DTYPE_BYTES[short]


def _model_dtype_bytes(
    text: Mapping[str, object], config: Mapping[str, object], override: str | None, source: str
) -> int:
    if override is not None and override != "auto":
        return _dtype_bytes(override, f"{source}: --dtype")
    for level in (text, config):
        for name in ("dtype", "torch_dtype"):
            if level.get(name) is not None:
                return min(2, _dtype_bytes(level[name], f"{source}: {name}"))
    return 2


def _ssm_dtype_bytes(text: Mapping[str, object], model_bytes: int, source: str) -> int:
    name = text.get("mamba_ssm_dtype")
    if name is None:
        return model_bytes
    return _dtype_bytes(name, f"{source}: mamba_ssm_dtype")
