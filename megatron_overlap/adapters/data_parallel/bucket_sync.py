"""Megatron's data parallel buckets on point-to-point messages; what does not fit runs Megatron's own collectives.

Megatron's own functions run, with the names under which they find the collectives bound to ours: what they do around
them (NaN checks, scaling, the first batch, handles) stays theirs in every release.
"""

from __future__ import annotations

import functools
import types
from typing import Any, Self

import torch
import torch.distributed as dist

from megatron_overlap.adapters.diagnostics.consistency import open_transport
from megatron_overlap.adapters.diagnostics.reference_check import Check
from megatron_overlap.adapters.wrapping import Method
from megatron_overlap.comm import Transport
from megatron_overlap.counters import Direction
from megatron_overlap.ops import Gathering, GradientReduce
from megatron_overlap.schedules.gather_scatter import MAX_RANKS
from megatron_overlap.session import Adapter, Session


class MissingFlagError(ValueError):
    """The config asks for messages that Megatron was not told to hide."""


class DataParallelAdapter(Adapter):
    """What the patched functions of one session share: transports, buckets on their way, and counting."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._reducers: dict[tuple[dist.ProcessGroup, bool, bool], GradientReduce] = {}
        self._check = Check.of(session)

    @classmethod
    def of(cls, session: Session) -> DataParallelAdapter:
        """The adapter of `session`; made by the first call."""
        return session.adapter(cls)

    def close(self) -> None:
        """Waits for the sums that are in flight; the session closes the transports."""
        for reducer in self._reducers.values():
            reducer.close()
        self._reducers.clear()

    def drop(self) -> None:
        """Forgets the sums in flight without waiting for them."""
        self._reducers.clear()

    def transport(self, group: dist.ProcessGroup, channel: str = "data") -> Transport:
        """The transport of a data parallel group; closed with the session."""
        return open_transport(self._session, group, channel)

    def reduce(self, bucket: torch.Tensor, group: dist.ProcessGroup, op: Any, *, whole: bool, wide: bool) -> Method:
        """Begins the sum of a bucket: of all of it with `whole`, else of the own shard. What waits for it."""
        assert op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG), op
        wide = wide or self._session.config.data.accumulate == "fp32"
        key = (group, whole, wide)
        if key not in self._reducers:
            gather = self.transport(group, "data sums") if whole else None
            self._reducers[key] = GradientReduce(self.transport(group), gather=gather, wide=wide)
        self._count("all_reduce" if whole else "reduce_scatter", bucket, group, 2 if whole else 1)
        name = "all_reduce" if whole else "reduce_scatter"
        compare = self._check.sums(name, bucket, group, op, whole) if self._check.due else None
        return _then(self._reducers[key].begin(bucket, mean=op == dist.ReduceOp.AVG).wait, compare)

    def gather(self, bucket: torch.Tensor, group: dist.ProcessGroup) -> Method:
        """Begins the all-gather of a bucket. What waits for it."""
        self._count("all_gather", bucket, group, 1)
        compare = self._check.gathered("all_gather", bucket, group) if self._check.due else None
        return _then(Gathering(self.transport(group), bucket).wait, compare)

    def count_step(self, how: str) -> None:
        """Counts the optimizer's step of one bucket, or of all."""
        self._session.counters.overlapped("data", "optimizer", how, "forward")

    def _count(self, op: str, bucket: torch.Tensor, group: dist.ProcessGroup, rounds: int) -> None:
        others = bucket.numel() * bucket.element_size() * (group.size() - 1) // group.size()
        self._session.counters.overlapped("data", _name(bucket), op, _direction(op), rounds * others)

    def leaves(self, op: str, bucket_group: Any, flag: str | None, reason: str | None) -> bool:
        """Whether Megatron's own path runs, because of a flag that is off or another reason; counts it then.

        Raises:
            MissingFlagError: a flag is off, and the config asks for messages by name.
            FallbackError: the config is strict.
        """
        if flag is not None:
            if self._session.config.data.method == "p2p":
                raise MissingFlagError(
                    f"overlap.data.method: p2p: needs Megatron's {flag}: add it to the launch, or use method auto"
                )
            reason = f"Megatron's {flag} is off"
        reason = reason or self._check.unsupported_reason(op)
        if reason is None:
            return False
        for bucket in bucket_group.buckets:
            self._session.counters.fallback("data", _name(bucket.grad_data), op, _direction(op), reason)
        return True


