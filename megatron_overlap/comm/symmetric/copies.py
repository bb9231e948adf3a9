"""Point-to-point messages as copies through symmetric memory: no kernel moves bytes, and no kernel waits.

A queue waits for a flag in memory without a kernel (`backend.Queue`), and clears it, so an operation enqueues the same
steps every time.

A message lands in a symmetric buffer of the receiver (`Transfer.lands`). It is a copy of each of its tensors. When
an operation begins, the receiver sets a flag at each sender, after the present work of its computing queue: that no
longer reads the buffer. The sender waits for it, copies, and sets a flag at the receiver, for which the computing queue
of the receiver waits. Or the sender sets a flag, and the receiver copies from a symmetric buffer of the sender
(`Transfer.reads`). All flags are those of the buffer (`heap`): one operation at a time uses a buffer.

A rank has one queue of sends and one of receives beside its computing queue. Each runs messages in the order of the
plan, so that each uses the whole link. Messages that the plan puts in one call are one batch of copies for the driver.

A device may run several queues in one hardware queue, in the order of their calls. Every wait is for a step that a peer
enqueues at an earlier point of the program, so this order has no deadlock.

A CUDA graph may capture operations, because they leave all flags as they found them. It keeps the dependencies of
steps, and not the order of their calls: during a capture every wait therefore depends on all flags that this rank sets
earlier in the program. Not yet run on several GPUs.

Queues note in host memory for which message they wait (`backend.Waits`). A `Watchdog` reads the notes, and names the
message and the peer when no queue has moved for the deadline.
"""

import sys
from collections import Counter
from collections.abc import Sequence
from itertools import chain, pairwise

import torch

from megatron_overlap.comm.buffers import BufferPool
from megatron_overlap.comm.symmetric.backend import FlagStep, SymmetricBackend, Wait, Waits
from megatron_overlap.comm.symmetric.copy_steps import (
    AFTER,
    COPY,
    COPY_OWN,
    MARK,
    RUN,
    Call,
    CopyMessage,
    CopyMessages,
    Queues,
    State,
)
from megatron_overlap.comm.symmetric.heap import MAX_FLAGS, HeapPool, SymmetricBuffer
from megatron_overlap.comm.transport import (
    DEFAULT_OPTIONS,
    Exchange,
    RepeatedTransfers,
    Transfer,
    TransportError,
    TransportOptions,
    message_text,
)
from megatron_overlap.diagnostics.heartbeat import Watchdog


