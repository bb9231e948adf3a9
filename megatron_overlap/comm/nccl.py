"""Point-to-point messages over NCCL: a stream of their own, ordered against the computation by events.

Nothing here waits on the host, and nothing relies on the order in which the device takes work from several queues
(CUDA_DEVICE_MAX_CONNECTIONS): every dependency is an event.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from megatron_overlap.comm.buffers import Workspace
from megatron_overlap.comm.cuda_timing import CudaEvents, CudaFlightEvents
from megatron_overlap.comm.transport import TransportError, Wire, store_beside
from megatron_overlap.tracing.events import Trace


class NcclTransport:
    """See `Transport`. Owns an NCCL group, a high-priority stream, events and a workspace.

    Args:
        group: the group whose ranks talk; an NCCL group with the same ranks is made for the messages.
        timeout_s: deadline of NCCL's watchdog in seconds; None means that of `group`.
        workspace: where ops take their buffers.
        trace: gets the events of every flight; None records none.
        lane: which of several transports of these ranks this is.
        register: the workspace's memory is NCCL's own, registered with the communicator: it need not be copied
            through NCCL's buffers.

    Raises:
        TransportError: `register`, and this torch cannot.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        timeout_s: float | None = None,
        workspace: Workspace | None = None,
        trace: Trace | None = None,
        lane: str = "",
        register: bool = False,
    ) -> None:
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.exposed_s = 0.0
        self._lane = lane
        self._timing = CudaEvents(trace) if trace is not None else None
        self._num_flights = 0
        self.ranks = dist.get_process_group_ranks(group)
        device = torch.device("cuda", torch.cuda.current_device())
        timeout = timedelta(seconds=timeout_s) if timeout_s else group._get_backend(device).options._timeout
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options._timeout = timeout
        store = store_beside(group)
        backend = dist.ProcessGroupNCCL(store, self.rank, self.size, options)
        # In a process group of its own, which is what can post several messages as one NCCL group call.
        self._group = dist.ProcessGroup(store, self.rank, self.size)
        self._group._set_default_backend(dist.ProcessGroup.BackendType.NCCL)
        self._group._register_backend(device, dist.ProcessGroup.BackendType.NCCL, backend)
        self._device = device
        self._pool = _registered_pool(backend, device) if register else None
        within = nullcontext if self._pool is None else partial(torch.cuda.use_mem_pool, self._pool)
        self.workspace = workspace if workspace is not None else Workspace(within=within)
        # Messages are short and others wait for them: let the device take them first.
        self._stream = torch.cuda.Stream(device, priority=-1)
        self._free_events: list[torch.cuda.Event] = []

    def begin(self, wires: Sequence[Wire], op: str) -> NcclFlight:
        """See `Transport.begin`."""
        self._num_flights += 1
        timing = self._timing
        events = timing.flight(self.ranks, self._lane, self._num_flights, op) if timing is not None else None
        return NcclFlight(self, wires, op, events)

    def event(self) -> torch.cuda.Event:
        """An event that nobody uses; given back by `recycle`."""
        return self._free_events.pop() if self._free_events else torch.cuda.Event()

    def recycle(self, events: Sequence[torch.cuda.Event]) -> None:
        """Takes back events whose waits have all been enqueued."""
        self._free_events += events

    def close(self) -> None:
        """See `Transport.close`."""
        self._free_events.clear()
        self.workspace.clear()
        backend = self._group._get_backend(self._device)
        if self._pool is not None:
            backend.deregister_mem_pool(self._pool)
            self._pool = None
        backend.shutdown()


def _registered_pool(backend: Any, device: torch.device) -> Any:
    """A memory pool whose segments, those of later too, are registered with the backend's communicator."""
    if not (hasattr(torch.cuda, "MemPool") and hasattr(backend, "register_mem_pool")):
        raise TransportError(f"overlap.register_buffers: torch {torch.__version__} cannot; set it to false")
    # torch registers with a communicator that is there, and makes them at the first message otherwise.
    backend.eager_connect_single_device(device)
    pool = torch.cuda.MemPool(backend.mem_allocator)
    backend.register_mem_pool(pool)
    return pool


class NcclFlight:
    """See `Flight`. Exchanges are enqueued in order, each as soon as its send is ready."""

    def __init__(
        self, transport: NcclTransport, wires: Sequence[Wire], op: str, timing: CudaFlightEvents | None
    ) -> None:
        self._transport = transport
        self._wires = wires
        self._op = op
        self._timing = timing
        self._landed: list[torch.cuda.Event] = []
        # Receive buffers may still be read by what the computing stream has enqueued before.
        self._order_after_compute()
        self.release(0)

    def _order_after_compute(self) -> None:
        ready = self._transport.event()
        ready.record()
        self._transport._stream.wait_event(ready)
        self._transport.recycle([ready])

    def release(self, work_done: int) -> None:
        """See `Flight.release`."""
        wires = self._wires
        first = len(self._landed)
        if first == len(wires) or wires[first].exchange.after_work > work_done:
            return
        if work_done:
            self._order_after_compute()
        with torch.cuda.stream(self._transport._stream):
            while len(self._landed) < len(wires) and wires[len(self._landed)].exchange.after_work <= work_done:
                self._enqueue(wires[len(self._landed)])

    def _enqueue(self, wire: Wire) -> None:
        group, exchange = self._transport._group, wire.exchange
        device = self._transport._device
        index = len(self._landed)
        start = self._timing.mark() if self._timing is not None else None
        try:
            if wire.send.numel() or wire.recv.numel():
                # One NCCL group call for both directions: neither waits for the other.
                group._start_coalescing(device)
                if wire.send.numel():
                    group.send([wire.send], exchange.to, 0)
                if wire.recv.numel():
                    group.recv([wire.recv], exchange.source, 0)
                group._end_coalescing(device).wait()
        except RuntimeError as error:
            ranks = self._transport.ranks
            raise TransportError(
                f"{self._op}: rank {ranks[self._transport.rank]} could not post exchange {index} to rank "
                f"{ranks[exchange.to]} and from rank {ranks[exchange.source]}: {error}"
            ) from error
        if self._timing is not None and start is not None:
            self._timing.moved(start, index, wire)
        landed = self._transport.event()
        landed.record()
        self._landed.append(landed)

    def landed(self, exchange: int) -> bool:
        """See `Flight.landed`."""
        return False

    def wait(self, exchange: int) -> None:
        """See `Flight.wait`."""
        start = self._timing.mark() if self._timing is not None else None
        torch.cuda.current_stream().wait_event(self._landed[exchange])
        if self._timing is not None and start is not None:
            self._timing.waited(start, exchange)

    def finish(self) -> None:
        """See `Flight.finish`."""
        assert len(self._landed) == len(self._wires), "an exchange was never released"
        if self._landed:
            self.wait(len(self._landed) - 1)
            self._transport.recycle(self._landed)
        if self._timing is not None:
            self._timing.finished()
