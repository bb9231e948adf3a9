"""Attention of some queries with some keys of one document, with its log-sum-exp, forward and backward.

On the CPU torch's flash kernel, on CUDA FlashAttention as torch carries it. Both give the logarithm of the sum of
exponentials, by which partial results are merged, and take it with the merged result in backward, so that every part
computes its own part of the gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

_aten = torch.ops.aten
# Rows of queries that share a mask on the CPU: it is as large as this times the window, and what is masked is computed.
_TILE_ROWS = 256


class Mask(NamedTuple):
    """Query row i sees key row j iff `0 <= before + i - j <= window`.

    Attributes:
        before: position of the first query less that of the first key.
        window: keys that a query sees before its own; None is all.
    """

    before: int
    window: int | None


Seen = torch.Tensor | tuple[int, int]
"""What is added to the scores (CPU), or the reach of a query to the left and to the right (CUDA)."""
Grads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, mask: Mask | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Equals `softmax(scale * q @ k.T, mask) @ v` for each head.

    Args:
        q: `[n, Hq, D]`, n above 0, D innermost in memory.
        k: `[m, Hkv, D]`, m above 0; every Hq / Hkv query heads in a row share a key head.
        v: as `k`.
        scale: of the scores.
        mask: what is seen; None is everything.

    Returns:
        `[n, Hq, D]`, and the log-sum-exp `[n, Hq]` in fp32, fp64 for fp64. A query that sees no key gets 0 and the
        smallest number there is.
    """
    if _is_plain(q, k, mask):
        return _forward(q, k, v, scale, causal=mask is not None)
    assert mask is not None
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    lse = torch.full(q.shape[:2], torch.finfo(wide(q.dtype)).min, dtype=wide(q.dtype), device=q.device)
    for rows, keys, seen in _tiles(q, k, mask):
        out[rows], lse[rows] = _forward(q[rows], k[keys], v[keys], scale, seen=seen)
    return out, lse


def backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
    mask: Mask | None,
) -> Grads:
    """The part of these keys in the gradients of q, k and v; `out` and `lse` are of all keys that the queries see."""
    if _is_plain(q, k, mask):
        return _backward(dout, q, k, v, out, lse, scale, causal=mask is not None)
    assert mask is not None
    grads = tuple(torch.zeros(x.shape, dtype=wide(x.dtype), device=x.device) for x in (q, k, v))
    for rows, keys, seen in _tiles(q, k, mask):
        parts = _backward(dout[rows], q[rows], k[keys], v[keys], out[rows], lse[rows], scale, seen=seen)
        for grad, place, part in zip(grads, (rows, keys, keys), parts, strict=True):
            grad[place] += part
    return grads  # type: ignore[return-value]


def documents_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: Sequence[int],
    scale: float,
    window: int | None,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """Causal attention of whole documents that lie one after the other; writes `out` and `lse`."""
    if q.is_cuda:
        starts, longest = _starts(lengths, q.device), max(lengths)
        result, log, *_ = _aten._flash_attention_forward(
            q,
            k,
            v,
            starts,
            starts,
            longest,
            longest,
            0.0,
            True,
            False,
            scale=scale,
            **_sizes(None if window is None else (window, 0)),
        )
        out.copy_(result)
        lse.copy_(log.t())
        return
    for rows in _runs(lengths):
        out[rows], lse[rows] = forward(q[rows], k[rows], v[rows], scale, Mask(0, window))


