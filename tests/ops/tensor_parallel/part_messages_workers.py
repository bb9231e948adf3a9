"""Runs pairs of linear layers under sequence parallelism on both parts of a batch, and their reference on the whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.nn import functional

from megatron_overlap.comm import transport_of
from megatron_overlap.comm.host_group import HostGroup
from megatron_overlap.comm.transport import OrderedTransport, P2PWork, Transfer, Transport
from megatron_overlap.ops import reference
from megatron_overlap.ops.call import product
from megatron_overlap.ops.tensor_parallel import p2p, part_messages
from megatron_overlap.ops.tensor_parallel.batch_overlap import (
    column_part,
    join_rows,
    part_input,
    part_output,
    reserve_slot,
    row_part,
    split_rows,
)
from megatron_overlap.ops.tensor_parallel.part_messages import GatherScatterMessages, PartGathers
from megatron_overlap.ops.wgrad import DeferredWgrad, WgradTarget
from tests.helpers.collectives import LateCollectives, device_copies
from tests.helpers.late import LateTransport
from tests.helpers.numerics import assert_close_to_exact

ROWS, K, F = 5, 24, 20
NAMES = ("y", "dx", "dw1", "dw2", "dbias")
CHANNELS = ("part a", "part b")
Messages = Literal["gloo", "late", "device", "collectives"]
"""What carries the parts; `device`: late messages that a device orders."""


class Logged:
    """A transport that logs starts and the last wait of each operation.

    Args:
        inner: carries the messages.
        part: in the log.
        log: gets the names.
        arrives_at: from this call of `is_completed` on, the messages of an operation have arrived; None: never.
    """

    def __init__(self, inner: Transport, part: str, log: list[str], arrives_at: int | None = None) -> None:
        self._inner, self._part, self._log, self._arrives_at = inner, part, log, arrives_at
        self.rank, self.size, self.buffer_pool, self.exposed_s = inner.rank, inner.size, inner.buffer_pool, 0.0
        self.copy_engines, self.on_device, self.prepares = inner.copy_engines, inner.on_device, inner.prepares
        self.collectives = inner.collectives

    def begin(self, transfers: Sequence[Transfer], op: str) -> P2PWork:
        name = f"{self._part} {op.removesuffix(' of a part').split(' of ')[1]}"
        self._log.append(f"start {name}")
        return _LoggedWork(self._inner.begin(transfers, op), name, self._log, self._arrives_at)

    def close(self) -> None:
        self._inner.close()


class _LoggedWork:
    def __init__(self, inner: P2PWork, name: str, log: list[str], arrives_at: int | None) -> None:
        self._inner, self._name, self._log, self._arrives_at = inner, name, log, arrives_at
        self._queries = 0
        self.mark_ready, self.wait = inner.mark_ready, inner.wait

    def is_completed(self, message: int) -> bool:
        self._queries += message == 0
        if self._arrives_at is None or self._queries < self._arrives_at:
            return False
        self._inner.wait(message)
        return True

    def wait_all(self) -> None:
        self._log.append(f"wait {self._name}")
        self._inner.wait_all()


def _data(group: dist.ProcessGroup, dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    """Own rows of the input, both weights, the first bias, and own rows of the output gradient."""
    own = torch.Generator().manual_seed(seed * 64 + 1 + dist.get_rank(group))
    x, dy = (torch.randn(ROWS, 4, K, generator=own).to(dtype) for _ in range(2))
    return [x, *(torch.randn(*shape, generator=own).to(dtype) for shape in ((F, K), (K, F), (F,))), dy]


def _reference(data: list[torch.Tensor], group: dist.ProcessGroup, blocks: int) -> list[torch.Tensor]:
    *tensors, dy = data
    x, w1, w2, bias = (tensor.clone().requires_grad_() for tensor in tensors)
    y = x
    for _ in range(blocks):
        middle = functional.silu(reference.all_gather_linear(torch.tanh(y), w1, bias, group=group))
        y = y + reference.linear_reduce_scatter(middle, w2, group=group)
    y.backward(dy)
    return [y.detach(), *(leaf.grad for leaf in (x, w1, w2, bias))]  # type: ignore[list-item]


class _Step:
    """One part in one block: `x + row(silu(column(tanh(x))))`."""

    def __init__(self, complete: Callable[[], torch.Tensor], messages: GatherScatterMessages) -> None:
        self._complete, self.messages = complete, messages
        self.x = self.inside = torch.empty(0)

    def prepare(self, slot: int | None = None) -> None:
        if not self.inside.numel():
            self.x = self._complete()
            self.inside = part_input(torch.tanh(self.x), self.messages, slot)


def overlapped(
    x: torch.Tensor,
    weights: list[torch.Tensor],
    transports: Sequence[Transport],
    into: Sequence[torch.Tensor | None] = (None, None),
    blocks: int = 2,
    late: bool = False,
    gathers: PartGathers | None = None,
) -> torch.Tensor:
    """`x + row(silu(column(tanh(x))))` for each block, both parts in turn, as a caller of these operations does it.

    `late`: the middle of a step is before its row-parallel GEMM.
    """
    w1, w2, bias = weights
    parts: list[Callable[[], torch.Tensor]] = [lambda part=part: part.contiguous() for part in x.chunk(2, dim=1)]
    of_first, of_second = (WgradTarget(main_grad, None) for main_grad in into)
    first = True
    for _ in range(blocks):
        deferred_wgrad = DeferredWgrad(num_terms=2)
        steps = [
            _Step(part, GatherScatterMessages(transport, deferred_wgrad, gathers=gathers))
            for part, transport in zip(parts, transports, strict=True)
        ]
        if first:
            for step in steps:
                step.prepare()
        following: list[Callable[[], torch.Tensor]] = []
        for number, step in enumerate(steps):
            step.prepare()
            middle = column_part(step.inside, w1, bias, step.messages, of_first)
            slot = reserve_slot()
            other = steps[1].prepare if number == 0 else None
            if other is not None and not late:
                other(slot)
            middle = functional.silu(middle)
            if other is not None and late:
                other(slot)
            output = row_part(middle, w2, step.messages, of_second)
            following.append(lambda step=step, output=output: step.x + part_output(output, step.messages))
        parts, first = following, False
    return torch.cat([part() for part in parts], dim=1)


def _transports(group: dist.ProcessGroup, messages: Messages) -> list[Transport]:
    match messages:
        case "collectives":
            return [LateCollectives(group) for _ in CHANNELS]
        case "gloo":
            return [transport_of(group, channel) for channel in CHANNELS]
        case "late" | "device":
            late = [LateTransport(group) for _ in CHANNELS]
            for transport in late:
                transport.on_device = messages == "device"
            return list(late)


def _close(transports: Sequence[Transport], messages: Messages) -> None:
    if messages != "gloo":
        for transport in transports:
            transport.close()


def against_reference(
    group: dist.ProcessGroup,
    dtype: torch.dtype,
    *,
    main_grad: bool = False,
    messages: Messages = "gloo",
) -> None:
    """Output and every gradient against the reference and against float64."""
    # The bound is that of one sum after another: rounding errors of a block are not amplified by a second one.
    blocks = 2 if dtype == torch.float32 else 1
    transports = _transports(group, messages)
    for seed in (1, 2):
        data = _data(group, dtype, seed)
        plain = _reference(data, group, blocks)
        exact = _reference([tensor.double() for tensor in data], group, blocks)
        x, w1, w2, bias = (tensor.clone().requires_grad_() for tensor in data[:-1])
        into = [torch.ones(w.shape, dtype=torch.float32) if main_grad else None for w in (w1, w2)]
        y = overlapped(x, [w1, w2, bias], transports, into, blocks, late=seed == 2)
        y.backward(data[-1])
        wgrads = [w.grad if grad is None else grad - 1 for w, grad in zip((w1, w2), into, strict=True)]
        got = [y.detach(), x.grad, *wgrads, bias.grad]
        for name, mine, unfused, true in zip(NAMES, got, plain, exact, strict=True):
            assert mine is not None
            assert_close_to_exact(f"parts {name}", mine, unfused, true, true.abs().max() * torch.ones_like(true), 64)
    _close(transports, messages)


def gathers_by_copies(group: dist.ProcessGroup, dtype: torch.dtype, blocks: int) -> list[str]:
    """The results of two passes that differ between all-gathers by copies and collectives. Sums are collectives."""
    copies = device_copies(HostGroup(group))
    gathers, transports = PartGathers(copies, min_bytes=0), _transports(group, "collectives")
    different = []
    for seed in (1, 2):
        *tensors, dy = _data(group, dtype, seed)
        results = []
        for by in (gathers, None):
            x, *weights = (tensor.clone().requires_grad_() for tensor in tensors)
            y = overlapped(x, weights, transports, blocks=blocks, late=seed == 2, gathers=by)
            y.backward(dy)
            results.append([y.detach(), *(leaf.grad for leaf in (x, *weights))])
        for name, *pair in zip(NAMES, *results, strict=True):
            if not torch.equal(*pair):
                different.append(name)
    assert sum(name.startswith("part") for name in copies.buffer_pool.sizes()) == PartGathers.NUM_BUFFERS
    dist.barrier(group)
    copies.close()
    _close(transports, "collectives")
    return different


class _Postpones(torch.autograd.Function):
    """Backward postpones a weight gradient that reads gathered rows, and gathers until their buffer is used again."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, rows: torch.Tensor, gathers: PartGathers
    ) -> torch.Tensor:
        ctx.given = weight, rows, gathers
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        weight, rows, gathers = ctx.given
        first, second = DeferredWgrad(), DeferredWgrad()
        gathered_rows = gathers.start(rows, "all-gather of rows", first)
        first.put(weight, grads[0], gathered_rows.finish, WgradTarget())
        for _ in range(PartGathers.NUM_BUFFERS):
            gathers.start(-rows, "all-gather of rows", second).finish()
        return grads[0], None, None, None


