"""The messages of one ring_group on their way: buffers and exchanges of one rank."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from megatron_overlap.comm import P2PWork, Transport
from megatron_overlap.comm.transport import Transfer
from megatron_overlap.schedules.layout import Chunk
from megatron_overlap.schedules.plan import Message
from megatron_overlap.schedules.varlen.message_order import Trip
from megatron_overlap.schedules.varlen.messages import Visit
from megatron_overlap.schedules.varlen.program import Turn


class TripP2PWork:
    """One trip of a turn, as this rank takes part in it. A rank without messages posts none.

    Attributes:
        num_bytes: that this rank sends, for others too.
        arrivals: rounds in which something arrives.
    """

    def __init__(
        self,
        transport: Transport,
        trip: Trip,
        sources: Mapping[tuple[int, int], torch.Tensor],
        sinks: Mapping[tuple[int, int], torch.Tensor],
        works: Mapping[tuple[int, int], int],
        like: torch.Tensor,
        width: int,
        name: str,
    ) -> None:
        """Posts the messages.

        Args:
            transport: carries them.
            trip: of all ranks.
            sources: the rows `[rows, width]` that this rank sends of a load, by load and step of the message.
            sinks: where rows land that are for this rank, alike; rows of a message to a load's home, under step -1.
            works: how many works of this rank must be done before a message leaves, by load and step; absent: none.
            like: dtype and device.
            width: numbers in a row.
            name: of the op, in errors and of the buffers.
        """
        rank, messages = transport.rank, trip.messages
        pairs = trip.exchanges(rank)
        self.arrivals = tuple(number for number, (_, recv) in enumerate(pairs) if recv is not None)
        through = [
            index for _, index in pairs if index is not None and not messages[index].ends
        ]  # for others: this rank is their proxy
        total = sum(messages[index].stop - messages[index].start for index in through)
        scratch = (
            transport.buffer_pool.take(f"{name} proxy", (total, width), like) if total else like.new_empty(0, width)
        )
        places: dict[int, torch.Tensor] = {}
        used = 0
        for index in through:
            rows = messages[index].stop - messages[index].start
            places[index] = scratch[used : used + rows]
            used += rows
        nothing = like.new_empty(0)
        transfers = []
        self.num_bytes = 0
        for send, recv in pairs:
            outgoing = incoming = nothing
            after_work, after_message = 0, None
            peers = [messages[index].to for index in (send,) if index is not None]
            peers += [messages[index].source for index in (recv,) if index is not None]
            other = peers[0] if peers else (rank + 1) % transport.size
            to = source = other
            if recv is not None:
                message = messages[recv]
                source = message.source
                if message.ends:
                    sink = sinks[message.load, -1 if message.home else message.step]
                    places[recv] = sink[message.start : message.stop]
                incoming = places[recv]
            if send is not None:
                message = messages[send]
                to = message.to
                if message.after is None:
                    outgoing = sources[message.load, message.step][message.start : message.stop]
                    after_work = works.get((message.load, message.step), 0)
                else:
                    before = messages[message.after]
                    after_message = before.round
                    outgoing = places[message.after][message.start - before.start : message.stop - before.start]
                self.num_bytes += outgoing.numel() * outgoing.element_size()
            nowhere = Chunk(rank, 0)
            transfers.append(
                Transfer(Message(nowhere, to, nowhere, source, after_work, after_message), outgoing, incoming)
            )
        self._p2p_work: P2PWork = transport.begin(transfers, name)
        self.mark_ready, self.wait_all = self._p2p_work.mark_ready, self._p2p_work.wait_all

    def is_completed(self, rounds: tuple[int, ...]) -> bool:
        """Whether all of these rounds have; False where asking would cost a synchronisation."""
        return all(self._p2p_work.is_completed(number) for number in rounds)

    def wait(self, rounds: tuple[int, ...]) -> None:
        """Returns when all of these have landed."""
        for number in rounds:
            self._p2p_work.wait(number)


def home_rounds(turn: Turn, load: int, rank: int) -> tuple[int, ...]:
    """The rounds that bring home what visits made of an own load."""
    assert turn.back is not None
    return tuple(m.round for m in turn.back.messages if m.load == load and m.home and m.ends and m.to == rank)


def index_of(visits: list[Visit]) -> dict[tuple[int, int], int]:
    """How many works are done when the one of a load and step is."""
    return {(visit.load, visit.step): number for number, visit in enumerate(visits, start=1)}
