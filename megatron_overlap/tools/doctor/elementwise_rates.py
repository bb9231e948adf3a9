"""How fast the operations between a step's GEMMs run on this machine: rates of the bytes that the cost model counts.

Each is what Megatron's local layers make of it on a CPU, in torch's own operations, forward and backward by autograd.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_overlap.autotune.cost_model import CLIP_BYTES, LOSS_BYTES, MAIN_GRADIENT_BYTES, TOUCHED
from megatron_overlap.config.cluster import Elementwise

Timer = Callable[[Callable[[], object]], float]
"""Microseconds that something takes: the mean over all ranks."""

ROWS, HIDDEN, FFN, HEADS, HEAD, VOCABULARY = 1024, 1024, 1408, 4, 128, 2048
_WEIGHTS = ((2816, 1024), (1024, 1408), (1024, 1024), (1024, 512))
# What glibc keeps for itself once so much was allocated and freed, as in every training; else tensors of a few
# megabytes go back to the kernel, and every operation touches fresh pages.
_WARM_BYTES = 31 << 20


def rates(cold_us: Timer, dtype: torch.dtype, update_bytes: float) -> dict[str, Any]:
    """GB/s of each kind of operation, `[forward, backward]`, and TFLOP/s of attention's products by columns of a head.

    Args:
        cold_us: times something on all ranks at once, with no cache as it left it.
        dtype: of activations and weights.
        update_bytes: counted for one parameter of the optimizer.
    """
    torch.empty(_WARM_BYTES, dtype=torch.uint8)
    found = {kind: _both(cold_us, run, leaves, kind) for kind, (run, leaves) in _chains(dtype).items()}
    logits = torch.randn(ROWS, 1, VOCABULARY).to(dtype)
    forward, backward = _times(cold_us, _CrossEntropy.apply, [logits])
    found["loss"] = [LOSS_BYTES[0] * logits.numel() / forward / 1e3, LOSS_BYTES[1] * logits.numel() / backward / 1e3]
    products, scores = _attention(cold_us, dtype)
    parameters = _parameters(cold_us, dtype, update_bytes)
    return {"elementwise": {**found, "scores": scores, **parameters}, "products": products}


def _chains(dtype: torch.dtype) -> dict[Elementwise, tuple[Callable[..., Tensor], list[Tensor]]]:
    def made(*shape: int) -> Tensor:
        return torch.randn(*shape).to(dtype)

    angles = torch.randn(ROWS, 1, 1, HEAD)

    def rotary(x: Tensor) -> Tensor:
        cosines, sines = (angles.cos() * 1.0).to(dtype), (angles.sin() * 1.0).to(dtype)
        low, high = x.chunk(2, dim=-1)
        return x * cosines + torch.cat((-high, low), dim=-1) * sines

    def swiglu(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * (up + 0.0)

    ones, zeros = torch.ones(HIDDEN).to(dtype), torch.zeros(HIDDEN).to(dtype)
    half = ROWS // 2  # what two tensor ranks hold under sequence parallelism
    return {
        "rms_norm": (lambda x, w: F.rms_norm(x, (HIDDEN,), w, 1e-5), [made(half, 1, HIDDEN), ones]),
        "layer_norm": (lambda x, w, b: F.layer_norm(x, (HIDDEN,), w, b, 1e-5), [made(half, 1, HIDDEN), ones, zeros]),
        "add": (lambda x, y: x + y, [made(half, 1, HIDDEN), made(half, 1, HIDDEN)]),
        "bias": (lambda x, b: x + b, [made(ROWS, 1, FFN), torch.zeros(FFN).to(dtype)]),
        "rotary": (rotary, [made(ROWS, 1, HEADS, HEAD)]),
        "repeat": (lambda x: x.repeat_interleave(2, dim=2), [made(ROWS, 1, HEADS // 2, HEAD)]),
        "swiglu": (swiglu, [made(ROWS, 1, 2 * FFN)]),
        "gelu": (lambda x, b: F.gelu(x + b), [made(ROWS, 1, FFN), torch.zeros(FFN).to(dtype)]),
    }


def _times(time_us: Timer, run: Callable[..., Tensor], leaves: Sequence[Tensor]) -> tuple[float, float]:
    """Forward and backward."""
    for leaf in leaves:
        leaf.requires_grad_()
    forward = time_us(lambda: run(*leaves))
    out = run(*leaves)
    grad = torch.randn_like(out)
    return forward, time_us(lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True))


def _both(time_us: Timer, run: Callable[..., Tensor], leaves: Sequence[Tensor], kind: Elementwise) -> list[float]:
    outputs = run(*leaves).numel()
    if kind == "add":  # its gradient is what it was given
        return [TOUCHED[kind][0] * outputs * leaves[0].element_size() / time_us(lambda: run(*leaves)) / 1e3]
    if kind == "repeat":  # counted by what is read and written together
        outputs += leaves[0].numel()
    moved = outputs * leaves[0].element_size()
    times = _times(time_us, run, leaves)
    return [part * moved / us / 1e3 for part, us in zip(TOUCHED[kind], times, strict=True)]


class _CrossEntropy(torch.autograd.Function):
    """Megatron's vocabulary-parallel cross entropy in its own steps, the sums over ranks left out."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        wide = logits.float()
        wide -= wide.max(dim=-1)[0].unsqueeze(-1)
        own = wide[..., 0].clone()
        torch.exp(wide, out=wide)
        total = wide.sum(dim=-1)
        loss = total.log() - own
        ctx.softmax, ctx.dtype = wide.div_(total.unsqueeze(-1)), logits.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.softmax[..., 0] -= 1.0
        return ctx.softmax.mul_(grads[0].unsqueeze(-1)).to(ctx.dtype)


