"""Weight gradients: accumulated over row ranges, written to `main_grad` or returned to autograd, now or later."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from weakref import WeakValueDictionary

import torch

from megatron_overlap.comm import BufferPool
from megatron_overlap.comm.symmetric.cuda import triton_unsupported_reason
from megatron_overlap.ops.call import WeightDone

_ADDS_IN_PLACE = "dtype_out" in torch.ops.aten.addmm.overloads()
"""Whether torch has a GEMM on CUDA that adds a bf16 or fp16 product to an fp32 total. It has since 2.8."""

LateTensor = torch.Tensor | Callable[[], torch.Tensor]
"""A tensor, or a function that waits for it."""

Piece = Callable[[], None]
"""A part of a computation. The caller checks for received messages between two pieces."""

_PRODUCT_ROWS = 2048
"""Rows of one block of a bf16 or fp16 product that is added to an fp32 total."""
_MIN_PIECE_FEATURES = 128
"""Output rows of the smallest piece of a weight gradient."""
MAX_PIECES = 8
"""Largest number of pieces of one weight gradient."""


@dataclass(frozen=True, slots=True)
class WgradTarget:
    """The destination of a weight gradient, as of a `Projection`, and a pool of temporary buffers."""

    main_grad: torch.Tensor | None = None
    weight_done: WeightDone | None = None
    buffer_pool: BufferPool = field(default_factory=BufferPool)


class WeightGradient:
    """`dw = dy.T @ x`, accumulated over row ranges.

    Args:
        weight: the parameter `[F, K]`; only its shape, dtype and device are used.
        sum_in_fp32: sum bf16 and fp16 products of several row ranges in fp32 and round once. Otherwise the sum is
            rounded after each range, which needs no fp32 buffer.

    Attributes:
        start_in_fp32: of its `ProductSum`.
        adds_to_main_grad: several products need no fp32 buffer.
    """

    def __init__(self, weight: torch.Tensor, target: WgradTarget, *, sum_in_fp32: bool = True) -> None:
        self._target, main_grad = target, target.main_grad
        self.adds_to_main_grad = main_grad is not None
        out = torch.empty_like(weight, memory_format=torch.contiguous_format) if main_grad is None else main_grad
        in_fp32 = sum_in_fp32 and main_grad is None
        self._sum = ProductSum(out, target.buffer_pool, "wgrad_sum", in_fp32=in_fp32, is_empty=main_grad is None)
        self.start_in_fp32 = self._sum.start_in_fp32

    def add(self, dy: torch.Tensor, x: torch.Tensor) -> None:
        """Adds the product of some rows: `dy` is `[rows, F]`, `x` is `[rows, K]`."""
        self._sum.add(dy.t(), x)

    def pieces(self, dy: torch.Tensor, x: torch.Tensor, max_pieces: int = MAX_PIECES) -> list[Piece]:
        """`add(dy, x)` of all rows, cut by output rows of the weight into calls of about equal length.

        Each element of the gradient is one sum over all rows, whatever the number of pieces.
        """
        features = dy.shape[1]
        size = max(_MIN_PIECE_FEATURES, -(-features // max_pieces))
        return [partial(self.add_features, dy, x, slice(start, start + size)) for start in range(0, features, size)]

    def add_features(self, dy: torch.Tensor, x: torch.Tensor, features: slice) -> None:
        """Computes `features` of the gradient (rows of the weight) from all input rows; each is computed once."""
        out, grad = self._sum.out[features], dy[:, features].t()
        if self._target.main_grad is None:
            self._sum.is_empty = False
            torch.mm(grad, x, out=out)
        else:
            add_product(out, grad, x, self._target.buffer_pool)

    def result(self) -> torch.Tensor | None:
        """The gradient for autograd; None where `main_grad` holds it and `weight_done` returns none."""
        if self._target.main_grad is None:
            return self._sum.result()
        return None if self._target.weight_done is None else self._target.weight_done()


class ProductSum:
    """A sum of matrix products, written to `out`, contiguous.

    Args:
        buffer_pool, name: of the fp32 buffer.
        in_fp32: sum bf16 and fp16 products in fp32 and round once. Otherwise the sum is rounded after each product.
        is_empty: the first product overwrites `out`. Otherwise the sum begins with its content, which may be in fp32.
    """

    def __init__(
        self, out: torch.Tensor, buffer_pool: BufferPool, name: str, *, in_fp32: bool = True, is_empty: bool = True
    ) -> None:
        self.out, self.is_empty = out, is_empty
        self._buffer_pool, self._name, self._in_fp32 = buffer_pool, name, in_fp32 and out.element_size() < 4
        self._fp32_sum: torch.Tensor | None = None

    def add(self, a: torch.Tensor, b: torch.Tensor) -> None:
        """Adds `a @ b`."""
        if self.is_empty:
            torch.mm(a, b, out=self.out)
            self.is_empty = False
        else:
            add_product(self._total(), a, b, self._buffer_pool)

    def start_in_fp32(self) -> None:
        """Before the first of several products: their sum is in fp32 and rounded once."""
        if self._in_fp32:
            self.out.zero_()
            self._total()
            self.is_empty = False

    def _total(self) -> torch.Tensor:
        """Where products are added: the sum so far."""
        if not self._in_fp32:
            return self.out
        if self._fp32_sum is None:
            self._fp32_sum = self._buffer_pool.take(self._name, self.out.shape, self.out, dtype=torch.float32)
            self._fp32_sum.copy_(self.out)
        return self._fp32_sum

    def result(self) -> torch.Tensor:
        """`out`, complete; zero without a product."""
        if self.is_empty:
            self.out.zero_()
        elif self._fp32_sum is not None:
            self.out.copy_(self._fp32_sum)
        return self.out


class Spans:
    """Row ranges whose weight gradient is not yet computed. Adjacent ranges are joined into one GEMM."""

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int]] = []

    def add(self, rows: tuple[int, int]) -> None:
        """Adds rows `[start, stop)`."""
        if rows[0] < rows[1]:
            self._ranges.append(rows)

    def joined(self) -> list[tuple[int, int]]:
        """The row ranges in ascending order, adjacent ones joined. Empties this object."""
        joined: list[tuple[int, int]] = []
        for start, stop in sorted(self._ranges):
            if joined and joined[-1][1] == start:
                joined[-1] = (joined[-1][0], stop)
            else:
                joined.append((start, stop))
        self._ranges.clear()
        return joined

    def add_to(self, wgrad: WeightGradient, dy: torch.Tensor, x: torch.Tensor) -> None:
        """Adds the product of these rows of `dy` and `x` to `wgrad`. Empties this object."""
        for start, stop in self.joined():
            wgrad.add(dy[start:stop], x[start:stop])


class _Job:
    """The postponed gradient of one weight."""

    def __init__(self, weight: torch.Tensor, target: WgradTarget) -> None:
        self.weight, self._target = weight, target
        self._wgrad: WeightGradient | None = None
        self.operands: list[tuple[torch.Tensor, LateTensor]] = []
        self.num_added = 0

    def _sum(self) -> WeightGradient:
        if self._wgrad is None:
            # Two terms: a second rounding costs less than an fp32 buffer of the weight's size.
            self._wgrad = WeightGradient(self.weight, self._target, sum_in_fp32=False)
        return self._wgrad

    def add_next(self) -> None:
        """Computes the oldest term."""
        dy, x = self.operands.pop(0)
        self._sum().add(dy, x if isinstance(x, torch.Tensor) else x())
        self.num_added += 1

    def pieces(self) -> list[Piece]:
        if len(self.operands) == 1 and self.num_added == 0:
            dy, x = self.operands[0]
            if isinstance(x, torch.Tensor):
                self.operands.clear()
                return [*self._sum().pieces(dy, x), self._accumulate]
        return [*[self.add_next] * len(self.operands), self._accumulate]

    def _accumulate(self) -> None:
        gradient, self._wgrad = self._sum().result(), None
        if gradient is not None:
            torch.autograd.backward(self.weight, gradient)


class DeferredWgrad:
    """Weight gradients postponed to a later point of the backward pass, where they hide communication.

    Nothing in the backward pass depends on a weight gradient, so it may run at any time before the pass ends. Two
    layers use this:

    - A row-parallel layer without sequence parallelism has no communication in backward. The column-parallel layer
      before it, whose backward comes next, has an all-reduce that is longer than its own GEMMs.
    - Under batch overlap, each part of a micro-batch has a product for the same weight. The products are summed before
      autograd gets the gradient.

    Each parameter gets its gradient once per pass, including hooks, as from autograd, at the latest at the end of the
    backward pass. `torch.autograd.grad` with respect to such a weight does not see the gradient.

    Args:
        num_terms: terms of each gradient; `run_while` gives the sum of all to autograd.
    """

    def __init__(self, num_terms: int = 1) -> None:
        self._num_terms = num_terms
        # Held by the callbacks of their backward pass: those of a pass that an exception ended are dropped with it.
        self._jobs: WeakValueDictionary[torch.Tensor, _Job] = WeakValueDictionary()

    @property
    def num_pending(self) -> int:
        """Postponed terms that are not computed."""
        return sum(len(job.operands) for job in self._jobs.values())

    def put(self, weight: torch.Tensor, dy: torch.Tensor, x: LateTensor, target: WgradTarget) -> None:
        """Called in backward: postpones `dy.T @ x`, a term of the gradient of `weight`, a leaf."""
        job = self._jobs.get(weight)
        if job is None:
            job = self._jobs[weight] = _Job(weight, target)
            # Runs at the end of this backward pass; under activation recomputation, at the end of the recomputed part.
            torch.autograd.Variable._execution_engine.queue_callback(partial(self._run_job, job))
        job.operands.append((dy, x))

    def take(self) -> list[Piece]:
        """Removes all postponed gradients; returns the calls that compute them, in this order."""
        jobs = list(self._jobs.values())
        self._jobs.clear()
        return [piece for job in jobs for piece in job.pieces()]

    def run(self, count: int | None = None) -> None:
        """Computes the gradients of the first `count` weights, or of all, and gives them to autograd."""
        for job in list(self._jobs.values())[:count]:
            self._run_job(job)

    def run_while(self, waiting: Callable[[], bool]) -> None:
        """Computes postponed terms one by one, the oldest weight first, while `waiting` returns True."""
        for job in list(self._jobs.values()):
            while job.operands:
                if not waiting():
                    return
                job.add_next()
            if job.num_added == self._num_terms:
                self._run_job(job)

    def _run_job(self, job: _Job) -> None:
        if self._jobs.get(job.weight) is job:
            del self._jobs[job.weight]
            for piece in job.pieces():
                piece()


def add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor, buffer_pool: BufferPool) -> None:
    """`total += a @ b`, where `total` may be fp32 and the operands bf16 or fp16."""
    if total.dtype == b.dtype:
        total.addmm_(a, b)
        return
    if total.is_cuda and total.dtype == torch.float32 and _ADDS_IN_PLACE:
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
        return
    # In blocks of rows, so that the product needs no buffer of the size of `total`.
    for start in range(0, total.shape[0], _PRODUCT_ROWS):
        rows = slice(start, start + _PRODUCT_ROWS)
        product = buffer_pool.take("product", (total[rows].shape[0], total.shape[1]), b)
        torch.mm(a[rows], b, out=product)
        add_wide(total[rows], product, buffer_pool)


def add_wide(total: torch.Tensor, term: torch.Tensor, buffer_pool: BufferPool) -> None:
    """`total += term`, where `total` may be fp32 and `term` bf16 or fp16."""
    if term.dtype != total.dtype and not term.is_cuda:
        # On the CPU torch adds mixed dtypes element by element, ten times slower than a conversion first.
        wide = buffer_pool.take("widened", term.shape, total)
        wide.copy_(term)
        term = wide
    total.add_(term)


def add_terms(terms: torch.Tensor, own: torch.Tensor, out: torch.Tensor, divisor: int = 1) -> torch.Tensor:
    """`out = (terms.sum(0) + own) / divisor` in fp32. On CUDA one kernel adds in this order: a second costs a pass."""
    if out.is_cuda and not triton_unsupported_reason():
        from megatron_overlap.kernels import gemm_rs

        gemm_rs.add_terms(terms, own, out, divisor)
        return out
    if divisor == 1:
        return torch.add(terms.sum(0, dtype=torch.float32), own, out=out)
    return out.copy_(terms.sum(0, dtype=torch.float32).add_(own).div_(divisor))
