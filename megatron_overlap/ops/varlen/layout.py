"""Rows of one rank: in its packed micro-batch, in payload buffers, and in the transfers of its messages."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Self

import torch

from megatron_overlap.comm import BufferPool, P2PWork, Transport
from megatron_overlap.comm.symmetric.heap import MAX_FLAGS
from megatron_overlap.comm.transport import Exchange, Repeated, Transfer, TransportError
from megatron_overlap.ops.call import repeated
from megatron_overlap.schedules.plan import Chunk, Message
from megatron_overlap.schedules.varlen import Plan, message_order
from megatron_overlap.schedules.varlen.message_order import MessagePlan
from megatron_overlap.schedules.varlen.plan import Ring
from megatron_overlap.schedules.varlen.ring_groups import Payload, RingGroup

type Key = tuple[int, int, int]
"""Number of the plan, payload and ring step; results for an owner have ring step -1."""

Runs = Sequence[slice]


@dataclass(frozen=True, slots=True)
class OwnRows:
    """The rows of one rank in its packed micro-batch.

    Attributes:
        num_ring_rows: rows of rings, which come first.
        starts: first row of each ring of this rank, by document.
        lengths: rows of each whole document, which follow.
    """

    num_ring_rows: int
    starts: dict[int, int]
    lengths: tuple[int, ...]

    @classmethod
    def of(cls, plan: Plan, index: int, rank: int) -> Self:
        """The rows of `rank` in pass `index`."""
        starts, row, part = {}, 0, plan.passes[index]
        for ring in part.rings:
            if rank in ring.ranks:
                starts[ring.document] = row
                row += ring.tokens(ring.ranks.index(rank))
        lengths = (plan.lengths[document] for document in part.local[rank])
        return cls(row, starts, tuple(length for length in lengths if length))

    def rows_of(self, ring: Ring, position: int, chunk: int) -> slice:
        """The rows of a chunk of this rank, which is at `position` of the ring: its early or its late chunk."""
        start = self.starts[ring.document] + (0 if chunk == position else ring.chunk_length(position))
        return slice(start, start + ring.chunk_length(chunk))


def rows_in_payload(ring_group: RingGroup, payload: Payload) -> dict[tuple[int, int], slice]:
    """The rows in the buffer of a payload, by number of the ring and chunk: chunk by chunk, then ring by ring."""
    keys = [(number, chunk) for chunk in payload.chunks for number in range(len(ring_group.rings))]
    counts = [ring_group.rings[number].chunk_length(chunk) for number, chunk in keys]
    return {key: slice(*run) for key, run in zip(keys, pairwise(accumulate(counts, initial=0)), strict=True)}


def join(slices: Runs) -> list[slice]:
    """The same rows in as few runs as possible; without empty runs."""
    runs: list[slice] = []
    for rows in slices:
        if runs and runs[-1].stop == rows.start:
            runs[-1] = slice(runs[-1].start, rows.stop)
        elif rows.stop > rows.start:
            runs.append(rows)
    return runs


def pick(x: torch.Tensor, runs: Runs) -> torch.Tensor:
    """The rows of `runs`; a view if there is one run."""
    return x[runs[0]] if len(runs) == 1 else torch.cat([x[rows] for rows in runs])


def add(total: torch.Tensor, runs: Runs, term: torch.Tensor) -> None:
    """`total[runs] += term`, in the dtype of `total`."""
    for rows, part in zip(runs, term.split([rows.stop - rows.start for rows in runs]), strict=True):
        total[rows] += part


def merge(out: torch.Tensor, lse: torch.Tensor, runs: Runs, term: torch.Tensor, term_lse: torch.Tensor) -> None:
    """Merges attention over further keys into `out[runs]` and `lse[runs]`, both in the accumulation dtype."""
    sizes = [rows.stop - rows.start for rows in runs]
    for rows, part, new in zip(runs, term.split(sizes), term_lse.split(sizes), strict=True):
        old = lse[rows]
        # The weight of the new keys: e^new / (e^old + e^new).
        out[rows].lerp_(part.to(out.dtype), torch.sigmoid(new - old).unsqueeze(-1))
        lse[rows] = torch.logaddexp(old, new)


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a contiguous tensor by their keys: those of this rank or, in `places`, of all ranks."""

    tensor: torch.Tensor
    places: Mapping[Key, slice]

    def __getitem__(self, key: Key) -> torch.Tensor:
        return self.tensor[self.places[key]]


