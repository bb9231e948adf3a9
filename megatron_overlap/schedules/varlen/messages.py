"""The messages of a pass, of all ranks: payloads from owners to ring steps, results from ring steps to owners.

A payload goes from its owner to its receivers, one after the other (`_distribute`). In backward the receivers compute
results for the owner: partial gradients. A result follows the payload from receiver to receiver, each of which adds its
own, and ends at the owner (`_collect`).
"""

from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from megatron_overlap.schedules.varlen.message_order import Message, MessageBuilder, MessagePlan
from megatron_overlap.schedules.varlen.plan import Plan
from megatron_overlap.schedules.varlen.rebalance import Rebalance
from megatron_overlap.schedules.varlen.ring_groups import Passing, Payload, RingGroup, payloads, ring_groups


class RingStep(NamedTuple):
    """One ring step at one receiver: the messages that it needs, and the round of the last one, -1 without one."""

    payload: int
    step: int
    messages: tuple[int, ...]
    round: int


@dataclass(frozen=True, eq=False)
class RingMessages:
    """The messages of one ring group in one direction. Compares by identity, as a cache key.

    Attributes:
        distribute: messages from owners to receivers.
        collect: those with results for the owners; None if the receivers keep them.
    """

    ring_group: RingGroup
    payloads: tuple[Payload, ...]
    distribute: MessagePlan
    collect: MessagePlan | None

    def received_steps(self, position: int) -> Sequence[RingStep]:
        """The ring steps at a position, in the order in which their payloads arrive."""
        return self._received_steps.get(position, ())

    def result_steps(self, position: int) -> Sequence[RingStep]:
        """The ring steps at a position with the messages of the earlier results: it sends its own in this order."""
        return self._result_steps.get(position, ())

    @cached_property
    def _received_steps(self) -> dict[int, list[RingStep]]:
        return self._steps(self.distribute, 0)

    @cached_property
    def _result_steps(self) -> dict[int, list[RingStep]]:
        return {} if self.collect is None else self._steps(self.collect, 1)

    def _steps(self, plan: MessagePlan, offset: int) -> dict[int, list[RingStep]]:
        """The ring steps by position, with the messages that bring rows from the ring step `offset` earlier."""
        needs = defaultdict[tuple[int, int], list[int]](list)
        for number, message in enumerate(plan.messages):
            if message.is_final and not message.to_owner:
                needs[message.payload, message.step + offset].append(number)
        found = defaultdict[int, list[RingStep]](list)
        for index, payload in enumerate(self.payloads):
            for step, position in enumerate(payload.receivers):
                brings = tuple(needs[index, step])
                last = max((plan.messages[each].round for each in brings), default=-1)
                found[position].append(RingStep(index, step, brings, last))
        return {
            position: sorted(steps, key=lambda step: (step.round, step.payload)) for position, steps in found.items()
        }

    @cached_property
    def owner_results(self) -> list[tuple[tuple[int, ...], int]]:
        """By payload, the messages that bring its results to its owner, and the round of the last one."""
        assert self.collect is not None
        found: list[list[int]] = [[] for _ in self.payloads]
        for number, message in enumerate(self.collect.messages):
            if message.to_owner and message.is_final:
                found[message.payload].append(number)
        return [(tuple(brings), max(self.collect.messages[each].round for each in brings)) for brings in found]


@lru_cache(maxsize=64)
def received_rows(
    groups: tuple[tuple[int, RingMessages], ...], num_ranks: int, *, results: bool
) -> tuple[dict[tuple[int, int, int], slice], list[int]]:
    """Where the ranks receive the payloads of numbered ring groups, or their results, each rank in its own buffer.

    Returns:
        Rows of the buffer of the receiver, by number of the ring group, payload and ring step (-1: results for the
        owner), and the number of rows of each rank. The same on every rank.
    """
    places, num_rows = dict[tuple[int, int, int], slice](), [0] * num_ranks
    for number, group in groups:
        for index, payload in enumerate(group.payloads):
            stops = (payload.owner, *payload.receivers[1:]) if results else payload.receivers
            for step, (position, rows) in enumerate(zip(stops, payload.rows, strict=True), -1 if results else 0):
                rank = group.ring_group.ranks[position]
                places[number, index, step] = slice(num_rows[rank], num_rows[rank] + rows)
                num_rows[rank] += rows
    return places, num_rows


