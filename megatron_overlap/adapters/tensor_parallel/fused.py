"""`overlap.tensor.method: fused` in Megatron's linears: the fused ops where they can be, p2p by name where not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist

from megatron_overlap.autotune.candidates import HOPPER, Candidate, Knob
from megatron_overlap.comm import Transport
from megatron_overlap.counters import SymmetricMemory
from megatron_overlap.ops import all_gather_linear, copy_linear, linear_all_reduce, linear_reduce_scatter
from megatron_overlap.ops.tensor_parallel.fused.hopper import Hopper
from megatron_overlap.ops.tensor_parallel.fused.linear import FusedMethod, unsupported_fused_reason
from megatron_overlap.ops.tensor_parallel.fused.multi_node import FusedTransport, inside_host, open_fused
from megatron_overlap.ops.tensor_parallel.fused.plan import FusedPlan
from megatron_overlap.session import Session

_FUSED_OPS: dict[str, Callable[..., torch.Tensor]] = {
    "ag_gemm": all_gather_linear,
    "copy_gemm": copy_linear,
    "gemm_rs": linear_reduce_scatter,
    "gemm_ar": linear_all_reduce,
}


@lru_cache(maxsize=256)
def _plan(knobs: tuple[Knob, ...]) -> FusedPlan:
    return FusedPlan(**dict(knobs))  # type: ignore[arg-type]


class FusedChoice:
    """Which calls of one session run fused, and the symmetric memory of each group that has it.

    Args:
        session: whose config counts.
        messages: the transport of messages between the ranks of a group, for groups on several hosts.
    """

    def __init__(self, session: Session, messages: Callable[[dist.ProcessGroup], Transport]) -> None:
        self.wanted = session.config.tensor.method == "fused"
        self._hopper = session.config.tensor.kernels == "hopper"
        self._counters, self._messages = session.counters, messages
        self._transports: dict[dist.ProcessGroup, FusedTransport | str] = {}
        if self.wanted:
            self._counters.symmetric_memory = self.memory

    def unsupported_reason(self, op: str, x: torch.Tensor, group: dist.ProcessGroup) -> str | None:
        """What keeps a call of `op` from running fused; None if nothing does. All ranks of `group` call alike."""
        rows = x[..., 0].numel()
        reason = unsupported_fused_reason(x, rows * group.size() if op == "ag_gemm" else rows, group.size())
        if reason is not None:
            return reason
        transport = self._transports.get(group)
        if transport is None:
            transport = self._transports[group] = open_fused(group, self._messages)
            # Method auto gets here too.
            self._counters.symmetric_memory = self.memory
        return transport if isinstance(transport, str) else None

    def ways(self, op: str, x: torch.Tensor, group: dist.ProcessGroup) -> list[Candidate]:
        """How a call of `op` may run fused. Where kernels for Hopper are asked for the first call tries them."""
        if self.unsupported_reason(op, x, group) is not None:
            return []
        transport = self._transports[group]
        assert not isinstance(transport, str)
        hopper = self._hopper and not Hopper.of(inside_host(transport)).objection
        return [Candidate("fused"), *([HOPPER] if hopper else [])]

    def run(
        self,
        op: str,
        x: torch.Tensor,
        w: torch.Tensor,
        bias: Any,
        group: dist.ProcessGroup,
        knobs: Sequence[Knob] | None = None,
        **options: Any,
    ) -> Any:
        """The fused op; `unsupported_reason` was None for it. Options that have no meaning here are left out.

        Args:
            knobs: how it is to run; None takes the defaults of the config.
        """
        if knobs is None:
            knobs = HOPPER.knobs if self._hopper else ()
        transport = self._transports[group]
        assert not isinstance(transport, str)
        known = {key: options[key] for key in ("main_grad", "weight_done", "observer") if key in options}
        return _FUSED_OPS[op](x, w, bias, group=FusedMethod(transport, _plan(tuple(knobs))), **known)

    def memory(self) -> list[SymmetricMemory]:
        """What the groups hold now; nothing where no call ran fused."""
        open_ = [each for each in self._transports.values() if not isinstance(each, str)]
        return [
            SymmetricMemory(each.size, each.num_bytes, each.bound_bytes, Hopper.reasons(inside_host(each)))
            for each in open_
            if each.num_bytes
        ]

    def close(self) -> None:
        """Lets the symmetric memory of all groups go."""
        for transport in self._transports.values():
            if not isinstance(transport, str):
                transport.close()
        self._transports.clear()
