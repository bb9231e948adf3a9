"""The messages of a pass, of all ranks: payloads from owners to ring steps, results from ring steps to owners.

A payload goes from its owner to its receivers, one after the other (`distribute`). With pass-Q, and in backward, the
receivers compute results for the owner: partial attention results or partial gradients. A result follows the payload
from receiver to receiver, each of which adds its own, and ends at the owner (`collect`).

A transfer between nodes may use several NICs (`schedules.varlen.message_order`): its rows are cut into parts that go
through proxy ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from megatron_overlap.schedules.varlen.message_order import Links, MessagePlan, MessageScheduler
from megatron_overlap.schedules.varlen.plan import Plan
from megatron_overlap.schedules.varlen.rebalance import Rebalance
from megatron_overlap.schedules.varlen.ring_groups import Passing, Payload, RingGroup, payloads, ring_groups
from megatron_overlap.schedules.varlen.topology import Topology


class RingStep(NamedTuple):
    """One ring step at one receiver, and the rounds whose messages it needs."""

    payload: int
    step: int
    rounds: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RingMessages:
    """The messages of one ring group in one direction.

    Attributes:
        ring_group: the ring group.
        payloads: the rows that travel.
        distribute: messages from owners to receivers.
        collect: messages with results for the owners; None if the receivers keep their results.
    """

    ring_group: RingGroup
    payloads: tuple[Payload, ...]
    distribute: MessagePlan
    collect: MessagePlan | None

    def received_steps(self, position: int) -> list[RingStep]:
        """The ring steps at a position, in the order in which their payloads arrive."""
        rank, needs = self.ring_group.ranks[position], self._steps_at(position)
        for message in self.distribute.messages:
            if message.to == rank and message.is_final and (message.payload, message.step) in needs:
                needs[message.payload, message.step].append(message.round)
        return _by_arrival(needs)

    def result_steps(self, position: int) -> list[RingStep]:
        """The ring steps at a position with the rounds of the earlier results, in the order in which those arrive.

        The position sends its own results in this order.
        """
        if self.collect is None:
            return []
        rank, needs = self.ring_group.ranks[position], self._steps_at(position)
        for message in self.collect.messages:
            if message.to == rank and message.is_final and not message.to_owner:
                needs[message.payload, message.step + 1].append(message.round)
        return _by_arrival(needs)

    def owner_rounds(self, payload: int, rank: int) -> tuple[int, ...]:
        """The rounds that bring the results of a payload to its owner, which is `rank`."""
        assert self.collect is not None
        return tuple(
            message.round
            for message in self.collect.messages
            if message.payload == payload and message.to_owner and message.is_final and message.to == rank
        )

    def _steps_at(self, position: int) -> dict[tuple[int, int], list[int]]:
        return {
            (index, step): []
            for index, payload in enumerate(self.payloads)
            for step, receiver in enumerate(payload.receivers)
            if receiver == position
        }


@dataclass(frozen=True, slots=True)
class Traffic:
    """What travels, and the bytes of a row; results have 0 bytes if the receivers keep them. The same on all ranks."""

    passing: Passing
    payload_bytes: int
    result_bytes: int


def messages_of(plan: Plan, index: int, traffic: Traffic, window: int | None) -> tuple[RingMessages, ...]:
    """The messages of every ring group in pass `index`, of all ranks; the same on every rank.

    Recent results are cached, because every layer of a model makes the same call.
    """
    _recent_calls.pop((traffic, window), None)
    _recent_calls[traffic, window] = None
    if len(_recent_calls) > _MAX_RECENT_CALLS:
        del _recent_calls[next(iter(_recent_calls))]
    return _messages_of(PlanKey(plan), index, traffic, window)


def precompute(plan: Plan) -> None:
    """Computes and caches the messages of `plan` for the traffic of recent `messages_of` calls.

    A data loader calls it on its thread, because rings of many ranks take a while.
    """
    for traffic, window in list(_recent_calls):
        for index in range(len(plan.passes)):
            _messages_of(PlanKey(plan), index, traffic, window)


_MAX_RECENT_CALLS = 4
"""Forward and backward of full attention, and of attention with a window. The cache holds the messages of so many for
the current micro-batch and the next ones."""

_recent_calls: dict[tuple[Traffic, int | None], None] = {}
"""Arguments of recent `messages_of` calls, the latest last."""


class PlanKey:
    """A plan as a cache key. Compares by identity: the hash of a plan takes time proportional to its documents."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PlanKey) and other.plan is self.plan

    def __hash__(self) -> int:
        return id(self.plan)


