"""Weight gradients of layers that run on two halves of a micro-batch: of both halves together, once."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import torch

from megatron_overlap.comm import BufferPool
from megatron_overlap.ops.call import WeightDone
from megatron_overlap.ops.tensor_parallel.pipelined import add_product


@dataclass(frozen=True)
class Into:
    """Where a weight gradient goes: into `main_grad`, as of `copy_linear`, or to autograd."""

    main_grad: torch.Tensor | None = None
    weight_done: WeightDone | None = None
    buffer_pool: BufferPool = field(default_factory=BufferPool)


class PairedWgrad:
    """Weight gradients of a layer's halves: `dw = dy_a.T @ x_a + dy_b.T @ x_b`, computed when somebody asks.

    Each reaches its parameter once, as autograd would have handed it over, hooks included, before the backward pass
    returns.
    """

    def __init__(self) -> None:
        self._jobs: dict[torch.Tensor, _Job] = {}

    def put(self, weight: torch.Tensor, dy: torch.Tensor, x: torch.Tensor, into: Into) -> None:
        """Called in backward with one half's operands."""
        job = self._jobs.get(weight)
        if job is None:
            job = self._jobs[weight] = _Job(weight, into)
            torch.autograd.Variable._execution_engine.queue_callback(partial(self._end, job))
        job.operands.append((dy, x))

    def run(self, count: int | None = None) -> None:
        """Computes and hands over the first `count`, or all."""
        for job in list(self._jobs.values())[:count]:
            self._end(job)

    def _end(self, job: _Job) -> None:
        if self._jobs.get(job.weight) is job:
            del self._jobs[job.weight]
            job.run()


class _Job:
    def __init__(self, weight: torch.Tensor, into: Into) -> None:
        self.weight, self._into = weight, into
        self.operands: list[tuple[torch.Tensor, torch.Tensor]] = []

    def run(self) -> None:
        into, own = self._into, None
        for dy, x in self.operands:
            if into.main_grad is not None:
                add_product(into.main_grad, dy, x, into.buffer_pool)
            elif own is None:
                own = torch.mm(dy.t(), x)
            else:
                own.addmm_(dy.t(), x)
        self.operands = []
        if own is None and into.weight_done is not None:
            own = into.weight_done()
        if own is not None:
            torch.autograd.backward(self.weight, own)
