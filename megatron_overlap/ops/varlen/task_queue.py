"""The order of computation of one rank: what has come over slow links first, what needs nothing where nothing has come.

Within a queue the order is fixed, so that every sum has one order whatever the timing; queues touch different rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from megatron_overlap.schedules.varlen import Zone


def _always() -> bool:
    return True


def _nothing() -> None:
    pass


@dataclass(slots=True)
class Task:
    """One piece of computation.

    Attributes:
        run: does it.
        is_completed: whether what it needs has come.
        wait: returns when it has.
        may: whether this rank has done what it needs.
        takes_fs: modelled time of it.
        due_fs: modelled time, from the start, at which what it needs has come.
    """

    run: Callable[[], None]
    is_completed: Callable[[], bool] = _always
    wait: Callable[[], None] = _nothing
    may: Callable[[], bool] = _always
    takes_fs: int = 0
    due_fs: int = 0


@dataclass(slots=True)
class Queues:
    """What one rank has to do in one pass.

    Attributes:
        first: done at once, in order: what rings compute on their own rows.
        visits: by zone, what needs a message.
        returns: by zone, what adds a message to the result of a visit, or to own rows.
        moved: whole documents with rows of other ranks' linear layers.
        local: what needs no message.
        asks: the transport can say what has is_completed; otherwise the model decides which message is likely to have.
    """

    asks: bool
    first: list[Task] = field(default_factory=list)
    visits: dict[Zone, deque[Task]] = field(default_factory=lambda: {"inter": deque(), "intra": deque()})
    returns: dict[Zone, deque[Task]] = field(default_factory=lambda: {"inter": deque(), "intra": deque()})
    moved: deque[Task] = field(default_factory=deque)
    local: deque[Task] = field(default_factory=deque)
    _now_fs: int = 0

    def run(self, *, gather_first: bool = False) -> None:
        """Does everything.

        A rank that has nothing else to do stands still for its visits first, those between nodes before those inside,
        and for results only after all visits: the order in which `schedules.varlen.verify` proves that nothing
        deadlocks. Moved
        rows come before results: they leave at the start, whatever their rank computes.

        Args:
            gather_first: wait for all visits before computing anything: what an all-gather does.
        """
        visits, returns = list(self.visits.values()), list(self.returns.values())
        if gather_first:
            for queue in visits:
                for task in queue:
                    task.wait()
        for task in self.first:
            self._do(task)
        while any(visits) or any(returns) or self.moved or self.local:
            # What others wait for goes before what nobody does.
            awaited = (*returns, *visits, self.moved)
            ready = next((queue for queue in awaited if queue and self._ready(queue[0])), None)
            if ready is not None:
                self._do(ready.popleft())
            elif self.local:
                self._do(self.local.popleft())
            else:
                self._do(next(queue for queue in (*visits, self.moved, *returns) if queue).popleft())

    def _ready(self, task: Task) -> bool:
        return task.may() and (task.is_completed() if self.asks else task.due_fs <= self._now_fs)

    def _do(self, task: Task) -> None:
        task.wait()
        task.run()
        self._now_fs = max(self._now_fs, task.due_fs) + task.takes_fs
