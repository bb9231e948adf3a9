"""The order of messages keeps the busiest link occupied."""

from collections import defaultdict
from dataclasses import dataclass, replace

import pytest

from megatron_overlap.schedules.varlen import Topology
from megatron_overlap.schedules.varlen.message_order import MessagePlan
from megatron_overlap.schedules.varlen.messages import Traffic, messages_of
from megatron_overlap.schedules.varlen.partition import ring_over_all

TRAFFIC = Traffic("q", payload_bytes=1552, result_bytes=1024)


def simulate(plan: MessagePlan, topology: Topology, row_bytes: int) -> tuple[float, float]:
    """Total time, and busy time of the busiest link, in microseconds.

    Every rank posts its messages in the order of their rounds. A message leaves when its rows are ready and all earlier
    messages of its rank have left.
    """
    posted: defaultdict[int, float] = defaultdict(float)
    free: defaultdict[object, float] = defaultdict(float)
    busy: defaultdict[object, float] = defaultdict(float)
    result_ready: defaultdict[tuple[int, int], float] = defaultdict(float)
    arrived: dict[int, float] = {}
    for index, message in sorted(enumerate(plan.messages), key=lambda item: item[1].round):
        own = result_ready[message.payload, message.step]
        ready = own if message.after is None else arrived[message.after]
        posted[message.source] = max(posted[message.source], ready)
        inter = topology.node_of(message.source) != topology.node_of(message.to)
        gbps, latency = topology.intra_gbps, topology.intra_latency_us
        if inter:
            gbps, latency = topology.inter_gbps, topology.inter_latency_us
        duration = (message.stop - message.start) * row_bytes / gbps / 1e3
        ports = (message.source, inter, "send"), (message.to, inter, "receive")
        end = max(posted[message.source], *(free[port] for port in ports)) + duration
        for port in ports:
            free[port] = end
            busy[port] += duration
        arrived[index] = end + latency
        if message.is_final and not message.to_owner:
            next_step = message.payload, message.step + 1
            result_ready[next_step] = max(result_ready[next_step], arrived[index])
    return max(arrived.values()), max(busy.values())


@dataclass(frozen=True)
class OrderCase:
    """A cluster, and the largest allowed ratio of the total time to the busy time of the busiest link, with routing."""

    nodes: int
    devices_per_node: int
    distribute_ratio: float
    collect_ratio: float


@pytest.mark.parametrize(
    "case",
    [
        OrderCase(nodes=2, devices_per_node=2, distribute_ratio=1.05, collect_ratio=1.1),
        OrderCase(nodes=2, devices_per_node=4, distribute_ratio=1.1, collect_ratio=1.3),
        OrderCase(nodes=4, devices_per_node=2, distribute_ratio=1.05, collect_ratio=1.25),
        OrderCase(nodes=3, devices_per_node=3, distribute_ratio=1.1, collect_ratio=1.25),
    ],
    ids=lambda case: f"{case.nodes}x{case.devices_per_node}",
)
def test_no_message_delays_one_that_is_ready(case: OrderCase) -> None:
    topology = Topology(
        case.nodes,
        case.devices_per_node,
        case.devices_per_node,
        intra_gbps=0.14,
        inter_gbps=0.01875,
        intra_latency_us=250,
        inter_latency_us=400,
    )
    for routing in (False, True):
        cluster = replace(topology, routing=routing)
        plan = ring_over_all([512 * topology.ranks], cluster, capacity=640)
        (group,) = messages_of(plan, 0, TRAFFIC, None)
        assert group.collect is not None
        for messages, row_bytes, ratio in (
            (group.distribute, TRAFFIC.payload_bytes, case.distribute_ratio),
            (group.collect, TRAFFIC.result_bytes, case.collect_ratio),
        ):
            total, busiest = simulate(messages, cluster, row_bytes)
            assert total < (ratio if routing else 1.05) * busiest
