"""What the workers run in tests of the transport."""

from __future__ import annotations

import threading
import time

import torch
import torch.distributed as dist

from megatron_overlap.comm import TransportError
from megatron_overlap.comm.gloo import GlooTransport
from megatron_overlap.comm.transport import Wire
from megatron_overlap.schedules import all_gather_plan, reduce_scatter_plan


def missing_peer(group: dist.ProcessGroup) -> tuple[str, float]:
    """Rank 0 waits for a message that rank 1 never sends: what it is told, and after how long."""
    transport = GlooTransport(group, timeout_s=1.0)
    text, start = "", time.perf_counter()
    if transport.rank == 0:
        plan = all_gather_plan(2, 0)
        wires = [Wire(exchange, torch.zeros(4), torch.zeros(4)) for exchange in plan.exchanges]
        flight = transport.begin(wires, "all_gather_linear")
        try:
            flight.wait(0)
        except TransportError as error:
            text = str(error)
    took = time.perf_counter() - start
    dist.barrier(group)
    transport.close()
    return text, took


def sends_wait_for_release(group: dist.ProcessGroup) -> list[float]:
    """A send leaves with what its buffer holds when the work is done, not when the flight began."""
    transport = GlooTransport(group)
    plan = reduce_scatter_plan(2, transport.rank, chunks_per_rank=2)
    out, into = torch.zeros(2, 3), torch.full((2, 3), float("nan"))
    flight = transport.begin(
        [Wire(exchange, out[i], into[i]) for i, exchange in enumerate(plan.exchanges)], "linear_reduce_scatter"
    )
    for done in (1, 2):
        time.sleep(0.05)
        out[done - 1] = 10 * transport.rank + done
        flight.release(done)
    flight.finish()
    assert flight.landed(0)
    assert flight.landed(1)
    transport.close()
    return into[:, 0].tolist()


def threads_end(group: dist.ProcessGroup) -> tuple[int, int]:
    """Threads of the package before, and after a transport was made and closed."""

    def count() -> int:
        return sum(thread.name.startswith("megatron_overlap") for thread in threading.enumerate())

    before = count()
    transport = GlooTransport(group)
    assert count() == before + 2
    # The other rank may still be connecting to this one.
    dist.barrier(group)
    transport.close()
    return before, count()


def many_flights(group: dist.ProcessGroup, count: int) -> bool:
    """Flights that begin before earlier ones have landed keep their messages apart."""
    transport = GlooTransport(group)
    plan = all_gather_plan(transport.size, transport.rank, chunks_per_rank=2, pattern="direct")
    flights, landings = [], []
    for number in range(count):
        sends = [torch.full((5,), float(100 * number + 10 * transport.rank + e.send.part)) for e in plan.exchanges]
        recvs = [torch.zeros(5) for _ in plan.exchanges]
        wires = [Wire(e, s, r) for e, s, r in zip(plan.exchanges, sends, recvs, strict=True)]
        flights.append(transport.begin(wires, f"flight {number}"))
        landings.append(recvs)
    for number, (flight, recvs) in enumerate(zip(flights, landings, strict=True)):
        flight.finish()
        for exchange, landed in zip(plan.exchanges, recvs, strict=True):
            expected = 100 * number + 10 * exchange.source + exchange.recv.part
            assert torch.equal(landed, torch.full((5,), float(expected)))
    transport.close()
    return True


def a_late_peer_holds_up_nobody_else(group: dist.ProcessGroup) -> list[int]:
    """The exchanges that have landed at rank 2 while rank 1, whose message is the first of its plan, has not come."""
    transport = GlooTransport(group)
    plan = all_gather_plan(3, transport.rank)
    shard = torch.full((4,), float(transport.rank))
    into = torch.full((2, 4), float("nan"))
    if transport.rank == 1:
        dist.barrier(group)
    flight = transport.begin(
        [Wire(exchange, shard, into[i]) for i, exchange in enumerate(plan.exchanges)], "all_gather_linear"
    )
    landed: list[int] = []
    if transport.rank == 2:
        flight.wait(1)
        landed = [index for index in (0, 1) if flight.landed(index)]
    if transport.rank != 1:
        dist.barrier(group)
    flight.finish()
    transport.close()
    return landed


def a_ready_message_passes_one_that_is_not(group: dist.ProcessGroup) -> bool:
    """Whether a younger flight's message reaches rank 1 while the older flight's work has not been done."""
    transport = GlooTransport(group)
    older = reduce_scatter_plan(2, transport.rank).exchanges[0]
    younger = all_gather_plan(2, transport.rank).exchanges[0]
    into = torch.zeros(2, 3)
    first = transport.begin([Wire(older, torch.ones(3), into[0])], "linear_reduce_scatter")
    second = transport.begin([Wire(younger, torch.ones(3), into[1])], "all_gather_linear")
    deadline = time.monotonic() + 10
    while not into[1].all() and time.monotonic() < deadline:
        time.sleep(0.01)
    passed = bool(into[1].all()) and not into[0].any()
    dist.barrier(group)
    first.release(1)
    first.finish()
    second.finish()
    transport.close()
    return passed
