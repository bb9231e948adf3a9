"""Workers of the tests of the watchdog of copies. Ranks 0, 1, ... of a group are the global ranks 10, 11, ..."""

from __future__ import annotations

import io
import threading
import time
from contextlib import redirect_stderr
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from megatron_overlap.comm.host_group import HostGroup
from megatron_overlap.comm.symmetric.copies import CopyTransport
from megatron_overlap.comm.transport import Transfer, TransportError, TransportOptions
from megatron_overlap.ops import LinearPlan, all_gather_linear
from megatron_overlap.schedules.plan import Chunk, Message
from scripts.kernels.cpu_backend import CpuBackend

DEADLINE_S = 1.0


@dataclass(frozen=True)
class Late:
    """What the last rank does late in each call after the first.

    Attributes:
        seconds: of lateness.
        copy: number of its late copy in the call; None: it begins late.
        calls: number of late calls.
    """

    seconds: float
    copy: int | None = None
    calls: int = 1


def _transport(group: dist.ProcessGroup) -> CopyTransport:
    backend = CpuBackend(HostGroup(group))
    backend.ranks = range(10, 10 + backend.size)
    return CopyTransport(backend, TransportOptions(timeout_s=DEADLINE_S))


def _late_copies(queue: Any, delays_s: list[float]) -> None:
    """Let each copy wait in `queue` for the next of `delays_s`, if any, and thereby all later work of the queue."""
    copy = queue.copy

    def copy_late(to: torch.Tensor, source: torch.Tensor) -> None:
        if delays_s:
            queue._work.put(partial(time.sleep, delays_s.pop(0)))
        copy(to, source)

    queue.copy = copy_late


def _failure(transport: CopyTransport) -> str:
    """The text of the error that the next operation raises; empty if it raises none."""
    chunk, empty = Chunk(0, 0), torch.empty(0)
    try:
        transport.begin([Transfer(Message(chunk, 0, chunk, 0), empty, empty)], "next").wait_all()
    except TransportError as error:
        return str(error)
    return ""


def gather_from_a_late_rank(group: dist.ProcessGroup, late: Late) -> tuple[str, str, bool]:
    """Return what a rank prints, the error of its next operation, and whether its results are right."""
    transport = _transport(group)
    last = transport.rank == transport.size - 1
    plan = LinearPlan(pattern="direct", chunks_per_rank=2)
    x, weight = torch.full((4, 8), float(transport.rank)), torch.eye(8)
    delays_s: list[float] = []
    _late_copies(transport.queues.sending, delays_s)
    expected = torch.arange(transport.size).repeat_interleave(4)[:, None].expand(-1, 8).float()
    right = True
    with redirect_stderr(io.StringIO()) as printed, torch.no_grad():
        for call in range(1 + late.calls):
            if call == 1:
                dist.barrier(group)
                if last and late.copy is not None:
                    delays_s += [0.0] * late.copy + [late.seconds]
            if call and last and late.copy is None:
                time.sleep(late.seconds)
            y = all_gather_linear(x, weight, group=transport, plan=plan)
            right &= torch.equal(y, expected)
    failure = _failure(transport)
    dist.barrier(group)
    transport.close()
    return printed.getvalue(), failure, right


def threads_after_close(group: dist.ProcessGroup) -> list[str]:
    """The threads of watchdogs while a transport is open, and after it is closed."""

    def names() -> list[str]:
        return [thread.name for thread in threading.enumerate() if "watchdog" in thread.name]

    transport = _transport(group)
    found = names()
    dist.barrier(group)
    transport.close()
    return [*found, *names()]
