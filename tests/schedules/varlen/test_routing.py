"""Routes: each share passes adjacent ranks from the source to the destination, over its own NIC, only where faster."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_overlap.schedules.varlen import Topology
from megatron_overlap.schedules.varlen.message_order import MessageBuilder, Route

FAST_INSIDE = Topology(2, 8, 8, intra_gbps=360, inter_gbps=48)


def plan_route(source: int, to: int, num_bytes: int, topology: Topology) -> Route:
    return MessageBuilder(topology, 1).route(source, to, num_bytes)


def check_paths(route: Route, source: int, to: int, topology: Topology) -> None:
    """A path leaves its node once, between two ranks next to the same NIC; no two paths use one NIC."""
    nics = []
    for path in route.paths:
        assert (path[0], path[-1]) == (source, to)
        between = [hop for hop in pairwise(path) if topology.node_of(hop[0]) != topology.node_of(hop[1])]
        assert len(between) == (topology.node_of(source) != topology.node_of(to))
        for sender, receiver in between:
            nics.append(topology.nic_of(sender))
            assert topology.nic_of(receiver) == nics[-1] or len(route.paths) == 1
    assert len(set(nics)) == len(nics)


@settings(max_examples=100)
@given(
    nodes=st.integers(1, 3),
    devices=st.integers(1, 6),
    nics=st.integers(1, 8),
    num_bytes=st.integers(0, 700),
    inter_gbps=st.floats(1e-6, 1e-3),
    data=st.data(),
)
def test_each_path_leads_to_the_destination(
    nodes: int, devices: int, nics: int, num_bytes: int, inter_gbps: float, data: st.DataObject
) -> None:
    topology = Topology(nodes, devices, nics, inter_gbps=inter_gbps)
    ranks = st.integers(0, topology.ranks - 1)
    source, to = data.draw(ranks), data.draw(ranks)
    route = plan_route(source, to, num_bytes, topology)
    check_paths(route, source, to, topology)
    assert len(route.paths) <= nics
    direct = plan_route(source, to, num_bytes, replace(topology, routing=False))
    assert direct.paths == ((source, to),)
    assert route.modelled_us <= direct.modelled_us


def test_large_transfers_use_all_nics() -> None:
    route = plan_route(1, 12, 100_000_000, FAST_INSIDE)
    assert len(route.paths) == 8
    assert route.paths[0] == (1, 9, 12)
    assert route.modelled_us < plan_route(1, 12, 100_000_000, replace(FAST_INSIDE, routing=False)).modelled_us * 0.4


def test_small_transfers_go_directly() -> None:
    assert plan_route(1, 12, 20_000, FAST_INSIDE).paths == ((1, 12),)


def test_no_routing_through_slow_nodes() -> None:
    """A route is faster only if a NIC has less than half of the bandwidth inside the node."""
    slow_inside = Topology(2, 2, 2, intra_gbps=24, inter_gbps=48)
    assert plan_route(0, 2, 100_000_000, slow_inside).paths == ((0, 2),)


def test_direct_with_one_nic_inside_a_node_or_without_routing() -> None:
    for topology, to in (
        (Topology(2, 8, 1), 12),
        (FAST_INSIDE, 3),
        (Topology(2, 8, 8, routing=False), 12),
    ):
        assert plan_route(1, to, 100_000_000, topology).paths == ((1, to),)
