"""Qwen3-Next for training, with its MTP layer: rows of equal length, every step a batch of matrix products.

What does not depend on how tokens are divided into rows works on all tokens of a batch at once, so that each part is
compiled once: shapes below are (tokens, ...) unless said otherwise. Parameters are called and laid out as in the
checkpoint.

The gated delta rule is computed by chunks (Yang et al., Gated Delta Networks, 2024, section 3.3). A chunk maps the
state S before it to A S + B, and such maps are composed in log2(chunks) steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CHUNK = 64
Weights = dict[str, Tensor]
Function = TypeVar("Function", bound=Callable[..., Any])

_compiled: dict[str, Any] = {}
compile_parts = False
"""Set to compile the parts; a change takes effect with the next call."""


def part(function: Function) -> Function:
    """Compile this part of the network when `compile_parts` is set."""

    def call(*arguments: Any) -> Any:
        if not compile_parts:
            return function(*arguments)
        name = function.__name__
        if name not in _compiled:
            _compiled[name] = torch.compile(function, dynamic=False)
        return _compiled[name](*arguments)

    return call  # type: ignore[return-value]


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


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """Qwen3-Next's norm, whose weight is an offset from 1."""
    x = x.float()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * (1.0 + weight)


def added(residual: Tensor, change: Tensor) -> Tensor:
    """Add to the residual stream, which is kept in the type that vLLM keeps it in, the model's."""
    return (residual.float() + change.float()).to(residual.dtype)