def postpones_a_weight_gradient(group: dist.ProcessGroup) -> None:
    """A gather does not overwrite rows that a postponed weight gradient reads."""
    copies, size = device_copies(HostGroup(group)), group.size()
    rows = torch.full((2, K), 1.0 + dist.get_rank(group))
    weight = torch.zeros(F, K, requires_grad=True)
    x = torch.ones(2 * size, F, requires_grad=True)
    _Postpones.apply(x, weight, rows, PartGathers(copies, min_bytes=0)).sum().backward()
    assert weight.grad is not None
    assert torch.equal(weight.grad, torch.full((F, K), size * (size + 1.0)))
    dist.barrier(group)
    copies.close()


def sums_parts(group: dist.ProcessGroup, dtype: torch.dtype, messages: Messages = "gloo") -> None:
    """The sums of both parts, started before either is complete, and the gathered gradients, against float64."""
    rank, size = dist.get_rank(group), group.size()
    transports = _transports(group, messages)
    # Each part is one of two sequences: its rows are not contiguous.
    terms, gradient = (
        torch.randn(size, size * ROWS, 2, K, generator=torch.Generator().manual_seed(seed)).to(dtype) for seed in (1, 2)
    )
    x = terms[rank].clone().requires_grad_()
    deferred_wgrad = DeferredWgrad(num_terms=2)
    of_parts = [GatherScatterMessages(transport, deferred_wgrad) for transport in transports]
    pairs = list(zip(x.chunk(2, dim=1), of_parts, strict=True))
    started = [row_part(part, None, own) for part, own in pairs]
    y = torch.cat([part_output(part, own) for part, own in zip(started, of_parts, strict=True)], dim=1)
    exact = terms.double().sum(0).chunk(size)[rank]
    # A collective rounds each of its sums.
    roundings = size - 1 if messages == "collectives" else 1
    bound = roundings * torch.finfo(dtype).eps * terms.double().abs().sum(0).chunk(size)[rank]
    assert bool(((y.double() - exact).abs() <= bound).all())
    y.backward(gradient[0].chunk(size)[rank])
    assert x.grad is not None
    assert torch.equal(x.grad, gradient[0])
    _close(transports, messages)


