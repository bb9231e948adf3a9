"""Routes: each share passes adjacent ranks from the source to the destination, over its own NIC, only where faster."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_overlap.schedules.varlen import Topology
from megatron_overlap.schedules.varlen.message_order import MessageBuilder, Paths, _routed_us

FAST_INSIDE = Topology(2, 8, 8, intra_gbps=360, inter_gbps=48)


def plan_route(source: int, to: int, num_bytes: int, topology: Topology) -> Paths:
    return MessageBuilder(topology, 1).paths(source, to, num_bytes)


def direct_us(num_bytes: int, topology: Topology) -> float:
    """Modelled time of a transfer between nodes without proxies."""
    return topology.inter_latency_us + num_bytes / topology.inter_gbps / 1e3


def check_paths(paths: Paths, source: int, to: int, topology: Topology) -> None:
    """A path leaves its node once, between two ranks next to the same NIC; no two paths use one NIC."""
    nics = []
    for path in paths:
        assert (path[0], path[-1]) == (source, to)
        between = [hop for hop in pairwise(path) if topology.node_of(hop[0]) != topology.node_of(hop[1])]
        assert len(between) == (topology.node_of(source) != topology.node_of(to))
        for sender, receiver in between:
            nics.append(topology.nic_of(sender))
            assert topology.nic_of(receiver) == nics[-1] or len(paths) == 1
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
    paths = plan_route(source, to, num_bytes, topology)
    check_paths(paths, source, to, topology)
    assert len(paths) <= nics
    assert plan_route(source, to, num_bytes, replace(topology, routing=False)) == ((source, to),)
    if len(paths) > 1:
        assert _routed_us(num_bytes, len(paths), topology) < direct_us(num_bytes, topology)


def test_large_transfers_use_all_nics() -> None:
    paths = plan_route(1, 12, 100_000_000, FAST_INSIDE)
    assert len(paths) == 8
    assert paths[0] == (1, 9, 12)
    assert _routed_us(100_000_000, 8, FAST_INSIDE) < direct_us(100_000_000, FAST_INSIDE) * 0.4


def test_small_transfers_go_directly() -> None:
    assert plan_route(1, 12, 20_000, FAST_INSIDE) == ((1, 12),)


def test_no_routing_through_slow_nodes() -> None:
    """A route is faster only if a NIC has less than half of the bandwidth inside the node."""
    slow_inside = Topology(2, 2, 2, intra_gbps=24, inter_gbps=48)
    assert plan_route(0, 2, 100_000_000, slow_inside) == ((0, 2),)


def test_direct_with_one_nic_inside_a_node_or_without_routing() -> None:
    for topology, to in (
        (Topology(2, 8, 1), 12),
        (FAST_INSIDE, 3),
        (Topology(2, 8, 8, routing=False), 12),
    ):
        assert plan_route(1, to, 100_000_000, topology) == ((1, to),)
