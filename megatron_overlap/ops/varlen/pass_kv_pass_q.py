"""Pass-KV and pass-Q, forward and backward: what a rank packs, computes and accumulates in a ring.

Pass-KV sends keys and values to the ranks with the queries; pass-Q sends queries to the ranks with the keys and values.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch

from megatron_overlap.ops.flash_attention import Grads, Mask, accumulation_dtype, partial_backward, partial_forward
from megatron_overlap.ops.varlen.layout import add, merge, pick
from megatron_overlap.schedules.varlen.messages import Traffic
from megatron_overlap.schedules.varlen.ring_groups import Passing

Runs = Sequence[slice]


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of a row: number of heads, head size, and dtype."""

    heads: int
    kv_heads: int
    size: int
    dtype: torch.dtype

    @classmethod
    def of(cls, q: torch.Tensor, k: torch.Tensor) -> Shape:
        """The shape of queries `[rows, Hq, D]` and keys `[rows, Hkv, D]`."""
        return cls(q.shape[1], k.shape[1], q.shape[2], q.dtype)

    def widths(self, passing: Passing, backward: bool) -> tuple[int, int]:
        """Elements of a payload row (dtype of the data) and of a result row (accumulation dtype; 0 without results)."""
        queries, keys = self.heads * self.size, 2 * self.kv_heads * self.size
        if passing == "kv":
            return keys, keys if backward else 0
        if backward:
            # Queries, output, output gradient, and the log-sum-exp, which keeps its own dtype.
            return 3 * queries + self.heads * accumulation_dtype(self.dtype).itemsize // self.dtype.itemsize, queries
        return queries, queries + self.heads

    def traffic(self, passing: Passing, backward: bool) -> Traffic:
        """Bytes of a payload row and of a result row."""
        payload, result = self.widths(passing, backward)
        return Traffic(passing, payload * self.dtype.itemsize, result * accumulation_dtype(self.dtype).itemsize)

    def cheaper(self, backward: bool) -> Passing:
        """Pass-KV or pass-Q, whichever sends fewer bytes; pass-KV if equal. Both send the same number of rows."""

        def row_bytes(passing: Passing) -> int:
            traffic = self.traffic(passing, backward)
            return traffic.payload_bytes + traffic.result_bytes

        return "q" if row_bytes("q") < row_bytes("kv") else "kv"


class RingAttention(ABC):
    """Pass-KV or pass-Q in one direction. The rows of rings come first in all tensors of the rank.

    Attributes:
        passing: what travels.
        backward: whether the direction is backward.
    """

    __slots__ = ()
    passing: ClassVar[Passing]
    backward: ClassVar[bool]

    @property
    @abstractmethod
    def shape(self) -> Shape:
        """The shape of a row."""

    @property
    def widths(self) -> tuple[int, int]:
        """See `Shape.widths`."""
        return self.shape.widths(self.passing, self.backward)

    @property
    def traffic(self) -> Traffic:
        """See `Shape.traffic`."""
        return self.shape.traffic(self.passing, self.backward)

    @abstractmethod
    def pack(self, runs: Runs, payload: torch.Tensor) -> None:
        """Copies own rows into the rows of a payload."""

    @abstractmethod
    def compute_own(self, queries: Runs, keys: Runs, mask: Mask | None) -> None:
        """Attention of own queries with own keys."""

    @abstractmethod
    def compute_step(
        self, own: Runs, payload: torch.Tensor, result: torch.Tensor, runs: Runs, mask: Mask | None
    ) -> None:
        """Attention of own rows with rows `runs` of a payload. Results for its owner go to rows `runs` of `result`."""

    def reset(self, result: torch.Tensor) -> None:
        """Sets `result` to the result over no keys and no queries. Forward pass-KV sends no results."""
        raise NotImplementedError

    def accumulate(self, result: torch.Tensor, received: torch.Tensor) -> None:
        """Adds the received result of earlier ring steps to `result`."""
        raise NotImplementedError

    def apply_result(self, runs: Runs, result: torch.Tensor) -> None:
        """Adds the result of all ring steps to own rows."""
        raise NotImplementedError


@dataclass(slots=True)
class ForwardPassKV(RingAttention):
    """Forward, pass-KV: the results stay with the queries."""

    passing: ClassVar[Passing] = "kv"
    backward: ClassVar[bool] = False

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    scale: float

    @property
    def shape(self) -> Shape:
        return Shape.of(self.q, self.k)

    def pack(self, runs: Runs, payload: torch.Tensor) -> None:
        both = payload.view(-1, 2, *self.k.shape[1:])
        both[:, 0], both[:, 1] = pick(self.k, runs), pick(self.v, runs)

    def compute_own(self, queries: Runs, keys: Runs, mask: Mask | None) -> None:
        q, k, v = pick(self.q, queries), pick(self.k, keys), pick(self.v, keys)
        self._take(queries, partial_forward(q, k, v, self.scale, mask), first=mask is not None and mask.offset == 0)

    def compute_step(
        self, own: Runs, payload: torch.Tensor, result: torch.Tensor, runs: Runs, mask: Mask | None
    ) -> None:
        both = pick(payload, runs).view(-1, 2, *self.k.shape[1:])
        self._take(own, partial_forward(pick(self.q, own), both[:, 0], both[:, 1], self.scale, mask), first=False)

    def _take(self, runs: Runs, result: tuple[torch.Tensor, torch.Tensor], *, first: bool) -> None:
        if first:
            (rows,) = runs
            self.out[rows], self.lse[rows] = result
        else:
            merge(self.out, self.lse, runs, *result)


