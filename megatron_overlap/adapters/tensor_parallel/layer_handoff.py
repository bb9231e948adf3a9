"""What transformer layers that run in halves hand on to each other: see `adapters/tensor_parallel/batch_overlap.py`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch


class PendingOutput:
    """A layer's result: each half as a call that waits for its sum, and the place of what was computed last."""

    def __init__(self, x: torch.Tensor, halves: Sequence[Callable[[], torch.Tensor]], slot: int | None) -> None:
        self.placeholder = x.new_full((), float("nan")).expand(x.shape)
        self.halves, self.slot = halves, slot


class LayerHandoff:
    """What the layers of a block hand on to each other.

    A layer whose result nobody reads but the next one hands it on in halves that are still being summed. What Megatron
    carries from one to the other is then a tensor of NaN: whoever else should read it would be noticed.
    """

    def __init__(self) -> None:
        self._next: dict[int, Any] = {}
        self._carried: PendingOutput | None = None

    @contextmanager
    def block(self, layers: Sequence[Any]) -> Iterator[None]:
        """While a block runs these layers, one after the other."""
        self._next = {id(layer): follower for layer, follower in itertools.pairwise(layers)}
        try:
            yield
        finally:
            self._next, self._carried = {}, None

    def after(self, layer: Any) -> Any:
        """The layer that reads this one's result, if nobody else does."""
        follower = self._next.get(id(layer))
        # Hooks that see the result. Those that Megatron puts before every module, for its parameter gathers, do not
        # see what is given by name.
        watched = layer._forward_hooks or layer._backward_hooks or layer._backward_pre_hooks
        return None if follower is None or watched or follower._forward_pre_hooks_with_kwargs else follower

    def hand_on(self, carried: PendingOutput) -> torch.Tensor:
        """Keeps what a layer hands on; returns what Megatron is given."""
        self._carried = carried
        return carried.placeholder

    def take(self, x: torch.Tensor) -> PendingOutput | None:
        """What was handed on as `x`, to a layer that `after` named and that was found fit."""
        carried, self._carried = self._carried, None
        return carried if carried is not None and carried.placeholder is x else None
