"""Everything that the ranks of a pass tell each other, forward or backward."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from megatron_overlap.varlen.circles import Circle, Load, Side, circles, loads
from megatron_overlap.varlen.messages import back_trip, out_trip
from megatron_overlap.varlen.plan import Plan
from megatron_overlap.varlen.rounds import Links, Trip


@dataclass(frozen=True, slots=True)
class Turn:
    """One circle's part of a program.

    Attributes:
        circle: whose rings these are.
        loads: what travels.
        out: the way to the visits.
        back: the way of what the visits make; None where they keep it.
    """

    circle: Circle
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
    return _program(_Same(plan), index, traffic, window)


class _Same:
    """A plan as a key: the object, not its value, whose hash takes as long as a plan has documents."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.plan is self.plan

    def __hash__(self) -> int:
        return id(self.plan)


@lru_cache(maxsize=16)
def _program(same: _Same, index: int, traffic: Traffic, window: int | None) -> tuple[Turn, ...]:
    plan = same.plan
    found = circles(plan.passes[index])
    turns = []
    for circle in found:
        sharing = _sharing(circle, found, plan)
        out = loads(circle, traffic.side, window)
        back = None
        if traffic.back_bytes:
            back = back_trip(out, circle.ranks, Links(plan.topology, traffic.back_bytes, sharing))
        way = out_trip(out, circle.ranks, Links(plan.topology, traffic.out_bytes, sharing))
        turns.append(Turn(circle, out, way, back))
    return tuple(turns)


def _sharing(circle: Circle, others: tuple[Circle, ...], plan: Plan) -> int:
    """Circles between nodes that use the cards of some node of this one: each has one message there at a time."""
    if circle.zone != "inter":
        return 1

    def nodes(of: Circle) -> set[int]:
        return set(map(plan.topology.node_of, of.ranks))

    between = [nodes(other) for other in others if other.zone == "inter"]
    return max(sum(node in other for other in between) for node in nodes(circle))


def without_routes(plan: Plan) -> Plan:
    """The same plan for a machine whose transfers use one card each."""
    return replace(plan, topology=replace(plan.topology, routing=False))
