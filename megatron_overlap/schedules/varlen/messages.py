"""The messages of a pass, of all ranks: payloads from owners to ring steps, results from ring steps to owners.

A payload goes from its owner to its receivers, one after the other (`_distribute`). With pass-Q, and in backward, the
receivers compute results for the owner: partial attention results or partial gradients. A result follows the payload
from receiver to receiver, each of which adds its own, and ends at the owner (`_collect`).

A transfer between nodes may use several NICs (`schedules.varlen.message_order`): its rows are cut into parts that go
through proxy ranks.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from megatron_overlap.schedules.varlen.message_order import MessagePlan, MessageScheduler
from megatron_overlap.schedules.varlen.plan import Plan
from megatron_overlap.schedules.varlen.rebalance import Rebalance
from megatron_overlap.schedules.varlen.ring_groups import Passing, Payload, RingGroup, payloads, ring_groups
from megatron_overlap.schedules.varlen.topology import Topology


class RingStep(NamedTuple):
    """One ring step at one receiver, and the rounds whose messages it needs."""

    payload: int
    step: int
    rounds: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
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

    def received_steps(self, position: int) -> list[RingStep]:
        """The ring steps at a position, in the order in which their payloads arrive."""
        return self._steps(position, self.distribute, 0)

    def result_steps(self, position: int) -> list[RingStep]:
        """The ring steps at a position with the rounds of the earlier results: it sends its own in this order."""
        return [] if self.collect is None else self._steps(position, self.collect, 1)

    def _steps(self, position: int, plan: MessagePlan, offset: int) -> list[RingStep]:
        """The ring steps at a position, by the rounds that bring rows from the step that is `offset` steps earlier."""
        needs: dict[tuple[int, int], list[int]] = {
            (index, payload.receivers.index(position)): []
            for index, payload in enumerate(self.payloads)
            if position in payload.receivers
        }
        for message in plan.messages:
            key = message.payload, message.step + offset
            if key in needs and message.to == self.ring_group.ranks[position] and message.is_final:
                needs[key].append(message.round)
        found = [RingStep(payload, step, tuple(sorted(rounds))) for (payload, step), rounds in needs.items()]
        return sorted(found, key=lambda step: (max(step.rounds, default=-1), step.payload))

    def owner_rounds(self, payload: int) -> tuple[int, ...]:
        """The rounds that bring the results of a payload to its owner."""
        assert self.collect is not None
        return tuple(
            message.round
            for message in self.collect.messages
            if message.payload == payload and message.to_owner and message.is_final
        )


@lru_cache(maxsize=64)
def received_rows(
    groups: tuple[RingMessages, ...], num_ranks: int, *, results: bool
) -> tuple[dict[tuple[int, int, int], slice], list[int]]:
    """Where the ranks receive the payloads of ring groups, or their results, each rank in a buffer of its own.

    Returns:
        Rows of the buffer of the receiver, by number of the ring group, payload and ring step (-1: results for the
        owner), and the number of rows of each rank. The same on every rank.
    """
    places, num_rows = dict[tuple[int, int, int], slice](), [0] * num_ranks
    for number, group in enumerate(groups):
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


def messages_of(plan: Plan, index: int, traffic: Traffic, window: int | None) -> tuple[RingMessages, ...]:
    """The messages of every ring group in pass `index`, of all ranks; the same on every rank.

    Cached, because every layer of a model makes the same call.
    """
    if (traffic, window) in _recent_calls:
        _recent_calls.remove((traffic, window))
    _recent_calls.append((traffic, window))
    return _messages_of(plan, index, traffic, window)


def precompute(plan: Plan) -> None:
    """Computes and caches the messages of `plan` for the traffic of recent `messages_of` calls.

    A data loader calls it on its thread, because rings of many ranks take a while.
    """
    for traffic, window in list(_recent_calls):
        for index in range(len(plan.passes)):
            _messages_of(plan, index, traffic, window)


# Four calls: forward and backward of full attention, and of attention with a window.
_recent_calls: deque[tuple[Traffic, int | None]] = deque(maxlen=4)


@lru_cache(maxsize=16)
def _messages_of(plan: Plan, index: int, traffic: Traffic, window: int | None) -> tuple[RingMessages, ...]:
    topology, groups = plan.topology, ring_groups(plan.passes[index])
    found = []
    for ring_group in groups:
        max_nics = _max_nics(ring_group, groups, topology)
        sent = payloads(ring_group, traffic.passing, window)
        collected = None
        if traffic.result_bytes:
            collected = _collect(sent, ring_group.ranks, MessageScheduler(topology, traffic.result_bytes, max_nics))
        distributed = _distribute(sent, ring_group.ranks, MessageScheduler(topology, traffic.payload_bytes, max_nics))
        found.append(RingMessages(ring_group, sent, distributed, collected))
    return tuple(found)


def _max_nics(ring_group: RingGroup, groups: Sequence[RingGroup], topology: Topology) -> int | None:
    """NICs of a node that a ring group may use. Inter-node groups share them in proportion to their tokens."""
    if ring_group.zone != "inter":
        return None

    def tokens(some: Iterable[RingGroup]) -> int:
        return sum(ring.length for each in some for ring in each.rings)

    inter = [(each, set(map(topology.node_of, each.ranks))) for each in groups if each.zone == "inter"]
    nodes = set(map(topology.node_of, ring_group.ranks))
    busiest = max(tokens(each for each, used in inter if node in used) for node in nodes)
    return max(1, (2 * topology.nics_per_node * tokens([ring_group]) + busiest) // (2 * busiest)) if busiest else None


def _distribute(sent: Sequence[Payload], ranks: Sequence[int], scheduler: MessageScheduler) -> MessagePlan:
    last: dict[tuple[int, int], int] = {}
    parts = [_parts(payload, ranks, scheduler) for payload in sent]
    for step, index, payload in _ring_steps(sent):
        source = ranks[payload.receivers[step - 1] if step else payload.owner]
        paths = scheduler.route(source, ranks[payload.receivers[step]], payload.rows[step]).paths
        for part, rows in _cut(parts[index], 0, payload.rows[step]):
            after = last.get((index, part))
            last[index, part] = scheduler.add(paths[part % len(paths)], index, step, rows, after=after)
    return scheduler.schedule()


def _collect(sent: Sequence[Payload], ranks: Sequence[int], scheduler: MessageScheduler) -> MessagePlan:
    received: dict[tuple[int, int], list[int]] = {}
    parts = [_parts(payload, ranks, scheduler) for payload in sent]
    for step, index, payload in _ring_steps(sent):
        source, num_rows = ranks[payload.receivers[step]], payload.rows[step]
        onward = payload.rows[step + 1] if step + 1 < len(payload.receivers) else 0
        transfers = [(ranks[payload.owner], onward, num_rows, True)]
        if onward:
            transfers.insert(0, (ranks[payload.receivers[step + 1]], 0, onward, False))
        needs = received.get((index, step), ())
        for to, first, stop, to_owner in transfers:
            paths = scheduler.route(source, to, stop - first).paths
            for part, rows in _cut(parts[index], first, stop):
                added = scheduler.add(paths[part % len(paths)], index, step, rows, needs=needs, to_owner=to_owner)
                if not to_owner:
                    received.setdefault((index, step + 1), []).append(added)
    return scheduler.schedule()


def _ring_steps(sent: Sequence[Payload]) -> Iterator[tuple[int, int, Payload]]:
    """The number of each ring step, and the index and the payload: the first ring step of all payloads first."""
    for step in range(max((len(payload.receivers) for payload in sent), default=0)):
        yield from ((step, index, payload) for index, payload in enumerate(sent) if step < len(payload.receivers))


def _cut(parts: Sequence[tuple[int, int]], first: int, stop: int) -> Iterator[tuple[int, tuple[int, int]]]:
    """The rows from `first` to `stop` of each part that has some, with its number."""
    for number, part in enumerate(parts):
        rows = max(part[0], first), min(part[1], stop)
        if rows[0] < rows[1]:
            yield number, rows


@lru_cache(maxsize=64)
def rebalance_messages(rebalance: Rebalance) -> MessagePlan:
    """The messages of a rebalancing: one payload per move, sent directly from its source to its destination."""
    # All rows are ready at the start, so the speed of the links does not affect the order.
    scheduler = MessageScheduler(Topology(1, len(rebalance.before)), row_bytes=1)
    for index, move in enumerate(rebalance.moves):
        scheduler.add((move.source, move.to), index, 0, (0, move.rows))
    return scheduler.schedule()


def _parts(payload: Payload, ranks: Sequence[int], scheduler: MessageScheduler) -> list[tuple[int, int]]:
    """The rows of a payload, cut into as many parts as its route with the most NICs and pieces needs."""
    total, stops = payload.rows[0], [ranks[position] for position in (payload.owner, *payload.receivers)]
    routes = map(scheduler.route, stops, stops[1:], payload.rows)
    most = max(len(route.paths) * route.pieces for route in routes)
    return [part for part in pairwise(total * part // most for part in range(most + 1)) if part[0] < part[1]]
