"""What `CopyTransport` enqueues on all ranks for operations on integers, with their results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from megatron_overlap.comm.symmetric.copies import CopyTransport
from megatron_overlap.ops import LinearPlan, all_gather_linear, linear_all_reduce, linear_reduce_scatter
from megatron_overlap.schedules.plan import Split
from tests.comm.copy_protocol import (
    RecordedBackend,
    RecordedQueue,
    Recording,
)


@dataclass
class Recorded:
    """What all ranks enqueue, their results, and the results of the plain program, which may be computed again.

    Attributes:
        set_input: writes other numbers to the input of all ranks.
    """

    queues: list[RecordedQueue]
    hardware_queues: list[RecordedQueue]
    backends: list[RecordedBackend]
    results: list[torch.Tensor]
    expected: Callable[[], list[torch.Tensor]]
    set_input: Callable[[int], None] = lambda seed: None

    def is_right(self) -> bool:
        """Whether all results have the bits of the plain program."""
        return all(torch.equal(*pair) for pair in zip(self.results, self.expected(), strict=True))


OPERATIONS: dict[str, Callable[..., torch.Tensor]] = {
    "ag_gemm": all_gather_linear,
    "gemm_rs": linear_reduce_scatter,
    "gemm_ar": linear_all_reduce,
}


def record(
    size: int,
    ops: list[str],
    *,
    rows: int = 2,
    pattern: str = "direct",
    chunks: int = 1,
    device: str = "cpu",
    split: Split | None = None,
    transport: type[CopyTransport] = CopyTransport,
    captured: bool = False,
) -> Recorded:
    """Records operations on integers, one after another, with buffers of the pool and of earlier operations.

    `captured` records a CUDA graph, after calls that allocate the buffers.
    """
    arenas: dict[tuple[str, int], list[torch.Tensor]] = {}
    backends = [RecordedBackend(rank, size, arenas, device) for rank in range(size)]
    transports = [transport(backend) for backend in backends]
    plan = LinearPlan(pattern=pattern, chunks_per_rank=chunks, split=split)
    x = torch.arange(rows * size * 64, dtype=torch.float32).remainder(7).view(-1, 64)
    weights = [torch.full((64, 64), rank + 1.0).tril() for rank in range(size)]
    found, owned = [], [x[rank * rows : (rank + 1) * rows].clone() for rank in range(size)]
    for rank, each in enumerate(transports):
        if captured:
            for op in set(ops):
                OPERATIONS[op](owned[rank] if op == "ag_gemm" else x, weights[rank], group=each, plan=plan)
            backends[rank].begin_capture()
        with torch.no_grad(), Recording(backends[rank].computing):
            for op in ops:
                operand = owned[rank] if op == "ag_gemm" else x + 0.0
                found.append(OPERATIONS[op](operand, weights[rank], group=each, plan=plan))

    def expected() -> list[torch.Tensor]:
        total = torch.stack([x @ weight.T for weight in weights]).sum(0)
        plain = []
        for rank in range(size):
            of_rank = {"ag_gemm": x @ weights[rank].T, "gemm_ar": total, "gemm_rs": total[rank * rows :][:rows]}
            plain += [of_rank[op] for op in ops]
        return plain

    def set_input(seed: int) -> None:
        x.copy_(torch.randint(7, x.shape, generator=torch.Generator().manual_seed(seed)))
        for rank, own in enumerate(owned):
            own.copy_(x[rank * rows : (rank + 1) * rows])

    return _recorded(backends, found, expected, set_input)


def _recorded(backends: list[RecordedBackend], results: list[torch.Tensor], *functions: Any) -> Recorded:
    queues = [queue for backend in backends for queue in backend.queues]
    return Recorded(queues, [backend.one_hardware_queue() for backend in backends], backends, results, *functions)


FOUR = ["ag_gemm", "gemm_rs", "gemm_rs", "ag_gemm"]


ALL_REDUCES = ["gemm_ar", "ag_gemm", "gemm_ar", "gemm_rs"]
