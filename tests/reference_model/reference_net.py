"""Qwen3-Next for training, with its MTP layer. Parameters are called and laid out as in the checkpoint."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from reference_parts import (
    HEAD,
    TOP_K,
    InverseOfUnitLower,
    attend,
    attention_in,
    attention_out,
    delta_chunks,
    delta_in,
    delta_out,
    dense,
    mixture,
    mtp_in,
    rms_norm,
    states,
    working_type,
)
from torch import Tensor, nn

Weights = dict[str, Tensor]


def init_weights(config: dict[str, Any], generator: torch.Generator) -> Weights:
    """Return random weights in float32 on the CPU, by the checkpoint's names."""
    hidden, vocabulary = config["hidden_size"], config["vocab_size"]
    weights: Weights = {}

    def matrix(name: str, rows: int, columns: int, gain: float = 1.0) -> None:
        weights[f"{name}.weight"] = torch.randn(rows, columns, generator=generator) * gain / columns**0.5

    def zeros(name: str, size: int) -> None:
        weights[f"{name}.weight"] = torch.zeros(size)

    def swiglu(name: str, inner: int) -> None:
        matrix(f"{name}.gate_proj", inner, hidden)
        matrix(f"{name}.up_proj", inner, hidden)
        matrix(f"{name}.down_proj", hidden, inner, 0.1)

    def experts(name: str) -> None:
        for expert in range(config["num_experts"]):
            swiglu(f"{name}.experts.{expert}", config["moe_intermediate_size"])
        swiglu(f"{name}.shared_expert", config["shared_expert_intermediate_size"])
        matrix(f"{name}.gate", config["num_experts"], hidden)
        matrix(f"{name}.shared_expert_gate", 1, hidden)

    def attention(name: str) -> None:
        size, heads, groups = config["head_dim"], config["num_attention_heads"], config["num_key_value_heads"]
        matrix(f"{name}.q_proj", heads * size * 2, hidden)
        matrix(f"{name}.k_proj", groups * size, hidden)
        matrix(f"{name}.v_proj", groups * size, hidden)
        matrix(f"{name}.o_proj", hidden, heads * size, 0.1)
        zeros(f"{name}.q_norm", size)
        zeros(f"{name}.k_norm", size)

    def delta_net(name: str) -> None:
        keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
        heads = config["linear_num_value_heads"]
        values = heads * config["linear_value_head_dim"]
        kernel = config["linear_conv_kernel_dim"]
        matrix(f"{name}.in_proj_qkvz", 2 * keys + 2 * values, hidden)
        matrix(f"{name}.in_proj_ba", 2 * heads, hidden)
        matrix(f"{name}.out_proj", hidden, values, 0.1)
        mix = torch.randn(2 * keys + values, 1, kernel, generator=generator) / kernel**0.5
        weights[f"{name}.conv1d.weight"] = mix
        steps = torch.empty(heads).uniform_(math.log(0.002), math.log(0.1), generator=generator).exp()
        weights[f"{name}.dt_bias"] = steps + torch.log(-torch.expm1(-steps))
        weights[f"{name}.A_log"] = torch.empty(heads).uniform_(0.0, 1.4, generator=generator)
        weights[f"{name}.norm.weight"] = torch.ones(config["linear_value_head_dim"])

    def layer(name: str, kind: str, index: int) -> None:
        zeros(f"{name}.input_layernorm", hidden)
        zeros(f"{name}.post_attention_layernorm", hidden)
        if kind == "full_attention":
            attention(f"{name}.self_attn")
        else:
            delta_net(f"{name}.linear_attn")
        if index in config["mlp_only_layers"]:
            swiglu(f"{name}.mlp", config["intermediate_size"])
        else:
            experts(f"{name}.mlp")

    weights["model.embed_tokens.weight"] = torch.randn(vocabulary, hidden, generator=generator) * 0.3
    for index, kind in enumerate(config["layer_types"]):
        layer(f"model.layers.{index}", kind, index)
    zeros("model.norm", hidden)
    matrix("lm_head", vocabulary, hidden, 0.3)
    matrix("mtp.fc", hidden, 2 * hidden)
    layer("mtp.layers.0", "full_attention", 0)
    for name in ("mtp.norm", "mtp.pre_fc_norm_hidden", "mtp.pre_fc_norm_embedding"):
        zeros(name, hidden)
    return weights


