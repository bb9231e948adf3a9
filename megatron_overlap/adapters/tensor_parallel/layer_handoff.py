"""Layer handoff: under batch overlap the embedding and each transformer layer are completed inside the next layer."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.tensor_parallel import reduce_scatter_to_sequence_parallel_region

from megatron_overlap.adapters.tensor_parallel.division import Division
from megatron_overlap.adapters.wrapping import is_hooked


class PendingPart(Protocol):
    """One part of a split micro-batch whose sum over ranks may be in flight."""

    def complete(self) -> torch.Tensor:
        """Waits for the sum; returns the output of the layer for this part."""


@dataclass(frozen=True, slots=True)
class InputPart:
    """One part of the input of the first layer."""

    part: torch.Tensor

    def complete(self) -> torch.Tensor:
        return self.part


class PendingOutput:
    """The output of a layer, in parts whose sums over ranks may not be complete.

    Megatron passes `placeholder` from layer to layer: a tensor with the shape of the output, filled with NaN. It
    requires a gradient as the input `x` does, and so does the output.
    """

    def __init__(self, x: torch.Tensor, parts: Sequence[PendingPart], division: Division) -> None:
        self.placeholder = x.new_full((), float("nan")).expand(x.shape).requires_grad_(x.requires_grad)
        self.parts, self.division = parts, division

    def whole(self) -> torch.Tensor:
        """The complete output, of both parts."""
        return self.division.whole([part.complete() for part in self.parts])


class PendingEmbedding:
    """The output of an embedding whose sum over ranks has not started: the layer that reads it knows its parts.

    `terms` `[S, B, H]` of this rank are zero for tokens of other ranks. Megatron passes `placeholder` to the block: own
    rows `[S/R, B, H]` of NaN.
    """

    def __init__(self, terms: torch.Tensor, group: dist.ProcessGroup) -> None:
        self.terms, self._group = terms, group
        # A block copies a view, so this is none. It requires a gradient as the output would.
        self.placeholder = terms.new_full((terms.shape[0] // group.size(), *terms.shape[1:]), float("nan"))
        self.placeholder.requires_grad_(terms.requires_grad)

    def whole(self) -> torch.Tensor:
        """The complete output, summed as Megatron does."""
        output: torch.Tensor = reduce_scatter_to_sequence_parallel_region(self.terms, group=self._group)
        return output


class LayerHandoff:
    """Passes the pending output of the embedding, or of a layer, to the next layer of the same block.

    No other module may read the output: it would read the NaN of the placeholder.
    """

    def __init__(self) -> None:
        self._next: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
        self._in_block = False
        self._pending: PendingOutput | PendingEmbedding | None = None

    @contextmanager
    def block(self, chains: Sequence[Sequence[Any]]) -> Iterator[None]:
        """Inside the context a block runs `chains` of layers in this order, and no pending output leaves its chain.

        The order also holds after the context, where backward recomputes layers.
        """
        for layers in chains:
            self._next.update(zip(layers, [*layers[1:], None], strict=False))  # a chain may be empty
        self._in_block = bool(chains)
        try:
            yield
        finally:
            self._in_block, self._pending = False, None

    def next_layer(self, layer: Any) -> Any:
        """The layer that reads the output of `layer`; None where a hook or another module may read it too."""
        follower = self._next.get(layer) if self._in_block or _recomputes() else None
        # Megatron's pre-hooks for parameter gathers get no keyword arguments, so they do not read the input.
        return None if follower is None or is_hooked(layer) or follower._forward_pre_hooks_with_kwargs else follower

    def is_unread(self, layer: Any) -> bool:
        """Whether backward recomputes `layer` as the last of its chain. Megatron's `checkpoint` ignores its output."""
        return _recomputes() and self._next.get(layer, layer) is None

    def put(self, pending: PendingOutput | PendingEmbedding) -> torch.Tensor:
        """Stores an output for the next layer; returns the placeholder."""
        self._pending = pending
        return pending.placeholder

    def take(self, x: object) -> PendingOutput | PendingEmbedding | None:
        """The stored output whose placeholder is `x`; None if there is none. It is no longer stored."""
        pending, self._pending = self.stored(x), None
        return pending

    def stored(self, x: object) -> PendingOutput | PendingEmbedding | None:
        """As `take`, but the output stays stored. RuntimeError: the embedding stored it, and `x` is another."""
        pending = self._pending
        if pending is not None and pending.placeholder is x:
            return pending
        if isinstance(pending, PendingEmbedding):
            raise RuntimeError(
                "the input of the first transformer layer is not the output of the embedding, whose reduce-scatter "
                "that layer runs: set overlap.tensor.split to none and report it"
            )
        return None

    def drop(self) -> None:
        """Drops an output that no layer has taken, as after an error."""
        self._pending = None


def _recomputes() -> bool:
    """Whether backward runs a forward again, inside Megatron's `checkpoint`."""
    return bool(megatron_random.IS_CHECKPOINTING) and torch.is_grad_enabled()