@dataclass(frozen=True, slots=True)
class Traffic:
    """What travels, and the bytes of a row; results have 0 bytes if the receivers keep them. The same on all ranks."""

    passing: Passing
    payload_bytes: int
    result_bytes: int


# Forward and backward of layers of two shapes.
_recent_traffic: deque[Traffic] = deque(maxlen=4)


@lru_cache(maxsize=16)
def messages_of(plan: Plan, index: int, traffic: Traffic) -> tuple[RingMessages, ...]:
    """The messages of every ring group in pass `index`, of all ranks; the same on every rank.

    Cached, because every layer of a model makes the same call.
    """
    if traffic not in tuple(_recent_traffic):  # a copy: another thread may append while elements are compared
        _recent_traffic.append(traffic)
    found = []
    for ring_group in ring_groups(plan.passes[index]):
        sent = payloads(ring_group, traffic.passing)
        collected = None
        if traffic.result_bytes:
            collected = _collect(sent, ring_group.ranks, MessageBuilder(plan.topology, traffic.result_bytes))
        distributed = _distribute(sent, ring_group.ranks, MessageBuilder(plan.topology, traffic.payload_bytes))
        found.append(RingMessages(ring_group, sent, distributed, collected))
    return tuple(found)


def precompute(plan: Plan) -> None:
    """Computes and caches the messages of a plan of one pass for the traffic of recent `messages_of` calls.

    A data loader calls it on its thread, because rings of many ranks take a while.
    """
    for traffic in list(_recent_traffic):
        messages_of(plan, 0, traffic)


def _distribute(sent: Sequence[Payload], ranks: Sequence[int], builder: MessageBuilder) -> MessagePlan:
    brings: list[Sequence[int]] = [()] * len(sent)
    for step, index, payload in _ring_steps(sent):
        source = ranks[payload.receivers[step - 1] if step else payload.owner]
        to, rows = ranks[payload.receivers[step]], (0, payload.rows[step])
        brings[index] = builder.transfer(source, to, index, step, rows, after=brings[index])
    return builder.build()


def _collect(sent: Sequence[Payload], ranks: Sequence[int], builder: MessageBuilder) -> MessagePlan:
    needs: list[Sequence[int]] = [()] * len(sent)
    for step, index, payload in _ring_steps(sent):
        source, num_rows, earlier = ranks[payload.receivers[step]], payload.rows[step], needs[index]
        onward = 0
        if step + 1 < len(payload.receivers):
            to, onward = ranks[payload.receivers[step + 1]], payload.rows[step + 1]
            needs[index] = builder.transfer(source, to, index, step, (0, onward), needs=earlier)
        owner = ranks[payload.owner]
        builder.transfer(source, owner, index, step, (onward, num_rows), needs=earlier, to_owner=True)
    return builder.build()


def _ring_steps(sent: Sequence[Payload]) -> Iterator[tuple[int, int, Payload]]:
    """The number of each ring step, and the index and the payload: the first ring step of all payloads first."""
    for step in range(max((len(payload.receivers) for payload in sent), default=0)):
        yield from ((step, index, payload) for index, payload in enumerate(sent) if step < len(payload.receivers))


@lru_cache(maxsize=64)
def rebalance_messages(rebalance: Rebalance) -> MessagePlan:
    """The messages of a rebalancing: one payload per move, sent directly from its source to its destination.

    In one round a rank sends at most one message and receives at most one: the messages of results become ready one
    after another.
    """
    sends, receives, messages = Counter[int](), Counter[int](), list[Message]()
    for index, move in enumerate(rebalance.moves):
        number = max(sends[move.source], receives[move.to])
        sends[move.source] = receives[move.to] = number + 1
        messages.append(Message(move.source, move.to, index, 0, 0, move.rows, number, (), True))
    return MessagePlan(tuple(messages))
