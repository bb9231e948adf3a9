"""The reductions of gradients start in one order on all data-parallel ranks.

Megatron starts the reduction of a bucket when the last of its gradients is complete, and all ranks of a group must
start their collectives in the same order. Overlap changes the order of gradients: a weight gradient may be postponed
until a message has arrived, and with `method: auto` two replicas of the model may run different candidates. Here a
bucket waits for those before it, which hold the parameters of later layers. torch's `DistributedDataParallel` does the
same.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from megatron_overlap.adapters.wrapping import Method
from megatron_overlap.session import Adapter, Session


class BucketOrders(Adapter):
    """The order of each bucket group that was made in a session."""

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self.of: WeakKeyDictionary[Any, BucketOrder] = WeakKeyDictionary()


class BucketOrder:
    """Starts the reductions of bucket groups in one order.

    Args:
        groups: in this order. Each reduction starts as soon as its group and those before it are ready.
    """

    def __init__(self, groups: Sequence[Any]) -> None:
        self._number = {id(group): number for number, group in enumerate(groups)}
        self._ready: dict[int, Callable[[], None]] = {}
        self._next = 0

    def ready(self, group: Any, start: Callable[[], None]) -> None:
        """Called once for each group in a step, when its gradients are complete; `start` starts its reduction."""
        number = self._number[id(group)]
        if number < self._next or number in self._ready:
            # A new step. The one before may have been aborted.
            self._ready, self._next = {}, 0
        self._ready[number] = start
        while self._next in self._ready:
            self._next += 1
            self._ready.pop(self._next - 1)()


def partition_buckets(original: Method, session: Session) -> Method:
    """Replacement of `partition_buckets`. Equals the original; its result is one order."""
    orders = session.adapter(BucketOrders)

    @functools.wraps(original)
    def partition(*args: Any, **kwargs: Any) -> Any:
        groups = original(*args, **kwargs)
        orders.of.update(dict.fromkeys(groups, BucketOrder(groups)))
        return groups

    return partition


def register_grad_ready(original: Method, session: Session) -> Method:
    """Replacement of `_ParamAndGradBucketGroup.register_grad_ready`.

    Equals the original, but the reduction that it starts may start later: see `BucketOrder`.
    """
    orders = session.adapter(BucketOrders)

    @functools.wraps(original)
    def register(self: Any, *args: Any, **kwargs: Any) -> None:
        order = orders.of.get(self)
        if order is None:
            return original(self, *args, **kwargs)
        start = self.start_grad_sync

        def postpone(**options: Any) -> None:
            order.ready(self, functools.partial(start, **options))

        self.start_grad_sync = postpone
        try:
            return original(self, *args, **kwargs)
        finally:
            del self.start_grad_sync

    return register
