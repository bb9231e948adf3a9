"""Pass-KV and pass-Q (see `schedules.varlen.ring_groups`): what a rank packs, computes and accumulates in a ring.

Forward always uses pass-KV. Pass-Q would send the queries and return their partial results in the accumulation dtype.
Keys and values have at most as many heads, so they are fewer bytes.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Self

import torch

from megatron_overlap.ops.flash_attention import (
    Attended,
    Grads,
    accumulation_dtype,
    partial_backward,
    partial_forward,
)
from megatron_overlap.ops.varlen.layout import Runs, add, merge, pick
from megatron_overlap.schedules.varlen.messages import Traffic
from megatron_overlap.schedules.varlen.ring_groups import Passing


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of a row: number of heads, head size, and dtype."""

    heads: int
    kv_heads: int
    size: int
    dtype: torch.dtype

    @classmethod
    def of(cls, q: torch.Tensor, k: torch.Tensor) -> Self:
        """The shape of queries `[rows, Hq, D]` and keys `[rows, Hkv, D]`."""
        return cls(q.shape[1], k.shape[1], q.shape[2], q.dtype)

    def forward_traffic(self) -> Traffic:
        """Bytes of a row of keys and values; the results stay with the queries."""
        return Traffic("kv", 2 * self.kv_heads * self.size * self.dtype.itemsize, 0)

    def backward_traffic(self, passing: Passing) -> Traffic:
        """Bytes of a payload row (dtype of the data) and of a result row (accumulation dtype)."""
        queries, keys = self.heads * self.size, 2 * self.kv_heads * self.size
        narrow, wide = self.dtype.itemsize, accumulation_dtype(self.dtype).itemsize
        if passing == "kv":
            return Traffic(passing, keys * narrow, keys * wide)
        # Queries, output, output gradient, and the log-sum-exp, which keeps its own dtype.
        return Traffic(passing, 3 * queries * narrow + self.heads * wide, queries * wide)

    def backward_passing(self) -> Passing:
        """Pass-KV or pass-Q, whichever sends fewer bytes; pass-KV if equal. Both send the same number of rows."""
        kv, q = self.backward_traffic("kv"), self.backward_traffic("q")
        return "q" if q.payload_bytes + q.result_bytes < kv.payload_bytes + kv.result_bytes else "kv"


@dataclass(slots=True)
class RingAttention(ABC):
    """Pass-KV or pass-Q in one direction. The rows of rings come first in all tensors of the rank.

    Attributes:
        traffic: what travels, and the bytes of a row.
        q, k, v: inputs of attention, `[rows, heads, D]`.
        out, lse: its results. Forward writes them, in the accumulation dtype.
    """

    traffic: Traffic
    scale: float
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor

    def pack(self, runs: Runs, payload: torch.Tensor) -> None:
        """Copies own rows into the rows of a payload: keys and values, unless a pass-Q class overrides it."""
        both = payload.view(-1, 2, *self.k.shape[1:])
        both[:, 0], both[:, 1] = pick(self.k, runs), pick(self.v, runs)

    @abstractmethod
    def compute_own(self, queries: Runs, keys: Runs, *, causal: bool) -> None:
        """Attention of own queries with own keys: of the same rows if `causal`, otherwise of earlier keys."""

    @abstractmethod
    def compute_step(self, own: Runs, rows: torch.Tensor, result: torch.Tensor, runs: Runs) -> None:
        """Attention of own rows with rows of a payload. Results for its owner go to rows `runs` of `result`."""

    def apply_result(self, runs: Runs, result: torch.Tensor) -> None:
        """Adds the result of all ring steps to own rows. Forward sends no results."""
        raise NotImplementedError


class ForwardPassKV(RingAttention):
    """Forward, pass-KV: the results stay with the queries."""

    def compute_own(self, queries: Runs, keys: Runs, *, causal: bool) -> None:
        k, v = pick(self.k, keys), pick(self.v, keys)
        result = partial_forward(pick(self.q, queries), k, v, self.scale, causal=causal)
        if causal:
            (rows,) = queries
            self.out[rows], self.lse[rows] = result
        else:
            merge(self.out, self.lse, queries, *result)

    def compute_step(self, own: Runs, rows: torch.Tensor, result: torch.Tensor, runs: Runs) -> None:
        both = rows.view(-1, 2, *self.k.shape[1:])
        term = partial_forward(pick(self.q, own), both[:, 0], both[:, 1], self.scale, causal=False)
        merge(self.out, self.lse, own, *term)


@dataclass(slots=True)
class BackwardPassKV(RingAttention):
    """Backward, pass-KV: gradients of keys and values return to their owner.

    Attributes:
        dout: gradient of `out`.
        dq, dk, dv: gradients, to which the methods add, in the accumulation dtype.
    """

    dout: torch.Tensor
    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor

    def compute_own(self, queries: Runs, keys: Runs, *, causal: bool) -> None:
        dq, dk, dv = self._grads(queries, pick(self.k, keys), pick(self.v, keys), causal=causal)
        add(self.dq, queries, dq)
        add(self.dk, keys, dk)
        add(self.dv, keys, dv)

    def _grads(self, queries: Runs, k: torch.Tensor, v: torch.Tensor, *, causal: bool) -> Grads:
        dout, q, out, lse = (pick(x, queries) for x in (self.dout, self.q, self.out, self.lse))
        return partial_backward(dout, Attended(q, k, v, out, lse), self.scale, causal=causal)

    def compute_step(self, own: Runs, rows: torch.Tensor, result: torch.Tensor, runs: Runs) -> None:
        shape = (-1, 2, *self.k.shape[1:])
        both, grads = rows.view(shape), result.view(shape)
        dq, dk, dv = self._grads(own, both[:, 0], both[:, 1], causal=False)
        add(self.dq, own, dq)
        add(grads[:, 0], runs, dk)
        add(grads[:, 1], runs, dv)

    def apply_result(self, runs: Runs, result: torch.Tensor) -> None:
        grads = result.view(-1, 2, *self.k.shape[1:])
        add(self.dk, runs, grads[:, 0])
        add(self.dv, runs, grads[:, 1])


class BackwardPassQ(BackwardPassKV):
    """Backward, pass-Q: queries, outputs and output gradients travel; gradients of queries return to their owner."""

    def pack(self, runs: Runs, payload: torch.Tensor) -> None:
        parts = [pick(x, runs).flatten(1) for x in (self.q, self.dout, self.out)]
        torch.cat([*parts, pick(self.lse, runs).contiguous().view(payload.dtype)], dim=1, out=payload)

    def compute_step(self, own: Runs, rows: torch.Tensor, result: torch.Tensor, runs: Runs) -> None:
        width = self.q.shape[1:].numel()
        q, dout, out = rows[:, : 3 * width].unflatten(1, (3, *self.q.shape[1:])).unbind(1)
        lse = rows[:, 3 * width :].contiguous().view(self.lse.dtype)
        attended = Attended(q, pick(self.k, own), pick(self.v, own), out, lse)
        dq, dk, dv = partial_backward(dout, attended, self.scale, causal=False)
        add(result.view(-1, *self.q.shape[1:]), runs, dq)
        add(self.dk, own, dk)
        add(self.dv, own, dv)

    def apply_result(self, runs: Runs, result: torch.Tensor) -> None:
        add(self.dq, runs, result.view(-1, *self.q.shape[1:]))
