"""Megatron's data-parallel buckets on point-to-point messages; an unsupported bucket runs the stock collectives.

Megatron's functions run unchanged, in a copy whose global names of the collectives are bound to the functions here. So
NaN checks, scaling, the handling of the first batch and handles are those of the installed release.

Megatron starts the reduction of a bucket when the last of its gradients is complete, and all ranks of a group must
start their collectives in the same order. Overlap changes the order of gradients, also between replicas of the model.
So a bucket waits for those before it, which hold the parameters of later layers, as in `DistributedDataParallel`.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from megatron_overlap.adapters.diagnostics.consistency import open_device_transport, open_transport
from megatron_overlap.adapters.diagnostics.reference_check import Check
from megatron_overlap.adapters.tensor_parallel.eligibility import CAPTURED, is_capturing
from megatron_overlap.adapters.wrapping import Method, with_globals
from megatron_overlap.counters import Site
from megatron_overlap.ops import Gathering, GradientReduce
from megatron_overlap.schedules.gather_scatter import MAX_RANKS
from megatron_overlap.session import Adapter, Session


class MissingFlagError(ValueError):
    """`method: p2p` needs an overlap flag of Megatron that is off."""


class DataParallelAdapter(Adapter):
    """Transports, reductions in flight and counters of the data-parallel buckets of one session."""

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._reducers: dict[tuple[dist.ProcessGroup, bool, bool], GradientReduce] = {}
        self._check = session.adapter(Check)

    def close(self) -> None:
        """Waits for the sums that are in flight; the session closes the transports."""
        for reducer in self._reducers.values():
            reducer.close()
        self._reducers.clear()

    def drop(self) -> None:
        """Forgets the sums in flight without waiting for them."""
        self._reducers.clear()

    def reduce(
        self, bucket: torch.Tensor, group: dist.ProcessGroup, op: Any, *, whole: bool, wide: bool
    ) -> list[Callable[[], None]]:
        """Starts the reduction of a bucket of gradients; returns functions that wait for it and check it, in order.

        `whole`: reduce all elements; otherwise the shard of this rank. `wide`: sum bf16 and fp16 gradients in fp32.
        """
        assert op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG), op
        wide = wide or self.session.config.data.accumulate == "fp32"
        key = (group, whole, wide)
        if key not in self._reducers:
            gather = open_transport(self.session, group, "data sums") if whole else None
            transport = open_device_transport(self.session, group, "data")
            self._reducers[key] = GradientReduce(transport, gather=gather, wide=wide)
        name = "all_reduce" if whole else "reduce_scatter"
        self._count(name, bucket, group, 2 if whole else 1)
        check = [self._check.reduce(name, bucket, group, op, whole)] if self._check.due else []
        return [self._reducers[key].begin(bucket, mean=op == dist.ReduceOp.AVG).wait, *check]

    def gather(self, bucket: torch.Tensor, group: dist.ProcessGroup) -> list[Callable[[], None]]:
        """Starts the all-gather of a bucket of parameters; returns functions as `reduce` does."""
        self._count("all_gather", bucket, group, 1)
        check = [self._check.gather("all_gather", bucket, group)] if self._check.due else []
        return [Gathering(open_transport(self.session, group, "data"), bucket).wait, *check]

    def selects_stock(self, data: torch.Tensor) -> bool:
        """Whether `method: auto` runs the stock collectives for `data`; if so, the report has the reason."""
        if self.session.config.data.method != "auto" or not data.is_cuda:
            return False
        self.session.counters.exclude(
            "data parallel buckets on CUDA",
            "method auto runs the collectives of NCCL: p2p has not been measured on a GPU; use method p2p to try it",
        )
        return True

    def _count(self, op: str, bucket: torch.Tensor, group: dist.ProcessGroup, rounds: int) -> None:
        bytes_of_peers = bucket.nbytes * (group.size() - 1) // group.size()
        self.session.counters.overlapped(*_site(op, bucket), rounds * bytes_of_peers)

    def falls_back(self, op: str, bucket_group: Any, flag: str | None, reason: str | None) -> bool:
        """Whether the stock path runs the collective `op` of a bucket group; if so, counts it.

        The cause is a flag that is off, or another reason. Raises MissingFlagError if a flag is off and the configured
        method is `p2p`, and FallbackError if the configuration is strict.
        """
        if flag is not None:
            if self.session.config.data.method == "p2p":
                remedy = "add it to the launch, or use method auto"
                raise MissingFlagError(f"overlap.data.method: p2p: needs Megatron's {flag}: {remedy}")
            reason = f"Megatron's {flag} is off"
        reason = reason or self._check.fallbacks.get(op)
        if reason is None:
            return False
        for bucket in bucket_group.buckets:
            self.session.counters.fallback(*_site(op, bucket.grad_data), reason)
        return True


def start_grad_sync(original: Method, session: Session) -> Method:
    """Replacement of `_ParamAndGradBucketGroup.start_grad_sync`.

    Equals the original: the sum (or mean) of the gradients of the buckets over the data-parallel ranks. With the
    distributed optimizer each rank gets the sum of its own shard.
    """
    adapter = session.adapter(DataParallelAdapter)

    def start(self: Any, force_all_reduce: bool | None = False) -> None:
        config = self.ddp_config
        sharded = config.use_distributed_optimizer
        group = self.intra_distributed_optimizer_instance_group if sharded else self.data_parallel_group
        if group.size() == 1 or adapter.selects_stock(self.buckets[0].grad_data):
            return original(self, force_all_reduce)
        flag = None if config.overlap_grad_reduce else "--overlap-grad-reduce"
        reason = _unsupported_group_reason(group, self.buckets[0].grad_data)
        if config.num_distributed_optimizer_instances > 1:
            reason = "several instances of the distributed optimizer"
        elif force_all_reduce:
            reason = "Megatron reduces all gradients to save them (force_all_reduce)"
        if adapter.falls_back("reduce_scatter" if sharded else "all_reduce", self, flag, reason):
            return original(self, force_all_reduce)
        wide = config.reduce_scatter_with_fp32_accumulation
        return _Collectives(adapter, wide=wide).run(original, self, force_all_reduce)

    return start


def start_param_sync(original: Method, session: Session) -> Method:
    """Replacement of `_ParamAndGradBucketGroup.start_param_sync`: an all-gather of the buckets' parameters."""
    adapter = session.adapter(DataParallelAdapter)

    def start(self: Any, force_sync: bool = False) -> None:
        config = self.ddp_config
        group = self.intra_distributed_optimizer_instance_group
        finishes = force_sync and self.param_gather_handle is not None
        if group.size() == 1 or finishes or adapter.selects_stock(self.buckets[0].grad_data):
            return original(self, force_sync)
        flag = None if config.overlap_param_gather else "--overlap-param-gather"
        reason: str | None = "layer-wise distributed optimizer"
        if config.use_distributed_optimizer:
            reason = _unsupported_group_reason(group, self.buckets[0].param_data)
        if adapter.falls_back("all_gather", self, flag, reason):
            return original(self, force_sync)
        return _Collectives(adapter).run(original, self, force_sync)

    return start


