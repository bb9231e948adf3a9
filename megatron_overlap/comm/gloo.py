"""Point-to-point messages over gloo: a sending thread, and a receiving one for each peer, beside the computation.

gloo gives no way to ask whether a message has landed, and a forwarded or ordered send must be posted by somebody
while the computing thread is inside a GEMM. Threads do both. They sleep in gloo, which lets go of the interpreter
lock, as torch's GEMMs do. Messages of one peer land in order; those of several share the link, so each peer needs a
thread of its own to see them land.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from queue import SimpleQueue

import torch
import torch.distributed as dist

from megatron_overlap.comm.transport import TransportError, Wire, store_beside
from megatron_overlap.comm.workspace import Workspace

# A tag is 31 bits: this many exchanges in one op, and this many ops before tags repeat, long after they have landed.
_TAGS_PER_OP = 1 << 13
_NUM_OPS = 1 << 17
_SENDS_IN_FLIGHT = 4


class GlooTransport:
    """See `Transport`. Owns a gloo group, a thread for sending and one for each peer, and a workspace.

    Args:
        group: the group whose ranks talk; a gloo group with the same ranks is made for the messages.
        timeout_s: deadline of one wait in seconds; None means that of `group`.
        workspace: where ops take their buffers.
    """

    def __init__(
        self, group: dist.ProcessGroup, *, timeout_s: float | None = None, workspace: Workspace | None = None
    ) -> None:
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.workspace = workspace if workspace is not None else Workspace()
        self.exposed_s = 0.0
        self.ranks = dist.get_process_group_ranks(group)
        timeout = (
            timedelta(seconds=timeout_s) if timeout_s else group._get_backend(torch.device("cpu")).options._timeout
        )
        self.timeout_s = timeout.total_seconds()
        self._group = dist.ProcessGroupGloo(store_beside(group), self.rank, self.size, timeout)
        self._op = 0
        self._threads: list[threading.Thread] = []
        self._sender = self._serve("send", GlooFlight.send_all)
        self._receivers = {
            peer: self._serve(f"receive_{peer}", partial(GlooFlight.receive_from, peer=peer))
            for peer in range(self.size)
            if peer != self.rank
        }

    def begin(self, wires: Sequence[Wire], op: str) -> GlooFlight:
        """See `Transport.begin`."""
        if len(wires) > _TAGS_PER_OP:
            raise ValueError(f"{op}: {len(wires)} exchanges: at most {_TAGS_PER_OP}; use fewer chunks per rank")
        self._op = (self._op + 1) % _NUM_OPS
        flight = GlooFlight(self, wires, op, self._op * _TAGS_PER_OP)
        for peer in {wire.exchange.source for wire in wires}:
            self._receivers[peer].put(flight)
        self._sender.put(flight)
        return flight

    def close(self) -> None:
        """See `Transport.close`. Messages still on their way are given up with the group."""
        for queue in (self._sender, *self._receivers.values()):
            queue.put(None)
        for thread in self._threads:
            # A thread that waits for a dead peer ends with the group's deadline; it is a daemon and holds up nobody.
            thread.join(timeout=1.0)
        self.workspace.clear()

    def _serve(self, name: str, part: Callable[[GlooFlight], None]) -> SimpleQueue[GlooFlight | None]:
        """Starts a thread that does its part of each flight put into the queue, in order; None ends it."""
        queue: SimpleQueue[GlooFlight | None] = SimpleQueue()

        def serve() -> None:
            while (flight := queue.get()) is not None:
                part(flight)

        thread = threading.Thread(target=serve, name=f"megatron_overlap_{name}", daemon=True)
        thread.start()
        self._threads.append(thread)
        return queue


class GlooFlight:
    """See `Flight`."""

    def __init__(self, transport: GlooTransport, wires: Sequence[Wire], op: str, tag: int) -> None:
        self._transport = transport
        self._wires = wires
        self._op = op
        self._tag = tag
        self._changed = threading.Condition()
        self._work_done = 0
        self._landed = [wire.recv.numel() == 0 for wire in wires]
        self._num_landed = 0
        self._all_sent = False
        self._error: TransportError | None = None
        group = transport._group
        # All receives are posted at once, so that gloo's sender never waits for the receiver's word. Both ends know a
        # message by the same number: the checker proves that it is the same exchange of both plans.
        self._receives = [
            None if landed else group.recv([wire.recv], wire.exchange.source, tag + index)
            for index, (wire, landed) in enumerate(zip(wires, self._landed, strict=True))
        ]

    def release(self, work_done: int) -> None:
        """See `Flight.release`."""
        with self._changed:
            self._work_done = work_done
            self._changed.notify_all()

    def landed(self, exchange: int) -> bool:
        """See `Flight.landed`."""
        return self._landed[exchange]

    def wait(self, exchange: int) -> None:
        """See `Flight.wait`."""
        if not self._landed[exchange]:
            self._sleep(lambda: self._landed[exchange])

    def finish(self) -> None:
        """See `Flight.finish`."""
        num = len(self._wires)
        if self._num_landed < num or not self._all_sent:
            self._sleep(lambda: self._num_landed == num and self._all_sent)

    def _sleep(self, ready: Callable[[], bool]) -> None:
        start = time.perf_counter()
        with self._changed:
            while not ready() and self._error is None:
                self._changed.wait()
        self._transport.exposed_s += time.perf_counter() - start
        if self._error is not None:
            raise self._error

    def receive_from(self, peer: int) -> None:
        """A receiving thread's part: the messages of one peer."""
        for index, wire in enumerate(self._wires):
            if wire.exchange.source != peer:
                continue
            work = self._receives[index]
            if work is not None:
                try:
                    work.wait()
                except RuntimeError as error:
                    self._fail(f"receive exchange {index} from", peer, error)
                    return
            with self._changed:
                self._landed[index] = True
                self._num_landed += 1
                self._changed.notify_all()

    def send_all(self) -> None:
        """The sending thread's part: in order, each when it is ready, a few at a time."""
        leaving: deque[tuple[int, dist.Work]] = deque()
        for index, wire in enumerate(self._wires):
            exchange = wire.exchange
            with self._changed:
                while self._error is None and not self._may_send(index):
                    self._changed.wait()
                if self._error is not None:
                    return
            if wire.send.numel():
                if len(leaving) == _SENDS_IN_FLIGHT and not self._see_off(*leaving.popleft()):
                    return
                leaving.append((index, self._transport._group.send([wire.send], exchange.to, self._tag + index)))
        while leaving:
            if not self._see_off(*leaving.popleft()):
                return
        with self._changed:
            self._all_sent = True
            self._changed.notify_all()

    def _see_off(self, index: int, work: dist.Work) -> bool:
        """Waits until a message has left; False where it cannot."""
        try:
            work.wait()
        except RuntimeError as error:
            self._fail(f"send exchange {index} to", self._wires[index].exchange.to, error)
            return False
        return True

    def _may_send(self, index: int) -> bool:
        exchange = self._wires[index].exchange
        forwarded = exchange.after_exchange
        return exchange.after_work <= self._work_done and (forwarded is None or self._landed[forwarded])

    def _fail(self, what: str, peer: int, error: RuntimeError) -> None:
        transport = self._transport
        cause = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        with self._changed:
            # The first failure is the cause; gloo closes the pair, and the other thread fails after it.
            self._error = self._error or TransportError(
                f"{self._op}: rank {transport.ranks[transport.rank]} could not {what} "
                f"rank {transport.ranks[peer]} within {transport.timeout_s:g} s: {cause}"
            )
            self._changed.notify_all()

