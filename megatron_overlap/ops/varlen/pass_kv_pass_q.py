"""What is packed, computed and handed back when keys travel, and when queries do; forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from megatron_overlap.ops.varlen import flash_attention as kernel
from megatron_overlap.ops.varlen.flash_attention import Mask
from megatron_overlap.ops.varlen.layout import add, merge, pick
from megatron_overlap.schedules.varlen.program import Traffic
from megatron_overlap.schedules.varlen.ring_groups import Side

Runs = Sequence[slice]


class Flow(Protocol):
    """One side in one direction. Rows of rings come first in all own tensors."""

    @property
    def traffic(self) -> Traffic:
        """Bytes of a row that travels."""

    @property
    def widths(self) -> tuple[int, int]:
        """Numbers in a row out, in the dtype of the data, and back, in the wide dtype; 0 where nothing goes back."""

    def pack(self, runs: Runs, load: torch.Tensor) -> None:
        """Writes own rows into the rows of a load."""

    def own(self, queries: Runs, keys: Runs, mask: Mask | None) -> None:
        """Own queries with own keys."""

    def visit(self, own: Runs, load: torch.Tensor, made: torch.Tensor, runs: Runs, mask: Mask | None) -> None:
        """Own rows with rows `runs` of a load; what its home is to get goes to the same rows of `made`."""

    def clear(self, made: torch.Tensor) -> None:
        """Makes `made` the result of nothing."""

    def grow(self, made: torch.Tensor, more: torch.Tensor) -> None:
        """Adds the result of earlier visits to `made`."""

    def home(self, runs: Runs, made: torch.Tensor) -> None:
        """Adds the result of all visits to own rows."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What a row is made of: heads, their size, and the dtype."""

    heads: int
    kv_heads: int
    size: int
    dtype: torch.dtype

    @classmethod
    def of(cls, q: torch.Tensor, k: torch.Tensor) -> Shape:
        """Of queries and keys `[rows, heads, size]`."""
        return cls(q.shape[1], k.shape[1], q.shape[2], q.dtype)

    def widths(self, side: Side, backward: bool) -> tuple[int, int]:
        """See `Flow.widths`."""
        queries, keys = self.heads * self.size, 2 * self.kv_heads * self.size
        if side == "keys":
            return keys, keys if backward else 0
        if backward:
            # Queries, the output and its gradient, and the log-sum-exp, which keeps its own dtype.
            return 3 * queries + self.heads * kernel.wide(self.dtype).itemsize // self.dtype.itemsize, queries
        return queries, queries + self.heads

    def traffic(self, side: Side, backward: bool) -> Traffic:
        """See `Flow.traffic`."""
        out, back = self.widths(side, backward)
        return Traffic(side, out * self.dtype.itemsize, back * kernel.wide(self.dtype).itemsize)

    def cheaper(self, backward: bool) -> Side:
        """The side that is fewer bytes; keys where they are as many. Both sides send as many rows."""

        def cost(side: Side) -> int:
            traffic = self.traffic(side, backward)
            return traffic.out_bytes + traffic.back_bytes

        return "queries" if cost("queries") < cost("keys") else "keys"