class RowMessages:
    """The messages of `MessagePlan`s that one rank sends and receives, posted as one operation.

    A transport that `prepares` copies rows into symmetric buffers of their destination, without proxies: inside a host
    the direct path is the fastest, and a proxy could forward only after its earlier computation.

    Attributes:
        num_bytes: bytes that this rank sends, including those that it forwards as a proxy.
        received: numbers of the messages that this rank receives, where there is one plan.
    """

    def __init__(
        self,
        transport: Transport,
        plans: Mapping[int, MessagePlan],
        sent: Rows,
        received: Rows,
        after_work: Mapping[Key, int],
        of: object | None,
        name: str,
    ) -> None:
        """Posts the messages.

        Args:
            plans: messages of all ranks, by number.
            sent: `[rows, ...]` that this rank sends without having received them.
            received: buffer `[rows, ...]` for the rows that it receives; a symmetric one has the places of all ranks.
            after_work: number of `mark_ready` units that must be done before a message leaves; absent means 0.
            of: the object from which plans and keys are derived, the same one in each layer, whose transfers of the
                last call are used again; None if `received` is another tensor in each call.

        Raises:
            TransportError: copies have too few flags for the messages between two ranks.
        """
        build = partial(_Transfers, transport, plans, sent.places, received, after_work, name)
        transfers = build() if of is None else repeated(transport, (of, received.tensor), build, name)
        self.num_bytes, self._numbers = transfers.num_bytes, transfers.numbers
        self.received = [index for _, index in transfers.numbers]
        self._p2p_work: P2PWork = transport.begin(Exchange(transfers, sent.tensor), name)
        self.mark_ready, self.wait_all = self._p2p_work.mark_ready, self._p2p_work.wait_all

    def needs(self, plan: int, messages: Sequence[int]) -> tuple[Callable[[], bool], Callable[[], None]]:
        """Functions for messages of a plan: whether all have completed, if it is known, and their wait."""
        numbers, work = sorted(self._numbers[plan, message] for message in messages), self._p2p_work
        return lambda: all(map(work.is_completed, numbers)), partial(work.wait, *numbers)