@lru_cache(maxsize=16)
def _messages_of(key: PlanKey, index: int, traffic: Traffic, window: int | None) -> tuple[RingMessages, ...]:
    plan = key.plan
    groups = ring_groups(plan.passes[index])
    found = []
    for ring_group in groups:
        max_nics = _max_nics(ring_group, groups, plan.topology)
        sent = payloads(ring_group, traffic.passing, window)
        collected = None
        if traffic.result_bytes:
            collected = collect(sent, ring_group.ranks, Links(plan.topology, traffic.result_bytes, max_nics))
        distributed = distribute(sent, ring_group.ranks, Links(plan.topology, traffic.payload_bytes, max_nics))
        found.append(RingMessages(ring_group, sent, distributed, collected))
    return tuple(found)


def _max_nics(ring_group: RingGroup, groups: Sequence[RingGroup], topology: Topology) -> int | None:
    """NICs of a node that a ring group may use. Inter-node groups share them in proportion to their tokens."""
    if ring_group.zone != "inter":
        return None

    def tokens(of: RingGroup) -> int:
        return sum(ring.length for ring in of.rings)

    def tokens_on_node(node: int) -> int:
        inter = [each for each in groups if each.zone == "inter" and node in map(topology.node_of, each.ranks)]
        return sum(map(tokens, inter))

    busiest = max(map(tokens_on_node, set(map(topology.node_of, ring_group.ranks))))
    return max(1, (2 * topology.nics_per_node * tokens(ring_group) + busiest) // (2 * busiest)) if busiest else None


def distribute(sent: Sequence[Payload], ranks: Sequence[int], links: Links) -> MessagePlan:
    """The messages that carry all payloads from their owners to their receivers."""
    scheduler = MessageScheduler(links)
    last: dict[tuple[int, tuple[int, int]], int] = {}
    parts = [_parts(payload, ranks, links) for payload in sent]
    for step in range(len(ranks) - 1):
        for index, payload in enumerate(sent):
            if step >= len(payload.receivers):
                continue
            source = ranks[payload.receivers[step - 1] if step else payload.owner]
            route = links.route(source, ranks[payload.receivers[step]], payload.rows[step])
            for number, part in enumerate(parts[index]):
                rows = part[0], min(part[1], payload.rows[step])
                if rows[0] < rows[1]:
                    key, path = (index, part), route.paths[number % len(route.paths)]
                    last[key] = scheduler.add(path, index, step, rows, after=last.get(key))
    return scheduler.schedule()


def collect(sent: Sequence[Payload], ranks: Sequence[int], links: Links) -> MessagePlan:
    """The messages that carry the results of all payloads: to the next receiver, and from the last one to the owner."""
    scheduler = MessageScheduler(links)
    received: dict[tuple[int, int], list[int]] = {}
    parts = [_parts(payload, ranks, links) for payload in sent]
    for step in range(len(ranks) - 1):
        for index, payload in enumerate(sent):
            if step >= len(payload.receivers):
                continue
            source, num_rows = ranks[payload.receivers[step]], payload.rows[step]
            onward = payload.rows[step + 1] if step + 1 < len(payload.receivers) else 0
            transfers = [(ranks[payload.owner], onward, num_rows, True)]
            if onward:
                transfers.insert(0, (ranks[payload.receivers[step + 1]], 0, onward, False))
            for to, first, stop, to_owner in transfers:
                paths = links.route(source, to, stop - first).paths
                for number, part in enumerate(parts[index]):
                    rows = max(part[0], first), min(part[1], stop)
                    if rows[0] >= rows[1]:
                        continue
                    needs = received.get((index, step), ())
                    path = paths[number % len(paths)]
                    added = scheduler.add(path, index, step, rows, needs=needs, to_owner=to_owner)
                    if not to_owner:
                        received.setdefault((index, step + 1), []).append(added)
    return scheduler.schedule()


def rebalance_messages(rebalance: Rebalance) -> MessagePlan:
    """The messages of a rebalancing: one payload per move, sent directly from its source to its destination."""
    # All rows are ready at the start, so the speed of the links does not affect the order.
    scheduler = MessageScheduler(Links(Topology(1, len(rebalance.before)), row_bytes=1))
    for index, move in enumerate(rebalance.moves):
        scheduler.add((move.source, move.to), index, 0, (0, move.rows))
    return scheduler.schedule()


def _by_arrival(needs: dict[tuple[int, int], list[int]]) -> list[RingStep]:
    found = [RingStep(payload, step, tuple(sorted(rounds))) for (payload, step), rounds in needs.items()]
    return sorted(found, key=lambda step: (max(step.rounds, default=-1), step.payload))


def _parts(payload: Payload, ranks: Sequence[int], links: Links) -> list[tuple[int, int]]:
    """The rows of a payload, cut into as many parts as its route with the most NICs and pieces needs."""
    total, most = payload.rows[0], 1
    stops = [ranks[payload.owner], *(ranks[position] for position in payload.receivers)]
    for source, to, rows in zip(stops, stops[1:], payload.rows, strict=False):
        route = links.route(source, to, rows)
        most = max(most, len(route.paths) * route.pieces)
    bounds = [total * part // most for part in range(most + 1)]
    return [part for part in zip(bounds, bounds[1:], strict=False) if part[0] < part[1]]