def start_grad_sync(original: Method, session: Session) -> Method:
    """Replacement of `_ParamAndGradBucketGroup.start_grad_sync`.

    Equals the original: the sum (or mean) of the buckets' gradients over the data parallel ranks, of the own shard
    with the distributed optimizer, of everything without it.
    """
    adapter = DataParallelAdapter.of(session)

    @functools.wraps(original)
    def start(self: Any, force_all_reduce: bool | None = False) -> None:
        config = self.ddp_config
        sharded = config.use_distributed_optimizer
        group = self.intra_distributed_optimizer_instance_group if sharded else self.data_parallel_group
        if group.size() == 1:
            return original(self, force_all_reduce)
        flag = None if config.overlap_grad_reduce else "--overlap-grad-reduce"
        reason = _unsupported_group_reason(group, self.buckets[0].grad_data)
        if config.num_distributed_optimizer_instances > 1:
            reason = "several instances of the distributed optimizer"
        elif force_all_reduce:
            reason = "gradients are reduced as a whole to be saved"
        if adapter.leaves("reduce_scatter" if sharded else "all_reduce", self, flag, reason):
            return original(self, force_all_reduce)
        posted = _Posted()
        wide = config.reduce_scatter_with_fp32_accumulation

        def reduce_scatter(output: Any, input: Any, *, op: Any, group: Any, async_op: bool) -> _Posted:
            return posted.add(adapter.reduce(input, group, op, whole=False, wide=wide))

        def all_reduce(tensor: Any, *, op: Any, group: Any, async_op: bool) -> _Posted:
            return posted.add(adapter.reduce(tensor, group, op, whole=True, wide=wide))

        own = _Seen(torch, distributed=_Seen(dist, all_reduce=all_reduce))
        names = {"dist_reduce_scatter_func": reduce_scatter, "_coalescing_manager": posted.manage, "torch": own}
        return _seeing(original, names)(self, force_all_reduce)

    return start


def start_param_sync(original: Method, session: Session) -> Method:
    """Replacement of `_ParamAndGradBucketGroup.start_param_sync`.

    Equals the original: every rank's shard of the buckets' parameters reaches all data parallel ranks.
    """
    adapter = DataParallelAdapter.of(session)

    @functools.wraps(original)
    def start(self: Any, force_sync: bool = False) -> None:
        config = self.ddp_config
        group = self.intra_distributed_optimizer_instance_group
        if group.size() == 1 or (force_sync and self.param_gather_handle is not None):
            return original(self, force_sync)
        flag = None if config.overlap_param_gather else "--overlap-param-gather"
        if not config.use_distributed_optimizer:
            reason: str | None = "layer-wise distributed optimizer"
        else:
            reason = _unsupported_group_reason(group, self.buckets[0].param_data)
        if adapter.leaves("all_gather", self, flag, reason):
            return original(self, force_sync)
        posted = _Posted()

        def all_gather(output: Any, input: Any, *, group: Any, async_op: bool) -> _Posted:
            return posted.add(adapter.gather(output, group))

        names = {"dist_all_gather_func": all_gather, "_coalescing_manager": posted.manage}
        return _seeing(original, names)(self, force_sync)

    return start


def finish_param_sync(original: Method, session: Session) -> Method:
    """Replacement of `_ParamAndGradBucketGroup.finish_param_sync`.

    Equals the original, which warns where the next bucket is on its way already: here that is how it should be.
    """

    @functools.wraps(original)
    def finish(self: Any, skip_next_bucket_dispatch: bool = False) -> None:
        following = self.next_param_gather_bucket_group
        skip = skip_next_bucket_dispatch or (following is not None and following.param_gather_dispatched)
        return original(self, skip)

    return finish


class _Posted:
    """What one call has begun: stands for torch's coalescing manager, and for the handle that it leaves behind."""

    def __init__(self) -> None:
        self._waits: list[Method] = []
        self._async = False

    def manage(self, group: dist.ProcessGroup, *, async_ops: bool = False) -> Self:
        """Called as torch's `_coalescing_manager` is."""
        self._async = async_ops
        return self

    def add(self, wait: Method) -> Self:
        """Notes how to wait for what has begun."""
        self._waits.append(wait)
        return self

    def wait(self) -> None:
        """Waits for all of it; does nothing the second time."""
        while self._waits:
            self._waits.pop(0)()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None and not self._async:
            self.wait()


class _Seen:
    """A module with some names of ours."""

    def __init__(self, module: Any, **names: Any) -> None:
        self.__dict__.update(names)
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _seeing(function: Any, names: dict[str, Any]) -> Method:
    """`function`, finding `names` where it would find those of its module. The module is not changed."""
    seen = {**function.__globals__, **names}
    return types.FunctionType(function.__code__, seen, function.__name__, function.__defaults__, function.__closure__)


def _then(wait: Method, compare: Method | None) -> Method:
    """`wait`, and then `compare` where there is one."""
    if compare is None:
        return wait

    def both() -> None:
        wait()
        compare()

    return both


def _direction(op: str) -> Direction:
    return "forward" if op == "all_gather" else "wgrad"


def _name(bucket: torch.Tensor) -> str:
    return f"bucket of {bucket.numel()}"


def _unsupported_group_reason(group: dist.ProcessGroup, data: torch.Tensor) -> str | None:
    if group.size() > MAX_RANKS:
        return f"more than {MAX_RANKS} data parallel ranks"
    if dist.get_backend(group) not in ("gloo", "nccl"):
        return f"backend {dist.get_backend(group)} has no point-to-point transport here"
    if data.is_cuda and torch.cuda.is_current_stream_capturing():
        return "a CUDA graph is being captured"
    return None
