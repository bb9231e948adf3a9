"""Point-to-point messages over NCCL on a separate stream that events order against the computation, and collectives.

The host never waits. Every dependency is an event, so that correctness does not depend on the order in which the device
executes several queues (CUDA_DEVICE_MAX_CONNECTIONS). For a trace, pairs of events measure messages and waits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from megatron_overlap.comm.buffers import BufferPool
from megatron_overlap.comm.host_group import store_beside
from megatron_overlap.comm.transport import DEFAULT_OPTIONS, Transfer, TransportError, TransportOptions
from megatron_overlap.diagnostics.consistency import ranks_text
from megatron_overlap.schedules import Chunk, Message
from megatron_overlap.schedules.plan import end_of_call
from megatron_overlap.tracing import Kind, Trace, WorkEvents


class NcclTransport:
    """See `Transport`. Owns an NCCL group of the same ranks, a high-priority stream, events and a buffer pool.

    Raises:
        TransportError: `register_buffers` is set, and this torch cannot register buffers.
    """

    copy_engines = capturable = prepares = False
    on_device = True

    def __init__(self, group: dist.ProcessGroup, options: TransportOptions = DEFAULT_OPTIONS) -> None:
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.exposed_s, self._channel, self._num_p2p_works = 0.0, options.channel, 0
        self._timing = CudaEvents(options.trace) if options.trace is not None else None
        self.ranks = dist.get_process_group_ranks(group)
        device = self._device = torch.device("cuda", torch.cuda.current_device())
        nccl_options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        limit_s = options.timeout_s
        nccl_options._timeout = timedelta(seconds=limit_s) if limit_s else group._get_backend(device).options._timeout
        store = store_beside(group)
        backend = dist.ProcessGroupNCCL(store, self.rank, self.size, nccl_options)
        # Only a `ProcessGroup` can post several messages as one NCCL group call.
        self._group = dist.ProcessGroup(store, self.rank, self.size)
        self._group._set_default_backend(dist.ProcessGroup.BackendType.NCCL)
        self._group._register_backend(device, dist.ProcessGroup.BackendType.NCCL, backend)
        # torch creates the communicator at the first message otherwise, and blocks the host until all ranks have one. A
        # rank whose first messages are empty would let its peers wait.
        backend.eager_connect_single_device(device)
        self._pool = _registered_pool(backend, device) if options.register_buffers else None
        within = nullcontext if self._pool is None else partial(torch.cuda.use_mem_pool, self._pool)
        self.buffer_pool = BufferPool(within=within)
        # Messages are short and peers wait for them: the device schedules them first.
        self._stream = torch.cuda.Stream(device, priority=-1)

    @property
    def collectives(self) -> NcclTransport:
        return self

    def begin(self, transfers: Sequence[Transfer], op: str) -> NcclP2PWork:
        return NcclP2PWork(self, transfers, op)

    def all_gather(self, shard: torch.Tensor, into: torch.Tensor, op: str) -> NcclCollective:
        return NcclCollective(self, partial(self._group._allgather_base, into, shard), into, shard, op)

    def reduce_scatter(self, rows: torch.Tensor, into: torch.Tensor, op: str) -> NcclCollective:
        return NcclCollective(self, partial(self._group._reduce_scatter_base, into, rows), rows, into, op)

    def _events(self, op: str) -> CudaWorkEvents | None:
        self._num_p2p_works += 1
        timing = self._timing
        return None if timing is None else timing.operation(self.ranks, self._channel, self._num_p2p_works, op)

    def close(self) -> None:
        self.buffer_pool.clear()
        backend = self._group._get_backend(self._device)
        if self._pool is not None:
            backend.deregister_mem_pool(self._pool)
            self._pool = None
        backend.shutdown()


def _registered_pool(backend: Any, device: torch.device) -> Any:
    """Return a memory pool whose present and future segments are registered with the communicator of the backend."""
    if not (hasattr(torch.cuda, "MemPool") and hasattr(backend, "register_mem_pool")):
        raise TransportError(f"overlap.register_buffers: torch {torch.__version__} cannot; set it to false")
    pool = torch.cuda.MemPool(backend.mem_allocator)
    backend.register_mem_pool(pool)
    return pool


class NcclP2PWork:
    """See `P2PWork`. Enqueues messages in order, each when its send is ready and the work that hides it is enqueued."""

    def __init__(self, transport: NcclTransport, transfers: Sequence[Transfer], op: str) -> None:
        self._transport, self._transfers, self._op = transport, transfers, op
        self._messages = [transfer.message for transfer in transfers]
        self._timing = transport._events(op)
        self._works: list[dist.Work | None] = []
        # Positions of the computing stream and the work done there. Kernels before the first may read receive buffers.
        self._positions: list[tuple[int, torch.cuda.Event]] = []
        self._work_done = self._followed = -1
        self._waited = 0, -1
        self.mark_ready(0)

    def mark_ready(self, work_done: int) -> None:
        # First what the last work hides: with one hardware queue, an event that waits for it would delay the message.
        self._enqueue_placed(work_done, self._work_done)
        left = self._transfers[len(self._works) :]
        if self._work_done < 0 or any(self._work_done < each.message.after_work <= work_done for each in left):
            position = torch.cuda.Event()
            position.record()
            self._positions.append((work_done, position))
        self._work_done = max(self._work_done, work_done)
        self._enqueue_placed(work_done, work_done)

    def _enqueue_placed(self, enqueued: int, done: int) -> None:
        """Enqueue the messages that the plan places after `work[:enqueued]` and that depend on `work[:done]`."""
        while transfers := self._next_transfers():
            if any(each.message.not_before > enqueued or each.message.after_work > done for each in transfers):
                break
            self._enqueue_next()

    def _next_transfers(self) -> Sequence[Transfer]:
        """The messages of the next NCCL group call: one, or all with the same number of a call."""
        first = len(self._works)
        return self._transfers[first : end_of_call(self._messages, first)]

    def _enqueue_next(self) -> None:
        """Enqueue the messages of the next call after the work that they depend on, but not after later work."""
        transport, transfers = self._transport, self._next_transfers()
        after_work = max(transfer.message.after_work for transfer in transfers)
        assert after_work <= self._work_done, "a message was never marked ready"
        while self._followed < after_work:
            self._followed, position = self._positions.pop(0)
            transport._stream.wait_event(position)
        with torch.cuda.stream(transport._stream):
            self._enqueue(transfers, len(self._works))

    def _enqueue(self, transfers: Sequence[Transfer], index: int) -> None:
        group, device, message = self._transport._group, self._transport._device, transfers[0].message
        start = self._timing.owner.mark() if self._timing is not None else None
        work = None
        try:
            if any(transfer.send.numel() or transfer.recv.numel() for transfer in transfers):
                # One NCCL group call for both directions: neither blocks the other.
                group._start_coalescing(device)
                for transfer in transfers:
                    message = transfer.message
                    if transfer.send.numel():
                        for tensor in (transfer.send, *transfer.extra_send):
                            group.send([tensor], message.to, 0)
                    if transfer.recv.numel():
                        for tensor in (transfer.recv, *transfer.extra_recv):
                            group.recv([tensor], message.source, 0)
                work = group._end_coalescing(device)
        except RuntimeError as error:
            ranks = self._transport.ranks
            raise TransportError(
                f"{self._op}: rank {ranks[self._transport.rank]} could not post message {index} to rank "
                f"{ranks[message.to]} and from rank {ranks[message.source]}: {error}"
            ) from error
        if self._timing is not None and start is not None:
            # Only for a trace: the wait of this stream blocks a single hardware queue until the message is complete.
            if work is not None:
                work.wait()
            for number, transfer in enumerate(transfers, len(self._works)):
                tag = transfer.message.tag
                self._timing.add(Kind.RECEIVED, start, number if tag is None else tag, transfer)
        self._works += [work] * len(transfers)

    def is_completed(self, message: int) -> bool:
        return False

    def wait(self, *messages: int) -> None:
        if not messages:
            return
        message = max(messages)
        while len(self._works) <= message:
            self._enqueue_next()
        # With one hardware queue a second wait for the same message delays later work until the stream reaches it.
        waited = torch.cuda.current_stream().cuda_stream, message
        if self._waited[0] == waited[0] and self._waited[1] >= message:
            return
        self._waited = waited
        start = self._timing.owner.mark() if self._timing is not None else None
        # Messages complete in order on the stream of NCCL. One that is empty in both directions has no work.
        work = next((work for work in reversed(self._works[: message + 1]) if work is not None), None)
        if work is not None:
            work.wait()
        if self._timing is not None and start is not None:
            self._timing.add(Kind.WAIT, start, message)

    def wait_all(self) -> None:
        if self._transfers:
            self.wait(len(self._transfers) - 1)
        if self._timing is not None:
            self._timing.add(Kind.OP, self._timing.began)


class NcclCollective:
    """See `CollectiveWork`. `start` enqueues it after the work of the current stream.

    In a trace it is one message to the next rank, as in a ring, of the rows `whole` of all ranks without `own` rows.
    """

    def __init__(
        self, transport: NcclTransport, start: Callable[[], dist.Work], whole: torch.Tensor, own: torch.Tensor, op: str
    ) -> None:
        self._timing = timing = transport._events(op)
        try:
            if timing is None:
                self._work = start()
                return
            transport._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(transport._stream):
                began = timing.owner.mark()
                self._work = start()
                # torch frees the operands after the first wait for the work, here on the transport's stream: NCCL may
                # still read them. This reference holds them until the caller's stream waits.
                self._operands: object = start
                # Only for a trace; see `NcclP2PWork`.
                self._work.wait()
                rank, size = transport.rank, transport.size
                to, source = (rank + 1) % size, (rank - 1) % size
                moved = whole.flatten()[own.numel() :]
                message = Message(Chunk(rank, 0), to, Chunk(source, 0), source)
                timing.add(Kind.RECEIVED, began, 0, Transfer(message, moved, moved))
        except RuntimeError as error:
            ranks = transport.ranks
            raise TransportError(
                f"{op}: rank {ranks[transport.rank]} could not start its part of a collective of ranks "
                f"{ranks_text(ranks)}: {error}"
            ) from error

    def wait(self) -> None:
        if self._timing is None:
            self._work.wait()
            return
        start = self._timing.owner.mark()
        self._work.wait()
        self._operands = None
        self._timing.add(Kind.WAIT, start, 0)
        self._timing.add(Kind.OP, self._timing.began)


class CudaEvents:
    """Collects pairs of timing events until the trace is taken, then converts them to the host's clock.

    A wait is the time between an event before `wait_event` and one after it on the computing stream. Taking the trace
    synchronises the device, so take it between steps.

    Attributes:
        intervals: two positions of a stream, and a function that records the times in ns at which it reached them.
    """

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self.intervals: list[tuple[torch.cuda.Event, torch.cuda.Event, Callable[[int, int], None]]] = []
        trace.settle.append(self._settle)

    def operation(self, ranks: Sequence[int], channel: str, number: int, op: str) -> CudaWorkEvents:
        """Return the recorder of one operation."""
        return CudaWorkEvents(self, WorkEvents(self._trace, ranks, channel, number, op), self.mark())

    def mark(self) -> torch.cuda.Event:
        """Record and return an event on the current stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _settle(self) -> None:
        if not self.intervals:
            return
        torch.cuda.synchronize()
        reference = self.mark()
        reference.synchronize()
        now = self._trace.clock()
        for start, stop, record in self.intervals:
            start_ns, stop_ns = (now - round(event.elapsed_time(reference) * 1e6) for event in (start, stop))
            record(start_ns, stop_ns)
        self.intervals.clear()


