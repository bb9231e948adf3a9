"""Routes: every byte arrives once through ranks that hold it, over different NICs, and only where that is faster."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_overlap.schedules.varlen import Topology
from megatron_overlap.schedules.varlen.routing import Route, plan_route

FAST_INSIDE = Topology(2, 8, 8, intra_gbps=360, inter_gbps=48)


def simulate(route: Route, topology: Topology) -> None:
    """Executes all hops in order: each sends bytes that its rank holds, and every byte arrives once."""
    held: dict[int, Counter[int]] = {route.source: Counter(dict.fromkeys(range(route.num_bytes), 1))}
    hops = route.hops()
    for index, hop in enumerate(hops):
        assert hop.after is None or hop.after < index
        if hop.after is None:
            assert hop.source == route.source
        else:
            before = hops[hop.after]
            assert (before.to, before.start, before.stop) == (hop.source, hop.start, hop.stop)
        same = topology.node_of(hop.source) == topology.node_of(hop.to)
        if hop.stage != "inter_node" or topology.node_of(route.source) == topology.node_of(route.to):
            assert same
        else:
            assert not same
            assert topology.nic_of(hop.source) == topology.nic_of(hop.to) or not route.routed
        moved = range(hop.start, hop.stop)
        assert all(held[hop.source][byte] for byte in moved)
        held.setdefault(hop.to, Counter()).update(moved)
    if route.source != route.to:
        assert held.get(route.to, Counter()) == Counter(range(route.num_bytes))


@settings(max_examples=100, deadline=None)
@given(
    nodes=st.integers(1, 3),
    devices=st.integers(1, 6),
    nics=st.integers(1, 8),
    num_bytes=st.integers(0, 700),
    inter_gbps=st.floats(1e-6, 1e-3),
    max_nics=st.none() | st.integers(1, 9),
    data=st.data(),
)
def test_every_byte_arrives_once(
    nodes: int, devices: int, nics: int, num_bytes: int, inter_gbps: float, max_nics: int | None, data: st.DataObject
) -> None:
    topology = Topology(nodes, devices, nics, inter_gbps=inter_gbps)
    ranks = st.integers(0, topology.ranks - 1)
    route = plan_route(data.draw(ranks), data.draw(ranks), num_bytes, topology, max_nics=max_nics)
    simulate(route, topology)
    assert len(route.nic_paths) <= (max_nics or nics)
    assert len({path.nic for path in route.nic_paths}) == len(route.nic_paths)
    assert route.routed_us <= route.direct_us


def test_large_transfers_use_all_nics() -> None:
    route = plan_route(1, 12, 100_000_000, FAST_INSIDE)
    assert len(route.nic_paths) == 8
    assert route.nic_paths[0].proxy == 1
    assert route.pieces > 1
    assert route.routed_us < route.direct_us / 4
    assert "8 NICs" in route.describe()


def test_small_transfers_go_directly() -> None:
    route = plan_route(1, 12, 20_000, FAST_INSIDE)
    assert not route.routed
    assert route.hops()[0].stage == "inter_node"
    assert "direct" in route.describe()


def test_no_routing_through_slow_nodes() -> None:
    """Without pipelining a route is faster only if a NIC has less than half of the bandwidth inside the node."""
    slow_inside = Topology(2, 2, 2, intra_gbps=24, inter_gbps=48)
    assert not plan_route(0, 2, 100_000_000, slow_inside).routed


def test_direct_with_one_nic_inside_a_node_or_without_routing() -> None:
    for topology, to in (
        (Topology(2, 8, 1), 12),
        (FAST_INSIDE, 3),
        (Topology(2, 8, 8, routing=False), 12),
    ):
        assert not plan_route(1, to, 100_000_000, topology).routed


def test_max_nics_is_respected() -> None:
    assert len(plan_route(0, 8, 100_000_000, FAST_INSIDE, max_nics=4).nic_paths) == 4
    assert not plan_route(0, 8, 100_000_000, FAST_INSIDE, max_nics=1).routed


def test_invalid_arguments() -> None:
    with pytest.raises(ValueError, match="to: 16"):
        plan_route(0, 16, 1, FAST_INSIDE)
    with pytest.raises(ValueError, match="num_bytes: -1"):
        plan_route(0, 1, -1, FAST_INSIDE)
