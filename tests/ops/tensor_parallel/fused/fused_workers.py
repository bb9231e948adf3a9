"""Worker functions: the protocol of symmetric memory under adversarial timing, and fused layers."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from megatron_overlap.comm.host_group import HostGroup
from megatron_overlap.comm.symmetric.transport import MAX_EPOCH
from megatron_overlap.comm.transport import TransportError
from megatron_overlap.ops import all_gather_linear, linear_reduce_scatter
from megatron_overlap.ops.tensor_parallel.fused.kernels import FusedPlan
from megatron_overlap.ops.tensor_parallel.fused.linear import FusedMethod, IntraNodeGather
from megatron_overlap.schedules.gather_scatter import Nodes
from tests.helpers.fused import PoisonedBackend, fused_transport
from tests.helpers.late import LateTransport
from tests.helpers.mutants import Edit, load
from tests.kernels.heap import shared_tensor
from tests.kernels.looks import watched

ROWS, K, N = 18, 8, 12
ROUNDS = 3
LATE_S = 0.1
# Long enough that a mutant reads too early even on a busy machine.
MUTANTS_LATE_S = 0.4
# A correct protocol may wait long on a busy machine. A mutant may wait forever, so its limit is short.
MAX_POLLS, MUTANTS_POLLS = 300_000, 20_000
GIVE_UP_S, MUTANTS_GIVE_UP_S = 120, 8


class _LateCopies:
    """A copying queue that delays every copy."""

    def __init__(self, inner: Any, late_s: float) -> None:
        self._inner, self._late_s = inner, late_s

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        def late() -> None:
            time.sleep(self._late_s)
            to.copy_(source)

        self._inner._work.put(late)


class _PoisonOnAcknowledge:
    """A computing queue that poisons the slot of this rank when the rank acknowledges an operation.

    It drains the copy queue first. The copy queue reads the rows of this rank from the slot until all peers have
    received them, and the protocol allows this until the last peer has acknowledged.
    """

    def __init__(self, inner: Any, transport: Any) -> None:
        self._inner, self._transport = inner, transport

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def write(self, words: torch.Tensor, index: int, value: int) -> None:
        transport = self._transport
        layout, own = transport._layout, transport._views[transport.rank]
        if words.data_ptr() == own.data_ptr() + layout.acknowledgements(value):
            transport.backend._thread.join()
            start = layout.slot(value)
            own[start : start + layout.slot_bytes].fill_(255)
        self._inner.write(words, index, value)


class _LateGemm:
    """The launch of a scattering GEMM, which returns before the GEMM runs, and a copying queue that checks its order.

    Attributes:
        wrong: waits of the copying queue that were enqueued before the launch.
    """

    def __init__(self, launch: Any, copying: Any) -> None:
        self._launch, self._copying, self._thread, self.wrong = launch, copying, threading.Thread(), 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._copying, name)

    def __call__(self, *operands: torch.Tensor, **options: Any) -> None:
        def late() -> None:
            time.sleep(LATE_S)
            self._launch(*operands, **options)

        self._thread = threading.Thread(target=late)
        self._thread.start()

    def wait(self, words: torch.Tensor, index: int, value: int) -> None:
        self.wrong += self._thread.ident is None
        self._copying.wait(words, index, value)

    def join(self) -> None:
        """Block until the GEMM is complete."""
        self._thread.join()
        self._thread = threading.Thread()


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
    late_gemm: bool = False,
) -> list[str]:
    """Run rounds of two concurrent operations, as a column-parallel backward does. Rank 1 is as late as possible.

    Args:
        plan: arguments of `FusedPlan`.
        edits: mutations of the package that the run must detect.
        folder: shared by the ranks; holds the number of times that rank 0 has read each acknowledgement.
        late_copies: the copies of rank 0 are delayed.
        late_start: rank 0 starts each round late.
        late_gemm: the scattering GEMM runs later than its launch returns, and the copying queue waits for it.

    Returns:
        The detected errors.
    """
    edits = tuple(edits)
    symmetric, parts = load("comm.symmetric.transport", edits), load("ops.tensor_parallel.fused.linear", edits)
    backend = PoisonedBackend(HostGroup(group), max_polls=MUTANTS_POLLS if edits else MAX_POLLS)
    rank, size = backend.rank, backend.size
    if late_copies and rank == 0:
        backend.copying = _LateCopies(backend.copying, MUTANTS_LATE_S if edits else LATE_S)  # type: ignore[assignment]
    transport = symmetric.SymmetricTransport(backend, load("kernels.primitives", edits).wait_all)
    fused_plan = load("ops.tensor_parallel.fused.kernels", edits).FusedPlan(chunk_rows=ROWS // size // 2, **plan)
    layout = fused_plan.layout(ROWS, size)
    own = slice(*layout.shard(rank))
    transport._allocate(4 * -(-ROWS // size) * size * max(K, N))
    # With pulls or late copies, peers may read the slot of this rank after its acknowledgement.
    if plan.get("mover", "push") == "push" and not late_copies:
        backend.computing = _PoisonOnAcknowledge(backend.computing, transport)  # type: ignore[assignment]
    acknowledgements = transport._words(rank, transport._layout.acknowledgements(0), 2 * 64)
    looks = shared_tensor(folder / f"looks{size}", (size, 2 * 64), torch.int32)
    if rank == 0:
        looks.zero_()
    backend.barrier()
    wrong = []
    launches = load("kernels.gemm_rs", edits)
    late = _LateGemm(launches.gemm_to_owners, backend.copying)
    if late_gemm:
        backend.copying = late  # type: ignore[assignment]
    give_up_s = MUTANTS_GIVE_UP_S if edits else GIVE_UP_S
    with (
        watched(acknowledgements, looks[rank]),
        patch.object(launches, "gemm_to_owners", late if late_gemm else launches.gemm_to_owners),
    ):
        for number in range(1, ROUNDS + 1):
            a, b = _operands(rank, number)
            operands = [_operands(other, number) for other in range(size)]
            if late_start and rank == 0:
                time.sleep(LATE_S)
            try:
                gather = parts.IntraNodeGather(transport, a[own].contiguous(), ROWS, "test", fused_plan)
                scatter = parts.IntraNodeScatter(transport, a, b, "test", fused_plan)
                if late_gemm:
                    late.join()
                _delay_rank_1(transport, 2 * number - 1, looks, give_up_s)
                got = [gather.matmul(b)]
                gather.finish()
                _delay_rank_1(transport, 2 * number, looks, give_up_s)
                got.append(scatter.finish())
            except (TransportError, symmetric.TransportError, TimeoutError) as error:
                wrong.append(f"round {number}: {type(error).__name__}: {error}")
                break
            gathered = torch.cat([x[slice(*layout.shard(other))] for other, (x, _) in enumerate(operands)])
            summed = torch.stack([x[own].double() @ y.double() for x, y in operands]).sum(0)
            for name, mine, exact in zip(
                ("gather", "scatter"), got, (gathered.double() @ b.double(), summed), strict=True
            ):
                if not torch.allclose(mine.double(), exact, rtol=1e-4, atol=1e-4):
                    wrong.append(f"round {number}: {name} is wrong")
    if late.wrong:
        wrong.append(f"{late.wrong} copies wait before the GEMM is launched")
    if int(transport.status):
        wrong.append(f"timed out at op {int(transport.status)}")
    return wrong


def _delay_rank_1(transport: Any, op: int, looks: torch.Tensor, give_up_s: float) -> None:
    """Block rank 1 in `op` until rank 0 waits for its acknowledgement, or has written for op + 2 too early."""
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
    # Let rank 0 complete the write that it has begun.
    time.sleep(0.02)


def layers(group: dist.ProcessGroup, edits: Sequence[Edit] = (), hosts: int = 1) -> list[str]:
    """Forward and backward of both layers with slots poisoned on acknowledgement; returns the wrong tensors."""
    edits = tuple(edits)
    fused, linear = load("ops.tensor_parallel.fused.linear", edits), load("ops.tensor_parallel.linear", edits)
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    nodes = Nodes(hosts, size // hosts)
    members = HostGroup(group, nodes.members(nodes.node(rank)))
    backend = PoisonedBackend(members, max_polls=MUTANTS_POLLS if edits else MAX_POLLS)
    transport = load("comm.symmetric.transport", edits).SymmetricTransport(
        backend, load("kernels.primitives", edits).wait_all
    )
    transport._allocate(4 * 32 * 16)
    backend.computing = _PoisonOnAcknowledge(backend.computing, transport)  # type: ignore[assignment]
    if hosts > 1:
        transport = load("ops.tensor_parallel.fused.linear", edits).NodesTransport(
            transport, LateTransport(group), nodes
        )
    generator = torch.Generator().manual_seed(5)
    whole, first, second = (torch.randn(shape, generator=generator) for shape in ((8 * size, 16), (12, 16), (16, 12)))
    x, w1, w2 = (t.clone().requires_grad_() for t in (whole[8 * rank : 8 * rank + 8], first + rank, second - rank))
    method = fused.FusedMethod(transport)
    y = linear.linear_reduce_scatter(linear.all_gather_linear(x, w1, group=method), w2, group=method)
    y.square().sum().backward()
    all_rows = whole.double().requires_grad_()
    firsts = [(first + r).double().requires_grad_() for r in range(size)]
    seconds = [(second - r).double().requires_grad_() for r in range(size)]
    true = sum(all_rows @ firsts[r].t() @ seconds[r].t() for r in range(size))
    assert isinstance(true, torch.Tensor)
    true.square().sum().backward()
    own = slice(8 * rank, 8 * rank + 8)
    pairs = {
        "y": (y, true[own]),
        "dx": (x.grad, all_rows.grad[own]),  # type: ignore[index]
        "dw1": (w1.grad, firsts[rank].grad),
        "dw2": (w2.grad, seconds[rank].grad),
    }
    scale = 1e-5 * float(all_rows.grad.abs().max())  # type: ignore[union-attr]
    return [
        name
        for name, (got, exact) in pairs.items()
        if got is None or exact is None or not torch.allclose(got.double(), exact, rtol=1e-4, atol=max(1e-3, scale))
    ]


def recomputed(group: dist.ProcessGroup, checkpoint: bool) -> list[float]:
    """Run a column- and a row-parallel layer, with or without activation recomputation."""
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


def numbered_anew(group: dist.ProcessGroup, stores: str) -> tuple[int, list[bool]]:
    """Run layers from shortly before the largest epoch; return the last epoch and whether each result is right."""
    transport = fused_transport(group)
    method = FusedMethod(transport, FusedPlan(stores=stores))  # type: ignore[arg-type]
    x, w = torch.arange(4.0 * transport.size * 8).view(-1, 8), torch.eye(8)
    own = slice(4 * transport.rank, 4 * transport.rank + 4)
    right = []
    for number in range(8):
        if number == 2:
            transport._epoch = MAX_EPOCH - 2
            for epoch in (0, 1):
                words = transport._words(transport.rank, transport._layout.acknowledgements(epoch), transport.size)
                transport.backend.barrier()
                words.fill_(transport._epoch)
            transport.backend.barrier()
        gathered = all_gather_linear(x[own] + number, w, group=method)
        right.append(int(transport._staged_flags.max()) <= transport._epoch)  # the scatter waits for larger ones
        scattered = linear_reduce_scatter(x + number, w, group=method)
        right += [torch.equal(gathered, x + number), torch.equal(scattered, transport.size * (x[own] + number))]
    transport.close()
    return transport._epoch, right


def num_gathers_kept(group: dist.ProcessGroup) -> int:
    """Return the all-gathers that only the garbage collector frees after a layer, with their rows and results."""
    transport = fused_transport(group)
    x, w = torch.randn(8, 16, requires_grad=True), torch.randn(24, 16, requires_grad=True)
    gc.disable()
    all_gather_linear(x, w, group=FusedMethod(transport)).sum().backward()
    kept = sum(isinstance(each, IntraNodeGather) for each in gc.get_objects())
    gc.enable()
    transport.close()
    return kept


def memory(group: dist.ProcessGroup) -> list[tuple[int, int]]:
    """Return bytes of symmetric memory and twice the largest gathered activation: at first and after each call."""
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


def staged_bytes(group: dist.ProcessGroup) -> list[int]:
    """Return bytes of staging after a reduce-scatter to peers with and without atomics."""
    sizes = []
    for peer_atomics in (True, False):
        transport = fused_transport(group)
        transport.backend.peer_atomics = peer_atomics
        x, w = torch.ones(2 * transport.size, 8), torch.ones(4, 8)
        y = linear_reduce_scatter(x, w, group=FusedMethod(transport))
        assert torch.equal(y, torch.full((2, 4), 8.0 * transport.size))
        sizes.append(transport._staging.numel())
        transport.close()
    return sizes


class _Capturing(PoisonedBackend):
    """Reports a stream capture."""

    def is_capturing(self) -> bool:
        return True


def refused(group: dist.ProcessGroup) -> list[str]:
    """Return the error messages for wrong shapes, a stream capture, and an operation after a timeout."""
    from megatron_overlap.comm.symmetric.transport import SymmetricTransport
    from megatron_overlap.kernels.primitives import wait_all

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
