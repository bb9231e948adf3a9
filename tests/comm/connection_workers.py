"""Functions that the workers run in tests of connecting and of the registry of transports."""

from __future__ import annotations

import atexit
import json
import threading
import time
from datetime import timedelta
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

from megatron_overlap.comm import TransportOptions, Transports, destroy_process_groups, transport_of
from megatron_overlap.comm.gloo import GlooTransport
from megatron_overlap.comm.host_group import connect_gloo, store_beside
from megatron_overlap.comm.transport import Transfer
from megatron_overlap.schedules import all_gather_plan

DELAY_S = 0.3


def open_and_close(group: dist.ProcessGroup, times: int) -> list[str]:
    """Open and close transports, with an all-gather in every third one; return the failures."""
    failures = []
    for number in range(times):
        try:
            transport = GlooTransport(group, TransportOptions(timeout_s=30))
            if number % 3 == 2:
                plan = all_gather_plan(transport.size, transport.rank)
                shard = torch.full((4,), float(transport.rank))
                transfers = [Transfer(message, shard, torch.zeros(4)) for message in plan.messages]
                transport.begin(transfers, "all_gather").wait_all()
                for message, transfer in zip(plan.messages, transfers, strict=True):
                    assert transfer.recv.tolist() == [message.recv.owner] * 4
            transport.close()
            del transport
        except (RuntimeError, AssertionError) as error:
            failures.append(f"transport {number}: {error}")
    return failures


def connect_with_a_slow_rank(group: dist.ProcessGroup) -> float:
    """Rank 1 finishes gloo's rendezvous late: return the seconds that `connect_gloo` took."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    rendezvous = dist.ProcessGroupGloo

    def slow(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroupGloo:
        connected = rendezvous(store, rank, size, timeout)
        time.sleep(DELAY_S if rank == 1 else 0)
        return connected

    store = store_beside(group)
    dist.barrier(group)
    start = time.perf_counter()
    with mock.patch.object(dist, "ProcessGroupGloo", slow):
        connect_gloo(store, rank, size, 30)
    return time.perf_counter() - start


def transports_have_one_owner(group: dist.ProcessGroup) -> dict[str, object]:
    """Open, find, insert and close transports of several channels."""
    transports, others = Transports(), Transports()
    first = transports.open(group, TransportOptions(timeout_s=20))
    data = transports.open(group, TransportOptions(channel="data"))
    seen = {
        "opened once": transports.open(group) is first and transports.find(group) is first,
        "channels are apart": data is not first and transports.find(group, "data") is data,
        "owners are apart": others.find(group) is None,
        "options": (first.timeout_s, data.channel),  # type: ignore[attr-defined]
        "buffers": dict(transports.buffers()),
    }
    dist.barrier(group)
    transports.close()
    seen["closed"] = transports.find(group) is None
    transports.insert(group, first)
    seen["inserted"] = transports.open(group) is first
    try:
        transports.open(group, TransportOptions(channel="dta"))
    except ValueError as error:
        seen["undeclared"] = str(error)
    return seen


def end_a_rank_program() -> None:
    """Main function of a job of one rank: print the threads after `destroy_process_groups` and at the end.

    At the end one transport is still open.
    """
    atexit.register(lambda: print(json.dumps([thread.name for thread in threading.enumerate()])))
    for _ in range(2):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        transport_of(dist.group.WORLD)
        dist.all_reduce(torch.ones(1))
        destroy_process_groups()
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    print(json.dumps([name for name in names if "gloo" in name]))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    GlooTransport(dist.group.WORLD)


if __name__ == "__main__":
    end_a_rank_program()