def swiglu(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


@part
def dense(residual: Tensor, norm: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Add a layer's MLP to the residual stream."""
    return added(residual, swiglu(rms_norm(residual, norm), gate, up, down))


@part
def mixture(
    residual: Tensor,
    norm: Tensor,
    router: Tensor,
    shared: list[Tensor],
    shared_gate: Tensor,
    experts: list[list[Tensor]],
) -> tuple[Tensor, Tensor]:
    """Add a layer's experts to the residual stream, each computed for all tokens.

    Returns:
        The residual stream, and the load balancing loss of Switch Transformer (1 when balanced).
    """
    x = rms_norm(residual, norm)
    shares = torch.softmax(F.linear(x, router).float(), -1)
    best, chosen = shares.topk(TOP_K, -1)
    best = best / best.sum(-1, keepdim=True)
    mask = F.one_hot(chosen, shares.shape[-1])
    weight = (mask * best.unsqueeze(-1)).sum(-2)
    out = torch.sigmoid(F.linear(x, shared_gate).float()) * swiglu(x, *shared).float()
    for index, expert in enumerate(experts):
        out = out + weight[:, index : index + 1] * swiglu(x, *expert).float()
    load = mask.sum(-2).float().mean(0) / TOP_K
    return added(residual, out), (load * shares.mean(0)).sum() * shares.shape[-1]


TOP_K = 2
"""Experts of a token, as in the config; a constant, since compiled code is made for one."""


class InverseOfUnitLower(torch.autograd.Function):  # type: ignore[misc]
    """(I + L)^-1 of strictly lower triangular L (..., n, n); what stands elsewhere in L is not read."""

    @staticmethod
    def forward(context: Any, lower: Tensor) -> Tensor:
        identity = torch.eye(lower.shape[-1], dtype=lower.dtype, device=lower.device).expand_as(lower)
        inverse = torch.linalg.solve_triangular(lower, identity, upper=False, unitriangular=True)
        context.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        (inverse,) = context.saved_tensors
        return -(inverse.mT @ gradient @ inverse.mT).tril(-1)


@part
def delta_in(
    residual: Tensor,
    norm: Tensor,
    qkvz: Tensor,
    ba: Tensor,
    conv: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    place: Tensor,
) -> tuple[Tensor, ...]:
    """Project and convolve; everything but the gate by chunks, (chunks, heads, CHUNK, ...).

    Args:
        place: of each token in its row; a row's length is a multiple of CHUNK.

    Returns:
        Query, key, value, beta, logarithm of the decay since the chunk's start, the system of the chunk's updates
        (CHUNK, CHUNK), decay from one token to another (CHUNK, CHUNK), and the output gate (tokens, heads, value size).
    """
    heads = dt_bias.shape[0]
    size = HEAD
    x = rms_norm(residual, norm)
    mixed = F.linear(x, qkvz).view(-1, heads, 4 * size)
    gate = mixed[..., 3 * size :]
    mixed = torch.cat([mixed[..., i * size : (i + 1) * size].flatten(1) for i in range(3)], -1)
    kernel = conv.shape[-1]
    taken = mixed * conv[:, 0, kernel - 1]
    for back in range(1, kernel):
        shifted = F.pad(mixed, (0, 0, back, 0))[: mixed.shape[0]]
        taken = taken + torch.where((place >= back).unsqueeze(-1), shifted, 0) * conv[:, 0, kernel - 1 - back]
    query, key, value = F.silu(taken.float()).view(-1, 3, heads, size).unbind(1)
    query = query * torch.rsqrt(query.pow(2).sum(-1, keepdim=True) + 1e-6) * size**-0.5
    key = key * torch.rsqrt(key.pow(2).sum(-1, keepdim=True) + 1e-6)
    strength, step = F.linear(x, ba).float().view(-1, heads, 2).unbind(-1)
    beta = torch.sigmoid(strength)
    decay = -a_log.exp() * F.softplus(step + dt_bias)

    def chunks(y: Tensor) -> Tensor:
        return y.reshape(-1, CHUNK, *y.shape[1:]).transpose(1, 2)

    query, key, value = chunks(query), chunks(key), chunks(value)
    beta, total = chunks(beta).unsqueeze(-1), chunks(decay).cumsum(-1)
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=x.device).triu(1)
    between = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(later, -torch.inf).exp()
    with torch.autocast(x.device.type, enabled=False):
        system = (key * beta) @ key.mT * between
    return query, key, value, beta, total, system, between, gate


@part
def delta_chunks(
    query: Tensor, key: Tensor, value: Tensor, beta: Tensor, total: Tensor, solve: Tensor, between: Tensor
) -> tuple[Tensor, ...]:
    """Everything else that stays within a chunk, from the inverse of its system; in float32.

    Returns:
        Reads of the state by queries (chunks, heads, CHUNK, key size), reads to be taken off the new values, new
        values, attention within the chunk, A and B of the chunk's map.
    """
    within = (query @ key.mT) * between
    since = total.exp().unsqueeze(-1)
    new = solve @ (value * beta)
    taken_off = solve @ (key * beta * since)
    left = key * (total[..., -1:] - total).exp().unsqueeze(-1)
    kept = torch.eye(key.shape[-1], device=key.device) * total[..., -1, None, None].exp()
    return query * since, taken_off, new, within, kept - left.mT @ taken_off, left.mT @ new


HEAD = 128
"""Size of a key and of a value of the delta nets; queries, keys, values and gates are as many."""


def states(a: Tensor, b: Tensor, rows: int) -> Tensor:
    """Return the state before each chunk (chunks, heads, key, value) from the chunks' maps, in rows of equal length."""
    a, b = (x.view(rows, -1, *x.shape[1:]) for x in (a, b))
    count, reach = a.shape[1], 1
    while reach < count:
        b = torch.cat([b[:, :reach], a[:, reach:] @ b[:, :-reach] + b[:, reach:]], 1)
        if 2 * reach < count:
            a = torch.cat([a[:, :reach], a[:, reach:] @ a[:, :-reach]], 1)
        reach *= 2
    return torch.cat([torch.zeros_like(b[:, :1]), b[:, :-1]], 1).flatten(0, 1)


@part
def delta_out(
    residual: Tensor,
    state: Tensor,
    query: Tensor,
    taken_off: Tensor,
    new: Tensor,
    within: Tensor,
    gate: Tensor,
    norm: Tensor,
    out: Tensor,
) -> Tensor:
    """Add a delta net's output to the residual stream."""
    read = query @ state + within @ (new - taken_off @ state)
    read = read.transpose(1, 2).flatten(0, 1)
    read = read * torch.rsqrt(read.pow(2).mean(-1, keepdim=True) + 1e-6) * norm
    return added(residual, F.linear((read * F.silu(gate.float())).flatten(1), out))


@part
def attention_in(
    residual: Tensor, norm: Tensor, q: Tensor, k: Tensor, v: Tensor, q_norm: Tensor, k_norm: Tensor, turn: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return query, key, value (tokens, heads, size) and the output gate; `turn` is the rotary angle of each token."""
    size = q_norm.shape[0]
    x = rms_norm(residual, norm)
    query, gate = F.linear(x, q).view(x.shape[0], -1, 2, size).unbind(2)
    key = F.linear(x, k).view(x.shape[0], -1, size)
    value = F.linear(x, v).view(x.shape[0], -1, size)
    return rotated(rms_norm(query, q_norm), turn), rotated(rms_norm(key, k_norm), turn), value, gate


def rotated(x: Tensor, turn: Tensor) -> Tensor:
    half = turn.shape[-1]
    cos, sin = turn.cos().unsqueeze(1), turn.sin().unsqueeze(1)
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)


@part
def attention_out(residual: Tensor, read: Tensor, gate: Tensor, out: Tensor) -> Tensor:
    """Add attention's output (tokens, heads, size) to the residual stream."""
    return added(residual, F.linear((read * torch.sigmoid(gate)).flatten(1), out))


def working_type(x: Tensor) -> torch.dtype:
    """The type of autocast, or of `x` without it."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def attend(query: Tensor, key: Tensor, value: Tensor, rows: int) -> Tensor:
    """Causal attention within rows of equal length."""
    groups = query.shape[1] // key.shape[1]
    dtype = working_type(query)
    query, key, value = (x.to(dtype).view(rows, -1, *x.shape[1:]).transpose(1, 2) for x in (query, key, value))
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    with torch.autocast(query.device.type, enabled=False):
        read = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    return read.transpose(1, 2).flatten(0, 1)


@part
def mtp_in(hidden: Tensor, embedded: Tensor, hidden_norm: Tensor, embedding_norm: Tensor, fc: Tensor) -> Tensor:
    """Join what was computed at a token with the next token's embedding."""
    return F.linear(torch.cat([rms_norm(embedded, embedding_norm), rms_norm(hidden, hidden_norm)], -1), fc)


@part
def losses_of(hidden: Tensor, head: Tensor, target: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weighted sum of the cross entropy, and whether each token's best logit is its target."""
    logits = F.linear(hidden, head).float()
    loss = (F.cross_entropy(logits, target, reduction="none") * weight).sum()
    return loss, logits.argmax(-1) == target


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