def collectives_of_ordered(group: dist.ProcessGroup) -> tuple[bool, bool]:
    """Whether an ordered transport has the collectives of its inner one, and whether that has any."""
    inner = LateCollectives(group)
    return OrderedTransport(inner).collectives is not None, inner.collectives is not None


def abandons(group: dist.ProcessGroup) -> None:
    """`abandon` waits for all messages, so that the next step can use the transport."""
    log: list[str] = []
    messages = GatherScatterMessages(Logged(transport_of(group, CHANNELS[0]), "a", log), DeferredWgrad(num_terms=2))
    x, _, w2, *_ = _data(group, torch.float32, 1)
    shard = x.flatten(0, 1)
    messages.gather("input", shard)
    messages.reduce("output", torch.ones(len(shard) * group.size(), F), w2.t())
    messages.abandon()
    assert sorted(log) == ["start a input", "start a output", "wait a input", "wait a output"]
    try:
        messages.finish("input")
    except RuntimeError as error:
        assert "the input of a split layer was not started" in str(error)  # noqa: PT017
    else:
        raise AssertionError("abandoned messages were finished again")
    messages.gather("input", shard)
    rows = [torch.empty_like(shard) for _ in range(group.size())]
    dist.all_gather(rows, shard, group=group)
    assert torch.equal(messages.finish("input"), torch.cat(rows))


