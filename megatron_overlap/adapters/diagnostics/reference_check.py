"""Reference check: every n-th step compares the overlapped operations with their references on the real tensors."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron_overlap.ops.numerics_check import Subject, share_of_allowed, share_of_rtol
from megatron_overlap.session import Adapter, Session


class CheckError(ValueError):
    """The difference between an overlapped operation and its reference exceeds the allowed error."""


class Check(Adapter):
    """The comparisons of one session. Its counters get the largest share of the allowed error, by operation and tensor.

    Attributes:
        enabled: whether any step is checked.
        fallbacks: operations that run the stock path after a mismatch, with the reason.
    """

    def __init__(self, session: Session) -> None:
        self._session, self._config = session, session.config.check
        self._rtol = None if self._config.rtol == "derived" else self._config.rtol
        self._step_shares: dict[str, float] = {}
        self._num_compared = 0
        self.enabled = self._config.every > 0
        self._worst = session.counters.numerics_check
        self.fallbacks: dict[str, str] = {}

    @property
    def due(self) -> bool:
        """Whether the current step is a checked one."""
        every, step = self._config.every, self._session.step
        return every > 0 and step > 0 and step % every == 0

    def subject(
        self,
        name: str,
        op: str,
        group: dist.ProcessGroup,
        device: torch.device,
        main_grad: torch.Tensor | None,
        weight_done: Callable[[], torch.Tensor | None] | None,
    ) -> Subject:
        """Describes one call of a linear layer for `checked_linear`; `name` names the operation in results."""
        judge = functools.partial(self.judge, name, group, device)
        return Subject(op, group, self._rtol, judge, main_grad, weight_done)

    def reduce(self, name: str, bucket: torch.Tensor, group: dist.ProcessGroup, op: Any, whole: bool) -> BucketCheck:
        """A comparison of the reduction of a gradient bucket, made before the reduction.

        Args:
            name: of the operation in results.
            bucket: gradients before the reduction.
            group: the data-parallel group.
            op: sum or mean.
            whole: all elements are reduced; otherwise the shard of this rank.
        """
        return _ReduceCheck(self, name, bucket, group, op, whole, bucket.clone())

    def gather(self, name: str, bucket: torch.Tensor, group: dist.ProcessGroup) -> BucketCheck:
        """A comparison of the all-gather of a parameter bucket, made before the all-gather."""
        shard = bucket.numel() // group.size()
        own = bucket[group.rank() * shard : (group.rank() + 1) * shard].clone()
        return _GatherCheck(self, name, bucket, group, own)

    def share(
        self, got: torch.Tensor, reference: torch.Tensor, exact: Callable[[], tuple[torch.Tensor, torch.Tensor]], n: int
    ) -> float:
        """The error of a sum of `n` terms as a share of the allowed error.

        Args:
            got: the overlapped sum.
            reference: the sum of the stock path.
            exact: returns the sum and the sum of absolute values, both in float64.
            n: number of terms, one of each rank.
        """
        if self._rtol is not None:
            return share_of_rtol(got, reference, self._rtol)
        return share_of_allowed(got, reference, *exact(), n, n + 1)

    def close(self) -> None:
        """Prints the result of a checked step that just ended."""
        self.step_ended()

    def step_ended(self) -> None:
        """Prints the result of a checked step, on rank 0."""
        if not self.due or not self._num_compared:
            return
        if dist.is_initialized() and dist.get_rank() == 0:
            name, share = max(self._step_shares.items(), key=lambda item: item[1])
            result = f"{self._num_compared} comparisons, worst {name}: {share:.3g} of the allowed error"
            print(f"overlap check: step {self._session.step}: {result}", flush=True)
        self._num_compared = 0
        self._step_shares.clear()

    def judge(self, call: str, group: dist.ProcessGroup, device: torch.device, shares: Mapping[str, float]) -> bool:
        """Records the shares of one comparison; returns whether the caller must use the reference result."""
        names = sorted(shares)
        if not names:
            return False
        # All ranks of the group must decide alike.
        worst = torch.tensor([shares[name] for name in names], dtype=torch.float64, device=device)
        dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=group)
        self._num_compared += 1
        for name, share in zip(names, worst.tolist(), strict=True):
            key = f"{call} {name}"
            self._worst[key] = max(self._worst.get(key, 0.0), share)
            self._step_shares[key] = max(self._step_shares.get(key, 0.0), share)
        share = float(worst.max())
        if share <= 1.0:
            return False
        name = names[int(worst.argmax())]
        text = f"check at step {self._session.step}: the error of {name} is {share:.3g} times the allowed error"
        if self._config.on_mismatch == "error":
            ranks = dist.get_process_group_ranks(group)
            raise CheckError(
                f"overlap.check: {call}: {text} on ranks {ranks[0]}-{ranks[-1]}: do not trust this run; "
                "set overlap.check.on_mismatch to fallback to go on without this operation"
            )
        self.fallbacks.setdefault(call, text)
        return True


@dataclass(frozen=True, slots=True)
class BucketCheck:
    """A comparison of one bucket of data parallelism.

    Attributes:
        check: records the result.
        name: of the operation.
        bucket: the tensor that the operation changes.
        group: the data-parallel group.
    """

    check: Check
    name: str
    bucket: torch.Tensor
    group: dist.ProcessGroup

    def compare(self) -> None:
        """Called after the operation: compares `bucket`, and replaces it after a mismatch with `fallback`."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class _ReduceCheck(BucketCheck):
    op: Any
    whole: bool
    before: torch.Tensor

    def compare(self) -> None:
        group, ranks = self.group, self.group.size()
        scale = ranks if self.op == dist.ReduceOp.AVG else 1
        shard = self.bucket.numel() // ranks
        own = slice(None) if self.whole else slice(group.rank() * shard, (group.rank() + 1) * shard)
        reference = self.before.clone()
        dist.all_reduce(reference, group=group)
        reference.div_(scale)
        got = self.bucket[own]

        def exact() -> tuple[torch.Tensor, torch.Tensor]:
            total, magnitude = self.before.double(), self.before.double().abs()
            for each in (total, magnitude):
                dist.all_reduce(each, group=group)
                each.div_(scale)
            return total[own], magnitude[own]

        share = self.check.share(got, reference[own], exact, ranks)
        if self.check.judge(self.name, group, self.bucket.device, {"sum": share}):
            got.copy_(reference[own])


@dataclass(frozen=True, slots=True)
class _GatherCheck(BucketCheck):
    own: torch.Tensor

    def compare(self) -> None:
        reference = torch.empty_like(self.bucket)
        dist.all_gather_into_tensor(reference, self.own, group=self.group)
        equal = torch.equal(reference.view(torch.uint8), self.bucket.view(torch.uint8))
        share = 0.0 if equal else math.inf
        if self.check.judge(self.name, self.group, self.bucket.device, {"parameters": share}):
            self.bucket.copy_(reference)
