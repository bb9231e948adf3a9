"""Messages of a pass: no deadlock, every row reaches its ring steps, every query sees each of its keys once."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_overlap.schedules.varlen import Plan, Topology, messages, partition
from megatron_overlap.schedules.varlen.message_order import MessagePlan
from megatron_overlap.schedules.varlen.messages import RingMessages, Traffic, messages_of, precompute
from megatron_overlap.schedules.varlen.partition import METHODS
from megatron_overlap.schedules.varlen.plan import Ring, make_ring
from megatron_overlap.schedules.varlen.ring_groups import Passing, blocks, chunks_at
from tests.schedules.varlen.verify import check_messages
from tests.schedules.verify import ScheduleError

SLOW = {"intra_gbps": 360.0, "inter_gbps": 1e-6, "intra_latency_us": 0.001, "inter_latency_us": 0.002}


def computed_pairs(ring: Ring, groups: tuple[RingMessages, ...], passing: Passing) -> dict[tuple[int, int], int]:
    """How often each query-key pair of a ring is computed, over own rows and all ring steps."""
    size = len(ring.ranks)
    found: dict[tuple[int, int], int] = {}

    def compute(queries: tuple[int, ...], keys: tuple[int, ...]) -> None:
        for block in blocks(ring, queries, keys):
            for query_chunk in block.queries:
                for key_chunk in block.keys:
                    for query in range(*ring.bounds[query_chunk : query_chunk + 2]):
                        for key in range(*ring.bounds[key_chunk : key_chunk + 2]):
                            if block.causal and key > query:
                                continue
                            found[query, key] = found.get((query, key), 0) + 1

    group = next(group for group in groups if ring in group.ring_group.rings)
    for position in range(size):
        own = group.ring_group.chunks_of(position)
        compute(own, own)
        for payload in group.payloads:
            for step, receiver in enumerate(payload.receivers):
                if receiver == position:
                    received = chunks_at(group.ring_group, payload, step)
                    compute(*((own, received) if passing == "kv" else (received, own)))
    return found


def causal_pairs(length: int) -> dict[tuple[int, int], int]:
    return {(query, key): 1 for query in range(length) for key in range(query + 1)}


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    topology = Topology(draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.integers(1, 4)), **SLOW)
    lengths = draw(st.lists(st.integers(0, 24), max_size=8))
    spare = draw(st.integers(0, 3))
    capacity = max(1, -(-max(sum(lengths), 1) // topology.ranks) + spare)
    method = draw(st.sampled_from(["balanced", "balanced", "ring"]))
    return METHODS[method](lengths, topology, capacity=capacity, cost=None)


@settings(max_examples=150)
@given(plan=plans(), passing=st.sampled_from(["kv", "q"]))
def test_messages_are_proved_and_every_causal_pair_is_computed_once(plan: Plan, passing: Passing) -> None:
    for index, part in enumerate(plan.passes):
        groups = messages_of(plan, index, Traffic(passing, 1000, 2000))
        check_messages(groups, plan.topology.ranks)
        for ring in part.rings:
            assert computed_pairs(ring, groups, passing) == causal_pairs(ring.length)


def test_unequal_shares() -> None:
    topology = Topology(2, 3, 3, **SLOW)
    ring = make_ring(0, [(0, 1), (2, 9), (3, 1), (5, 4)], topology)
    plan = partition([15], topology, capacity=9)
    plan = replace(plan, passes=(replace(plan.passes[0], local=((),) * 6, rings=(ring,)),))
    for passing in ("kv", "q"):
        groups = messages_of(plan, 0, Traffic(passing, 1000, 2000))
        check_messages(groups, topology.ranks)
        assert computed_pairs(ring, groups, passing) == causal_pairs(ring.length)


def test_routes_use_proxies_and_nics_of_both_nodes() -> None:
    topology = Topology(2, 2, 2, **SLOW)
    groups = messages_of(partition([64], topology, capacity=16), 0, Traffic("kv", 1000, 2000))
    proof = check_messages(groups, topology.ranks)
    inter_node = [
        (message.source, message.to)
        for message in groups[0].distribute.messages
        if topology.node_of(message.source) != topology.node_of(message.to)
    ]
    # Transfers 2 to 1 and 0 to 3 use both NICs of their nodes. NICs of the same number are on one switch.
    assert set(inter_node) == {(2, 0), (3, 1), (0, 2), (1, 3)}
    assert proof.routed > 0


def test_precompute_uses_the_traffic_of_earlier_plans() -> None:
    traffic = Traffic("kv", 12, 34)
    first, second = (partition([length], Topology(1, 2), capacity=64) for length in (64, 66))
    messages_of(first, 0, traffic)
    precompute(second)
    misses = messages_of.cache_info().misses
    messages_of(second, 0, traffic)
    assert messages_of.cache_info().misses == misses


def test_a_full_ring_group_sends_a_quarter_less_than_an_all_gather() -> None:
    ranks, chunk = 4, 8
    plan = partition([2 * ranks * chunk], Topology(1, ranks), capacity=2 * chunk)
    (group,) = messages_of(plan, 0, Traffic("kv", 1000, 0))
    rows = sum(message.stop - message.start for message in group.distribute.messages)
    early, late = ranks * (ranks - 1) * chunk, (3 + 2 + 1) * chunk
    assert rows == early + late == 2 * early * 3 // 4


def test_a_full_ring_group_needs_one_round_per_ring_step() -> None:
    for ranks in (2, 3, 5):
        plan = partition([8 * ranks], Topology(1, ranks), capacity=8)
        (group,) = messages_of(plan, 0, Traffic("kv", 1000, 0))
        assert [message.round for message in group.distribute.messages] == sorted(list(range(ranks - 1)) * ranks)


@pytest.mark.parametrize("passing", ["kv", "q"])
def test_damaged_messages_are_caught(passing: Passing) -> None:
    ranks = 4
    plan = partition([64], Topology(1, ranks), capacity=16)
    (group,) = messages_of(plan, 0, Traffic(passing, 1000, 2000))
    assert group.collect is not None
    messages = list(group.distribute.messages)

    def damaged(number: int, collects: bool = False, **changes: int) -> RingMessages:
        sent = group.collect if collects else group.distribute
        assert sent is not None
        changed = list(sent.messages)
        changed[number] = changed[number]._replace(**changes)
        return replace(group, **{"collect" if collects else "distribute": MessagePlan(tuple(changed))})

    last = len(messages) - 1
    for case in (
        damaged(last, to=(messages[last].to + 1) % ranks),
        damaged(last, start=messages[last].start + 1),
        damaged(0, stop=messages[0].stop - 1),
        damaged(last, collects=True, stop=group.collect.messages[last].stop - 1),
        replace(group, distribute=MessagePlan(tuple(messages[:-1]))),
        replace(group, collect=MessagePlan(group.collect.messages[:-1])),
    ):
        with pytest.raises(ScheduleError):
            check_messages((case,), ranks)


def test_two_threads_may_add_traffic(monkeypatch: pytest.MonkeyPatch) -> None:
    """The data loader plans messages on its thread while a layer asks for its own."""

    @dataclass(frozen=True)
    class Interrupted(Traffic):
        """The comparison with it lets another thread run, which appends."""

        def __eq__(self, other: object) -> bool:
            messages._recent_traffic.append(Traffic("kv", 1, 1))
            return False

    traffic = [Interrupted("kv", size, 0) for size in (1, 2)]
    monkeypatch.setattr(messages, "_recent_traffic", deque(traffic, maxlen=4))
    messages_of(partition([9], Topology(1, 2), capacity=8), 0, Traffic("kv", 77, 0))
    assert Traffic("kv", 77, 0) in tuple(messages._recent_traffic)