def row_order(group: dist.ProcessGroup, *, arrived: bool) -> tuple[list[str], list[str]]:
    """The order of GEMMs and waits of a gather of one part, and of the GEMMs of a scatter."""
    log: list[str] = []
    transport = Logged(transport_of(group, CHANNELS[0]), "a", log, 1 if arrived else None)
    messages = GatherScatterMessages(transport, DeferredWgrad(num_terms=2))
    x, w1, w2, *_ = _data(group, torch.float32, 1)
    shard, size = x.flatten(0, 1), group.size()
    own = len(shard)

    def logged(
        a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        out = a.new_empty(len(a), b.shape[1]) if out is None else out
        start = out.storage_offset() // out.stride(0)
        log.append(f"rows {start // own} to {start // own + len(out) // own}")
        return product(a, b, bias, out)

    with patch.object(part_messages, "product", logged):
        messages.gather("input", shard)
        gather = messages.full("input", shard)
        y, full = gather.matmul(w1.t()), gather.finish()
    torch.testing.assert_close(y, full @ w1.t())
    gathered_order, log[:] = list(log), []
    terms = torch.ones(size * own, F)

    gemm_rows = p2p.P2PMethod._gemm_rows

    def logged_rows(*args: Any) -> Any:
        gemm = gemm_rows(*args)

        def run(start: int, stop: int, out: torch.Tensor) -> None:
            log.append(f"rows {start // own} to {stop // own}")
            gemm(start, stop, out)

        return run

    with patch.object(p2p.P2PMethod, "_gemm_rows", logged_rows):
        out = messages.reduce("output", terms, w2.t()).out
    scattered_order = list(log)
    messages.finish("output")
    weights = [torch.empty_like(w2) for _ in range(size)]
    dist.all_gather(weights, w2, group=group)
    torch.testing.assert_close(out, sum(weights).sum(1).expand(own, K))
    return gathered_order, scattered_order


def moves_rows(group: dist.ProcessGroup, num_rows: int, num_first: int) -> None:
    """Own rows of both parts of a sequence, and the way back, in forward and in backward."""
    size, rank = group.size(), dist.get_rank(group)
    whole = torch.randn(num_rows * size, 2, 5, generator=torch.Generator().manual_seed(3))
    gradient = torch.randn(whole.shape, generator=torch.Generator().manual_seed(4))

    def own(tensor: torch.Tensor) -> list[torch.Tensor]:
        sizes = [num_first * size, (num_rows - num_first) * size]
        return [part.chunk(size)[rank] for part in tensor.split(sizes)]

    x = whole.chunk(size)[rank].clone().requires_grad_()
    parts = split_rows(x, group, num_first)
    for part, expected in zip(parts, own(whole), strict=True):
        assert torch.equal(part, expected)
    torch.autograd.backward(parts, own(gradient))
    assert x.grad is not None
    assert torch.equal(x.grad, gradient.chunk(size)[rank])

    leaves = [part.clone().requires_grad_() for part in own(whole)]
    joined = join_rows(leaves[0], leaves[1], group)
    assert torch.equal(joined, x)
    joined.backward(gradient.chunk(size)[rank])
    for leaf, expected in zip(leaves, own(gradient), strict=True):
        assert leaf.grad is not None
        assert torch.equal(leaf.grad, expected)