class Network(nn.Module):  # type: ignore[misc]
    """The target and its MTP layer, over weights by the checkpoint's names."""

    def __init__(self, config: dict[str, Any], weights: Weights) -> None:
        super().__init__()
        if config["num_experts_per_tok"] != TOP_K or config["linear_key_head_dim"] != HEAD:
            raise ValueError("reference_net.py is written for two experts of a token and linear heads of 128")
        self.config = config
        self.parameters_by_name = {name: nn.Parameter(weight) for name, weight in weights.items()}
        for name, parameter in self.parameters_by_name.items():
            self.register_parameter(name.replace(".", "/"), parameter)

    def weight(self, name: str) -> Tensor:
        return self.parameters_by_name[f"{name}.weight"]

    def layer(self, name: str, residual: Tensor, kind: str, places: Places) -> tuple[Tensor, Tensor]:
        """Return the residual stream after a layer, and the balancing loss of its experts."""
        if kind == "full_attention":
            residual = self._attention(name, residual, places, None)[0]
        else:
            residual = self._delta_net(name, residual, places)
        return self._mlp(name, residual)

    def hidden(self, tokens: Tensor, places: Places) -> tuple[Tensor, Tensor]:
        """Return the normed hidden states, whose product with lm_head are the logits, and the balancing loss."""
        residual = F.embedding(tokens.flatten(), self.weight("model.embed_tokens"))
        residual = residual.to(working_type(residual))
        balance = torch.zeros((), device=residual.device)
        for index, kind in enumerate(self.config["layer_types"]):
            residual, loss = self.layer(f"model.layers.{index}", residual, kind, places)
            balance = balance + loss
        return rms_norm(residual, self.weight("model.norm")), balance

    def mtp(
        self, hidden: Tensor, following: Tensor, places: Places, memory: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor], Tensor]:
        """Return the hidden states of one MTP step, the keys and values that later steps read, the balancing loss.

        Args:
            hidden: of the model, or of the step before.
            following: the token after each one; the step predicts the one after that.
            memory: of the first step. A later step reads it in place of its own: vLLM's reads the first step's for all
                tokens but the last few.
        """
        embedded = F.embedding(following, self.weight("model.embed_tokens"))
        norms = self.weight("mtp.pre_fc_norm_hidden"), self.weight("mtp.pre_fc_norm_embedding")
        residual = mtp_in(hidden, embedded, *norms, self.weight("mtp.fc"))
        residual, memory = self._attention("mtp.layers.0", residual, places, memory)
        residual, balance = self._mlp("mtp.layers.0", residual)
        return rms_norm(residual, self.weight("mtp.norm")), memory, balance

    def _attention(
        self, name: str, residual: Tensor, places: Places, memory: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        own = f"{name}.self_attn"
        norm, q, k, v = (self.weight(f"{name}.input_layernorm"), *self._of(own, "q_proj", "k_proj", "v_proj"))
        q_norm, k_norm = self._of(own, "q_norm", "k_norm")
        query, key, value, gate = attention_in(residual, norm, q, k, v, q_norm, k_norm, places.turn)
        memory = memory or (key, value)
        read = attend(query, *memory, places.rows)
        return attention_out(residual, read, gate, self.weight(f"{own}.o_proj")), memory

    def _delta_net(self, name: str, residual: Tensor, places: Places) -> Tensor:
        own = f"{name}.linear_attn"
        norm, (qkvz, ba, conv) = (
            self.weight(f"{name}.input_layernorm"),
            self._of(own, "in_proj_qkvz", "in_proj_ba", "conv1d"),
        )
        a_log, dt_bias = (self.parameters_by_name[f"{own}.{part}"] for part in ("A_log", "dt_bias"))
        query, key, value, beta, total, system, between, gate = delta_in(
            residual, norm, qkvz, ba, conv, a_log, dt_bias, places.place
        )
        with torch.autocast(residual.device.type, enabled=False):
            solve = InverseOfUnitLower.apply(system)
            query, taken_off, new, within, a, b = delta_chunks(query, key, value, beta, total, solve, between)
            state = states(a, b, places.rows)
        norm, out = self.weight(f"{own}.norm"), self.weight(f"{own}.out_proj")
        return delta_out(residual, state, query, taken_off, new, within, gate, norm, out)

    def _mlp(self, name: str, residual: Tensor) -> tuple[Tensor, Tensor]:
        norm = self.weight(f"{name}.post_attention_layernorm")
        if f"{name}.mlp.gate.weight" not in self.parameters_by_name:
            return dense(residual, norm, *self._swiglu(f"{name}.mlp")), torch.zeros((), device=residual.device)
        return mixture(
            residual,
            norm,
            self.weight(f"{name}.mlp.gate"),
            self._swiglu(f"{name}.mlp.shared_expert"),
            self.weight(f"{name}.mlp.shared_expert_gate"),
            [self._swiglu(f"{name}.mlp.experts.{expert}") for expert in range(self.config["num_experts"])],
        )

    def _swiglu(self, name: str) -> list[Tensor]:
        return self._of(name, "gate_proj", "up_proj", "down_proj")

    def _of(self, name: str, *parts: str) -> list[Tensor]:
        return [self.weight(f"{name}.{part}") for part in parts]


class Places:
    """Where the tokens of a batch of rows stand."""

    def __init__(self, config: dict[str, Any], rows: int, length: int, device: torch.device | str) -> None:
        self.rows = rows
        self.place = torch.arange(length, device=device).repeat(rows)
        size = round(config["head_dim"] * config["partial_rotary_factor"])
        rates = config["rope_theta"] ** (-torch.arange(0, size, 2, device=device, dtype=torch.float32) / size)
        self.turn = self.place.unsqueeze(-1).float() * rates
        """The rotary angles (tokens, size / 2)."""
