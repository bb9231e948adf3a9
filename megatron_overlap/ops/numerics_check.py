"""Comparison of an overlapped operation with its reference on the same tensors, with a derived error bound.

The bound of docs/numerics.md: the largest error of the reference against float64, plus the error of another order of
the same sums and of the rounding of partial results.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from megatron_overlap.ops import reference
from megatron_overlap.ops.call import WeightDone

REFERENCES: dict[str, Callable[..., torch.Tensor]] = {
    "ag_gemm": reference.all_gather_linear,
    "copy_gemm": reference.copy_linear,
    "gemm_rs": reference.linear_reduce_scatter,
    "gemm_ar": reference.linear_all_reduce,
}

Judge = Callable[[Mapping[str, float]], bool]
"""Called with the error of each result as a share of the bound, on this rank. Returns whether to use the result of the
reference, the same on all ranks. Collective."""

Op = Callable[..., torch.Tensor]
"""`op(x, w, bias, main_grad=..., weight_done=...)`, overlapped."""


@dataclass(frozen=True)
class Subject:
    """One comparison, of an `op` of `REFERENCES`; `main_grad` and `weight_done` are as of `ops.wgrad.WgradTarget`.

    `rtol` is the largest difference as a share of the largest element of the reference; None derives the bound.
    """

    op: str
    group: dist.ProcessGroup
    rtol: float | None
    judge: Judge
    main_grad: torch.Tensor | None = None
    weight_done: WeightDone | None = None


def checked_linear(
    overlapped: Op, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, subject: Subject
) -> torch.Tensor:
    """Equals `overlapped(x, w, bias)`, and compares it with its reference, in forward and in backward.

    This call also runs the reference. With a derived bound it runs the reference twice more in float64. Their memory
    lives until the end of backward.
    """
    return _Checked.apply(x, w, bias, overlapped, subject)


def share_of_allowed(
    got: torch.Tensor, plain: torch.Tensor, exact: torch.Tensor, magnitude: torch.Tensor, terms: int, ranks: int
) -> float:
    """The largest error as a share of its bound: the check fails above 1.

    Args:
        got, plain: the results of the operation and of the reference, in the dtype of the data.
        exact, magnitude: the result, and the same sum over absolute values, in float64.
        terms: number of terms of each sum.
        ranks: number of ranks whose partial results were rounded before the addition; in a ring once per rank.
    """
    finite = plain.isfinite()
    if not torch.equal(got.isfinite(), finite):
        return float("inf")
    if not finite.any():
        return 0.0
    eps32, eps = torch.finfo(torch.float32).eps, torch.finfo(plain.dtype).eps
    error = (got.double() - exact).abs()[finite]
    allowed = (plain.double() - exact).abs()[finite].max()
    allowed = allowed + (terms**0.5 * eps32 + max(1, ranks - 1) * eps / 2) * magnitude[finite]
    return float((error / allowed.clamp_min(torch.finfo(torch.float64).tiny)).max())


def share_of_rtol(got: torch.Tensor, plain: torch.Tensor, rtol: float) -> float:
    """The largest difference as a share of `rtol` times the largest element."""
    finite = plain.isfinite()
    if not torch.equal(got.isfinite(), finite):
        return float("inf")
    if not finite.any():
        return 0.0
    got, plain = got.double()[finite], plain.double()[finite]
    difference, allowed = float((got - plain).abs().max()), rtol * float(plain.abs().max())
    return difference / allowed if allowed else (0.0 if difference == 0 else float("inf"))


class _Leaves:
    """One path: its inputs as leaves of a separate graph, which `copy` makes, and its output."""

    def __init__(
        self,
        function: Callable[..., torch.Tensor],
        inputs: Sequence[torch.Tensor | None],
        copy: Callable[[torch.Tensor], torch.Tensor] = torch.clone,
    ) -> None:
        self.leaves = [None if t is None else copy(t.detach()).requires_grad_(t.requires_grad) for t in inputs]
        # Autograd cannot save inference tensors for a backward pass.
        with torch.set_grad_enabled(not torch.is_inference_mode_enabled()):
            self.y = function(*self.leaves)

    def gradients(self, dy: torch.Tensor) -> list[torch.Tensor | None]:
        self.y.backward(dy)
        return [None if leaf is None else leaf.grad for leaf in self.leaves]


class _Checked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, overlapped: Op, subject: Subject
    ) -> torch.Tensor:
        inputs = [x, w, bias]
        run_reference = partial(REFERENCES[subject.op], group=subject.group)
        into = None if subject.main_grad is None or not w.requires_grad else torch.zeros_like(subject.main_grad)
        ctx.paths = [_Leaves(partial(overlapped, main_grad=into), inputs), _Leaves(run_reference, inputs)]
        if subject.rtol is None:
            exact = _Leaves(run_reference, inputs, lambda tensor: tensor.double().clone())
            ctx.paths += [exact, _Leaves(run_reference, inputs, lambda tensor: tensor.double().abs())]
        ctx.subject, ctx.into = subject, into
        ranks = subject.group.size()
        rows = x.shape[:-1].numel() * (ranks if subject.op == "ag_gemm" else 1)
        ctx.terms = {"y": w.shape[1] * ranks, "dx": w.shape[0] * ranks, "dw": rows, "dbias": rows}
        results = [path.y.detach() for path in ctx.paths]
        use_plain = subject.judge({"y": _share(subject, results, ctx.terms["y"])})
        return results[1] if use_plain else results[0]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        subject, (dy,) = ctx.subject, grads
        given = [dy, dy, dy.double(), dy.double().abs()]
        found = [path.gradients(each) for path, each in zip(ctx.paths, given, strict=False)]
        ctx.paths.clear()
        if ctx.into is not None:
            found[0][1] = ctx.into
        shares = {
            name: _share(subject, results, ctx.terms[name])
            for name, *results in zip(("dx", "dw", "dbias"), *found, strict=True)
            if results[1] is not None
        }
        chosen = found[1] if subject.judge(shares) else found[0]
        if ctx.into is not None:
            subject.main_grad.add_(chosen[1])
            chosen[1] = None if subject.weight_done is None else subject.weight_done()
        return *chosen, None, None


def _share(subject: Subject, results: Sequence[Any], terms: int) -> float:
    got, plain = results[:2]
    if got is None:
        return float("inf")
    got = got.reshape(plain.shape)
    if subject.rtol is not None:
        return share_of_rtol(got, plain, subject.rtol)
    return share_of_allowed(got, plain, results[2], results[3], terms, subject.group.size())
