"""Everything that the ranks of a pass tell each other, forward or backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from megatron_overlap.schedules.varlen.message_order import Links, Trip
from megatron_overlap.schedules.varlen.messages import back_trip, out_trip
from megatron_overlap.schedules.varlen.plan import Plan
from megatron_overlap.schedules.varlen.ring_groups import Load, RingGroup, Side, loads, ring_groups
from megatron_overlap.schedules.varlen.topology import Topology


@dataclass(frozen=True, slots=True)
class Turn:
    """One ring_group's part of a program.

    Attributes:
        ring_group: whose rings these are.
        loads: what travels.
        out: the way to the visits.
        back: the way of what the visits make; None where they keep it.
    """

    ring_group: RingGroup
    loads: tuple[Load, ...]
    out: Trip
    back: Trip | None


@dataclass(frozen=True, slots=True)
class Traffic:
    """What travels: the same on all ranks.

    Attributes:
        side: keys and values, or queries.
        out_bytes: of one row.
        back_bytes: of one row of what visits make; 0 where they keep it.
    """

    side: Side
    out_bytes: int
    back_bytes: int


def program(plan: Plan, index: int, traffic: Traffic, window: int | None) -> tuple[Turn, ...]:
    """The turns of pass `index`, for all ranks: every rank computes the same.

    The last few are kept, since every layer of a model asks for them again.
    """
    _asked.pop((traffic, window), None)
    _asked[traffic, window] = None
    if len(_asked) > _MOST_KINDS:
        del _asked[next(iter(_asked))]
    return _program(Same(plan), index, traffic, window)


def foresee(plan: Plan) -> None:
    """Makes what layers that have run will ask of this plan as well: rings of many ranks take a while."""
    for traffic, window in list(_asked):
        for index in range(len(plan.passes)):
            _program(Same(plan), index, traffic, window)


_MOST_KINDS = 4
"""A model asks for forward and backward of full attention, and of attention with a window; of so many all programs of
this micro-batch and the next ones are kept."""

_asked: dict[tuple[Traffic, int | None], None] = {}
"""What was asked for, the last one last."""


class Same:
    """A plan as a key: the object, not its value, whose hash takes as long as a plan has documents."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.plan is self.plan

    def __hash__(self) -> int:
        return id(self.plan)


@lru_cache(maxsize=16)
def _program(same: Same, index: int, traffic: Traffic, window: int | None) -> tuple[Turn, ...]:
    plan = same.plan
    found = ring_groups(plan.passes[index])
    turns = []
    for ring_group in found:
        cards = _cards(ring_group, found, plan.topology)
        out = loads(ring_group, traffic.side, window)
        back = None
        if traffic.back_bytes:
            back = back_trip(out, ring_group.ranks, Links(plan.topology, traffic.back_bytes, cards))
        way = out_trip(out, ring_group.ranks, Links(plan.topology, traffic.out_bytes, cards))
        turns.append(Turn(ring_group, out, way, back))
    return tuple(turns)


def _cards(ring_group: RingGroup, others: Sequence[RingGroup], topology: Topology) -> int | None:
    """How many of a node's cards a ring_group may use: of those between nodes each as much as of their tokens, or
    one."""
    if ring_group.zone != "inter":
        return None

    def tokens(of: RingGroup) -> int:
        return sum(ring.length for ring in of.rings)

    def on_node(node: int) -> int:
        there = [each for each in others if each.zone == "inter" and node in map(topology.node_of, each.ranks)]
        return sum(map(tokens, there))

    busiest = max(map(on_node, set(map(topology.node_of, ring_group.ranks))))
    return max(1, (2 * topology.nics_per_node * tokens(ring_group) + busiest) // (2 * busiest)) if busiest else None


def without_routes(plan: Plan) -> Plan:
    """The same plan for a machine whose transfers use one card each."""
    return replace(plan, topology=replace(plan.topology, routing=False))
