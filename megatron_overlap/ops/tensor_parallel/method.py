"""The protocol of the methods `p2p` and `fused`: what the autograd functions of the linear layers call."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch

from megatron_overlap.comm import BufferPool
from megatron_overlap.ops.call import Observer, product
from megatron_overlap.ops.wgrad import DeferredWgrad, Piece, WeightGradient, WgradTarget


class Gather(Protocol):
    """An all-gather in progress, of rows called `full` below. Results of computations on them are complete after
    `finish`.
    """

    @property
    def num_bytes(self) -> int:
        """Bytes that this rank sends."""

    def matmul(
        self, b: torch.Tensor, bias: torch.Tensor | None = None, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """`full @ b + bias`, in `out` if given."""

    def wgrad(self, wgrad: WeightGradient, *, dy: torch.Tensor | None = None, x: torch.Tensor | None = None) -> None:
        """Adds `dy.T @ x` to `wgrad`. The operand that is None is `full`."""

    def advance(self) -> bool:
        """Computes on rows that have arrived; False where there are none, or where a query would synchronise."""

    def finish(self) -> None:
        """Computes on the remaining rows as they arrive, and completes the messages."""


class LocalRows:
    """Rows that this rank has already, for the computations of a `Gather`."""

    num_bytes = 0

    def __init__(self, full: torch.Tensor) -> None:
        self.full = full

    def matmul(
        self, b: torch.Tensor, bias: torch.Tensor | None = None, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        return product(self.full, b, bias, out)

    def wgrad(self, wgrad: WeightGradient, *, dy: torch.Tensor | None = None, x: torch.Tensor | None = None) -> None:
        wgrad.add(self.full if dy is None else dy, self.full if x is None else x)

    def advance(self) -> bool:
        return False

    def finish(self) -> None:
        """See `Gather.finish`."""


class Reduce(Protocol):
    """A GEMM whose result is summed over ranks."""

    @property
    def num_bytes(self) -> int:
        """Bytes that this rank sends."""

    def finish(self) -> torch.Tensor:
        """The sum: own rows of a reduce-scatter, all rows of an all-reduce, with the same bits on every rank."""


class LinearMethod(ABC):
    """Communication of the linear layers between the ranks of one group.

    Attributes:
        wgrad_pieces: largest number of pieces of a weight gradient that runs beside an all-reduce.
        concurrent: an operation may begin before an earlier one has finished, also in a later call.
    """

    rank: int
    size: int
    buffer_pool: BufferPool
    wgrad_pieces = 1
    concurrent = False

    @abstractmethod
    def gather(self, shard: torch.Tensor, num_rows: int, op: str) -> Gather:
        """Starts an all-gather.

        Args:
            shard: own rows `[rows, K]`, contiguous, unchanged until `finish`.
            num_rows: rows of all ranks.
            op: name in error messages.
        """

    @abstractmethod
    def scatter(self, a: torch.Tensor, b: torch.Tensor, op: str, meanwhile: Callable[[], bool] | None = None) -> Reduce:
        """Runs `a @ b` and sends partial sums to the owners of the rows; `meanwhile` as of `PipelinedReduceScatter`."""

    @abstractmethod
    def all_reduce(self, a: torch.Tensor, b: torch.Tensor, op: str, pieces: Sequence[Piece] = ()) -> Reduce:
        """Runs `a @ b`, starts the sum over ranks, and runs `pieces` of other work while messages are sent."""


class LinearOptions(NamedTuple):
    """The options of one call of a linear layer: everything but tensors that autograd differentiates.

    Attributes:
        sharded: sequence parallelism: each rank owns rows of the input, or of the output of a row-parallel layer.
        num_rows: rows of all ranks, if `sharded`.
        save_input: forward saves the input for the weight gradient.
        deferred_wgrad: where the layer puts, or takes, postponed weight gradients.
        deferred_weight: the leaf whose gradient is postponed; autograd gets a detached weight in its place.
        skip_output: forward of a row-parallel layer computes and sends nothing.
    """

    method: LinearMethod
    target: WgradTarget
    observer: Observer | None = None
    sharded: bool = False
    num_rows: int = 0
    save_input: bool = True
    deferred_wgrad: DeferredWgrad | None = None
    deferred_weight: torch.Tensor | None = None
    skip_output: bool = False

    def report(self, direction: str, num_bytes: int = 0) -> None:
        """Reports a pass to the observer."""
        if self.observer is not None:
            self.observer(direction, num_bytes)


def skipped_output(x: torch.Tensor, num_rows: int, features: int, observer: Observer) -> torch.Tensor:
    """NaN in place of an output `[num_rows, features]` that no code reads. All elements share one number in memory."""
    observer("skipped forward", 0)
    return x.new_full((), float("nan")).expand(num_rows, features)


class LinearContext(Protocol):
    """The autograd context of the linear layers. The saved tensors are input and weight."""

    call: LinearOptions
    saved_tensors: tuple[torch.Tensor, torch.Tensor]
    needs_input_grad: tuple[bool, ...]

    def save_for_backward(self, *tensors: torch.Tensor | None) -> None:
        """Saves tensors for backward."""