class CopyTransport:
    """See `Transport`. Every message is a copy into the memory of the receiver.

    Args:
        backend: symmetric memory of the ranks; the transport closes it.
        options: deadline of a wait, and flight recorder. Without a deadline there is no watchdog.
    """

    prepares = capturable = True
    collectives = None

    def __init__(self, backend: SymmetricBackend, options: TransportOptions = DEFAULT_OPTIONS) -> None:
        self.backend, self.rank, self.size = backend, backend.rank, backend.size
        self.exposed_s = 0.0
        self.copy_engines = self.on_device = backend.device.type == "cuda"
        self._heap = HeapPool(backend)
        self.buffer_pool: BufferPool = self._heap
        self.queues = Queues(backend.computing, backend.queue(), backend.queue())
        self.waits = Waits(on_device=self.on_device)
        self._num_begun = 0
        # What the watchdog has found. Every later operation raises it.
        self.broken: TransportError | None = None
        self._timeout_s, self._flight_recorder = options.timeout_s, options.flight_recorder
        backend.barrier()
        self._watchdog: Watchdog | None = None
        if options.timeout_s is not None:
            self._watchdog = Watchdog(options.timeout_s, self._waiting, self._report)

    def begin(self, transfers: Sequence[Transfer], op: str) -> "CopyP2PWork":
        """See `Transport.begin`.

        Raises:
            TransportError: a message lands in no symmetric buffer, there are too many, or an earlier one was late.
        """
        if self.broken is not None:
            raise self.broken
        self._num_begun += 1
        repeats = isinstance(transfers, Exchange)
        exchange = transfers if isinstance(transfers, Exchange) else Exchange(RepeatedTransfers(transfers))
        captured, copies_own = self.backend.is_capturing(), exchange.into is not None
        if captured:
            self._heap.captured = True
            # A replay runs no Python: without this the watchdog would take repeated replays for one that does not move.
            self.waits.count_replay(self.backend.computing)
        key = op, captured, copies_own
        state: State | None = exchange.repeated.prepared.get(key)
        if state is None:
            messages = self._prepared(exchange, op, repeats=repeats)
            state = State(messages, captured=captured, copies_own=copies_own, repeats=repeats)
            exchange.repeated.prepared[key] = state
        work = CopyP2PWork(self, state, exchange)
        work.mark_ready(0)
        return work

    def _prepared(self, exchange: Exchange, op: str, *, repeats: bool = True) -> CopyMessages:
        messages, own = CopyMessages(op), exchange.own
        num_sent, num_received = Counter[tuple[int, int]](), Counter[tuple[int, int]]()
        awaited = list[tuple[CopyMessage, list[FlagStep]]]()
        for index, transfer in enumerate(exchange):
            plan, sends = transfer.message, transfer.send.numel() > 0
            message = CopyMessage(plan)
            messages.all.append(message)
            if not sends and not transfer.recv.numel():
                continue
            buffer = self._buffer_of(transfer, index, op)
            words, to, source = buffer.words, (plan.to, id(buffer)), (plan.source, id(buffer))
            sent = FlagStep(words[plan.to], buffer.flag(self.rank, num_sent[to]), sets=True)
            if sends:
                message.sent = [sent]
            if sends and transfer.reads is None:
                assert transfer.lands is not None
                places = (transfer.lands, *transfer.extra_lands)
                lands = [_at(buffer.data[plan.to], place) for place in places]
                message.own_rows = None if own is None else _rows_of(own, transfer.send)
                if message.own_rows is None:
                    message.copies = tuple(zip(lands, (transfer.send, *transfer.extra_send), strict=True))
                else:  # the message must not keep the own rows of this call
                    (message.lands,) = lands
                if not num_sent[to]:
                    wait = Wait(op, index, plan, "its buffer is not free")
                    note = self.waits.note(Waits.SENDING, wait, repeats=repeats)
                    awaited.append((message, [FlagStep(words[self.rank], buffer.free(plan.to), False, note)]))
            num_sent[to] += sends
            if transfer.recv.numel():
                flag = buffer.flag(plan.source, num_received[source])
                queue = Waits.COMPUTING if transfer.reads is None else Waits.RECEIVING
                note = self.waits.note(queue, Wait(op, index, plan), repeats=repeats)
                arrives = FlagStep(words[self.rank], flag, False, note)
                if transfer.reads is not None:
                    assert own is not None, "rows that this rank copies itself are rows of the call"
                    message.own_rows = _rows_of(own, transfer.recv)
                    message.reads = _at(buffer.data[plan.source], transfer.reads)
                    message.arrived = [arrives]
                else:
                    message.flag = arrives
                if transfer.reads is None and not num_received[source]:
                    messages.buffers_are_free.append(FlagStep(words[plan.source], buffer.free(self.rank), sets=True))
                num_received[source] += 1
        if max((*num_sent.values(), *num_received.values()), default=0) > MAX_FLAGS:
            raise TransportError(f"{op}: more than {MAX_FLAGS} messages between two ranks; use fewer chunks")
        if all(message.plan.after_work for message, _ in awaited):
            # The work before the first message hides the waits: one call of the driver.
            awaited = awaited[:1] and [(awaited[0][0], [step for _, steps in awaited for step in steps])]
        for message, steps in awaited:
            message.free = steps
        if own is not None:
            messages.own_rows = {message.own_rows for message in messages.all if message.own_rows is not None}
            bounds = {0, own.shape[0], *chain.from_iterable(messages.own_rows)}
            messages.runs_of_own = list(pairwise(sorted(bounds)))
        return messages

    def _buffer_of(self, transfer: Transfer, number: int, op: str) -> SymmetricBuffer:
        """The symmetric buffer in which message `number` lands, or from which the receiver copies it."""
        place = transfer.lands if transfer.reads is None else transfer.reads
        complete = place is not None and len(transfer.extra_lands) == len(transfer.extra_send)
        buffer = self._heap.buffer_of(place) if complete and place is not None else None
        if buffer is None:
            what = message_text(transfer.message, number, self.backend.ranks, sends=transfer.send.numel() > 0)
            raise TransportError(f"{op}: cannot {what}: it lands in no symmetric buffer; use overlap.transport: nccl")
        return buffer

    def _waiting(self) -> tuple[int, ...] | None:
        """The waits of the queues and the operations begun and replayed; None if no queue waits for a peer."""
        numbers = self.waits.numbers()
        return (*numbers, self._num_begun, self.waits.num_replayed()) if any(numbers) else None

    def _report(self, waiting: tuple[int, ...]) -> None:
        """Print which messages are late, and let later operations raise it. The computing thread may be blocked."""
        ranks, waits = self.backend.ranks, self.waits.of(waiting[:-2])
        peer = ranks[waits[0].peer]
        text = (
            f"{waits[0].op}: within {self._timeout_s:g} s rank {ranks[self.rank]} could not "
            f"{', and not '.join(wait.text(ranks) for wait in waits)}; look at the log of rank {peer}, or raise "
            "overlap.timeout_s if it is only slow"
        )
        if self._flight_recorder is not None:
            text = self._flight_recorder.explain(text, peer)
        self.broken = TransportError(text, peer=peer)
        self.broken.explained = True
        print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        """See `Transport.close`. Call it when no rank uses the memory any more."""
        if self._watchdog is not None:
            self._watchdog.close()
        self.buffer_pool.clear()
        self.backend.close()


