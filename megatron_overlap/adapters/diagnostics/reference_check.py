"""Check mode: every so many steps the plugin's calls are compared with the plain path on the real tensors."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from megatron_overlap.ops.numerics_check import Subject, checked_linear, share_of_allowed, share_of_rtol
from megatron_overlap.session import Adapter, Session


class CheckError(ValueError):
    """The plugin's result and the plain one are further apart than they may be."""


class Check(Adapter):
    """What was compared in a session, and what was found.

    The session's counters get the largest share of the allowed error, by op and tensor.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._wanted = session.config.check
        self._rtol = None if self._wanted.rtol == "derived" else self._wanted.rtol
        self._fallen: dict[str, str] = {}
        self._step: dict[str, float] = {}
        self._compared = 0
        self._worst = session.counters.numerics_check

    @classmethod
    def of(cls, session: Session) -> Check:
        """The check of `session`; made by the first call."""
        return session.adapter(cls)

    @property
    def due(self) -> bool:
        """Whether the step that runs is a checked one."""
        every, step = self._wanted.every, self._session.step
        return every > 0 and step > 0 and step % every == 0

    def unsupported_reason(self, call: str) -> str | None:
        """Why a call runs Megatron's own path since a check; None where none failed."""
        return self._fallen.get(call)

    def linear(
        self,
        call: str,
        op: str,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        group: dist.ProcessGroup,
        run: Callable[..., torch.Tensor],
        options: Mapping[str, Any],
    ) -> torch.Tensor:
        """A layer's call, compared in forward and backward. `run` is the overlapped op."""
        kept = {name: options[name] for name in ("plan", "observer") if name in options}
        subject = Subject(
            op,
            group,
            self._rtol,
            functools.partial(self._judge, call, group, x.device),
            options.get("main_grad"),
            options.get("weight_done"),
        )
        return checked_linear(functools.partial(run, **kept), x, weight, bias, subject)

    def sums(
        self, call: str, bucket: torch.Tensor, group: dist.ProcessGroup, op: Any, whole: bool
    ) -> Callable[[], None]:
        """Called before a bucket is summed; what it returns is called after, and compares the sum."""
        before = bucket.clone()

        def compare() -> None:
            plain = before.clone()
            dist.all_reduce(plain, group=group)
            shard = bucket.numel() // group.size()
            mine = slice(None) if whole else slice(group.rank() * shard, (group.rank() + 1) * shard)
            scale = group.size() if op == dist.ReduceOp.AVG else 1
            plain.div_(scale)
            got = bucket[mine]
            if self._rtol is not None:
                share = share_of_rtol(got, plain[mine], self._rtol)
            else:
                exact, size = before.double(), before.double().abs()
                for total in (exact, size):
                    dist.all_reduce(total, group=group)
                    total.div_(scale)
                share = share_of_allowed(got, plain[mine], exact[mine], size[mine], group.size(), group.size() + 1)
            if self._judge(call, group, bucket.device, {"sum": share}):
                got.copy_(plain[mine])

        return compare

    def gathered(self, call: str, bucket: torch.Tensor, group: dist.ProcessGroup) -> Callable[[], None]:
        """Called before a bucket is gathered; what it returns is called after: what was moved is the same bits."""
        shard = bucket.numel() // group.size()
        own = bucket[group.rank() * shard : (group.rank() + 1) * shard].clone()

        def compare() -> None:
            plain = torch.empty_like(bucket)
            dist.all_gather_into_tensor(plain, own, group=group)
            share = 0.0 if torch.equal(plain.view(torch.uint8), bucket.view(torch.uint8)) else math.inf
            if self._judge(call, group, bucket.device, {"parameters": share}):
                bucket.copy_(plain)

        return compare

    def close(self) -> None:
        """Prints the result of a checked step that just ended."""
        self.step_ended()

    def step_ended(self) -> None:
        """Prints the result of a checked step, on rank 0."""
        if not self.due or not self._compared:
            return
        if dist.is_initialized() and dist.get_rank() == 0:
            name, share = max(self._step.items(), key=lambda item: item[1])
            found = f"{self._compared} comparisons, worst {name}: {share:.3g} of what is allowed"
            print(f"overlap check: step {self._session.step}: {found}", flush=True)
        self._compared = 0
        self._step.clear()

    def _judge(self, call: str, group: dist.ProcessGroup, device: torch.device, shares: Mapping[str, float]) -> bool:
        """Notes the shares; whether the plain result is to be used. Every rank of the group decides alike."""
        names = sorted(shares)
        if not names:
            return False
        worst = torch.tensor([shares[name] for name in names], dtype=torch.float64, device=device)
        dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=group)
        self._compared += 1
        for name, share in zip(names, worst.tolist(), strict=True):
            key = f"{call} {name}"
            self._worst[key] = max(self._worst.get(key, 0.0), share)
            self._step[key] = max(self._step.get(key, 0.0), share)
        share = float(worst.max())
        if share <= 1.0:
            return False
        name = names[int(worst.argmax())]
        text = f"check at step {self._session.step}: {name} was off by {share:.3g} times what is allowed"
        if self._wanted.on_mismatch == "error":
            ranks = dist.get_process_group_ranks(group)
            raise CheckError(
                f"overlap.check: {call}: {text} on ranks {ranks[0]}-{ranks[-1]}: do not trust this run; "
                "set overlap.check.on_mismatch to fallback to go on without this op"
            )
        self._fallen.setdefault(call, text)
        return True
