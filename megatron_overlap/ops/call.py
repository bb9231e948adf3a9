"""What the overlapped linear layers share: their arguments, and the GEMM that writes where it is told."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from megatron_overlap.comm import Transport, transport_of

Observer = Callable[[str, int], None]
"""Told of each overlapped pass: `forward`, `dgrad` or `wgrad`, and the bytes that this rank sent for it."""

WeightDone = Callable[[], torch.Tensor | None]
"""Called when the weight gradient is in `main_grad`; what it returns is given to autograd as the gradient."""

Keeper = Callable[[torch.Tensor, int], Callable[[], None]]
"""Told in forward of the own rows of an input, and of the bytes of its gathered rows, one of which is kept for wgrad
as `LinearPlan.save_gathered` says; what it returns is called when that is let go."""


class Hold:
    """Calls `let_go` once: when told to, or when whoever holds this is gone (a graph that is never run backward)."""

    def __init__(self, let_go: Callable[[], None]) -> None:
        self._let_go: Callable[[], None] | None = let_go

    def end(self) -> None:
        """Lets go now."""
        if self._let_go is not None:
            let_go, self._let_go = self._let_go, None
            let_go()

    def __del__(self) -> None:
        self.end()


def transport_for(group: dist.ProcessGroup | Transport) -> Transport:
    """The transport of `group`, or `group` where it is one."""
    return transport_of(group) if isinstance(group, dist.ProcessGroup) else group


def check_operands(
    x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, main_grad: torch.Tensor | None, name: str
) -> int:
    """Refuses what does not fit; returns the rows at one index of the first dimension."""
    if x.dim() < 2 or w.dim() != 2 or x.shape[-1] != w.shape[1]:
        raise ValueError(f"{name}: shape {tuple(x.shape)} does not fit a weight of shape {tuple(w.shape)}")
    if x.dtype != w.dtype or x.device != w.device:
        raise ValueError(f"{name}: {x.dtype} on {x.device} does not fit a weight of {w.dtype} on {w.device}")
    if bias is not None and bias.shape != w.shape[:1]:
        raise ValueError(f"bias: shape {tuple(bias.shape)}: must be ({w.shape[0]},)")
    if main_grad is not None and main_grad.shape != w.shape:
        raise ValueError(f"main_grad: shape {tuple(main_grad.shape)}: must be {tuple(w.shape)}")
    return int(x.shape[1:-1].numel())


def gathered_rows(x: torch.Tensor, ranks: int) -> int:
    """Rows of all ranks together, where each has as many as `x`."""
    return int(x.shape[:-1].numel()) * ranks


def gemm_into(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None = None) -> None:
    """`out = a @ b + bias`."""
    if bias is None:
        torch.mm(a, b, out=out)
    else:
        torch.addmm(bias, a, b, out=out)