@dataclass(slots=True)
class ForwardKeys:
    """Keys and values travel; results stay with the queries."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    scale: float

    @property
    def shape(self) -> Shape:
        return Shape.of(self.q, self.k)

    @property
    def widths(self) -> tuple[int, int]:
        return self.shape.widths("keys", False)

    @property
    def traffic(self) -> Traffic:
        return self.shape.traffic("keys", False)

    def pack(self, runs: Runs, load: torch.Tensor) -> None:
        both = load.view(-1, 2, *self.k.shape[1:])
        both[:, 0], both[:, 1] = pick(self.k, runs), pick(self.v, runs)

    def own(self, queries: Runs, keys: Runs, mask: Mask | None) -> None:
        q, k, v = pick(self.q, queries), pick(self.k, keys), pick(self.v, keys)
        self._take(queries, kernel.forward(q, k, v, self.scale, mask), first=mask is not None and mask.before == 0)

    def visit(self, own: Runs, load: torch.Tensor, made: torch.Tensor, runs: Runs, mask: Mask | None) -> None:
        both = pick(load, runs).view(-1, 2, *self.k.shape[1:])
        self._take(own, kernel.forward(pick(self.q, own), both[:, 0], both[:, 1], self.scale, mask), first=False)

    def _take(self, runs: Runs, result: tuple[torch.Tensor, torch.Tensor], *, first: bool) -> None:
        if first:
            (rows,) = runs
            self.out[rows], self.lse[rows] = result
        else:
            merge(self.out, self.lse, runs, *result)

    def clear(self, made: torch.Tensor) -> None:
        raise AssertionError("nothing goes back")

    def grow(self, made: torch.Tensor, more: torch.Tensor) -> None:
        raise AssertionError("nothing goes back")

    def home(self, runs: Runs, made: torch.Tensor) -> None:
        raise AssertionError("nothing goes back")


class ForwardQueries(ForwardKeys):
    """Queries travel; partial results and their log-sum-exp come back."""

    @property
    def widths(self) -> tuple[int, int]:
        return self.shape.widths("queries", False)

    @property
    def traffic(self) -> Traffic:
        return self.shape.traffic("queries", False)

    def pack(self, runs: Runs, load: torch.Tensor) -> None:
        load.view(-1, *self.q.shape[1:]).copy_(pick(self.q, runs))

    def visit(self, own: Runs, load: torch.Tensor, made: torch.Tensor, runs: Runs, mask: Mask | None) -> None:
        q = pick(load, runs).view(-1, *self.q.shape[1:])
        merge(*self._split(made), runs, *kernel.forward(q, pick(self.k, own), pick(self.v, own), self.scale, mask))

    def clear(self, made: torch.Tensor) -> None:
        out, lse = self._split(made)
        out.zero_()
        lse.fill_(torch.finfo(lse.dtype).min)

    def grow(self, made: torch.Tensor, more: torch.Tensor) -> None:
        merge(*self._split(made), [slice(0, more.shape[0])], *self._split(more))

    def home(self, runs: Runs, made: torch.Tensor) -> None:
        merge(self.out, self.lse, runs, *self._split(made))

    def _split(self, made: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        _, heads, size = self.q.shape
        return made[:, : heads * size].unflatten(1, (heads, size)), made[:, heads * size :]


class Rows(NamedTuple):
    """What backward reads of the rows of rings, and the sums that it adds to, which are wide."""

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
class BackwardKeys:
    """Keys and values travel; their gradients come home."""

    rows: Rows
    scale: float

    @property
    def shape(self) -> Shape:
        return Shape.of(self.rows.q, self.rows.k)

    @property
    def widths(self) -> tuple[int, int]:
        return self.shape.widths("keys", True)

    @property
    def traffic(self) -> Traffic:
        return self.shape.traffic("keys", True)

    def pack(self, runs: Runs, load: torch.Tensor) -> None:
        both = load.view(-1, 2, *self.rows.k.shape[1:])
        both[:, 0], both[:, 1] = pick(self.rows.k, runs), pick(self.rows.v, runs)

    def own(self, queries: Runs, keys: Runs, mask: Mask | None) -> None:
        dq, dk, dv = self._grads(queries, pick(self.rows.k, keys), pick(self.rows.v, keys), mask)
        add(self.rows.dq, queries, dq)
        add(self.rows.dk, keys, dk)
        add(self.rows.dv, keys, dv)

    def _grads(self, queries: Runs, k: torch.Tensor, v: torch.Tensor, mask: Mask | None) -> kernel.Grads:
        dout, q, out, lse = (pick(x, queries) for x in (self.rows.dout, self.rows.q, self.rows.out, self.rows.lse))
        return kernel.backward(dout, q, k, v, out, lse, self.scale, mask)

    def visit(self, own: Runs, load: torch.Tensor, made: torch.Tensor, runs: Runs, mask: Mask | None) -> None:
        both, grads = pick(load, runs).view(-1, 2, *self.rows.k.shape[1:]), made.view(-1, 2, *self.rows.k.shape[1:])
        dq, dk, dv = self._grads(own, both[:, 0], both[:, 1], mask)
        add(self.rows.dq, own, dq)
        add(grads[:, 0], runs, dk)
        add(grads[:, 1], runs, dv)

    def clear(self, made: torch.Tensor) -> None:
        made.zero_()

    def grow(self, made: torch.Tensor, more: torch.Tensor) -> None:
        made += more

    def home(self, runs: Runs, made: torch.Tensor) -> None:
        grads = made.view(-1, 2, *self.rows.k.shape[1:])
        add(self.rows.dk, runs, grads[:, 0])
        add(self.rows.dv, runs, grads[:, 1])


class BackwardQueries(BackwardKeys):
    """Queries, results and their gradients travel; gradients of queries come home."""

    @property
    def widths(self) -> tuple[int, int]:
        return self.shape.widths("queries", True)

    @property
    def traffic(self) -> Traffic:
        return self.shape.traffic("queries", True)

    def pack(self, runs: Runs, load: torch.Tensor) -> None:
        parts = [pick(x, runs).flatten(1) for x in (self.rows.q, self.rows.dout, self.rows.out)]
        torch.cat([*parts, pick(self.rows.lse, runs).contiguous().view(load.dtype)], dim=1, out=load)

    def visit(self, own: Runs, load: torch.Tensor, made: torch.Tensor, runs: Runs, mask: Mask | None) -> None:
        width = self.shape.heads * self.shape.size
        there = pick(load, runs)
        q, dout, out = there[:, : 3 * width].unflatten(1, (3, *self.rows.q.shape[1:])).unbind(1)
        lse = there[:, 3 * width :].contiguous().view(self.rows.lse.dtype)
        dq, dk, dv = kernel.backward(
            dout, q, pick(self.rows.k, own), pick(self.rows.v, own), out, lse, self.scale, mask
        )
        add(made.view(-1, *self.rows.q.shape[1:]), runs, dq)
        add(self.rows.dk, own, dk)
        add(self.rows.dv, own, dv)

    def home(self, runs: Runs, made: torch.Tensor) -> None:
        add(self.rows.dq, runs, made.view(-1, *self.rows.q.shape[1:]))
