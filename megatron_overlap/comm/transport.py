"""Protocols of point-to-point transports: ordered messages between the ranks of one group, beside the computation."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, overload

import torch

from megatron_overlap.comm.buffers import BufferPool
from megatron_overlap.diagnostics.flight_recorder import FlightRecorder
from megatron_overlap.schedules.plan import Message
from megatron_overlap.tracing import Trace


class TransportError(RuntimeError):
    """A message did not arrive. The text names the peer, the operation and the chunk.

    Attributes:
        peer: global rank of the peer that failed; -1 if the failure names no single peer.
        explained: whether a `FlightRecorder` has added layer, step and state of the peer to the text.
    """

    def __init__(self, text: str, *, peer: int = -1) -> None:
        super().__init__(text)
        self.peer, self.explained = peer, False


@dataclass(frozen=True, slots=True)
class TransportOptions:
    """How to open one transport.

    Attributes:
        channel: key of `registry.CHANNELS`; each channel of a group is a separate transport.
        timeout_s: deadline of one wait in seconds; None means the timeout of the group.
        trace, flight_recorder: receive the events of messages and waits; explain failed waits.
        ordered: never report messages as completed, see `OrderedTransport`.
        register_buffers: allocate NCCL buffers from its own memory pool and register them with the communicator.
    """

    channel: str = ""
    timeout_s: float | None = None
    trace: Trace | None = None
    flight_recorder: FlightRecorder | None = None
    ordered: bool = False
    register_buffers: bool = False


DEFAULT_OPTIONS = TransportOptions()


@dataclass(frozen=True, slots=True)
class Transfer:
    """The contiguous tensors of one message. An empty `send` or `recv` is not transferred in that direction.

    Attributes:
        extra_send: further tensors for the same peer, such as the scales of a quantised chunk. None is sent if `send`
            is empty.
        extra_recv: further tensors to receive, as many as the peer sends, with equal sizes. None is received if
            `recv` is empty.
        lands: where `send` lands, in the buffer of this rank that has the name and size of the receiver's
            (`BufferPool.take` with `symmetric`); None if the ranks do not know. Given on all ranks or on none.
        extra_lands: where `extra_send` lands, in the same buffer.
        reads: where the peer has the rows of `recv`, in the buffer of this rank that has the name and size of the
            peer's. This rank may copy them from there; `send` is rows of the buffer too. The peer writes them after
            it has received an earlier message of the operation from this rank, so earlier copies are complete. Given
            on all ranks or on none, without `lands` and further tensors.
    """

    message: Message
    send: torch.Tensor
    recv: torch.Tensor
    extra_send: tuple[torch.Tensor, ...] = ()
    extra_recv: tuple[torch.Tensor, ...] = ()
    lands: torch.Tensor | None = None
    extra_lands: tuple[torch.Tensor, ...] = ()
    reads: torch.Tensor | None = None

    @property
    def send_bytes(self) -> int:
        """Bytes that this rank sends."""
        return self.send.nbytes + sum(tensor.nbytes for tensor in self.extra_send)

    @property
    def recv_bytes(self) -> int:
        """Bytes that this rank receives."""
        return self.recv.nbytes + sum(tensor.nbytes for tensor in self.extra_recv)


def message_text(message: Message, number: int, ranks: Sequence[int], *, sends: bool) -> str:
    """Return the send or the receive of message `number` in words, with the global numbers of `ranks`."""
    (owner, part), peer = (message.send, message.to) if sends else (message.recv, message.source)
    way = ("send", "to") if sends else ("receive", "from")
    return f"{way[0]} message {number} (chunk {part} of rank {ranks[owner]}) {way[1]} rank {ranks[peer]}"


class Repeated:
    """An operation that is repeated with the same buffers, and each time with other own rows.

    A subclass defines `build`. A function of the owner of the buffers would be a reference cycle, and the buffers would
    live until the garbage collector runs, which Megatron's `--manual-gc` delays.
    """

    @cached_property
    def prepared(self) -> dict[Any, Any]:
        """What a transport derives from the transfers, apart from the own rows, by keys of its own."""
        return {}

    def build(self, own: torch.Tensor | None) -> Sequence[Transfer]:
        """Return the transfers of the own rows of a call. A send is rows of them, or of a buffer."""
        raise NotImplementedError


class RepeatedTransfers(Repeated):
    """The same transfers in each call: all sends are rows of buffers."""

    def __init__(self, transfers: Sequence[Transfer]) -> None:
        self._transfers = transfers

    def build(self, own: torch.Tensor | None) -> Sequence[Transfer]:
        return self._transfers


class Exchange(Sequence[Transfer]):
    """The transfers of one call of a repeated operation, built when a transport reads them.

    Args:
        repeated: the operation.
        own: own rows of this call: one contiguous tensor. None if all sends are rows of buffers.
        into: the transport also copies `own` there, complete after `wait_all`; None: no copy.
        cut: rows of `own` that the caller has cut, by start and stop.
    """

    def __init__(
        self,
        repeated: Repeated,
        own: torch.Tensor | None = None,
        into: torch.Tensor | None = None,
        *,
        cut: dict[tuple[int, int], torch.Tensor] | None = None,
    ) -> None:
        self.repeated, self.own, self.into = repeated, own, into
        self.cut = {} if cut is None else cut

    @cached_property
    def _built(self) -> Sequence[Transfer]:
        return self.repeated.build(self.own)

    def __len__(self) -> int:
        return len(self._built)

    @overload
    def __getitem__(self, index: int) -> Transfer: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Transfer]: ...
    def __getitem__(self, index: int | slice) -> Transfer | Sequence[Transfer]:
        return self._built[index]


class P2PWork(Protocol):
    """All messages of one operation, like `torch.distributed.Work`.

    A wait raises `TransportError` if the peer is gone or the deadline has passed, here and in `CollectiveWork`.
    """

    def mark_ready(self, work_done: int) -> None:
        """Allow the sends that depend on `work[:work_done]` of the plan; on a device, enqueue those placed there."""

    def wait(self, *messages: int) -> None:
        """Return when the caller may read what `messages` receive. On CUDA: order the current stream after them."""

    def is_completed(self, message: int) -> bool:
        """Return whether `wait` would return at once. Always False where the answer needs a synchronisation."""

    def wait_all(self) -> None:
        """Return when all messages are sent and received, so that the caller may reuse all buffers."""


class CollectiveWork(Protocol):
    """A collective that has started, like `torch.distributed.Work`."""

    def wait(self) -> None:
        """Return when the caller may read the result and reuse the input. On CUDA: order the current stream."""


class Collectives(Protocol):
    """Collectives of whole tensors. Each starts when the work that the caller has enqueued before it is complete.

    Every rank of the group starts the same ones in the same order. The ranks have equal numbers of rows.
    """

    def all_gather(self, shard: torch.Tensor, into: torch.Tensor, op: str) -> CollectiveWork:
        """Start `into = all_gather(shard)`. `op` names it in errors and traces."""

    def reduce_scatter(self, rows: torch.Tensor, into: torch.Tensor, op: str) -> CollectiveWork:
        """Start `into = reduce_scatter(rows)`, a sum."""


class Transport(Protocol):
    """Point-to-point messages between the ranks of one group.

    Every rank of the group begins the same operations in the same order.

    Attributes:
        copy_engines: copy engines of GPUs move the messages, which take no SMs from GEMMs.
        on_device: streams of a device order messages and work. The host never waits, so no message is ever reported as
            completed.
        capturable: a CUDA graph that captures its operations may be replayed.
        prepares: derives the steps of an `Exchange` once, and does not build its transfers again. Each call
            receives into the same tensors, best into symmetric buffers.
    """

    rank: int
    size: int
    buffer_pool: BufferPool
    copy_engines: bool
    on_device: bool
    capturable: bool
    prepares: bool

    @property
    def exposed_s(self) -> float:
        """Seconds for which the computing thread has waited for messages; 0 if the transport does not measure it."""

    @property
    def collectives(self) -> Collectives | None:
        """The collectives of a library, faster than messages where no GEMM is cut; None if it has none."""

    def begin(self, transfers: Sequence[Transfer], op: str) -> P2PWork:
        """Post the messages of one operation. `op` names it in errors and traces."""

    def close(self) -> None:
        """Stop the threads and streams of the transport and free its buffers."""


class OrderedTransport:
    """Never reports messages as completed: the plan alone orders computation, and results are bitwise reproducible."""

    def __init__(self, inner: Transport) -> None:
        self._inner, self.close = inner, inner.close
        self.rank, self.size, self.buffer_pool = inner.rank, inner.size, inner.buffer_pool
        self.copy_engines, self.on_device, self.prepares = inner.copy_engines, inner.on_device, inner.prepares
        self.capturable = inner.capturable

    @property
    def exposed_s(self) -> float:
        return self._inner.exposed_s

    @property
    def collectives(self) -> None:
        """None: NCCL may select an algorithm whose order of additions varies."""

    def begin(self, transfers: Sequence[Transfer], op: str) -> P2PWork:
        return _OrderedP2PWork(self._inner.begin(transfers, op))


class _OrderedP2PWork:
    def __init__(self, inner: P2PWork) -> None:
        self.mark_ready, self.wait, self.wait_all = inner.mark_ready, inner.wait, inner.wait_all

    def is_completed(self, message: int) -> bool:
        return False
