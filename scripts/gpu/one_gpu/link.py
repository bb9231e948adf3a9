"""Method p2p over copies on one rank of eight: the peers are pinned host memory, the link is PCIe in both directions.

The rank runs the package's operations and its `CopyTransport`. Its copies go to the host. What the peers would send
arrives from the host, in the same order and no earlier: message k of the peers follows what message k of this rank
follows, since all ranks run the same plan.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from statistics import median
from typing import Any

import torch

from megatron_overlap.comm.symmetric.backend import Copy, FlagStep, copies_of
from megatron_overlap.comm.symmetric.copies import CopyP2PWork, CopyTransport
from megatron_overlap.comm.symmetric.copy_steps import AFTER, COPY, CopyMessages, Queues, State
from megatron_overlap.comm.symmetric.heap import HeapPool
from megatron_overlap.comm.transport import Exchange, Transfer
from megatron_overlap.ops import all_gather_linear, linear_reduce_scatter
from megatron_overlap.ops.tensor_parallel.p2p import LinearPlan, P2PMethod
from megatron_overlap.ops.tensor_parallel.pipelined_reduce_scatter import PipelinedReduceScatter
from megatron_overlap.ops.wgrad import add_product
from megatron_overlap.schedules.plan import Message
from one_gpu.device import device as measured_device
from one_gpu.parts import REPEATS
from one_gpu.problem import is_wrong
from one_gpu.shapes import Shape, overlap_figures, shapes


class ImmediateQueue:
    """Of a dry run: everything happens at once."""

    def prepare_copies(self, copies: Sequence[Copy], *, captured: bool = False) -> object:
        return copies

    def copy_all(self, prepared: Any, tensors: Sequence[torch.Tensor]) -> None:
        for to, source in copies_of(prepared, tensors):
            to.copy_(source)

    def prepare(self, steps: Sequence[FlagStep], *, captured: bool = False) -> object:
        return tuple(steps)

    def run(self, prepared: Any) -> None:
        for words, position, sets, _ in prepared:
            assert sets or int(words[position]) == 1
            words[position] = int(sets)

    def mark(self) -> object:
        return None

    def after(self, mark: object) -> None:
        pass


class HostPeers:
    """`SymmetricBackend` of rank 0. One arena in pinned host memory stands for all peers."""

    rank = 0

    def __init__(self, size: int, dry: bool) -> None:
        self.size, self.ranks, self._dry = size, range(size), dry
        self.device = torch.device("cpu" if dry else "cuda")
        self.computing = self._queue(None)

    def _queue(self, stream: Any) -> Any:
        if self._dry:
            return ImmediateQueue()
        from megatron_overlap.comm.symmetric.stream_queue import StreamQueue

        return StreamQueue(stream)

    def queue(self) -> Any:
        return self._queue(None if self._dry else torch.cuda.Stream(priority=-1))

    def map(self, num_bytes: int, name: str = "") -> list[torch.Tensor]:
        own = torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)
        far = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=not self._dry)
        return [own, *[far] * (self.size - 1)]

    def barrier(self) -> None:
        """Return: there is one rank."""

    def all_gather_text(self, text: str) -> list[str]:
        return [text] * self.size

    def is_capturing(self) -> bool:
        return False

    def close(self) -> None:
        """Free nothing."""


class HostPeersTransport(CopyTransport):
    """Sends to the host, and receives what `sent_by` returns for a message."""

    def __init__(self, backend: HostPeers, sent_by: Callable[[Message], torch.Tensor]) -> None:
        super().__init__(backend)  # type: ignore[arg-type]
        self.sent_by = sent_by
        self.share = 1
        self.arrival_s = 0.0
        self.arriving = backend.queue()
        self.queues = self.queues._replace(sending=HostQueue(self.queues.sending, self))  # type: ignore[arg-type]

    def begin(self, transfers: Sequence[Transfer], op: str) -> CopyP2PWork:
        assert isinstance(transfers, Exchange), "an operation without symmetric buffers"
        prepared = transfers.repeated.prepared
        state = prepared.get(op)
        if state is None:
            messages = self._prepared(transfers, op)
            # Flags at the peers stay set: the host clears none.
            messages.buffers_are_free = []
            state = prepared[op] = HostPeersState(messages, self, *self._steps_of_peers(transfers))
        self.backend.computing.mark()  # by torch, which gives a new thread a context
        start = time.perf_counter()
        self.backend.computing.run(state.freed)
        self.arrival_s += time.perf_counter() - start
        work = CopyP2PWork(self, state, transfers)
        work.mark_ready(0)
        return work

    def _steps_of_peers(self, transfers: Sequence[Transfer]) -> tuple[object, list[tuple[torch.Tensor, object]]]:
        """The steps that free the buffers of the peers, and where their messages arrive with the steps that follow."""
        assert isinstance(self.buffer_pool, HeapPool)
        free: dict[int, FlagStep] = {}
        sent, numbers, arriving = [], Counter[int](), self.arriving
        for transfer in transfers:
            buffer, source = self.buffer_pool.buffer_of(transfer.recv), transfer.message.source
            assert buffer is not None, "a message that is not between symmetric buffers"
            step = FlagStep(buffer.words[0], buffer.flag(source, numbers[source]), sets=True)
            sent.append((transfer.recv.view(-1), arriving.prepare([step])))
            numbers[source] += 1
            free[transfer.message.to] = FlagStep(buffer.words[0], buffer.free(transfer.message.to), sets=True)
        return self.backend.computing.prepare(list(free.values())), sent

    def arrive_after(self, position: object) -> None:
        """Let later messages of the peers arrive after a position of the computing queue."""
        start = time.perf_counter()
        self.arriving.after(position)
        self.arrival_s += time.perf_counter() - start

    def arrive(self, messages: list[tuple[torch.Tensor, torch.Tensor, object]], own_rows: object) -> None:
        """Enqueue messages of peers. Their hosts do this, so the time is not that of this rank."""
        start = time.perf_counter()
        for source, into, sent in messages:
            with nullcontext() if source.device == into.device else torch.cuda.stream(self.arriving.stream):
                _share(into, self.share).copy_(_share(source, self.share), non_blocking=True)
            self.arriving.run(sent)
        self.arrival_s += time.perf_counter() - start


class HostPeersState(State):
    """Lets message k arrive after what message k of this rank follows.

    Args:
        freed: the steps that free the buffers of the peers.
        of_peers: where the messages of the peers arrive, with the steps that follow.
    """

    def __init__(
        self,
        messages: CopyMessages,
        transport: HostPeersTransport,
        freed: object,
        of_peers: list[tuple[torch.Tensor, object]],
    ) -> None:
        super().__init__(messages, captured=False, copies_own=False)
        self.freed, self._transport, self._of_peers = freed, transport, of_peers

    def _send_next(self, queues: Queues) -> None:
        transport, first = self._transport, self._num_sent
        messages = [message.plan for message in self._next_call()]
        self._steps.append((AFTER, transport.arrive_after, self._marks[messages[0].after_work], None))
        arriving = [
            (transport.sent_by(message).view(-1), *self._of_peers[number])
            for number, message in enumerate(messages, first)
        ]
        self._steps.append((COPY, transport.arrive, arriving, ()))
        super()._send_next(queues)


SHARES = 8, 1
"""Of each message, the first of so many parts is copied."""


def _share(tensor: torch.Tensor, share: int) -> torch.Tensor:
    return tensor.view(-1)[: tensor.numel() // share]


class HostQueue:
    """A queue to the host that copies one `share`th of each message."""

    def __init__(self, queue: Any, transport: Any) -> None:
        self._queue, self._transport = queue, transport

    def prepare_copies(self, copies: Sequence[Copy], *, captured: bool = False) -> object:
        def cut(share: int) -> list[Copy]:
            return [tuple(None if each is None else _share(each, share) for each in copy) for copy in copies]  # type: ignore[misc]

        return {share: self._queue.prepare_copies(cut(share)) for share in SHARES}

    def copy_all(self, prepared: Any, tensors: Sequence[torch.Tensor]) -> None:
        share = self._transport.share
        self._queue.copy_all(prepared[share], [_share(tensor, share) for tensor in tensors])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queue, name)


class _Problem:
    """One layer of rank 0 of `shape.ranks`, and what its peers send."""

    def __init__(self, shape: Shape, dry: bool) -> None:
        self.device, self.shape = measured_device(dry), shape
        self.gathers = shape.op == "ag"
        dtype, name = torch.bfloat16, self.device.name
        self.width = shape.k if self.gathers else shape.n
        shard = shape.m // shape.ranks
        self.whole = torch.randn(shape.m, self.width, device=name).to(dtype)
        self.far = self.whole.cpu() if dry else self.whole.cpu().pin_memory()
        rows = shard if self.gathers else shape.m
        self.x = self.whole[:shard].clone() if self.gathers else torch.randn(rows, shape.k, device=name).to(dtype)
        self.w = torch.randn(shape.n, shape.k, device=name).to(dtype)
        self.transport = HostPeersTransport(HostPeers(shape.ranks, dry), self._sent_by)
        self.out: Any = None
        self.main_grad = torch.zeros(shape.n, shape.k, device=name)
        self.dy = torch.randn(shape.m if self.gathers else shard, shape.n, device=name).to(dtype)

    def _sent_by(self, message: Message) -> torch.Tensor:
        """Rows of the gathered input, or a peer's sums of rows of this rank: those at the peer's place."""
        rows = slice(*self.layout.rows(message.recv))
        if message.recv.owner == 0:
            start, shard = message.source * (self.shape.m // self.shape.ranks), rows
            rows = slice(start + shard.start, start + shard.stop)
        return self.far[rows]

    def method(self, plan: LinearPlan) -> P2PMethod:
        collective: Any = "all_gather" if self.gathers else "reduce_scatter"
        row_bytes = self.width * self.far.itemsize
        self.schedule, self.layout = plan.schedule(
            collective, self.transport, self.shape.m, row_bytes, self.whole.device
        )
        return P2PMethod(self.transport, plan)

    def overlapped(self, method: P2PMethod) -> None:
        """Forward."""
        function = all_gather_linear if self.gathers else linear_reduce_scatter
        with torch.no_grad():
            self.out = function(self.x, self.w, group=method)

    def both_passes(self, method: P2PMethod) -> None:
        """Forward and backward, the weight gradient added to an fp32 buffer."""
        function = all_gather_linear if self.gathers else linear_reduce_scatter
        x, w = self.x.detach().requires_grad_(), self.w.detach().requires_grad_()
        y = function(x, w, group=method, main_grad=self.main_grad)
        y.backward(self.dy)

    def gemms_alone(self) -> None:
        """The GEMMs of both passes on resident data."""
        x = self.whole if self.gathers else self.x
        dy = self.dy if self.gathers else self.whole
        torch.mm(x, self.w.t())
        torch.mm(dy, self.w)
        add_product(self.main_grad, dy.t(), x, self.transport.buffer_pool)

    def messages_alone(self, method: P2PMethod) -> None:
        """The same messages, and the sum of a reduce-scatter, without a GEMM."""
        if self.gathers:
            method.gather(self.x, self.shape.m, "alone").finish()
            return
        out = self.x.new_empty(self.shape.m // self.shape.ranks, self.width)
        scatter = PipelinedReduceScatter(self.transport, self.schedule, self.layout, out, "alone")
        scatter.compute(lambda start, stop, out: None)
        scatter.finish()

    def gemm_alone(self) -> None:
        torch.mm(self.whole if self.gathers else self.x, self.w.t())

    def is_right(self) -> bool:
        """Whether the last result is the product of all rows, or the sum of the own rows and what the peers sent."""
        shard, weight = self.shape.m // self.shape.ranks, self.w.double()
        if self.gathers:
            x = self.whole.double()
            return not is_wrong(self.out, x @ weight.t(), x.abs() @ weight.abs().t())
        own, terms = self.x[:shard].double(), self.whole.double().view(self.shape.ranks, shard, -1)[1:]
        exact = own @ weight.t() + terms.sum(0)
        return not is_wrong(self.out, exact, own.abs() @ weight.abs().t() + terms.abs().sum(0))


PLANS = {
    "p2p": LinearPlan(pattern="direct"),
    "serial": LinearPlan(pattern="serial"),
}


def link(dry: bool, deadline: float) -> Iterator[dict[str, Any]]:
    """Forward of each shape with each plan, the messages alone, and cuBLAS alone.

    Each is timed over PCIe. A second time an eighth of each message is copied, as if the link were eight times as fast.
    """
    for shape in shapes(dry):
        if time.perf_counter() > deadline:
            return
        problem = _Problem(shape, dry)
        for share in SHARES:
            yield _row(problem, share)
        problem.transport.close()
        del problem
        if not dry:
            torch.cuda.empty_cache()


def _row(problem: _Problem, share: int) -> dict[str, Any]:
    gpu, shape, transport = problem.device, problem.shape, problem.transport
    repeats = REPEATS // 3
    right = True
    transport.share = 1
    for plan in PLANS.values():
        # Buffers are compared between ranks at first use, and libraries load their kernels. Then with whole messages.
        method, problem.out = problem.method(plan), None
        problem.overlapped(method)
        gpu.synchronize()
        right &= problem.is_right()
        problem.both_passes(method)
        gpu.synchronize()
    transport.share = share
    found: dict[str, list[float]] = {}

    def measure(name: str, enqueue: Callable[[], object]) -> None:
        before = transport.arrival_s
        found.setdefault(name, []).append(gpu.timed_ms(enqueue, None, repeats))
        arrivals_us = (transport.arrival_s - before) / (repeats + 3) * 1e6
        found.setdefault(f"{name} host_us", []).append(gpu.host_us - arrivals_us)

    for _ in range(3):
        measure("gemm", problem.gemm_alone)
        for name, plan in PLANS.items():
            method = problem.method(plan)
            if name == "p2p":
                measure("messages", partial(problem.messages_alone, method))
            measure(name, partial(problem.overlapped, method))
            measure(f"both {name}", partial(problem.both_passes, method))
        measure("both gemm", problem.gemms_alone)
    at = {name: median(values) for name, values in found.items()}
    return {
        "shape": shape.name,
        "op": shape.op,
        "mnk": [shape.m, shape.n, shape.k],
        "share": share,
        "link_gbps": shape.link_bytes / at["messages"] / 1e6,
        "ms": {name: value for name, value in at.items() if not name.endswith("host_us")},
        "host_us": {name.removesuffix(" host_us"): value for name, value in at.items() if name.endswith("host_us")},
        **overlap_figures(at["gemm"], at["messages"], at["p2p"]),
        "right": right,
    }
