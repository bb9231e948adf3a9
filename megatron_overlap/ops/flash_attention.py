"""Attention of whole sequences on one rank, forward and backward apart, so that a schedule can order both."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

_flash_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_cpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class Saved(NamedTuple):
    """What backward needs of one forward call; `[B, heads, S, D]` views."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    out: torch.Tensor
    logsumexp: torch.Tensor | None


def forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, causal: bool, scale: float
) -> tuple[torch.Tensor, Saved]:
    """Equals `softmax(scale * query @ key.T, causal) @ value` for each head.

    Args:
        query: `[S, B, Hq, D]`, any strides.
        key, value: `[S, B, Hkv, D]`; each head serves `Hq / Hkv` consecutive query heads.
        causal: row i sees rows 0..i.
        scale: of the scores.

    Returns:
        `[S, B, Hq, D]`, and what `backward` needs.
    """
    q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
    logsumexp = None
    if q.numel() == 0:
        out = torch.zeros_like(q)
    elif q.is_cuda:
        # torch chooses the kernel, and its graph, over leaves of our own, is kept until backward.
        q, k, v = (tensor.detach().requires_grad_() for tensor in (q, k, v))
        grouped = q.shape[1] != k.shape[1]
        with torch.enable_grad():
            out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=grouped)
    else:
        # Called by its name: `scaled_dot_product_attention` would repeat key/value heads in memory.
        out, logsumexp = _flash_cpu(q, k, v, 0.0, causal, scale=scale)
    return out.detach().permute(2, 0, 1, 3), Saved(q, k, v, out, logsumexp)


def backward(
    saved: Saved, grad: torch.Tensor, *, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of query, key and value, `[S, B, heads, D]` each, for `grad` of the result, `[S, B, Hq, D]`."""
    q, k, v, out, logsumexp = saved
    grad = grad.permute(1, 2, 0, 3)
    grads: tuple[torch.Tensor, ...]
    if q.numel() == 0:
        grads = tuple(torch.zeros_like(tensor) for tensor in (q, k, v))
    elif logsumexp is None:
        grads = torch.autograd.grad(out, (q, k, v), grad)
    else:
        grads = _flash_cpu_backward(grad, q, k, v, out, logsumexp, 0.0, causal, scale=scale)
    dq, dk, dv = (tensor.permute(2, 0, 1, 3) for tensor in grads)
    return dq, dk, dv
