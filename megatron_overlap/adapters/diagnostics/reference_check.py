"""Reference check: every n-th step compares the overlapped operations with their references on the real tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from megatron_overlap.diagnostics.consistency import ranks_text
from megatron_overlap.ops.numerics_check import share_of_allowed, share_of_rtol
from megatron_overlap.session import Adapter, Session


class CheckError(ValueError):
    """The difference between an overlapped operation and its reference exceeds the allowed error."""


class Check(Adapter):
    """The comparisons of one session. Its counters get the largest share of the allowed error, by operation and tensor.

    `enabled`: any step is checked. `fallbacks`: operations that run the stock path after a mismatch, with the reason.
    """

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._config = session.config.check
        self.rtol = None if self._config.rtol == "derived" else self._config.rtol
        self._step_shares: dict[str, float] = {}
        self._num_compared = 0
        self.enabled = self._config.every > 0
        self._worst = session.counters.numerics_check
        self.fallbacks: dict[str, str] = {}

    @property
    def due(self) -> bool:
        step = self.session.step
        return self.enabled and step > 0 and step % self._config.every == 0

    def reduce(
        self, name: str, bucket: torch.Tensor, group: dist.ProcessGroup, op: Any, whole: bool
    ) -> Callable[[], None]:
        """Prepares the comparison of a reduction (see `DataParallelAdapter.reduce`).

        The caller calls the returned function after the reduction. After a mismatch with `fallback` the function
        replaces the reduced bucket.
        """
        before = bucket.clone()
        ranks, shard = group.size(), bucket.numel() // group.size()
        own = slice(None) if whole else slice(group.rank() * shard, (group.rank() + 1) * shard)

        def reduced(tensor: torch.Tensor) -> torch.Tensor:
            dist.all_reduce(tensor, group=group)
            return tensor.div_(ranks if op == dist.ReduceOp.AVG else 1)[own]

        def compare() -> None:
            got, reference = bucket[own], reduced(before.clone())
            if self.rtol is not None:
                share = share_of_rtol(got, reference, self.rtol)
            else:
                exact, magnitude = (reduced(tensor) for tensor in (before.double(), before.double().abs()))
                share = share_of_allowed(got, reference, exact, magnitude, ranks, ranks + 1)
            if self.judge(name, group, bucket.device, {"sum": share}):
                got.copy_(reference)

        return compare

    def gather(self, name: str, bucket: torch.Tensor, group: dist.ProcessGroup) -> Callable[[], None]:
        """Prepares the comparison of the all-gather of a parameter bucket, as `reduce` does."""
        shard = bucket.numel() // group.size()
        own = bucket[group.rank() * shard : (group.rank() + 1) * shard].clone()

        def compare() -> None:
            reference = torch.empty_like(bucket)
            dist.all_gather_into_tensor(reference, own, group=group)
            equal = torch.equal(reference.view(torch.uint8), bucket.view(torch.uint8))
            if self.judge(name, group, bucket.device, {"parameters": 0.0 if equal else math.inf}):
                bucket.copy_(reference)

        return compare

    def step_ended(self) -> None:
        """Prints the result of a checked step, on rank 0."""
        if not self.due or not self._num_compared:
            return
        if dist.is_initialized() and dist.get_rank() == 0:
            name, share = max(self._step_shares.items(), key=lambda item: item[1])
            result = f"{self._num_compared} comparisons, worst {name}: {share:.3g} of the allowed error"
            print(f"overlap check: step {self.session.step}: {result}", flush=True)
        self._num_compared = 0
        self._step_shares.clear()

    close = step_ended

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
        text = f"check at step {self.session.step}: the error of {name} is {share:.3g} times the allowed error"
        if self._config.on_mismatch == "error":
            ranks = ranks_text(dist.get_process_group_ranks(group))
            remedy = "set overlap.check.on_mismatch to fallback to go on without this operation"
            raise CheckError(f"overlap.check: {call}: {text} on ranks {ranks}: do not trust this run; {remedy}")
        self.fallbacks.setdefault(call, text)
        return True
