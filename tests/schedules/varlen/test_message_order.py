"""The rounds of messages: few, in the order of dependencies, and faster with routes than without."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import pytest

from megatron_overlap.schedules.varlen import Topology
from megatron_overlap.schedules.varlen.message_order import MessagePlan
from megatron_overlap.schedules.varlen.messages import RingMessages, Traffic, messages_of
from megatron_overlap.schedules.varlen.partition import ring_over_all

TRAFFIC = Traffic("q", payload_bytes=4096, result_bytes=8192)
CALL_US = 5.0
"""Fixed time of one call of NCCL."""


@dataclass(frozen=True)
class Cluster:
    """Nodes of GPUs with one card for each, and rows of each rank in the only document."""

    nodes: int
    devices_per_node: int
    rows: int = 2048

    def group(self, *, routing: bool) -> tuple[RingMessages, Topology]:
        """The only ring group, in backward."""
        devices = self.devices_per_node
        topology = Topology(self.nodes, devices, devices, intra_gbps=300, inter_gbps=50, routing=routing)
        plan = ring_over_all([self.rows * topology.ranks], topology, capacity=self.rows)
        (group,) = messages_of(plan, 0, TRAFFIC)
        return group, topology


def both(group: RingMessages) -> tuple[tuple[MessagePlan, int], ...]:
    """The messages of both directions, and the bytes of their rows."""
    assert group.collect is not None
    return (group.distribute, TRAFFIC.payload_bytes), (group.collect, TRAFFIC.result_bytes)


def duration_us(plan: MessagePlan, topology: Topology, row_bytes: int) -> float:
    """Modelled time on NCCL: a rank makes one call in each of its rounds, and its next one when all messages of it are
    complete. Messages share the ports of devices and network cards."""
    rounds = defaultdict[int, list[int]](list)
    for index, message in enumerate(plan.messages):
        rounds[message.round].append(index)
    free, called = defaultdict[object, float](float), defaultdict[int, float](float)
    for number in sorted(rounds):
        messages = [plan.messages[index] for index in rounds[number]]
        starts = {rank: called[rank] + CALL_US for each in messages for rank in (each.source, each.to)}
        for message in messages:
            inter = topology.is_inter(message.source, message.to)
            between = topology.inter_gbps, topology.inter_latency_us
            gbps, latency_us = between if inter else (topology.intra_gbps, topology.intra_latency_us)
            ports = (message.source, inter, "out"), (message.to, inter, "in")
            start = max(starts[message.source], starts[message.to], *(free[port] for port in ports))
            end = start + (message.stop - message.start) * row_bytes / gbps / 1e3
            free.update(dict.fromkeys(ports, end))
            for rank in (message.source, message.to):
                called[rank] = max(called[rank], end + latency_us)
    return max(called.values())


CLUSTERS = [Cluster(2, 4), Cluster(2, 8), Cluster(4, 4), Cluster(4, 8), Cluster(3, 3)]


@pytest.mark.parametrize("cluster", CLUSTERS, ids=lambda cluster: f"{cluster.nodes}x{cluster.devices_per_node}")
def test_routes_are_faster_on_a_transport_that_completes_round_by_round(cluster: Cluster) -> None:
    (routed, topology), (direct, _) = (cluster.group(routing=routing) for routing in (True, False))
    for (plan, row_bytes), (other, _) in zip(both(routed), both(direct), strict=True):
        assert duration_us(plan, topology, row_bytes) < 0.65 * duration_us(other, topology, row_bytes)


@pytest.mark.parametrize("routing", [True, False])
@pytest.mark.parametrize("cluster", CLUSTERS, ids=lambda cluster: f"{cluster.nodes}x{cluster.devices_per_node}")
def test_a_round_follows_the_rounds_that_it_depends_on(cluster: Cluster, routing: bool) -> None:
    group, topology = cluster.group(routing=routing)
    for plan, _ in both(group):
        results = defaultdict[tuple[int, int], int](int)
        for message in plan.messages:
            earlier = [plan.messages[each].round + 1 for each in message.after]
            if plan is group.collect and not message.after:
                earlier = [results[message.payload, message.step]]
            assert message.round == max(earlier, default=0)
            if message.is_final and not message.to_owner:
                step = message.payload, message.step + 1
                results[step] = max(results[step], message.round + 1)
        # The longest path of a payload: a hop for each ring step, and two more where it leaves a node with a route.
        hops = topology.ranks - 1 + 2 * topology.nodes * routing
        assert max(message.round for message in plan.messages) <= hops
