"""What interpreting workers run: the protocol of symmetric memory under an adversary, and fused layers in use."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_overlap.comm.host_group import HostGroup
from megatron_overlap.comm.transport import TransportError
from megatron_overlap.ops import all_gather_linear, linear_reduce_scatter
from megatron_overlap.ops.tensor_parallel.fused.linear import FusedMethod
from megatron_overlap.schedules.hierarchical import Nodes
from tests.helpers.fused import PoisonedFabric, fused_transport
from tests.helpers.late import LateTransport
from tests.helpers.mutants import Edit, load
from tests.kernels.heap import shared_tensor
from tests.kernels.looks import watched

ROWS, K, N = 18, 8, 12
ROUNDS = 3
LATE_S = 0.1
MUTANTS_LATE_S = 0.4  # what reads too early must do so even when two cores serve many
# What is right waits long on a busy machine; what is wrong may wait for ever, and is cut short.
MAX_POLLS, MUTANTS_POLLS = 300_000, 20_000
GIVE_UP_S, MUTANTS_GIVE_UP_S = 120, 8


class _LateCopies:
    """A copying queue in which every copy takes long."""

    def __init__(self, inner: Any, late_s: float) -> None:
        self._inner, self._late_s = inner, late_s

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        def late() -> None:
            time.sleep(self._late_s)
            to.copy_(source)

        self._inner._work.put(late)


class _Forgetting:
    """A computing queue that poisons this rank's half when the rank acknowledges an operation.

    The copy queue reads the own rows of the half until the peers have them, so it is drained first: the protocol
    keeps the half unchanged until every peer has acknowledged, which is later than this rank's acknowledgement.
    """

    def __init__(self, inner: Any, transport: Any) -> None:
        self._inner, self._transport = inner, transport

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def write(self, words: torch.Tensor, index: int, value: int) -> None:
        transport = self._transport
        layout, own = transport._layout, transport._views[transport.rank]
        if words.data_ptr() == own.data_ptr() + layout.acknowledgements(value):
            transport.fabric.join()
            start = layout.half(value)
            own[start : start + layout.half_bytes].fill_(255)
        self._inner.write(words, index, value)


def _operands(rank: int, op: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(op * 64 + rank)
    return torch.randn(ROWS, K, generator=generator), torch.randn(K, N, generator=generator)


def protocol(
    group: dist.ProcessGroup,
    plan: dict[str, Any],
    edits: Sequence[Edit],
    folder: Path,
    late_copies: bool = False,
    late_start: bool = False,
) -> list[str]:
    """Rounds as in the backward of a column-parallel layer, two ops in p2p_work; rank 1 is as late as it may be.

    Args:
        plan: arguments of `FusedPlan`.
        edits: changes of the package that must be noticed.
        folder: shared by the ranks: how often rank 0 has looked for an acknowledgement.
        late_copies: copies of rank 0 take long.
        late_start: rank 0 starts each round late.

    Returns:
        What was wrong.
    """
    edits = tuple(edits)
    symmetric, parts = load("comm.symmetric.transport", edits), load("ops.tensor_parallel.fused.intra_node", edits)
    fabric = PoisonedFabric(HostGroup(group), max_polls=MUTANTS_POLLS if edits else MAX_POLLS)
    rank, size = fabric.rank, fabric.size
    if late_copies and rank == 0:
        fabric.copying = _LateCopies(fabric.copying, MUTANTS_LATE_S if edits else LATE_S)  # type: ignore[assignment]
    transport = symmetric.SymmetricTransport(fabric, load("kernels.wait", edits).wait_all)
    fused_plan = load("ops.tensor_parallel.fused.plan", edits).FusedPlan(chunk_rows=ROWS // size // 2, **plan)
    layout = fused_plan.layout(ROWS, size)
    own = slice(*layout.shard(rank))
    transport._allocate(4 * -(-ROWS // size) * size * max(K, N))
    # What copies may still read of the own half is no longer needed by this rank, and so not forgotten.
    if plan.get("mover", "push") == "push" and not late_copies:
        fabric.computing = _Forgetting(fabric.computing, transport)  # type: ignore[assignment]
    acknowledgements = transport._words(rank, transport._layout.acknowledgements(0), 2 * 64)
    looks = shared_tensor(folder / f"looks{size}", (size, 2 * 64), torch.int32)
    if rank == 0:
        looks.zero_()
    fabric.barrier()
    wrong = []
    give_up_s = MUTANTS_GIVE_UP_S if edits else GIVE_UP_S
    with watched(acknowledgements, looks[rank]):
        for number in range(1, ROUNDS + 1):
            a, b = _operands(rank, number)
            everybody = [_operands(other, number) for other in range(size)]
            if late_start and rank == 0:
                time.sleep(LATE_S)
            try:
                gather = parts.IntraNodeGather(transport, a[own].contiguous(), ROWS, "test", fused_plan)
                scatter = parts.IntraNodeScatter(transport, a, b, "test", fused_plan)
                _as_late_as_it_may(transport, 2 * number - 1, looks, give_up_s)
                got = [gather.matmul(b)]
                gather.finish()
                _as_late_as_it_may(transport, 2 * number, looks, give_up_s)
                got.append(scatter.finish())
            except (TransportError, symmetric.TransportError, TimeoutError) as error:
                wrong.append(f"round {number}: {type(error).__name__}: {error}")
                break
            gathered = torch.cat([x[slice(*layout.shard(other))] for other, (x, _) in enumerate(everybody)])
            summed = torch.stack([x[own].double() @ y.double() for x, y in everybody]).sum(0)
            for name, mine, exact in zip(
                ("gather", "scatter"), got, (gathered.double() @ b.double(), summed), strict=True
            ):
                if not torch.allclose(mine.double(), exact, rtol=1e-4, atol=1e-4):
                    wrong.append(f"round {number}: {name} is wrong")
    if int(transport.status):
        wrong.append(f"gave up at op {int(transport.status)}")
    return wrong


def _as_late_as_it_may(transport: Any, op: int, looks: torch.Tensor, give_up_s: float) -> None:
    """Rank 1 goes on with `op` when rank 0 waits for that, or has written for op + 2 where it must not yet."""
    if transport.rank != 1 or op + 2 > 2 * ROUNDS:
        return
    layout = transport._layout
    flags = transport._words(1, layout.flags(op), layout.num_flags)
    word = (layout.acknowledgements(op) - layout.acknowledgements(0)) // 4 + 1
    before = int(looks[0, word])
    deadline = time.monotonic() + give_up_s
    while int(looks[0, word]) < before + 2 and not bool((flags == op + 2).any()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"op {op}: rank 0 neither waits nor writes")
        time.sleep(0.0005)
    # What rank 0 has begun to write is written whole.
    time.sleep(0.02)


def layers(group: dist.ProcessGroup, edits: Sequence[Edit] = (), hosts: int = 1) -> list[str]:
    """Forward and backward of both layers over memory that is forgotten on acknowledgement; what was wrong."""
    edits = tuple(edits)
    fused, linear = load("ops.tensor_parallel.fused.linear", edits), load("ops.tensor_parallel.linear", edits)
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    nodes = Nodes(hosts, size // hosts)
    members = HostGroup(group, nodes.members(nodes.node(rank)))
    fabric = PoisonedFabric(members, max_polls=MUTANTS_POLLS if edits else MAX_POLLS)
    transport = load("comm.symmetric.transport", edits).SymmetricTransport(fabric, load("kernels.wait", edits).wait_all)
    transport._allocate(4 * 32 * 16)
    fabric.computing = _Forgetting(fabric.computing, transport)  # type: ignore[assignment]
    if hosts > 1:
        transport = load("ops.tensor_parallel.fused.multi_node", edits).NodesTransport(
            transport, LateTransport(group), nodes
        )
    generator = torch.Generator().manual_seed(5)
    whole, first, second = (torch.randn(shape, generator=generator) for shape in ((8 * size, 16), (12, 16), (16, 12)))
    x, w1, w2 = (t.clone().requires_grad_() for t in (whole[8 * rank : 8 * rank + 8], first + rank, second - rank))
    method = fused.FusedMethod(transport)
    y = linear.linear_reduce_scatter(linear.all_gather_linear(x, w1, group=method), w2, group=method)
    y.square().sum().backward()
    everything = whole.double().requires_grad_()
    firsts = [(first + r).double().requires_grad_() for r in range(size)]
    seconds = [(second - r).double().requires_grad_() for r in range(size)]
    true = sum(everything @ firsts[r].t() @ seconds[r].t() for r in range(size))
    assert isinstance(true, torch.Tensor)
    true.square().sum().backward()
    own = slice(8 * rank, 8 * rank + 8)
    pairs = {
        "y": (y, true[own]),
        "dx": (x.grad, everything.grad[own]),  # type: ignore[index]
        "dw1": (w1.grad, firsts[rank].grad),
        "dw2": (w2.grad, seconds[rank].grad),
    }
    scale = 1e-5 * float(everything.grad.abs().max())  # type: ignore[union-attr]
    return [
        name
        for name, (got, exact) in pairs.items()
        if got is None or exact is None or not torch.allclose(got.double(), exact, rtol=1e-4, atol=max(1e-3, scale))
    ]


def recomputed(group: dist.ProcessGroup, checkpoint: bool) -> list[float]:
    """A column- and a row-parallel layer, with and without activation recomputation."""
    from torch.utils.checkpoint import checkpoint as recompute

    transport = fused_transport(group)
    method = FusedMethod(transport)
    generator = torch.Generator().manual_seed(7 + dist.get_rank(group))
    x, w1, w2 = (torch.randn(s, generator=generator, requires_grad=True) for s in ((8, 16), (24, 16), (16, 24)))

    def block(hidden: torch.Tensor) -> torch.Tensor:
        inner = torch.relu(all_gather_linear(hidden, w1, group=method))
        return linear_reduce_scatter(inner, w2, group=method)

    y = recompute(block, x, use_reentrant=False) if checkpoint else block(x)
    assert isinstance(y, torch.Tensor)
    y.square().sum().backward()
    transport.close()
    return [float(t.double().sum()) for t in (y, x.grad, w1.grad, w2.grad) if t is not None]


def memory(group: dist.ProcessGroup) -> list[tuple[int, int]]:
    """Bytes of symmetric memory, and twice the largest gathered activation: before, after small, large, small ops."""
    transport = fused_transport(group)
    sizes = [(transport.num_bytes, transport.bound_bytes)]
    largest = 0
    for rows, k in ((4, 16), (32, 64), (4, 16)):
        x = torch.randn(rows, k)
        y = all_gather_linear(x, torch.eye(k), group=FusedMethod(transport))
        assert torch.equal(y[rows * transport.rank : rows * (transport.rank + 1)], x)
        largest = max(largest, transport.size * x.nbytes)
        assert transport.bound_bytes == 2 * largest
        sizes.append((transport.num_bytes, transport.bound_bytes))
    transport.close()
    return sizes


class _Capturing(PoisonedFabric):
    """As on a device whose stream is being captured."""

    def objection(self) -> str:
        return "a CUDA graph is being captured"


def refused(group: dist.ProcessGroup) -> list[str]:
    """The messages for what does not fit, and what the op after a wait in vain says."""
    from megatron_overlap.comm.symmetric.transport import SymmetricTransport
    from megatron_overlap.kernels.wait import wait_all

    transport = fused_transport(group)
    capturing = FusedMethod(SymmetricTransport(_Capturing(HostGroup(group)), wait_all))
    method = FusedMethod(transport)
    x, w = torch.zeros(4, 8), torch.zeros(6, 8)
    calls = [
        lambda: all_gather_linear(torch.zeros(4, 9), w, group=method),
        lambda: all_gather_linear(x, w, group=method, num_rows=13),
        lambda: linear_reduce_scatter(torch.zeros(5, 2, 8), w, group=method),
        lambda: all_gather_linear(x, w, group=capturing),
    ]
    messages = []
    for call in calls:
        try:
            call()
        except (ValueError, TransportError) as error:
            messages.append(str(error))
    all_gather_linear(x, w, group=method)
    transport.status.fill_(1)
    all_gather_linear(x, w, group=method)
    try:
        all_gather_linear(x, w, group=method)
    except TransportError as error:
        messages.append(str(error))
    dist.barrier(group)
    transport.close()
    return messages
