"""The parts of Qwen3-Next for training: what layers are made of, each a function of tensors.

What does not depend on how tokens are divided into rows works on all tokens of a batch at once, so that each part is
compiled once: shapes below are (tokens, ...) unless said otherwise.

The gated delta rule is computed by chunks (Yang et al., Gated Delta Networks, 2024, section 3.3). A chunk maps the
state S before it to A S + B, and such maps are composed in log2(chunks) steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64
HEAD = 128
"""Size of a key and of a value of the delta nets; queries, keys, values and gates are as many."""
TOP_K = 2
"""Experts of a token, as in the config; a constant, since compiled code is made for one."""

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
