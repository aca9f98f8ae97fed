"""What the attention kernels compute, in plain PyTorch."""

from __future__ import annotations

import torch


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, causal: bool, scale: float, out: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend in FP32 from query [T, Hq, D] to key and value [N, Hk, D]; each KV head serves Hq / Hk query heads.

    Causal: the T queries are the last of the N tokens.  As `prefill.Attention`: writes the output [T, Hq, D] to `out`
    and returns it with the natural logarithm of the softmax's denominator [Hq, T].
    """
    group = query.shape[1] // key.shape[1]
    key, value = (part.float().repeat_interleave(group, 1) for part in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query.float(), key) * scale
    if causal:
        last = torch.arange(len(key) - len(query), len(key)).unsqueeze(1)
        scores = scores.masked_fill(torch.arange(len(key)) > last, float("-inf"))
    out.copy_(torch.einsum("hqk,khd->qhd", scores.softmax(-1), value))
    return out, scores.logsumexp(-1)