class _Transfers(Repeated):
    """The transfers of one rank, which `repeated` builds for a tensor of the rows that it sends.

    `numbers` has the place of each received message among the transfers, by numbers of its plan and of the message.
    """

    def __init__(
        self,
        transport: Transport,
        plans: Mapping[int, MessagePlan],
        sent: Mapping[Key, slice],
        received: Rows,
        after_work: Mapping[Key, int],
        name: str,
    ) -> None:
        self._rank = transport.rank
        self._sent, self._received, self._after_work, self._name = sent, received, after_work, name
        self._nothing, self._chunk = received.tensor.new_empty(0), Chunk(transport.rank, 0)
        self._row_bytes = received.tensor.itemsize * received.tensor.shape[1:].numel()
        self._all: list[tuple[Message, slice | torch.Tensor, torch.Tensor, torch.Tensor | None]] = []
        self.numbers: dict[tuple[int, int], int] = {}
        self.num_bytes = 0
        if transport.prepares:
            self._add_direct(plans)
        else:
            self._add_rounds(plans, transport.buffer_pool)

    def build(self, own: torch.Tensor | None) -> list[Transfer]:
        assert own is not None
        return [
            Transfer(message, own[send] if isinstance(send, slice) else send, recv, lands=lands)
            for message, send, recv, lands in self._all
        ]

    def _own_rows(self, key: Key, start: int, stop: int) -> slice:
        """Rows `start` to `stop` of those of a key in the tensor of sent rows."""
        self.num_bytes += (stop - start) * self._row_bytes
        first: int = self._sent[key].start
        return slice(first + start, first + stop)

    def _sink(self, number: int, message: message_order.Message) -> torch.Tensor:
        """Where the destination receives the rows of a message of a plan."""
        rows = self._received[number, message.payload, -1 if message.to_owner else message.step]
        return rows[message.start : message.stop]

    def _add_direct(self, plans: Mapping[int, MessagePlan]) -> None:
        """Adds the messages in the order of the rounds, in which the ranks complete their results."""
        rank, chunk, nothing, pairs = self._rank, self._chunk, self._nothing, Counter[tuple[int, int]]()
        origins = dict[tuple[int, int], message_order.Message]()
        ordered = list[tuple[int, int, int]]()
        for number, plan in plans.items():
            for index, message in enumerate(plan.messages):
                origins[number, index] = origins[number, message.after[0]] if message.after else message
                if message.is_final:
                    ordered.append((message.round, number, index))
        for _, number, index in sorted(ordered):
            message, origin = plans[number].messages[index], origins[number, index]
            source, to = origin.source, message.to
            pairs[source, to] += 1
            if pairs[source, to] == MAX_FLAGS:
                raise TransportError(
                    f"{self._name}: {MAX_FLAGS} or more messages from rank {source} to rank {to} of the group: too "
                    "many for the flags of copies; use overlap.transport: nccl"
                )
            if rank not in (source, to):
                continue
            lands = self._sink(number, message)
            if to == rank:
                self.numbers[number, index] = len(self._all)
                self._all.append((Message(chunk, source, chunk, source), nothing, lands, lands))
            else:
                key = number, message.payload, origin.step
                posted = Message(chunk, to, chunk, to, self._after_work.get(key, 0))
                self._all.append((posted, self._own_rows(key, message.start, message.stop), nothing, lands))

    def _add_rounds(self, plans: Mapping[int, MessagePlan], buffer_pool: BufferPool) -> None:
        """Adds the messages of this rank round by round. NCCL carries those of one round in one call."""
        rank, chunk, nothing, tags = self._rank, self._chunk, self._nothing, Counter[tuple[int, int]]()
        own = sorted(
            (plan.messages[index].round, number, index) for number, plan in plans.items() for index in plan.of(rank)
        )
        messages = {(number, index): plans[number].messages[index] for _, number, index in own}
        passed = self._passed_rows(messages, buffer_pool)
        for call, number, index in own:
            message = messages[number, index]
            source, to = message.source, message.to
            tag = tags[source, to]
            tags[source, to] += 1
            if to == rank:
                self.numbers[number, index] = len(self._all)
                rows = self._sink(number, message) if message.is_final else passed[number, index]
                self._all.append((Message(chunk, source, chunk, source, call=call, tag=tag), nothing, rows, None))
                continue
            num_work, brings = 0, tuple(self.numbers[number, each] for each in message.after)
            sent: slice | torch.Tensor
            if not message.after:
                key = number, message.payload, message.step
                sent, num_work = self._own_rows(key, message.start, message.stop), self._after_work.get(key, 0)
            else:
                first = number, message.after[0]
                if first in passed:
                    sent = passed[first]
                else:
                    key = number, message.payload, messages[first].step
                    sent = self._received[key][message.start : message.stop]
                self.num_bytes += sent.nbytes
            posted = Message(chunk, to, chunk, to, num_work, brings, call=call, tag=tag)
            self._all.append((posted, sent, nothing, None))

    def _passed_rows(
        self, messages: Mapping[tuple[int, int], message_order.Message], buffer_pool: BufferPool
    ) -> dict[tuple[int, int], torch.Tensor]:
        """Memory for the rows that this rank receives as a proxy."""
        passed = [key for key, message in messages.items() if message.to == self._rank and not message.is_final]
        if not passed:
            return {}
        sizes = [messages[key].stop - messages[key].start for key in passed]
        rows = buffer_pool.take(f"{self._name} proxy", (sum(sizes), *self._received.tensor.shape[1:]), self._nothing)
        return dict(zip(passed, rows.split(sizes), strict=True))
