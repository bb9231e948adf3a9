"""One call of a tensor-parallel linear layer."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

import torch
import torch.distributed as dist

from megatron_overlap.counters import Counters, Direction
from megatron_overlap.ops import Projection
from megatron_overlap.ops.call import WeightDone

type LayerOutput = Any
"""The result of a patched Megatron method: a tensor, or a tensor and the bias that the caller adds."""


NO_MAIN_GRAD = None, None
"""Autograd gets the gradient."""


def main_grad_of(weight: Any) -> tuple[torch.Tensor | None, WeightDone | None]:
    """`main_grad` of a weight of a layer with the fusion, and what backward calls when it holds the gradient."""
    if weight.requires_grad and hasattr(weight, "main_grad"):
        return weight.main_grad, partial(_written, weight, weight.main_grad)
    return NO_MAIN_GRAD


def _written(weight: Any, main_grad: torch.Tensor) -> torch.Tensor | None:
    """Called in backward when `main_grad` holds the gradient; autograd gets the result, as in the stock path.

    Megatron's data-parallel hook runs when autograd gives the weight a gradient, and reads `grad_added_to_main_grad` to
    skip the addition.
    """
    weight.main_grad = main_grad
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    new = torch.zeros if getattr(weight, "zero_out_wgrad", False) else torch.empty
    return new(main_grad.shape, dtype=weight.dtype, device=weight.device)


def projection_of(linear: Any, weight: torch.Tensor) -> Projection:
    """A weight of a local or TransformerEngine linear layer, with the destination of its gradient."""
    is_te = hasattr(linear, "fuse_wgrad_accumulation")
    fusion = linear.fuse_wgrad_accumulation if is_te else linear.gradient_accumulation_fusion
    return Projection(weight, *(main_grad_of(weight) if fusion else NO_MAIN_GRAD))


@dataclass(frozen=True, slots=True)
class LinearHooks:
    """Counts the passes of one kind of layer, weight shape and operation; `forward_only`: no backward pass follows."""

    counters: Counters
    site: tuple[str, str, str]  # kind, name and operation of `counters.Site`
    forward_only: bool = False

    @property
    def forward(self) -> Direction:
        """The direction under which the forward passes are counted."""
        return "forward only" if self.forward_only else "forward"

    def overlapped(self, direction: Any, num_bytes: int) -> None:
        """Counts an overlapped pass, or a forward that is skipped, and the bytes that this rank sent."""
        if direction == "skipped forward":
            self.counters.not_communicating(*self.site, direction)
            return
        self.counters.overlapped(*self.site, self.forward if direction == "forward" else direction, num_bytes)

    def fallback(self, reason: str) -> None:
        """Counts a call that runs the stock path."""
        self.counters.fallback(*self.site, self.forward, reason)


@dataclass(frozen=True, slots=True)
class LinearCall:
    """One forward call of a tensor-parallel linear layer.

    Attributes:
        op: `ag_gemm`, `copy_gemm`, `gemm_rs` or `gemm_ar`; see `ops.reference`.
        x: input of the operation; with `norm`, input of the norm before it.
        weight: weight shard of this rank.
        bias: added by the operation; None for a row-parallel layer, whose bias is added to the sum.
        main_grad, weight_done: see `main_grad_of`.
        run_stock: runs the replaced Megatron method, with the norm.
        result: the result of that method, given the output of `op`.
        norm: of a layer that starts with a norm. Overlapped backends get a call whose `x` went through it.
        skip_output: backends need not compute the output, which is recomputed and not read.
    """

    layer: torch.nn.Module
    op: str
    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    group: dist.ProcessGroup
    main_grad: torch.Tensor | None
    weight_done: WeightDone | None
    hooks: LinearHooks
    run_stock: Callable[[], LayerOutput]
    result: Callable[[torch.Tensor], LayerOutput]
    norm: Callable[[torch.Tensor], torch.Tensor] | None = None
    skip_output: bool = False

    def normalized(self) -> Self:
        """This call after its norm, if it has one."""
        return self if self.norm is None else replace(self, x=self.norm(self.x), norm=None)

    def run_not_communicating(self) -> LayerOutput:
        """Runs the replaced Megatron method, which communicates nothing in this call, and counts it."""
        self.hooks.counters.not_communicating(*self.hooks.site, self.hooks.forward)
        return self.run_stock()