def _attention(time_us: Timer, dtype: torch.dtype) -> tuple[dict[int, list[float]], list[float]]:
    """Megatron's attention without a fused kernel: TFLOP/s of its products alone by columns of a head, GB/s of all that
    is around them."""
    q, k, v = (torch.randn(ROWS, HEADS, HEAD).to(dtype) for _ in range(3))

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        empty = torch.empty(HEADS, ROWS, ROWS, dtype=dtype)
        scores = torch.baddbmm(
            empty, q.transpose(0, 1), k.transpose(0, 1).transpose(1, 2), beta=0.0, alpha=1 / math.sqrt(HEAD)
        )
        mask = torch.triu(torch.ones(ROWS, ROWS), diagonal=1).bool()
        shown = scores.view(1, HEADS, ROWS, ROWS).masked_fill_(mask, -10000.0)
        return torch.bmm(torch.softmax(shown, dim=-1).view(HEADS, ROWS, ROWS), v.transpose(0, 1))

    times = {head: _products(time_us, head, dtype) for head in (HEAD // 2, HEAD)}
    flops = {head: 2.0 * HEADS * ROWS * ROWS * head for head in times}
    whole = _times(time_us, attention, [q, k, v])
    moved = [part * HEADS * ROWS * ROWS * dtype.itemsize for part in TOUCHED["scores"]]
    # The rest is never less than a tenth: noise in a difference must not make it free.
    rest = [max(us - products, 0.1 * us) for us, products in zip(whole, times[HEAD], strict=True)]
    return (
        {
            head: [2 * flops[head] / first / 1e6, 4 * flops[head] / second / 1e6]
            for head, (first, second) in times.items()
        },
        [b / us / 1e3 for b, us in zip(moved, rest, strict=True)],
    )


def _products(time_us: Timer, head: int, dtype: torch.dtype) -> tuple[float, float]:
    """Forward [s, d] x [d, s] and [s, s] x [s, d]; backward the same twice, with the scores transposed once each."""
    tall, wide = torch.randn(HEADS, ROWS, head).to(dtype), torch.randn(HEADS, head, ROWS).to(dtype)
    square = torch.randn(HEADS, ROWS, ROWS).to(dtype)
    first = time_us(lambda: (torch.bmm(tall, wide), torch.bmm(square, tall)))
    second = time_us(lambda: (torch.bmm(tall, wide), torch.bmm(square.transpose(1, 2), tall)))
    return first, second + time_us(lambda: (torch.bmm(square, tall), torch.bmm(wide, square)))


def _parameters(time_us: Timer, dtype: torch.dtype, update_bytes: float) -> dict[str, list[float]]:
    """What passes over parameters: gradients added to main ones, those clipped, the optimizer."""
    weights = [torch.nn.Parameter(torch.randn(*shape)) for shape in _WEIGHTS]
    narrow = [weight.detach().to(dtype) for weight in weights]
    count = sum(weight.numel() for weight in weights)
    main = torch.zeros(count)
    pieces = torch.split(main, [weight.numel() for weight in weights])
    for weight, piece in zip(weights, pieces, strict=True):
        weight.grad = piece.view_as(weight)
    optimizer = torch.optim.AdamW(weights, lr=1e-4)

    def accumulate() -> None:
        for weight, other in zip(weights, narrow, strict=True):
            assert weight.grad is not None
            weight.grad.add_(other)

    def clip() -> None:
        main.zero_()
        torch.linalg.vector_norm(main)
        for piece in pieces:
            torch.linalg.vector_norm(piece)
            piece.copy_(piece * 0.5)

    def update() -> None:
        optimizer.step()
        for weight, other in zip(weights, narrow, strict=True):
            other.copy_(weight.detach())

    added = MAIN_GRADIENT_BYTES + narrow[0].element_size()
    with torch.no_grad():
        cleaned_us, added_us = time_us(clip), time_us(accumulate)
        main.normal_()  # moments of zeros would fall to numbers so small that a processor is slow with them
        bytes_and_us = {
            "accumulate": (added, added_us),
            "clip": (sum(CLIP_BYTES), cleaned_us),
            "update": (update_bytes, time_us(update)),
        }
    return {name: [moved * count / us / 1e3] for name, (moved, us) in bytes_and_us.items()}