def _at(data: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor of another rank, with the bytes `data` of a buffer, at the place of `tensor` in the own buffer."""
    start = tensor.storage_offset() * tensor.itemsize
    return data[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)


def _rows_of(own: torch.Tensor, send: torch.Tensor) -> tuple[int, int] | None:
    """Start and stop of the rows `send` of `own`; None if `send` is no part of it."""
    if send.untyped_storage()._cdata != own.untyped_storage()._cdata:
        return None
    start = (send.storage_offset() - own.storage_offset()) // own.stride(0)
    return start, start + send.shape[0]


class CopyP2PWork:
    """See `P2PWork`. Enqueues a send when it is ready and the work that hides it is enqueued; receives in `wait`."""

    def __init__(self, transport: CopyTransport, state: State, exchange: Exchange) -> None:
        self._transport, self._state = transport, state
        self._own, self._into = exchange.own, exchange.into
        self._own_rows = {} if exchange.own is None else state.messages.rows_of(exchange.own, exchange.cut)
        self._positions: list[object] = []

    def mark_ready(self, work_done: int) -> None:
        self._enqueue(work_done)

    def is_completed(self, message: int) -> bool:
        return False

    def wait(self, *messages: int) -> None:
        self._enqueue(messages)

    def wait_all(self) -> None:
        self._enqueue(None)

    def _enqueue(self, call: Call) -> None:
        steps, self._state = self._state.then.get(call) or self._state.plan(call, self._transport.queues)
        positions, own_rows = self._positions, self._own_rows
        try:
            for kind, do, a, b in steps:
                if kind == RUN:
                    do(a)
                elif kind == COPY:
                    do(a, [own_rows[rows] for rows in b])
                elif kind == AFTER:
                    do(positions[a])
                elif kind == MARK:
                    positions.append(do())
                else:
                    assert kind == COPY_OWN
                    do(self._into, self._own)
        except TransportError as error:
            rank = self._transport.backend.ranks[self._transport.rank]
            raise TransportError(
                f"{self._state.messages.op}: rank {rank} could not enqueue its messages: {error}"
            ) from error
