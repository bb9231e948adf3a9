"""Attention of a run of query rows, and its gradient, on torch's flash kernels.

A run of causal query rows `[start, stop)` is two kernel calls: the keys before `start`, which all of its queries see,
and the square of keys `[start, stop)`, which is causal. torch's causal mask starts at the first key, so it fits a
square and nothing else; one call with a mask of its own would compute the half of the square that nobody needs. The
two partial results are merged by their logarithms of sums of exponentials. Gradients need no merge: each part computes
its own from the merged result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

_aten = torch.ops.aten


class Heads(NamedTuple):
    """Query heads in groups: `groups` in a row share each of the `num_kv` key and value heads."""

    num_kv: int
    groups: int


@dataclass(frozen=True, slots=True)
class AttentionRows:
    """`softmax(scale * q @ k.T) @ v` per head, for any run of query rows.

    Attributes:
        q: queries `[S, B, Hq, D]`, any strides with D innermost.
        k: keys `[S, B, Hkv, D]`; every Hq / Hkv query heads in a row share one.
        v: values, shaped as the keys.
        causal: query i sees keys 0..i only.
        scale: of the scores before the softmax.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    causal: bool
    scale: float

    @property
    def heads(self) -> Heads:
        """How query heads share key heads."""
        num_kv = self.k.shape[2]
        return Heads(num_kv, self.q.shape[2] // num_kv)

    def _full_keys(self, start: int) -> int:
        """Keys that all queries from `start` on see."""
        return start if self.causal else self.k.shape[0]

    def forward(self, start: int, stop: int, context: torch.Tensor, lse: torch.Tensor) -> None:
        """Computes rows `[start, stop)`.

        Args:
            start: first query row.
            stop: query row after the last.
            context: the result of these rows `[stop - start, B, Hq * D]`, contiguous, written here.
            lse: fp32 `[B, stop - start, Hq]`, written here: log of the sum of exponentials, which the gradient needs.
        """
        heads, q = self.heads, self.q[start:stop]
        num_keys = self._full_keys(start)
        context = context.view(q.shape)
        full = square = None
        if num_keys:
            keys = slice(0, num_keys)
            out, log = _forward(_fold(q, heads), _rows(self.k[keys]), _rows(self.v[keys]), False, self.scale)
            full = _unfold(out, heads), log.reshape(lse.shape[0], -1, stop - start).transpose(1, 2)
        if self.causal:
            keys = slice(start, stop)
            out, log = _forward(_rows(q), _spread(self.k[keys], heads), _spread(self.v[keys], heads), True, self.scale)
            square = out.permute(2, 0, 1, 3), log.transpose(1, 2)
        if full is None or square is None:
            out, log = full or square  # type: ignore[misc]
            context.copy_(out)
            lse.copy_(log)
            return
        # The share of the square in the sum of both: e^b / (e^a + e^b).
        share = torch.sigmoid(square[1] - full[1]).transpose(0, 1).unsqueeze(-1)
        context.copy_(torch.lerp(full[0].to(share.dtype), square[0].to(share.dtype), share))
        torch.logaddexp(full[1], square[1], out=lse)

    def backward(
        self,
        start: int,
        stop: int,
        dcontext: torch.Tensor,
        context: torch.Tensor,
        lse: torch.Tensor,
        dq: torch.Tensor,
    ) -> list[tuple[slice, torch.Tensor, torch.Tensor]]:
        """Gradients of rows `[start, stop)`; `dq` `[stop - start, B, Hq, D]` is written.

        Args:
            start: first query row.
            stop: query row after the last.
            dcontext: gradient of the result of these rows `[stop - start, B, Hq * D]`, contiguous.
            context: the result of these rows, as `forward` wrote it.
            lse: as `forward` wrote it for these rows.
            dq: gradient of these queries.

        Returns:
            Terms of the key and value gradients: rows, dk and dv of these rows `[rows, B, Hkv, D]`.
        """
        heads, q = self.heads, self.q[start:stop]
        dcontext, context = dcontext.view(q.shape), context.view(q.shape)
        log = lse.transpose(1, 2)
        terms: list[tuple[slice, torch.Tensor, torch.Tensor]] = []
        parts: list[torch.Tensor] = []
        num_keys = self._full_keys(start)
        if num_keys:
            keys = slice(0, num_keys)
            grads = _backward(
                _fold(dcontext, heads),
                _fold(q, heads),
                _rows(self.k[keys]),
                _rows(self.v[keys]),
                _fold(context, heads),
                log.reshape(log.shape[0], heads.num_kv, -1),
                False,
                self.scale,
            )
            parts.append(_unfold(grads[0], heads))
            terms.append((keys, grads[1].permute(2, 0, 1, 3), grads[2].permute(2, 0, 1, 3)))
        if self.causal:
            keys = slice(start, stop)
            grads = _backward(
                _rows(dcontext),
                _rows(q),
                _spread(self.k[keys], heads),
                _spread(self.v[keys], heads),
                _rows(context),
                log,
                True,
                self.scale,
            )
            parts.append(grads[0].permute(2, 0, 1, 3))
            terms.append((keys, _gather(grads[1], heads), _gather(grads[2], heads)))
        if len(parts) == 1:
            dq.copy_(parts[0])
        else:
            torch.add(parts[0], parts[1], out=dq)
        return terms


def _rows(x: torch.Tensor) -> torch.Tensor:
    """`[n, B, H, D]` as the kernels want it: `[B, H, n, D]`."""
    return x.permute(1, 2, 0, 3)


def _fold(x: torch.Tensor, heads: Heads) -> torch.Tensor:
    """`[n, B, Hq, D]` to `[B, Hkv, groups * n, D]`: queries that share keys and see all of them are more rows."""
    if heads.groups == 1:
        return _rows(x)
    return x.unflatten(2, (heads.num_kv, heads.groups)).permute(1, 2, 3, 0, 4).flatten(2, 3)


def _unfold(x: torch.Tensor, heads: Heads) -> torch.Tensor:
    """The inverse of `_fold`."""
    return x.unflatten(2, (heads.groups, -1)).permute(3, 0, 1, 2, 4).flatten(2, 3)


def _spread(x: torch.Tensor, heads: Heads) -> torch.Tensor:
    """Keys or values `[n, B, Hkv, D]` for each query head: `[B, Hq, n, D]`."""
    return _rows(x if heads.groups == 1 else x.repeat_interleave(heads.groups, dim=2))


def _gather(x: torch.Tensor, heads: Heads) -> torch.Tensor:
    """The gradient of `_spread`: `[B, Hq, n, D]` to `[n, B, Hkv, D]`, summed over the heads that share."""
    x = x.permute(2, 0, 1, 3)
    if heads.groups == 1:
        return x
    return x.unflatten(2, (heads.num_kv, heads.groups)).sum(3, dtype=torch.float32 if x.element_size() < 4 else None)


def _forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    kernel = _aten._scaled_dot_product_flash_attention if q.is_cuda else _flash_cpu
    out, lse, *_ = kernel(q, k, v, 0.0, causal, scale=scale)
    return out, lse


_flash_cpu = _aten._scaled_dot_product_flash_attention_for_cpu


def _backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if not q.is_cuda:
        return _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dout, q, k, v, out, lse, 0.0, causal, scale=scale
        )
    # Without dropout there is no random state to repeat.
    none = torch.empty(0, dtype=torch.int64, device=q.device)
    return _aten._scaled_dot_product_flash_attention_backward(
        dout, q, k, v, out, lse.contiguous(), None, None, q.shape[2], k.shape[2], 0.0, causal, none, none, scale=scale
    )