def documents_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    lengths: Sequence[int],
    scale: float,
    window: int | None,
    grads: Grads,
) -> None:
    """Gradients of `documents_forward`; writes `grads`."""
    if q.is_cuda:
        starts, longest, none = _starts(lengths, q.device), max(lengths), _no_state(q)
        parts = _aten._flash_attention_backward(
            dout.contiguous(), q, k, v, out, lse.t().contiguous(), starts, starts, longest, longest, 0.0, True,
            none, none, scale=scale, **_sizes(None if window is None else (window, 0)),
        )  # fmt: skip
        for grad, part in zip(grads, parts, strict=True):
            grad.copy_(part)
        return
    for rows in _runs(lengths):
        parts = backward(dout[rows], q[rows], k[rows], v[rows], out[rows], lse[rows], scale, Mask(0, window))
        for grad, part in zip(grads, parts, strict=True):
            grad[rows] = part


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which results of `dtype` are summed."""
    return torch.promote_types(dtype, torch.float32)


def _is_plain(q: torch.Tensor, k: torch.Tensor, mask: Mask | None) -> bool:
    """Whether one call of a kernel does it: everything is seen, or a causal square."""
    if mask is None:
        return True
    return mask.before == 0 and q.shape[0] == k.shape[0] and (mask.window is None or mask.window >= k.shape[0] - 1)


def _tiles(q: torch.Tensor, k: torch.Tensor, mask: Mask) -> Iterator[tuple[slice, slice, Seen]]:
    """Runs of query rows that see a key, the keys that they see, and which of these."""
    before, window = mask
    num_keys = k.shape[0]
    first, last = max(0, -before), q.shape[0]
    if window is not None:
        last = min(last, num_keys + window - before)
    # A kernel that knows windows needs no tiles.
    step = max(1, last - first) if q.is_cuda else _TILE_ROWS
    for start in range(first, last, step):
        stop = min(start + step, last)
        low = 0 if window is None else max(0, before + start - window)
        high = min(num_keys, before + stop)
        if q.is_cuda:
            # FlashAttention counts from the last query, which it lays on the last key.
            right = before + stop - high
            yield slice(start, stop), slice(low, high), (-1 if window is None else window - right, right)
            continue
        keys = torch.arange(low, high, device=q.device)
        distance = before + torch.arange(start, stop, device=q.device)[:, None] - keys
        unseen = (distance < 0) if window is None else (distance < 0) | (distance > window)
        hidden = torch.zeros(unseen.shape, dtype=q.dtype, device=q.device)
        yield slice(start, stop), slice(low, high), hidden.masked_fill_(unseen, float("-inf"))


def _forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, *, causal: bool = False, seen: Seen | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    if q.is_cuda:
        out, lse, *_ = _aten._flash_attention_forward(
            q[None], k[None], v[None], None, None, q.shape[0], k.shape[0], 0.0, causal, False,
            scale=scale, **_sizes(seen),
        )  # fmt: skip
        return out[0], lse[0].t()
    out, lse = _flash_cpu(_heads(q), _heads(k), _heads(v), 0.0, causal, attn_mask=seen, scale=scale)
    return out[0].transpose(0, 1), lse[0].t()


def _backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
    *,
    causal: bool = False,
    seen: Seen | None = None,
) -> Grads:
    if q.is_cuda:
        none = _no_state(q)
        grads = _aten._flash_attention_backward(
            dout[None], q[None], k[None], v[None], out[None], lse.t()[None].contiguous(), None, None,
            q.shape[0], k.shape[0], 0.0, causal, none, none, scale=scale, **_sizes(seen),
        )  # fmt: skip
        dq, dk, dv = (grad[0] for grad in grads)
        return dq, dk, dv
    heads = (_heads(x) for x in (dout, q, k, v, out))
    grads = _flash_cpu_backward(*heads, lse.t()[None], 0.0, causal, attn_mask=seen, scale=scale)
    dq, dk, dv = (grad[0].transpose(0, 1) for grad in grads)
    return dq, dk, dv


_flash_cpu = _aten._scaled_dot_product_flash_attention_for_cpu
_flash_cpu_backward = _aten._scaled_dot_product_flash_attention_for_cpu_backward


def _heads(x: torch.Tensor) -> torch.Tensor:
    """`[n, H, D]` as the CPU kernel wants it: `[1, H, n, D]`."""
    return x.transpose(0, 1)[None]


def _sizes(seen: Seen | None) -> dict[str, int]:
    if seen is None:
        return {}
    left, right = seen
    return {"window_size_left": int(left), "window_size_right": int(right)}


def _no_state(q: torch.Tensor) -> torch.Tensor:
    """Without dropout there is no random state to repeat."""
    return torch.empty(0, dtype=torch.int64, device=q.device)


def _runs(lengths: Sequence[int]) -> Iterator[slice]:
    start = 0
    for length in lengths:
        yield slice(start, start + length)
        start += length


def _starts(lengths: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