def finish_param_sync(original: Method, session: Session) -> Method:
    """Replacement of `_ParamAndGradBucketGroup.finish_param_sync`.

    Equals the original without its warning that the all-gather of the next bucket has started already: the optimizer
    step starts all of them.
    """

    def finish(self: Any, skip_next_bucket_dispatch: bool = False) -> None:
        following = self.next_param_gather_bucket_group
        skip = skip_next_bucket_dispatch or (following is not None and following.param_gather_dispatched)
        return original(self, skip)

    return finish


class _Collectives:
    """The collectives of one call of Megatron, their coalescing manager, and the handle that it returns."""

    def __init__(self, adapter: DataParallelAdapter, *, wide: bool = False) -> None:
        self._adapter, self._wide = adapter, wide
        self._waits: list[Callable[[], None]] = []

    def run(self, original: Method, *args: Any) -> Any:
        """Calls a copy of `original` that runs these collectives."""
        distributed = _ModuleOverlay(dist, all_reduce=self._all_reduce)
        names = {"torch": _ModuleOverlay(torch, distributed=distributed), "_coalescing_manager": self._manager}
        names |= {"dist_reduce_scatter_func": self._reduce_scatter, "dist_all_gather_func": self._all_gather}
        return with_globals(original, names)(*args)

    def _reduce_scatter(self, output: Any, input: Any, *, op: Any, group: Any, async_op: bool) -> Self:
        self._waits += self._adapter.reduce(input, group, op, whole=False, wide=self._wide)
        return self

    def _all_reduce(self, tensor: Any, *, op: Any, group: Any, async_op: bool) -> Self:
        self._waits += self._adapter.reduce(tensor, group, op, whole=True, wide=self._wide)
        return self

    def _all_gather(self, output: Any, input: Any, *, group: Any, async_op: bool) -> Self:
        self._waits += self._adapter.gather(output, group)
        return self

    @contextmanager
    def _manager(self, group: dist.ProcessGroup, *, async_ops: bool = False) -> Iterator[Self]:
        yield self
        if not async_ops:
            self.wait()

    def wait(self) -> None:
        """Waits for all of them, once."""
        while self._waits:
            self._waits.pop(0)()


