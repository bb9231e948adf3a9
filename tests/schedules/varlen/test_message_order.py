"""The order of messages keeps the network cards busy."""

from collections import defaultdict
from dataclasses import replace

import pytest

from megatron_overlap.schedules.varlen import Topology
from megatron_overlap.schedules.varlen.baselines import ring_over_all
from megatron_overlap.schedules.varlen.message_order import Trip
from megatron_overlap.schedules.varlen.program import Traffic, program

TRAFFIC = Traffic("queries", out_bytes=1552, back_bytes=1024)


def plays(trip: Trip, topology: Topology, row_bytes: int) -> tuple[float, float]:
    """Time of a trip, and of its busiest link, if every rank posts its messages in the order of their rounds, each when
    what it carries is there and no earlier than those before it. Microseconds."""
    posted: defaultdict[int, float] = defaultdict(float)
    free: defaultdict[object, float] = defaultdict(float)
    busy: defaultdict[object, float] = defaultdict(float)
    summed: defaultdict[tuple[int, int], float] = defaultdict(float)
    arrived: dict[int, float] = {}
    for index, message in sorted(enumerate(trip.messages), key=lambda item: item[1].round):
        there = summed[message.load, message.step] if message.after is None else arrived[message.after]
        posted[message.source] = max(posted[message.source], there)
        inter = topology.node_of(message.source) != topology.node_of(message.to)
        gbps, latency = topology.intra_gbps, topology.intra_latency_us
        if inter:
            gbps, latency = topology.inter_gbps, topology.inter_latency_us
        takes = (message.stop - message.start) * row_bytes / gbps / 1e3
        ports = (message.source, inter, "out"), (message.to, inter, "in")
        end = max(posted[message.source], *(free[port] for port in ports)) + takes
        for port in ports:
            free[port] = end
            busy[port] += takes
        arrived[index] = end + latency
        if message.ends and not message.home:
            goal = message.load, message.step + 1
            summed[goal] = max(summed[goal], arrived[index])
    return max(arrived.values()), max(busy.values())


@pytest.mark.parametrize(
    ("nodes", "devices", "out", "back"), [(2, 2, 1.05, 1.1), (2, 4, 1.1, 1.3), (4, 2, 1.05, 1.25), (3, 3, 1.1, 1.25)]
)
def test_no_message_holds_up_one_that_is_ready(nodes: int, devices: int, out: float, back: float) -> None:
    topology = Topology(
        nodes, devices, devices, intra_gbps=0.14, inter_gbps=0.01875, intra_latency_us=250, inter_latency_us=400
    )
    for routing in (False, True):
        machine = replace(topology, routing=routing)
        plan = ring_over_all([512 * topology.ranks], machine, capacity=640)
        (turn,) = program(plan, 0, TRAFFIC, None)
        assert turn.back is not None
        for trip, row_bytes, most in ((turn.out, 1552, out), (turn.back, 1024, back)):
            took, busiest = plays(trip, machine, row_bytes)
            assert took < (most if routing else 1.05) * busiest
