"""The contract of a transport: programs that every transport must run with the same results, and the transports.

A program receives the transport of one rank and `compute`, which runs a function on the computing stream of the rank.
It returns pairs of a received tensor and its expected value, to compare when all ranks have finished. A new transport
is one line in `TRANSPORTS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from megatron_overlap.comm.gloo import GlooTransport
from megatron_overlap.comm.host_group import HostGroup
from megatron_overlap.comm.symmetric.copies import CopyTransport
from megatron_overlap.comm.symmetric.transport import SymmetricTransport
from megatron_overlap.comm.transport import OrderedTransport, Transfer, TransportError, TransportOptions
from megatron_overlap.schedules import ChunkLayout, all_gather_plan, reduce_scatter_plan
from megatron_overlap.schedules.plan import Message, Pattern
from scripts.kernels.cpu_backend import CpuBackend
from tests.helpers.faulty import CorruptTransport, LossyTransport
from tests.helpers.late import LateTransport

Compute = Callable[[Callable[[], object]], None]
Results = list[tuple[torch.Tensor, float]]
Program = Callable[[Any, Compute, "ExchangeCase"], Results]

TRANSPORTS: Mapping[str, Callable[[dist.ProcessGroup], Any]] = {
    "gloo": GlooTransport,
    "ordered": lambda group: OrderedTransport(GlooTransport(group)),
    "late": LateTransport,
    "copies": lambda group: CopyTransport(CpuBackend(HostGroup(group))),
    "corrupting no message": lambda group: CorruptTransport(group, every=0),
}
FAULTY: Mapping[str, Callable[[dist.ProcessGroup], Any]] = {
    "corrupting": lambda group: CorruptTransport(group, every=1),
    "losing": lambda group: LossyTransport(group, TransportOptions(timeout_s=0.5)),
}


@dataclass(frozen=True)
class ExchangeCase:
    """Messages of one program.

    Attributes:
        num_ranks: ranks of the group.
        pattern: pattern of the plan.
        chunks_per_rank: chunks of a shard.
        num_operations: operations in flight at the same time.
        num_elements: elements of each tensor; 0 sends nothing.
        num_extra_tensors: further tensors of each message.
    """

    num_ranks: int
    pattern: Pattern = "direct"
    chunks_per_rank: int = 2
    num_operations: int = 1
    num_elements: int = 5
    num_extra_tensors: int = 0

    @property
    def sizes(self) -> list[int]:
        """The elements of the tensors of one message."""
        return [self.num_elements + k for k in range(1 + self.num_extra_tensors)]

    def tensors(self, value: float = float("nan")) -> list[torch.Tensor]:
        """Return the tensors of one message: the k-th is filled with `value` + k / 4."""
        return [torch.full((size,), value + k / 4) for k, size in enumerate(self.sizes)]

    def received(self, transport: Any, name: str, count: int) -> list[list[torch.Tensor]]:
        """Return the tensors of `count` messages in a buffer that has the same layout on all ranks."""
        pool, shape = transport.buffer_pool, (count * sum(self.sizes),)
        parts = iter(
            pool.take(name, shape, torch.empty(0), symmetric=True).fill_(float("nan")).split(self.sizes * count)
        )
        return [[next(parts) for _ in self.sizes] for _ in range(count)]


def _transfer(
    message: Message,
    send: torch.Tensor,
    recv: torch.Tensor,
    extra_send: Sequence[torch.Tensor],
    extra_recv: Sequence[torch.Tensor],
) -> Transfer:
    """A message that lands where this rank receives the message with the same number."""
    return Transfer(message, send, recv, tuple(extra_send), tuple(extra_recv), recv, tuple(extra_recv))


def all_gather(transport: Any, compute: Compute, case: ExchangeCase) -> Results:
    """Gather the chunks of all ranks; operations overlap, and buffers are reused after `wait_all`."""
    plan = all_gather_plan(transport.size, transport.rank, chunks_per_rank=case.chunks_per_rank, pattern=case.pattern)
    results, operations = [], []
    for number in range(case.num_operations):
        own = [case.tensors(1000.0 * number + 10 * transport.rank + part) for part in range(case.chunks_per_rank)]
        recvs = case.received(transport, f"received {number}", len(plan.messages))
        transfers = []
        for message, (recv, *extra_recv) in zip(plan.messages, recvs, strict=True):
            forwarded = message.after_messages
            send, *extra_send = recvs[forwarded[0]] if forwarded else own[message.send.part]
            transfers.append(_transfer(message, send, recv, extra_send, extra_recv))
        operations.append((transport.begin(transfers, f"all_gather {number}"), own, recvs))
    for number, (work, own, recvs) in enumerate(operations):
        for index, message in enumerate(plan.messages):
            work.wait(index)
            for k, recv in enumerate(recvs[index]):
                seen = torch.empty_like(recv)
                compute(partial(seen.copy_, recv))
                results.append((seen, 1000.0 * number + 10 * message.recv.owner + message.recv.part + k / 4))
        work.wait_all()
        for tensor in (tensor for tensors in own for tensor in tensors):
            compute(partial(tensor.fill_, -1.0))
    return results


def reduce_scatter(transport: Any, compute: Compute, case: ExchangeCase) -> Results:
    """Send each chunk after the work that produces it; its buffer holds NaN until then."""
    plan = reduce_scatter_plan(
        transport.size, transport.rank, chunks_per_rank=case.chunks_per_rank, pattern=case.pattern
    )
    sends = [case.tensors() for _ in plan.messages]
    recvs = case.received(transport, "received", len(plan.messages))
    work = transport.begin(
        [
            _transfer(message, send, recv, extra_send, extra_recv)
            for message, (send, *extra_send), (recv, *extra_recv) in zip(plan.messages, sends, recvs, strict=True)
        ],
        "reduce_scatter",
    )
    results = []
    for done, step in enumerate(plan.work, start=1):
        for index in (*step.needs, *step.adds):
            work.wait(index)
            message = plan.messages[index]
            for k, recv in enumerate(recvs[index]):
                seen = torch.empty_like(recv)
                compute(partial(seen.copy_, recv))
                results.append((seen, 100.0 * message.source + 10 * message.recv.owner + message.recv.part + k / 4))
        for message, tensors in zip(plan.messages, sends, strict=True):
            if message.after_work == done:
                for k, tensor in enumerate(tensors):
                    value = 100.0 * transport.rank + 10 * message.send.owner + message.send.part + k / 4
                    compute(partial(tensor.fill_, value))
        work.mark_ready(done)
    work.wait_all()
    return results


PROGRAMS: Mapping[str, Program] = {"all_gather": all_gather, "reduce_scatter": reduce_scatter}


def wrong(results: Results) -> list[str]:
    """Describe the tensors that differ from their expected value."""
    return [f"{seen.tolist()} is not {value}" for seen, value in results if not (seen == value).all()]


def run_on_workers(group: dist.ProcessGroup, name: str, program: str, case: ExchangeCase) -> tuple[int, list[str]]:
    """Run a program on one rank; return the number of results and those that are wrong."""
    transport = (TRANSPORTS | FAULTY)[name](group)
    try:
        results = PROGRAMS[program](transport, lambda work: work(), case)
        return len(results), wrong(results)
    except TransportError as error:
        return 0, [str(error)]
    finally:
        dist.barrier(group)
        transport.close()


def symmetric_all_gather(group: dist.ProcessGroup, case: ExchangeCase) -> list[str]:
    """Gather shards by copies into symmetric memory of the host; return the wrong results."""

    waits: list[int] = []

    def wait_all(flags: torch.Tensor, epoch: int, status: torch.Tensor, max_polls: int) -> None:
        waits.append(epoch)
        for _ in range(max_polls):
            if bool((flags >= epoch).all()):
                return
        status.fill_(epoch)

    transport = SymmetricTransport(CpuBackend(HostGroup(group)), wait_all)
    shard_rows = case.chunks_per_rank * case.num_elements
    layout = ChunkLayout(transport.size * shard_rows, transport.size, case.chunks_per_rank)
    found = []
    for number in range(case.num_operations):
        operation = transport.begin(4 * layout.num_rows, "all_gather")
        gathered = operation.gather(torch.full((shard_rows, 1), 10.0 * number + transport.rank), layout)
        transport.wait_all(operation.flags[: transport.size * case.chunks_per_rank], operation.epoch)
        shards = gathered.clone().view(transport.size, shard_rows)
        found += wrong([(shard, 10.0 * number + owner) for owner, shard in enumerate(shards)])
        operation.acknowledge()
    if waits[0] != 0:
        found.append("the kernel that waits is not loaded before the first operation")
    dist.barrier(group)
    transport.close()
    return found
