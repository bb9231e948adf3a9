"""Worker functions of the tests of events: messages with known delays and clocks with known offsets."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from megatron_overlap.adapters.training.train_step import collective_wait
from megatron_overlap.comm.gloo import GlooP2PWork, GlooTransport
from megatron_overlap.comm.host_group import compare_clocks, store_beside
from megatron_overlap.comm.transport import Transfer, TransportOptions
from megatron_overlap.schedules import all_gather_plan
from megatron_overlap.tracing import EVENT, Kind, RankEvents, Trace, exposed_in


class DelayTransport(GlooTransport):
    """Sends every message `delay_s` after it is ready and records the time."""

    delay_s = 0.0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.sent_ns: list[int] = []
        super().__init__(*args, **kwargs)

    def begin(self, transfers: Sequence[Transfer], op: str) -> GlooP2PWork:
        self._num_ops += 1
        p2p_work = DelayP2PWork(self, transfers, op, self._num_ops)
        for peer in {transfer.message.source for transfer in transfers}:
            self._receivers[peer].put(p2p_work)
        with self.changed:
            self._sending.append(p2p_work)
            self.changed.notify_all()
        return p2p_work


class DelayP2PWork(GlooP2PWork):
    def send_next(self) -> None:
        transport = self._transport
        assert isinstance(transport, DelayTransport)
        time.sleep(transport.delay_s)
        transport.sent_ns.append(time.perf_counter_ns())
        super().send_next()


def known_delays(group: dist.ProcessGroup, delays: list[tuple[str, float, float]]) -> dict[str, tuple[float, float]]:
    """Return the exposed time of each operation of rank 0 by its events, and the true time, in milliseconds.

    Args:
        group: two ranks.
        delays: operation, delay of the message of rank 1 in seconds, computation of rank 0 before its wait in seconds.
    """
    trace = Trace()
    transport = DelayTransport(group, TransportOptions(trace=trace))
    plan = all_gather_plan(2, transport.rank)
    computed_ns = []
    start_ns = time.perf_counter_ns()
    for op, delay_s, compute_s in delays:
        transfers = [Transfer(message, torch.ones(64), torch.zeros(64)) for message in plan.messages]
        transport.delay_s = delay_s if transport.rank == 1 else 0.0
        dist.barrier(group)
        p2p_work = transport.begin(transfers, op)
        time.sleep(compute_s if transport.rank == 0 else 0.0)
        computed_ns.append(time.perf_counter_ns())
        p2p_work.wait(0)
        p2p_work.wait_all()
    stop_ns = time.perf_counter_ns()
    sent: list[Any] = [None, None]
    dist.all_gather_object(sent, transport.sent_ns, group)
    transport.close()
    names, rows = trace.take()
    found = exposed_in(RankEvents(transport.rank, _array(rows), names), start_ns, stop_ns)
    by_op = {
        f"{name} {direction}".removesuffix(" forward"): time_ms for (name, direction), time_ms in found.by_op.items()
    }
    true_ms = [max(0, stop - start) / 1e6 for stop, start in zip(sent[1], computed_ns, strict=True)]
    result = {op: (by_op.get(op, 0.0), true) for (op, _, _), true in zip(delays, true_ms, strict=True)}
    return {**result, "all": (found.total_ms, sum(true_ms))}


def message_names(group: dist.ProcessGroup) -> tuple[set[Any], set[Any]]:
    """Return the identities of the messages that this rank sent and received; the last two fields are the ranks."""
    trace = Trace()
    transport = GlooTransport(group, TransportOptions(trace=trace, channel="test"))
    for op in ("first", "second dgrad"):
        plan = all_gather_plan(transport.size, transport.rank, chunks_per_rank=2, pattern="ring")
        slots = {k: torch.zeros(5) for k, _ in enumerate(plan.messages)}
        transfers = [
            Transfer(e, slots[e.after_messages[0]] if e.after_messages else torch.ones(5), slots[k])
            for k, e in enumerate(plan.messages)
        ]
        transport.begin(transfers, op).wait_all()
    dist.barrier(group)
    transport.close()
    names, rows = trace.take()
    sent, received = set(), set()
    for row in _array(rows):
        ends = (transport.ranks[transport.rank], int(row["peer"]))
        name = (
            names[row["op"]],
            names[row["group"]],
            int(row["operation"]),
            int(row["message"]),
            int(row["num_bytes"]),
        )
        if row["kind"] == Kind.SENT:
            sent.add((*name, *ends))
        elif row["kind"] == Kind.RECEIVED:
            received.add((*name, *ends[::-1]))
    return sent, received


def clocks(group: dist.ProcessGroup, ahead_ms: float) -> tuple[float, float]:
    """Return the offset to rank 0 and its error bound in milliseconds. Each clock is `rank * ahead_ms` ahead."""
    rank = dist.get_rank(group)
    mark = compare_clocks(group, lambda: time.perf_counter_ns() + round(rank * ahead_ms * 1e6))
    return mark.offset_ns / 1e6, mark.error_ns / 1e6


def clocks_without_the_last_rank(group: dist.ProcessGroup) -> str:
    """Return the error of a comparison in which the last rank takes no part."""
    if dist.get_rank(group) == dist.get_world_size(group) - 1:
        store_beside(group)  # as the others do
        return ""
    try:
        compare_clocks(group, timeout_s=0.5)
    except RuntimeError as error:
        return str(error)
    return "compared"


def collective_waits(group: dist.ProcessGroup, late_s: float) -> list[tuple[str, float]]:
    """Return names and seconds of the waits for collectives that rank 1 joins `late_s` late."""
    session: Any = SimpleNamespace(trace=(trace := Trace()))
    with mock.patch.object(dist.Work, "wait", collective_wait(dist.Work.wait, session)):
        _collectives_with_a_late_rank(group, late_s, trace)
    names, rows = trace.take()
    return [
        (names[row["op"]], (row["stop_ns"] - row["start_ns"]) / 1e9)
        for row in _array(rows)
        if row["kind"] == Kind.COLLECTIVE_WAIT
    ]


def _collectives_with_a_late_rank(group: dist.ProcessGroup, late_s: float, trace: Trace) -> None:
    rank = dist.get_rank(group)
    transport = GlooTransport(group, TransportOptions(trace=trace))
    p2p_work = transport.begin(
        [Transfer(e, torch.ones(1), torch.ones(1)) for e in all_gather_plan(2, rank).messages], "op"
    )
    p2p_work.wait_all()
    dist.barrier(group)
    trace.take()
    time.sleep(late_s if rank else 0)
    dist.all_reduce(torch.ones(1), group=group)
    time.sleep(late_s if rank else 0)
    handle = dist.all_reduce(torch.ones(1), group=group, async_op=True)
    handle.wait()
    transport.close()


def _array(rows: Any) -> Any:
    import numpy as np

    return np.array(rows, dtype=EVENT)
