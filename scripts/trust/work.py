"""What the ranks of a fault case compute: every feature's ops on three batches in turn, against their references."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from megatron_overlap.comm import Transport
from megatron_overlap.comm.gloo import GlooTransport
from megatron_overlap.comm.transport import TransportOptions
from megatron_overlap.ops import (
    ExpertOptions,
    GradientReduce,
    LinearPlan,
    MLPExperts,
    Projection,
    all_gather_linear,
    balanced_attention,
    copy_linear,
    expert_parallel,
    linear_all_reduce,
    linear_reduce_scatter,
    ulysses_attention,
)
from megatron_overlap.ops import reference as linear_reference
from megatron_overlap.ops.numerics_check import Subject, checked_linear
from megatron_overlap.ops.tensor_parallel.batch_overlap import column_part, part_input, part_output, row_part
from megatron_overlap.ops.tensor_parallel.part_messages import GatherScatterMessages
from megatron_overlap.ops.wgrad import DeferredWgrad
from megatron_overlap.schedules import SequenceLayout
from megatron_overlap.schedules.varlen import Topology, partition
from tests.helpers import reference

NUM_BATCHES = 3
LOADS = ("tp", "split", "up", "ep", "dp", "varlen")
CHECKED_LOADS = ("tp", "dp")
"""The loads that `check` compares."""
Results = list[torch.Tensor]


class CorruptionError(Exception):
    """The comparison with the plain path found a wrong result."""


class Work:
    """One feature's step. What is right is computed once, before any fault, on collectives of torch.

    Args:
        load: one of `LOADS`.
        transport: carries the messages.
        group: the ranks.
        check: compare with the plain path in every step, as check mode does.
    """

    def __init__(self, load: str, transport: Transport, group: dist.ProcessGroup, *, check: bool) -> None:
        self._group, self._transport = group, transport
        plain, mine = getattr(self, f"_{load}")(check)
        self._mine = mine
        self._batches = [self._data(load, number) for number in range(NUM_BATCHES)]
        self._right = [plain(batch) for batch in self._batches]

    def step(self, number: int) -> bool:
        """Computes a batch; whether everything is right.

        Raises:
            TransportError: a wait failed.
            CorruptionError: `check` found something.
        """
        results = self._mine(self._batches[number % NUM_BATCHES])
        right = self._right[number % NUM_BATCHES]
        return all(torch.allclose(a, b, rtol=1e-4, atol=1e-4) for a, b in zip(results, right, strict=True))

    def _data(self, load: str, number: int) -> Results:
        size, rank = self._group.size(), self._group.rank()
        generator = torch.Generator().manual_seed(100 * number + rank)
        common = torch.Generator().manual_seed(number)
        draw = partial(torch.randn, generator=generator)
        if load in ("tp", "split"):
            # Own rows, the same rows everywhere, and the weights of a column- and a row-parallel layer.
            same = torch.randn(37, 16, generator=common)
            return [draw(24, 16), same, draw(12, 16), draw(16, 12), draw(24 * size, 12)]
        if load == "dp":
            return [draw(50 * size)]
        if load == "ep":
            # Tokens, their probabilities, output gradient, and the weights of two experts.
            tokens = sum(map(sum, _routing(size)[rank]))
            return [draw(tokens, 16), draw(tokens), draw(tokens, 16), draw(2, 24, 16), draw(2, 16, 24)]
        heads = 4 * (size if load == "up" else 1)
        rows = 12 if load == "up" else self._plan().tokens(0)[rank]
        shape = (rows, 1, heads, 8) if load == "up" else (rows, heads, 8)
        return [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(4)]

    def _plan(self) -> Any:
        ranks = self._group.size()
        # One document over all ranks: a rank that waits for nobody has nothing to notice.
        lengths = [120, 8, 3, 1, 1, 0, 2]
        return partition(lengths, Topology(1, ranks), capacity=-(-sum(lengths) // ranks) + 2)

    def _tp(self, check: bool) -> tuple[Callable[[Results], Results], Callable[[Results], Results]]:
        names = ("ag_gemm", "gemm_rs", "copy_gemm", "gemm_ar")
        ops = (all_gather_linear, linear_reduce_scatter, copy_linear, linear_all_reduce)
        plain = (
            linear_reference.all_gather_linear,
            linear_reference.linear_reduce_scatter,
            linear_reference.copy_linear,
            linear_reference.linear_all_reduce,
        )

        def run(functions: Sequence[Any], batch: Results) -> Results:
            rows, same, column, row, wide = (tensor.clone().requires_grad_() for tensor in batch)
            ag, rs, copy, ar = functions
            y = ag(rows, column, None)
            z = rs(wide, row, None)
            u = ar(torch.relu(copy(same, column, None)), row, None)
            (y.sum() + z.square().sum() + u.sum() / self._group.size()).backward()
            return [y.detach(), z.detach(), u.detach(), *(t.grad for t in (rows, column, row, wide))]  # type: ignore[misc]

        plan = LinearPlan(pattern="direct", chunks_per_rank=2)
        mine: list[Any] = [partial(op, group=self._transport, plan=plan) for op in ops]
        if check:
            subjects = [Subject(name, self._group, None, self._judge) for name in names]
            mine = [
                lambda x, w, bias, op=op, subject=subject: checked_linear(op, x, w, bias, subject)
                for op, subject in zip(mine, subjects, strict=True)
            ]
        return partial(run, [partial(op, group=self._group) for op in plain]), partial(run, mine)

    def _split(self, check: bool) -> tuple[Callable[[Results], Results], Callable[[Results], Results]]:
        first = self._transport
        options = TransportOptions(
            channel="part b",
            timeout_s=first.timeout_s,
            flight_recorder=first.flight_recorder,  # type: ignore[attr-defined]
        )
        transports = first, GlooTransport(self._group, options)

        def run(of_parts: Callable[..., list[torch.Tensor]], batch: Results) -> Results:
            rows, column, row = leaves = [batch[k].clone().requires_grad_() for k in (0, 2, 3)]
            y = torch.cat(of_parts(rows[:, None].chunk(2), column, row))
            y.square().sum().backward()
            return [y.detach(), *(leaf.grad for leaf in leaves)]  # type: ignore[misc]

        def plain(parts: Sequence[torch.Tensor], column: torch.Tensor, row: torch.Tensor) -> list[torch.Tensor]:
            wide = [linear_reference.all_gather_linear(part, column, None, group=self._group).relu() for part in parts]
            return [linear_reference.linear_reduce_scatter(middle, row, None, group=self._group) for middle in wide]

        def mine(parts: Sequence[torch.Tensor], column: torch.Tensor, row: torch.Tensor) -> list[torch.Tensor]:
            deferred_wgrad = DeferredWgrad(num_terms=2)
            both = [GatherScatterMessages(transport, deferred_wgrad) for transport in transports]
            inputs = [part_input(part.contiguous(), messages) for part, messages in zip(parts, both, strict=True)]
            wide = [column_part(x, column, None, messages).relu() for x, messages in zip(inputs, both, strict=True)]
            outputs = [row_part(middle, row, messages) for middle, messages in zip(wide, both, strict=True)]
            return [part_output(y, messages) for y, messages in zip(outputs, both, strict=True)]

        return partial(run, plain), partial(run, mine)

    def _dp(self, check: bool) -> tuple[Callable[[Results], Results], Callable[[Results], Results]]:
        size, rank = self._group.size(), self._group.rank()
        reducer = GradientReduce(self._transport, pieces=2)
        own = slice(50 * rank, 50 * rank + 50)
        assert size * 50 >= own.stop

        def plain(batch: Results) -> Results:
            total = batch[0].clone()
            dist.all_reduce(total, group=self._group)
            return [total[own]]

        def mine(batch: Results) -> Results:
            bucket = batch[0].clone()
            reducer.begin(bucket).wait()
            if check:
                off = float((bucket[own] - plain(batch)[0]).abs().max())
                # The largest of all ranks is lost where one is no number.
                self._judge({"sum": off / 1e-4 if math.isfinite(off) else math.inf})
            return [bucket[own]]

        return plain, mine

    def _up(self, check: bool) -> tuple[Callable[[Results], Results], Callable[[Results], Results]]:
        layout = SequenceLayout.zigzag(12 * self._group.size(), self._group.size())
        plain = partial(reference.ulysses_attention, group=self._group, layout=layout)
        mine = partial(ulysses_attention, group=self._transport, layout=layout)
        return partial(_attend, plain), partial(_attend, mine)

    def _ep(self, check: bool) -> tuple[Callable[[Results], Results], Callable[[Results], Results]]:
        size, rank = self._group.size(), self._group.rank()
        routing = _routing(size)
        sent, received = routing[rank], [routing[source][rank] for source in range(size)]

        def run(function: Any, batch: Results) -> Results:
            x, probs, dy, *weights = (tensor.clone() for tensor in batch)
            leaves = [each.requires_grad_() for each in (x, probs, *weights[0].unbind(), *weights[1].unbind())]
            first, second = (tuple(map(Projection, leaves[at : at + 2])) for at in (2, 4))
            experts = MLPExperts(first, second, lambda hidden, scale: torch.relu(hidden) * scale[:, None])
            y = function(x, probs, sent, received, experts)
            y.backward(dy)
            return [y.detach(), *(leaf.grad for leaf in leaves)]  # type: ignore[misc]

        options = ExpertOptions(parts=2, min_rows=64)
        plain = partial(reference.expert_parallel, group=self._group)
        mine = partial(expert_parallel, group=self._transport, options=options)
        return partial(run, plain), partial(run, mine)

    def _varlen(self, check: bool) -> tuple[Callable[[Results], Results], Callable[[Results], Results]]:
        plan = self._plan()
        plain = partial(reference.balanced_attention, plan=plan, group=self._group)
        mine = partial(balanced_attention, plan=plan, group=self._transport)
        return partial(_attend, plain), partial(_attend, mine)

    def _judge(self, shares: Any) -> bool:
        worst = torch.tensor(max(shares.values(), default=0.0), dtype=torch.float64)
        dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=self._group)
        if not worst <= 1:
            raise CorruptionError(f"off by {float(worst):.3g} times what is allowed")
        return False


def _routing(size: int) -> list[list[list[int]]]:
    """`[source][owner][expert]`: groups of several chunks, of few rows, and of none."""
    return [[[130 + source, (source + owner) % 3] for owner in range(size)] for source in range(size)]


def _attend(function: Any, batch: Results) -> Results:
    leaves = [tensor.clone().requires_grad_() for tensor in batch[:3]]
    y = function(*leaves)
    y.backward(batch[3])
    return [y.detach(), *(leaf.grad for leaf in leaves)]  # type: ignore[misc]
