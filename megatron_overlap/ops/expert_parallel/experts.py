"""The MLPs of the experts of one rank, computed in pieces of rows."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from megatron_overlap.comm import BufferPool
from megatron_overlap.ops.call import Projection
from megatron_overlap.ops.wgrad import WeightGradient, WgradTarget
from megatron_overlap.schedules.expert_parallel import Segments, rows_by_expert

Activation = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""`activation(hidden, probs)`: `[rows, F1]` and `[rows]` to the input of the second linear layer `[rows, F2]`. Autograd
must be able to differentiate it, and no row may depend on another."""

_EXACT_ROWS = 4
"""GEMMs of fewer rows take other kernels, which sum in another order (fp32: MKL, below 4 rows; bf16: a matrix-vector
product, 1 row)."""

_ROWS_STEP = 32
"""oneDNN compiles a kernel for each new number of rows of a GEMM in bf16 or fp16 on a CPU. With AMX that takes 8 to 17
ms, and a GEMM of 350 rows, 1024 and 2048 features 5 ms. Routing changes the rows in each call."""


class Activated(NamedTuple):
    """What backward needs of the activation of some rows: both inputs, `[rows, F1]` and `[rows]`, and the output.

    `output` `[rows, F2]` keeps its autograd graph; None: backward computes it again.
    """

    hidden: torch.Tensor
    probs: torch.Tensor
    output: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class MLPExperts:
    """`activation(x @ fc1[e].T, probs) @ fc2[e].T` for each local expert e.

    Attributes:
        fc1, fc2: for each expert its weights `[F1, H]` and `[H, F2]`, and the destinations of their gradients.
        activation: see `Activation`.
        recompute: backward computes the activation again, so that its output is not saved.
    """

    fc1: tuple[Projection, ...]
    fc2: tuple[Projection, ...]
    activation: Activation
    recompute: bool = False

    @property
    def weights(self) -> tuple[torch.Tensor, ...]:
        """All first weights, then all second weights."""
        return tuple(each.weight for each in (*self.fc1, *self.fc2))

    def forward(
        self,
        rows: Segments,
        whole: Sequence[int],
        x: torch.Tensor,
        probs: torch.Tensor,
        y: torch.Tensor,
        *,
        keep_output: bool,
    ) -> Activated:
        """Writes `y` of some rows, which follow one another; an expert has `whole` rows in all."""
        hidden, probs = _mm_by_expert(x, self.fc1, rows, whole, transposed=True), probs.clone()
        activated = self._activate(hidden, probs) if keep_output else Activated(hidden, probs, None)
        output = self.activation(hidden, probs) if activated.output is None else activated.output.detach()
        _mm_by_expert(output, self.fc2, rows, whole, transposed=True, out=y)
        return activated

    def _activate(self, hidden: torch.Tensor, probs: torch.Tensor) -> Activated:
        leaves = hidden.detach().requires_grad_(), probs.detach().requires_grad_()
        with torch.enable_grad():
            return Activated(*leaves, self.activation(*leaves))

    def dgrad(
        self,
        rows: Segments,
        whole: Sequence[int],
        activated: Activated,
        dy: torch.Tensor,
        dhidden: torch.Tensor,
        output: torch.Tensor,
        dx: torch.Tensor,
        dprobs: torch.Tensor,
    ) -> None:
        """Writes `dx` and `dprobs` of some rows and, at their place among all rows, `dhidden` and the activation."""
        grad = _mm_by_expert(dy, self.fc2, rows, whole)
        if activated.output is None:
            activated = self._activate(activated.hidden, activated.probs)
        assert activated.output is not None
        leaves = activated.hidden, activated.probs
        # A second backward pass through a retained graph needs this one again.
        of_hidden, of_probs = torch.autograd.grad(
            activated.output, leaves, grad, retain_graph=True, allow_unused=True, materialize_grads=True
        )
        dprobs.copy_(of_probs)
        sizes = [segment.rows for segment in rows]
        for sink, value in ((dhidden, of_hidden), (output, activated.output.detach())):
            for segment, part in zip(rows, value.split(sizes), strict=True):
                sink[segment.start : segment.stop] = part
        _mm_by_expert(of_hidden, self.fc1, rows, whole, out=dx)

    def wgrad(
        self,
        experts: Segments,
        x: torch.Tensor,
        dhidden: torch.Tensor,
        activated: torch.Tensor,
        dy: torch.Tensor,
        needed: tuple[bool, ...],
        buffer_pool: BufferPool,
    ) -> list[WeightGradient | None]:
        """The gradient of each of `weights`.

        Args:
            experts: for each expert, which rows of `x`, `dhidden`, `activated` and `dy` are its tokens.
            x, dhidden, activated, dy: input of each layer, and gradient of its output.
            needed: for each of `weights` whether it has a gradient.
        """
        gradients = [
            WeightGradient(each.weight, WgradTarget(each.main_grad, each.done, buffer_pool)) if need else None
            for each, need in zip((*self.fc1, *self.fc2), needed, strict=True)
        ]
        operands = [(dhidden, x, rows) for rows in experts] + [(dy, activated, rows) for rows in experts]
        for gradient, (grad, value, rows) in zip(gradients, operands, strict=True):
            if gradient is not None:
                gradient.add(grad[rows.start : rows.stop], value[rows.start : rows.stop])
        return gradients


def _mm_by_expert(
    a: torch.Tensor,
    layers: Sequence[Projection],
    rows: Segments,
    whole: Sequence[int],
    *,
    transposed: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the rows of `a` times the weight of their expert, or its transpose, in `out` if given."""
    counts = rows_by_expert(rows)
    weights = {each: layers[each].weight.t() if transposed else layers[each].weight for each in counts}
    if len(counts) == 1:
        ((expert, weight),) = weights.items()
        return _mm(a, weight, whole[expert], out)
    out = a.new_empty(a.shape[0], weights[rows[0].expert].shape[1]) if out is None else out
    sizes = list(counts.values())
    for (expert, weight), some, into in zip(weights.items(), a.split(sizes), out.split(sizes), strict=True):
        _mm(some, weight, whole[expert], into)
    return out


def _mm(a: torch.Tensor, b: torch.Tensor, whole: int, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return `a @ b`, in `out` if given.

    `a` holds some of the `whole` rows of an expert; each row rounds as in one GEMM over all. For that `a` is extended
    with rows of zeros: AMX kernels multiply the first columns of the next row by zero, so a NaN there would change a
    row.
    """
    rows = _padded_rows(a, whole)
    if rows == a.shape[0]:
        return torch.mm(a, b, out=out)
    padded = a.new_empty(rows, a.shape[1])
    padded[: a.shape[0]] = a
    padded[a.shape[0] :] = 0
    product = torch.mm(padded, b)[: a.shape[0]]
    return product if out is None else out.copy_(product)


def _padded_rows(a: torch.Tensor, whole: int) -> int:
    """Rows of the GEMM for `a`: at least `_EXACT_ROWS`, and few different numbers where a new one costs time."""
    rows = a.shape[0]
    least = min(_EXACT_ROWS, whole)
    if not a.is_cpu or a.dtype not in (torch.bfloat16, torch.float16) or whole < _EXACT_ROWS:
        return max(rows, least)
    step = _ROWS_STEP
    while rows > 64 * step:
        step *= 2
    return -(-rows // step) * step
