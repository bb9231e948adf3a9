"""Messages of a pass: nothing deadlocks, every row is where it is needed, every query sees its causal keys once."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_overlap.schedules.varlen import Plan, Topology, partition
from megatron_overlap.schedules.varlen.baselines import METHODS
from megatron_overlap.schedules.varlen.message_order import Trip
from megatron_overlap.schedules.varlen.plan import Ring, make_ring
from megatron_overlap.schedules.varlen.program import Traffic, Turn, _program, foresee, program
from megatron_overlap.schedules.varlen.ring_groups import Side, blocks, chunks_at
from megatron_overlap.schedules.varlen.verify import check
from megatron_overlap.schedules.verify import ScheduleError

SLOW = {"intra_gbps": 360.0, "inter_gbps": 1e-6, "intra_latency_us": 0.001, "inter_latency_us": 0.002}


def seen(ring: Ring, turns: tuple[Turn, ...], side: Side, window: int | None) -> dict[tuple[int, int], int]:
    """How often each query of a ring meets each key: in its own place, and in the visits."""
    size = len(ring.ranks)
    found: dict[tuple[int, int], int] = {}

    def meet(queries: tuple[int, ...], keys: tuple[int, ...]) -> None:
        for block in blocks(ring, queries, keys, window):
            for query_chunk in block.queries:
                for key_chunk in block.keys:
                    for query in range(*ring.bounds[query_chunk : query_chunk + 2]):
                        for key in range(*ring.bounds[key_chunk : key_chunk + 2]):
                            if block.masked and (key > query or (window is not None and query - key > window)):
                                continue
                            found[query, key] = found.get((query, key), 0) + 1

    turn = next(turn for turn in turns if ring in turn.ring_group.rings)
    for place in range(size):
        own = (place, 2 * size - 1 - place)
        meet(own, own)
        for load in turn.loads:
            for step, visit in enumerate(load.visits):
                if visit == place:
                    other = chunks_at(turn.ring_group, load, step)
                    meet(*((own, other) if side == "keys" else (other, own)))
    return found


def causal(length: int, window: int | None) -> dict[tuple[int, int], int]:
    first = [0 if window is None else max(0, query - window) for query in range(length)]
    return {(query, key): 1 for query in range(length) for key in range(first[query], query + 1)}


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    topology = Topology(draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.integers(1, 4)), **SLOW)
    lengths = draw(st.lists(st.integers(0, 24), max_size=8))
    spare = draw(st.integers(0, 3))
    capacity = max(1, -(-max(sum(lengths), 1) // topology.ranks) + spare)
    method = draw(st.sampled_from(["balanced", "balanced", "ring"]))
    return METHODS[method](lengths, topology, capacity=capacity, cost=None)


@settings(max_examples=150, deadline=None)
@given(plan=plans(), side=st.sampled_from(["keys", "queries"]), window=st.sampled_from([None, None, 0, 1, 5]))
def test_plays_and_sees_every_causal_pair_once(plan: Plan, side: Side, window: int | None) -> None:
    for index, part in enumerate(plan.passes):
        turns = program(plan, index, Traffic(side, 1000, 2000), window)
        check(turns, plan.topology.ranks)
        for ring in part.rings:
            assert seen(ring, turns, side, window) == causal(ring.length, window)


def test_unequal_shares() -> None:
    topology = Topology(2, 3, 3, **SLOW)
    ring = make_ring(0, [(0, 1), (2, 9), (3, 1), (5, 4)], topology)
    plan = partition([15], topology, capacity=9)
    plan = replace(plan, passes=(replace(plan.passes[0], local=((),) * 6, rings=(ring,)),))
    for side in ("keys", "queries"):
        turns = program(plan, 0, Traffic(side, 1000, 2000), None)
        check(turns, 6)
        assert seen(ring, turns, side, None) == causal(15, None)


def test_routes_go_through_proxies_and_cards_of_both_nodes() -> None:
    topology = Topology(2, 2, 2, **SLOW)
    turns = program(partition([64], topology, capacity=16), 0, Traffic("keys", 1000, 2000), None)
    proof = check(turns, 4)
    between = [
        (message.source, message.to)
        for message in turns[0].out.messages
        if topology.node_of(message.source) != topology.node_of(message.to)
    ]
    # 2 to 1 and 0 to 3, over both cards of their nodes: cards of one number are on one switch.
    assert set(between) == {(2, 0), (3, 1), (0, 2), (1, 3)}
    assert proof.routed > 0


@pytest.mark.parametrize(("other", "routed"), [(64, [False, False]), (8, [True, False])])
def test_circles_share_cards_by_their_tokens(other: int, routed: list[bool]) -> None:
    topology = Topology(2, 2, 2, **SLOW)
    shares = [(rank, 16) for rank in range(4)], [(1, other // 2), (3, other // 2)]
    rings = tuple(make_ring(document, parts, topology) for document, parts in enumerate(shares))
    plan = partition([64, other], topology, capacity=64)
    plan = replace(plan, passes=(replace(plan.passes[0], local=((),) * 4, rings=rings),))
    turns = program(plan, 0, Traffic("keys", 1000, 2000), None)
    check(turns, 4)
    assert [any(not message.ends for message in turn.out.messages) for turn in turns] == routed


def test_what_was_asked_for_is_foreseen_of_other_plans() -> None:
    traffic = Traffic("keys", 12, 34)
    first, second = (partition([length], Topology(1, 2), capacity=64) for length in (64, 66))
    program(first, 0, traffic, 3)
    foresee(second)
    made = _program.cache_info().misses
    program(second, 0, traffic, 3)
    assert _program.cache_info().misses == made


def test_a_quarter_of_a_full_circle_is_not_sent() -> None:
    turns = program(partition([64], Topology(1, 4), capacity=16), 0, Traffic("keys", 1000, 0), None)
    rows = sum(message.stop - message.start for message in turns[0].out.messages)
    assert rows == 4 * 3 * 8 + (3 + 2 + 1) * 8


def test_full_circle_takes_a_round_a_step() -> None:
    for ranks in (2, 3, 5):
        turns = program(partition([8 * ranks], Topology(1, ranks), capacity=8), 0, Traffic("keys", 1000, 0), None)
        assert len(turns[0].out.exchanges(0)) == ranks - 1


@pytest.mark.parametrize("side", ["keys", "queries"])
def test_what_is_wrong_is_named(side: Side) -> None:
    plan = partition([64], Topology(1, 4), capacity=16)
    (turn,) = program(plan, 0, Traffic(side, 1000, 2000), None)
    assert turn.back is not None
    messages = list(turn.out.messages)

    def broken(number: int, back: bool = False, **changes: int) -> Turn:
        trip = turn.back if back else turn.out
        assert trip is not None
        changed = list(trip.messages)
        changed[number] = replace(changed[number], **changes)
        return replace(turn, **{"back" if back else "out": Trip(tuple(changed))})

    last = len(messages) - 1
    wrong = [
        broken(last, to=(messages[last].to + 1) % 4),
        broken(last, start=messages[last].start + 1),
        broken(0, stop=messages[0].stop - 1),
        broken(last, back=True, stop=turn.back.messages[last].stop - 1),
        replace(turn, out=Trip(tuple(messages[:-1]))),
        replace(turn, back=Trip(turn.back.messages[:-1])),
    ]
    for case in wrong:
        with pytest.raises(ScheduleError):
            check((case,), 4)
