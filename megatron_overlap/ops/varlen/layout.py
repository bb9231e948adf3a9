"""Rows of one rank: in its packed micro-batch, in payload buffers, and in the transfers of its messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch

from megatron_overlap.comm import P2PWork, Transport
from megatron_overlap.comm.transport import Transfer
from megatron_overlap.schedules.plan import Chunk, Message
from megatron_overlap.schedules.varlen import Plan
from megatron_overlap.schedules.varlen.message_order import MessagePlan
from megatron_overlap.schedules.varlen.plan import Ring
from megatron_overlap.schedules.varlen.ring_groups import Payload, RingGroup

type Key = tuple[int, int]
"""Payload and ring step; results for an owner have ring step -1."""


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
    def of(cls, plan: Plan, index: int, rank: int) -> OwnRows:
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


def join(slices: Sequence[slice]) -> list[slice]:
    """The same rows in as few runs as possible; without empty runs."""
    runs: list[slice] = []
    for rows in slices:
        if runs and runs[-1].stop == rows.start:
            runs[-1] = slice(runs[-1].start, rows.stop)
        elif rows.stop > rows.start:
            runs.append(rows)
    return runs


def pick(x: torch.Tensor, runs: Sequence[slice]) -> torch.Tensor:
    """The rows of `runs`; a view if there is one run."""
    return x[runs[0]] if len(runs) == 1 else torch.cat([x[rows] for rows in runs])


def add(total: torch.Tensor, runs: Sequence[slice], term: torch.Tensor) -> None:
    """`total[runs] += term`, in the dtype of `total`."""
    for rows, part in zip(runs, term.split([rows.stop - rows.start for rows in runs]), strict=True):
        total[rows] += part


def merge(
    out: torch.Tensor, lse: torch.Tensor, runs: Sequence[slice], term: torch.Tensor, term_lse: torch.Tensor
) -> None:
    """Merges attention over further keys into `out[runs]` and `lse[runs]`, both in the accumulation dtype."""
    sizes = [rows.stop - rows.start for rows in runs]
    for rows, part, new in zip(runs, term.split(sizes), term_lse.split(sizes), strict=True):
        old = lse[rows]
        # The weight of the new keys: e^new / (e^old + e^new).
        out[rows].lerp_(part.to(out.dtype), torch.sigmoid(new - old).unsqueeze(-1))
        lse[rows] = torch.logaddexp(old, new)


class RowMessages:
    """The messages of a `MessagePlan` that one rank sends and receives, posted. A rank without messages posts none.

    Attributes:
        num_bytes: bytes that this rank sends, including those that it forwards as a proxy.
        receive_rounds: rounds in which this rank receives a message.
    """

    def __init__(
        self,
        transport: Transport,
        plan: MessagePlan,
        sources: Mapping[Key, torch.Tensor],
        sinks: Mapping[Key, torch.Tensor],
        after_work: Mapping[Key, int],
        like: torch.Tensor,
        width: int,
        name: str,
    ) -> None:
        """Posts the messages.

        Args:
            plan: messages of all ranks.
            sources, sinks: the rows `[rows, width]` that this rank sends, and buffers for those that it receives.
            after_work: number of `mark_ready` units that must be done before a message leaves; absent means 0.
            like, width: dtype and device, and elements of a row.
            name: name of the operation, for errors and buffers.
        """
        rank, messages, pairs = transport.rank, plan.messages, plan.rounds(transport.rank)
        self.receive_rounds = tuple(number for number, (_, recv) in enumerate(pairs) if recv is not None)
        # This rank forwards these messages as a proxy.
        forwarded = [index for _, index in pairs if index is not None and not messages[index].is_final]
        sizes = [messages[index].stop - messages[index].start for index in forwarded]
        received: dict[int, torch.Tensor] = {}
        if sizes:
            scratch = transport.buffer_pool.take(f"{name} proxy", (sum(sizes), width), like)
            received.update(zip(forwarded, scratch.split(sizes), strict=True))
        nothing, unnumbered = like.new_empty(0), Chunk(rank, 0)
        transfers = []
        for send, recv in pairs:
            outgoing = incoming = nothing
            to = source = (rank + 1) % transport.size
            num_work, after_message = 0, None
            if recv is not None:
                message = messages[recv]
                to = source = message.source
                if message.is_final:
                    sink = sinks[message.payload, -1 if message.to_owner else message.step]
                    received[recv] = sink[message.start : message.stop]
                incoming = received[recv]
            if send is not None:
                message = messages[send]
                # A direction without a message names the peer of the other one.
                to, source = message.to, message.to if recv is None else source
                if message.after is None:
                    outgoing = sources[message.payload, message.step][message.start : message.stop]
                    num_work = after_work.get((message.payload, message.step), 0)
                else:
                    before = messages[message.after]
                    after_message = before.round
                    outgoing = received[message.after][message.start - before.start : message.stop - before.start]
            posted = Message(unnumbered, to, unnumbered, source, num_work, after_message)
            transfers.append(Transfer(posted, outgoing, incoming))
        self.num_bytes = sum(transfer.send_bytes for transfer in transfers)
        self._p2p_work: P2PWork = transport.begin(transfers, name)
        self.mark_ready, self.wait_all = self._p2p_work.mark_ready, self._p2p_work.wait_all

    def is_completed(self, rounds: tuple[int, ...]) -> bool:
        """Whether the messages of all these rounds have completed; False if a query would need a synchronisation."""
        return all(self._p2p_work.is_completed(number) for number in rounds)

    def wait(self, rounds: tuple[int, ...]) -> None:
        """Waits for the messages of these rounds."""
        for number in rounds:
            self._p2p_work.wait(number)
