"""A captured and replayed sequence on the host, as a CUDA graph: the calls of all queues, without the Python of ops.

Replays run in real processes: threads copy between memories that the processes share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from megatron_overlap.comm.gloo import GlooTransport
from megatron_overlap.comm.host_group import HostGroup
from megatron_overlap.comm.symmetric.backend import Copy, FlagStep, Queue
from megatron_overlap.comm.symmetric.copies import CopyTransport
from megatron_overlap.comm.transport import OrderedTransport, Transport
from megatron_overlap.ops import (
    LinearPlan,
    UlyssesPlan,
    all_gather_linear,
    copy_linear,
    linear_all_reduce,
    linear_reduce_scatter,
    ulysses_attention,
)
from megatron_overlap.schedules import SequenceLayout
from scripts.kernels.cpu_backend import CpuBackend
from tests.comm.copy_protocol import Recording

Step = Callable[[Transport], list[torch.Tensor]]


class Graph:
    """The calls of a sequence, in the order of the host.

    Attributes:
        calls: None outside a capture: calls then run at once.
        marks: of the queues, by the marks that the ops hold.
    """

    def __init__(self) -> None:
        self.calls: list[Callable[[], object]] | None = None
        self.marks: dict[object, object] = {}

    def add(self, call: Callable[[], object]) -> None:
        if self.calls is None:
            call()
        else:
            self.calls.append(call)

    def capture(
        self, queue: Any, step: Callable[[], list[torch.Tensor]]
    ) -> tuple[list[torch.Tensor], Callable[[], None]]:
        """Capture what `step` enqueues. Return its results, which have no content yet, and the replay."""
        self.calls = calls = []
        with Recording(queue):
            results = step()
        self.calls = None

        @torch.no_grad()
        def replay() -> None:
            for call in calls:
                call()

        return results, replay


class CapturedQueue:
    """See `backend.Queue`."""

    def __init__(self, inner: Any, graph: Graph) -> None:
        self._inner, self._graph = inner, graph
        # `Recording` appends the torch operations of the computing queue here.
        self.steps = SimpleNamespace(append=lambda step: graph.add(step.action))

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        self._graph.add(lambda: self._inner.copy(to, source))

    def prepare_copies(self, copies: Sequence[Copy], *, captured: bool = False) -> object:
        assert captured == (self._graph.calls is not None)
        return self._inner.prepare_copies(copies, captured=captured)

    def copy_all(self, prepared: object, tensors: Sequence[torch.Tensor]) -> None:
        self._graph.add(lambda: self._inner.copy_all(prepared, tensors))

    def prepare(self, steps: Sequence[FlagStep], *, captured: bool = False) -> object:
        assert captured == (self._graph.calls is not None)
        return self._inner.prepare(steps, captured=captured)

    def run(self, prepared: object) -> None:
        self._graph.add(lambda: self._inner.run(prepared))

    def mark(self) -> object:
        mark, marks = object(), self._graph.marks
        self._graph.add(lambda: marks.update({mark: self._inner.mark()}))
        return mark

    def after(self, mark: object) -> None:
        self._graph.add(lambda: self._inner.after(self._graph.marks[mark]))


class CapturedBackend(CpuBackend):
    """See `CpuBackend`. Its queues can be captured."""

    def __init__(self, host_group: HostGroup, graph: Graph) -> None:
        super().__init__(host_group)
        self._graph = graph
        self.computing: Any = CapturedQueue(self.computing, graph)

    def queue(self) -> Queue:
        queue: Any = CapturedQueue(super().queue(), self._graph)
        return queue

    def is_capturing(self) -> bool:
        return self._graph.calls is not None


def _layers(column: Any, row: Any, rows: int, plan: LinearPlan, dtype: torch.dtype) -> tuple[list[torch.Tensor], Step]:
    shapes = ((rows, 16), (24, 16), (16, 24))
    x, w1, w2 = leaves = [torch.zeros(shape, dtype=dtype, requires_grad=True) for shape in shapes]
    dy = torch.zeros(rows, 16, dtype=dtype)

    def step(transport: Transport) -> list[torch.Tensor]:
        hidden = column(x, w1, group=transport, plan=plan)
        y = row(hidden, w2, group=transport, plan=plan)
        return [hidden.detach(), y.detach(), *torch.autograd.grad(y, leaves, dy)]

    return [*leaves, dy], step


def _rows(group: dist.ProcessGroup, plan: LinearPlan, dtype: torch.dtype) -> tuple[list[torch.Tensor], Step]:
    return _layers(all_gather_linear, linear_reduce_scatter, 8, plan, dtype)


def _all_reduce(group: dist.ProcessGroup, plan: LinearPlan, dtype: torch.dtype) -> tuple[list[torch.Tensor], Step]:
    return _layers(copy_linear, linear_all_reduce, 37, plan, dtype)


def _ulysses(group: dist.ProcessGroup, plan: LinearPlan, dtype: torch.dtype) -> tuple[list[torch.Tensor], Step]:
    layout, groups = SequenceLayout.zigzag(32, group.size()), UlyssesPlan(num_groups=plan.chunks_per_rank)
    heads = (8, 4, 4)
    qkv = [torch.zeros(32 // group.size(), 2, each, 8, dtype=dtype, requires_grad=True) for each in heads]
    dy = torch.zeros_like(qkv[0], requires_grad=False)

    def step(transport: Transport) -> list[torch.Tensor]:
        y = ulysses_attention(*qkv, group=transport, layout=layout, plan=groups)
        return [y.detach(), *torch.autograd.grad(y, qkv, dy)]

    return [*qkv, dy], step


STEPS = {"rows": _rows, "all-reduce": _all_reduce, "Ulysses": _ulysses}
"""Forward and backward of operations between symmetric buffers, and the tensors that they read."""


def replay(
    group: dist.ProcessGroup, name: str, num_steps: int, plan: LinearPlan, dtype: torch.dtype
) -> tuple[list[int], int]:
    """Replay forward and backward of an operation, with new input in the same tensors.

    Return the steps whose results differ from those of messages over gloo in fixed order, and the number of steps of
    which every result differs from that of the step before.
    """
    generator = torch.Generator().manual_seed(dist.get_rank(group))
    tensors, step = STEPS[name](group, plan, dtype)
    graph = Graph()
    backend = CapturedBackend(HostGroup(group), graph)
    copies, messages = CopyTransport(backend), OrderedTransport(GlooTransport(group))
    step(copies)  # allocates the symmetric buffers
    results, play = graph.capture(backend.computing, lambda: step(copies))
    copies.begin = None  # type: ignore[assignment,method-assign]  # a replay runs no op
    different, num_changed, before = [], 0, [torch.empty(0)] * len(results)
    for number in range(num_steps):
        with torch.no_grad():
            for tensor in tensors:
                tensor.copy_(torch.randn(tensor.shape, generator=generator))
        play()
        if not all(map(torch.equal, results, step(messages))):
            different.append(number)
        num_changed += not any(map(torch.equal, results, before))
        before = [result.clone() for result in results]
    dist.barrier(group)
    copies.close()
    messages.close()
    return different, num_changed
