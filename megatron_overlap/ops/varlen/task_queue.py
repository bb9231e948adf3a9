"""Schedules the compute tasks of one rank: tasks with inter-node messages first, then intra-node, then local.

The order within a queue is fixed, so every sum has one order for every timing. Different queues write different rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from megatron_overlap.schedules.varlen import Zone


def _always() -> bool:
    return True


def _no_wait() -> None:
    pass


@dataclass(slots=True)
class Task:
    """One unit of computation.

    Attributes:
        run: executes the task.
        is_completed: whether the messages that the task needs have completed.
        wait: waits for these messages.
        is_runnable: whether this rank has executed the tasks that this one needs.
        duration_fs: modelled duration.
        arrival_fs: modelled time, from the start of the pass, at which the messages arrive.
    """

    run: Callable[[], None]
    is_completed: Callable[[], bool] = _always
    wait: Callable[[], None] = _no_wait
    is_runnable: Callable[[], bool] = _always
    duration_fs: int = 0
    arrival_fs: int = 0


@dataclass(slots=True)
class TaskQueues:
    """The tasks of one rank in one pass.

    Attributes:
        can_query: the transport can report completion without a synchronisation. Otherwise the model predicts it.
        first: tasks that run first, in order: ring attention with the rank's own rows.
        ring_steps: by zone, tasks that need a payload.
        results: by zone, tasks that add a received result to the rank's own result.
        rebalanced: whole documents with rows that other ranks hold in the linear layout.
        local: tasks that need no message.
    """

    can_query: bool
    first: list[Task] = field(default_factory=list)
    ring_steps: dict[Zone, deque[Task]] = field(default_factory=lambda: {"inter": deque(), "intra": deque()})
    results: dict[Zone, deque[Task]] = field(default_factory=lambda: {"inter": deque(), "intra": deque()})
    rebalanced: deque[Task] = field(default_factory=deque)
    local: deque[Task] = field(default_factory=deque)
    _now_fs: int = 0

    def run(self, *, gather_first: bool = False) -> None:
        """Runs all tasks.

        Without a ready or local task the rank waits: for ring steps first, inter-node before intra-node, then for
        rebalanced rows, then for results. `tests/schedules/varlen` proves that this order cannot deadlock. Rebalanced
        rows come before results because their owners send them at the start, before any computation.

        Args:
            gather_first: wait for all payloads before the first computation, as an all-gather does.
        """
        ring_steps, results = list(self.ring_steps.values()), list(self.results.values())
        if gather_first:
            for queue in ring_steps:
                for task in queue:
                    task.wait()
        for task in self.first:
            self._execute(task)
        while any(ring_steps) or any(results) or self.rebalanced or self.local:
            # Tasks whose results other ranks need come before the others.
            queues = (*results, *ring_steps, self.rebalanced)
            ready = next((queue for queue in queues if queue and self._is_ready(queue[0])), None)
            if ready is not None:
                self._execute(ready.popleft())
            elif self.local:
                self._execute(self.local.popleft())
            else:
                self._execute(next(queue for queue in (*ring_steps, self.rebalanced, *results) if queue).popleft())

    def _is_ready(self, task: Task) -> bool:
        return task.is_runnable() and (task.is_completed() if self.can_query else task.arrival_fs <= self._now_fs)

    def _execute(self, task: Task) -> None:
        task.wait()
        task.run()
        self._now_fs = max(self._now_fs, task.arrival_fs) + task.duration_fs