class _ModuleOverlay:
    """A module in which some names are replaced."""

    def __init__(self, module: Any, **names: Any) -> None:
        self.__dict__.update(names)
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _site(op: str, bucket: torch.Tensor) -> Site:
    return Site("data", f"bucket of {bucket.numel()}", op, "forward" if op == "all_gather" else "wgrad")


def _unsupported_group_reason(group: dist.ProcessGroup, data: torch.Tensor) -> str | None:
    if group.size() > MAX_RANKS:
        return f"more than {MAX_RANKS} data-parallel ranks"
    if dist.get_backend(group) not in ("gloo", "nccl"):
        return f"process group backend {dist.get_backend(group)} has no point-to-point transport"
    if is_capturing(data):
        return CAPTURED
    return None


class BucketOrders(Adapter):
    """The `BucketOrder` of each bucket group that was made in a session."""

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self.of: WeakKeyDictionary[Any, BucketOrder] = WeakKeyDictionary()

    def step_ended(self) -> None:
        for order in set(self.of.values()):
            if order.num_late:
                self.session.counters.exclude(
                    "early start of gradient buckets",
                    f"{order.num_late} of {order.num_groups} wait for parameters that the model registers after theirs "
                    "but uses before them: register modules in the order of forward",
                )
            order.begin_step()


class BucketOrder:
    """Starts the reductions of `groups` in their order, each as soon as its group and those before it are ready.

    A group that has had no gradient since the model was made is passed over, as by Megatron.

    Attributes:
        num_late: the largest number of groups that waited at one time; 0 if it was always less than half of all.
    """

    def __init__(self, groups: Sequence[Any]) -> None:
        self.num_groups, self.num_late = len(groups), 0
        self._number = {id(group): number for number, group in enumerate(groups)}
        self._groups = [weakref.ref(group) for group in groups]
        self.begin_step()

    def begin_step(self) -> None:
        """Forgets the groups that are ready. The step before may have been aborted."""
        self._ready: dict[int, Callable[[], None]] = {}
        self._next = 0

    def ready(self, group: Any, start: Callable[[], None]) -> None:
        """Called once for each group in a step, when its gradients are complete; `start` starts its reduction."""
        number = self._number[id(group)]
        if number < self._next or number in self._ready:
            self.begin_step()
        self._ready[number] = start
        while self._next in self._ready or self._has_no_gradient(self._next):
            reduce = self._ready.pop(self._next, None)
            self._next += 1
            if reduce is not None:
                reduce()
        waiting = len(self._ready)
        if waiting > 1 and 2 * waiting >= self.num_groups:
            self.num_late = max(self.num_late, waiting)

    def _has_no_gradient(self, number: int) -> bool:
        group = self._groups[number]() if number < len(self._groups) else None
        return bool(getattr(group, "is_first_batch", False))


def partition_buckets(original: Method, session: Session) -> Method:
    """Replacement of `partition_buckets`: its result is one `BucketOrder`."""
    orders = session.adapter(BucketOrders)

    def partition(*args: Any, **kwargs: Any) -> Any:
        groups = original(*args, **kwargs)
        orders.of.update(dict.fromkeys(groups, BucketOrder(groups)))
        return groups

    return partition


def register_grad_ready(original: Method, session: Session) -> Method:
    """Replacement of `_ParamAndGradBucketGroup.register_grad_ready`: `BucketOrder` starts the reduction."""
    orders = session.adapter(BucketOrders)

    def register(self: Any, *args: Any, **kwargs: Any) -> None:
        order = orders.of.get(self)
        if order is None:
            return original(self, *args, **kwargs)
        start, own = self.start_grad_sync, vars(self).get("start_grad_sync")
        self.start_grad_sync = lambda **options: order.ready(self, functools.partial(start, **options))
        try:
            return original(self, *args, **kwargs)
        finally:
            if own is None:
                del self.start_grad_sync
            else:
                self.start_grad_sync = own

    return register