@dataclass(frozen=True, slots=True)
class CudaWorkEvents:
    """Records the events of one operation on a device. The operation started at `began`."""

    owner: CudaEvents
    events: WorkEvents
    began: torch.cuda.Event

    def add(self, kind: Kind, start: torch.cuda.Event, message: int = 0, transfer: Transfer | None = None) -> None:
        """Record an event of the current stream from `start` until now: a wait, the operation, or `transfer`."""
        # Numbers and not the transfer, whose tensors would live until the trace is taken.
        plan, sent, received = None, 0, 0
        if transfer is not None:
            plan = transfer.message
            sent = transfer.send_bytes if transfer.send.numel() else 0
            received = transfer.recv_bytes if transfer.recv.numel() else 0
        record = partial(self._record, kind, message, plan, sent, received)
        self.owner.intervals.append((start, self.owner.mark(), record))

    def _record(
        self, kind: Kind, message: int, plan: Message | None, sent: int, received: int, start_ns: int, stop_ns: int
    ) -> None:
        if plan is None:
            self.events.span(kind, start_ns, stop_ns, message)
            return
        if sent:
            self.events.message(Kind.SENT, start_ns, start_ns, message, plan.to, sent)
        if received:
            self.events.message(Kind.RECEIVED, start_ns, stop_ns, message, plan.source, received)
