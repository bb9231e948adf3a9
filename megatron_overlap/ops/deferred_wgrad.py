"""Weight gradients that are put off until there is a message to hide under them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

Piece = Callable[[], None]


class DeferredWgrad:
    """Weight gradients of layers whose backward has no communication, kept for a layer whose backward has.

    Nothing in the backward pass needs a weight gradient, so it may be computed at any time before the pass ends. A
    row-parallel layer without sequence parallelism communicates nothing in backward, and the column-parallel layer
    before it, whose backward comes next, an all-reduce that its own GEMMs are too short to hide.

    Every gradient reaches its parameter as autograd would have handed it over, hooks included, before the backward
    pass returns: what nobody took is computed at its end. It is for training, where gradients are accumulated into
    parameters: `torch.autograd.grad` with respect to such a weight does not see it.
    """

    def __init__(self) -> None:
        self._jobs: list[_Job] = []

    def put(self, weight: torch.Tensor, pieces: Sequence[Piece], result: Callable[[], torch.Tensor | None]) -> None:
        """Called in backward: puts off `pieces`, after which `result()` is the gradient of `weight`, a leaf."""
        job = _Job(weight, pieces, result)
        self._jobs.append(job)
        # Runs when this backward pass is over; with activation recomputation, when that of the recomputed part is.
        torch.autograd.Variable._execution_engine.queue_callback(partial(self._end, job))

    def take(self) -> list[Piece]:
        """All that is waiting, as calls that the caller makes now, in this order."""
        jobs, self._jobs = self._jobs, []
        return [call for job in jobs for call in (*job.pieces, job.hand_over)]

    def _end(self, job: _Job) -> None:
        if job in self._jobs:
            self._jobs.remove(job)
            for call in (*job.pieces, job.hand_over):
                call()


class _Job:
    def __init__(
        self, weight: torch.Tensor, pieces: Sequence[Piece], result: Callable[[], torch.Tensor | None]
    ) -> None:
        self.weight, self.pieces, self._result = weight, pieces, result

    def hand_over(self) -> None:
        gradient = self._result()
        if gradient is not None:
            torch.autograd.backward(self.weight, gradient)