class ForwardPassQ(ForwardPassKV):
    """Forward, pass-Q: partial results and their log-sum-exp return to the owner of the queries."""

    passing: ClassVar[Passing] = "q"

    def pack(self, runs: Runs, payload: torch.Tensor) -> None:
        payload.view(-1, *self.q.shape[1:]).copy_(pick(self.q, runs))

    def compute_step(
        self, own: Runs, payload: torch.Tensor, result: torch.Tensor, runs: Runs, mask: Mask | None
    ) -> None:
        q = pick(payload, runs).view(-1, *self.q.shape[1:])
        part = partial_forward(q, pick(self.k, own), pick(self.v, own), self.scale, mask)
        merge(*self._split(result), runs, *part)

    def reset(self, result: torch.Tensor) -> None:
        out, lse = self._split(result)
        out.zero_()
        lse.fill_(torch.finfo(lse.dtype).min)

    def accumulate(self, result: torch.Tensor, received: torch.Tensor) -> None:
        merge(*self._split(result), [slice(0, received.shape[0])], *self._split(received))

    def apply_result(self, runs: Runs, result: torch.Tensor) -> None:
        merge(self.out, self.lse, runs, *self._split(result))

    def _split(self, result: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        _, heads, size = self.q.shape
        return result[:, : heads * size].unflatten(1, (heads, size)), result[:, heads * size :]


class BackwardRows(NamedTuple):
    """Tensors of the ring rows that backward reads, and the gradients that it adds to, in the accumulation dtype."""

    dout: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor


@dataclass(slots=True)
class BackwardPassKV(RingAttention):
    """Backward, pass-KV: gradients of keys and values return to their owner."""

    passing: ClassVar[Passing] = "kv"
    backward: ClassVar[bool] = True

    rows: BackwardRows
    scale: float

    @property
    def shape(self) -> Shape:
        return Shape.of(self.rows.q, self.rows.k)

    def pack(self, runs: Runs, payload: torch.Tensor) -> None:
        both = payload.view(-1, 2, *self.rows.k.shape[1:])
        both[:, 0], both[:, 1] = pick(self.rows.k, runs), pick(self.rows.v, runs)

    def compute_own(self, queries: Runs, keys: Runs, mask: Mask | None) -> None:
        dq, dk, dv = self._grads(queries, pick(self.rows.k, keys), pick(self.rows.v, keys), mask)
        add(self.rows.dq, queries, dq)
        add(self.rows.dk, keys, dk)
        add(self.rows.dv, keys, dv)

    def _grads(self, queries: Runs, k: torch.Tensor, v: torch.Tensor, mask: Mask | None) -> Grads:
        dout, q, out, lse = (pick(x, queries) for x in (self.rows.dout, self.rows.q, self.rows.out, self.rows.lse))
        return partial_backward(dout, q, k, v, out, lse, self.scale, mask)

    def compute_step(
        self, own: Runs, payload: torch.Tensor, result: torch.Tensor, runs: Runs, mask: Mask | None
    ) -> None:
        shape = (-1, 2, *self.rows.k.shape[1:])
        both, grads = pick(payload, runs).view(shape), result.view(shape)
        dq, dk, dv = self._grads(own, both[:, 0], both[:, 1], mask)
        add(self.rows.dq, own, dq)
        add(grads[:, 0], runs, dk)
        add(grads[:, 1], runs, dv)

    def reset(self, result: torch.Tensor) -> None:
        result.zero_()

    def accumulate(self, result: torch.Tensor, received: torch.Tensor) -> None:
        result += received

    def apply_result(self, runs: Runs, result: torch.Tensor) -> None:
        grads = result.view(-1, 2, *self.rows.k.shape[1:])
        add(self.rows.dk, runs, grads[:, 0])
        add(self.rows.dv, runs, grads[:, 1])


class BackwardPassQ(BackwardPassKV):
    """Backward, pass-Q: queries, outputs and output gradients travel; gradients of queries return to their owner."""

    passing: ClassVar[Passing] = "q"

    def pack(self, runs: Runs, payload: torch.Tensor) -> None:
        parts = [pick(x, runs).flatten(1) for x in (self.rows.q, self.rows.dout, self.rows.out)]
        torch.cat([*parts, pick(self.rows.lse, runs).contiguous().view(payload.dtype)], dim=1, out=payload)

    def compute_step(
        self, own: Runs, payload: torch.Tensor, result: torch.Tensor, runs: Runs, mask: Mask | None
    ) -> None:
        width = self.shape.heads * self.shape.size
        received = pick(payload, runs)
        q, dout, out = received[:, : 3 * width].unflatten(1, (3, *self.rows.q.shape[1:])).unbind(1)
        lse = received[:, 3 * width :].contiguous().view(self.rows.lse.dtype)
        dq, dk, dv = partial_backward(
            dout, q, pick(self.rows.k, own), pick(self.rows.v, own), out, lse, self.scale, mask
        )
        add(result.view(-1, *self.rows.q.shape[1:]), runs, dq)
        add(self.rows.dk, own, dk)
        add(self.rows.dv, own, dv)

    def apply_result(self, runs: Runs, result: torch.Tensor) -> None:
        add(self.rows.dq, runs, result.view(-1, *self.rows.q.shape[1:]))
