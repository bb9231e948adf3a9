"""The transport protocol: an ordered stream of messages beside the computation."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from megatron_overlap.comm.buffers import BufferPool
from megatron_overlap.diagnostics.flight_recorder import FlightRecorder
from megatron_overlap.schedules.plan import Message
from megatron_overlap.tracing.events import Trace


class TransportError(RuntimeError):
    """A message did not arrive: names the peer, the op and the chunk; under a `FlightRecorder` also layer, step and
    more.

    Args:
        text: for people.
        peer: global rank that was waited for; -1 where it is not one.
    """

    def __init__(self, text: str, *, peer: int = -1) -> None:
        super().__init__(text)
        self.peer = peer
        self.explained = False


@dataclass(frozen=True, slots=True)
class Transfer:
    """One message with its bytes: contiguous tensors, either of which may be empty and is then not sent."""

    message: Message
    send: torch.Tensor
    recv: torch.Tensor


class P2PWork(Protocol):
    """The messages of one op, on their way."""

    def mark_ready(self, work_done: int) -> None:
        """Says that `work[:work_done]` of the plan is done: sends that waited for it may leave."""

    def wait(self, message: int) -> None:
        """Returns when what `message` receives may be read (on CUDA: orders the current stream after it).

        Raises:
            TransportError: the peer is gone or the deadline has passed.
        """

    def is_completed(self, message: int) -> bool:
        """Whether `wait` would return at once. Always False where asking would cost a synchronisation."""

    def wait_all(self) -> None:
        """Waits until everything has landed and left: all buffers belong to the caller again.

        Raises:
            TransportError: the peer is gone or the deadline has passed.
        """


class Transport(Protocol):
    """Point-to-point messages between the ranks of one group, in the order in which they are posted.

    Every rank of the group begins the same p2p_works in the same order.
    """

    rank: int
    size: int
    buffer_pool: BufferPool

    @property
    def exposed_s(self) -> float:
        """Seconds that computation has stood still for messages so far; 0 where it is not measured."""

    def begin(self, transfers: Sequence[Transfer], op: str) -> P2PWork:
        """Posts the messages of one op. `op` is its name in messages to people."""

    def close(self) -> None:
        """Ends the transport's threads and streams and lets its buffers go."""


class Ordered:
    """A transport that tells nobody what has landed: what is done when then depends on the plan alone.

    The answer that ops get is the one that a device gives that cannot be asked (see `P2PWork.is_completed`).
    """

    def __init__(self, inner: Transport) -> None:
        self._inner = inner
        self.rank, self.size, self.buffer_pool = inner.rank, inner.size, inner.buffer_pool

    @property
    def exposed_s(self) -> float:
        """See `Transport.exposed_s`."""
        return self._inner.exposed_s

    def begin(self, transfers: Sequence[Transfer], op: str) -> P2PWork:
        """See `Transport.begin`."""
        return _OrderedP2PWork(self._inner.begin(transfers, op))

    def close(self) -> None:
        """See `Transport.close`."""
        self._inner.close()


class _OrderedP2PWork:
    def __init__(self, inner: P2PWork) -> None:
        self.mark_ready, self.wait, self.wait_all = inner.mark_ready, inner.wait, inner.wait_all

    def is_completed(self, message: int) -> bool:
        return False


# Keyed by the group, which owns its transports, by channel: they go when the group goes, or by close_transport.
_TRANSPORTS: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, Transport]] = weakref.WeakKeyDictionary()


def transport_of(
    group: dist.ProcessGroup,
    *,
    timeout_s: float | None = None,
    channel: str = "",
    trace: Trace | None = None,
    flight_recorder: FlightRecorder | None = None,
    ordered: bool = False,
    register: bool = False,
) -> Transport:
    """The transport of `group`; made by the first call, which all ranks of the group must make.

    A group of its own carries the messages, so that they are never ordered behind Megatron's collectives.

    Args:
        group: a gloo or NCCL process group.
        timeout_s: deadline of one wait in seconds, looked at by the first call; None means that of `group`.
        channel: a name for one of several transports of the same ranks: the order in which p2p_works begin counts
        within
            a channel alone.
        trace: gets events of all messages and waits, looked at by the first call.
        flight_recorder: notes what is on its way, to tell it when a wait fails; looked at by the first call.
        ordered: nobody is told what has landed, so that nothing depends on it; looked at by the first call.
        register: NCCL's buffers are its own and registered with the communicator; looked at by the first call.

    Raises:
        TransportError: not all ranks of the group came within the deadline; this torch registers no buffers.
        ValueError: the group's backend carries no point-to-point messages that this package knows.
    """
    transports = _TRANSPORTS.setdefault(group, {})
    transport = transports.get(channel)
    if transport is None:
        backend = dist.get_backend(group)
        if backend == "gloo":
            from megatron_overlap.comm.gloo import GlooTransport

            transport = GlooTransport(
                group, timeout_s=timeout_s, trace=trace, channel=channel, flight_recorder=flight_recorder
            )
        elif backend == "nccl":
            from megatron_overlap.comm.nccl import NcclTransport

            transport = NcclTransport(group, timeout_s=timeout_s, trace=trace, channel=channel, register=register)
        else:
            raise ValueError(f"group: backend {backend}: overlap needs gloo or nccl")
        if ordered:
            transport = Ordered(transport)
        transports[channel] = transport
    return transport


def close_transport(group: dist.ProcessGroup) -> None:
    """Closes the transports of `group`, in all channels."""
    for transport in _TRANSPORTS.pop(group, {}).values():
        transport.close()


def store_beside(group: dist.ProcessGroup) -> dist.Store:
    """A key-value store that exactly the ranks of `group` share, to make one more communicator of them.

    `new_group` would need every rank of the job, or, with local synchronisation, derives its name from the number of
    groups that a rank is in, which differs between the ranks of Megatron's groups: they would wait for each other for
    ever (seen with torch 2.13).
    """
    store: dist.Store = dist.distributed_c10d._get_process_group_store(group)
    # One name a generation: a closed transport's keys must not be met by the next one's.
    generation = _GENERATIONS.get(group, 0)
    _GENERATIONS[group] = generation + 1
    return dist.PrefixStore(f"megatron_overlap/{generation}", store)


_GENERATIONS: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()
