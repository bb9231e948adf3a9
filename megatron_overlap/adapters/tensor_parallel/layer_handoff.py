"""Layer handoff: a transformer layer under batch overlap is completed inside the next layer."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from megatron.core.tensor_parallel import random as megatron_random

from megatron_overlap.adapters.tensor_parallel.division import Division


class PendingPart(Protocol):
    """One part of a split micro-batch whose sum over ranks may be in flight."""

    def complete(self) -> torch.Tensor:
        """Waits for the sum; returns the output of the layer for this part."""


@dataclass(frozen=True, slots=True)
class InputPart:
    """One part of the input of the first layer."""

    part: torch.Tensor

    def complete(self) -> torch.Tensor:
        """See `PendingPart`."""
        return self.part


@dataclass(frozen=True, slots=True)
class PendingAdd:
    """Output of the attention or the MLP for one part, before dropout and residual.

    Attributes:
        layer: the transformer layer.
        bias_dropout_add: of the layer, for this output.
        output: output and bias of the row-parallel layer; the sum over ranks may be in flight.
        arrive: waits for that sum; returns it.
        residual: added to the output.
    """

    layer: Any
    bias_dropout_add: Any
    output: tuple[Any, Any]
    arrive: Callable[[torch.Tensor], torch.Tensor]
    residual: torch.Tensor

    def complete(self) -> torch.Tensor:
        """See `PendingPart`."""
        layer = self.layer
        summed = self.arrive(self.output[0]), self.output[1]
        with layer.bias_dropout_add_exec_handler():
            result: torch.Tensor = self.bias_dropout_add(layer.training, layer.config.bias_dropout_fusion)(
                summed, self.residual, layer.hidden_dropout
            )
        return result


class PendingOutput:
    """The output of a layer, in parts whose sums over ranks may be in flight.

    Attributes:
        parts: of the micro-batch.
        slot: position of the last part in the order of the backward pass; see `Slots`.
        division: joins the parts.
        placeholder: what Megatron passes from layer to layer: the shape of the output, filled with NaN.
    """

    def __init__(self, x: torch.Tensor, parts: Sequence[PendingPart], slot: int | None, division: Division) -> None:
        self.placeholder = x.new_full((), float("nan")).expand(x.shape)
        self.parts, self.slot, self.division = parts, slot, division

    def whole(self) -> torch.Tensor:
        """The complete output, of both parts."""
        return self.division.whole([part.complete() for part in self.parts])


class LayerHandoff:
    """Passes the pending output of a layer to the next layer of the same block.

    Only for an output that no other module reads. Megatron passes a placeholder of NaN, so that any other reader gets
    NaN.
    """

    def __init__(self) -> None:
        self._next: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
        self._in_block = False
        self._pending: PendingOutput | None = None

    @contextmanager
    def block(self, chains: Sequence[Sequence[Any]]) -> Iterator[None]:
        """Inside the context a block runs `chains` of layers in this order. No pending output leaves its chain.

        The order also holds after the context, where backward runs layers again (activation recomputation).
        """
        for layers in chains:
            self._next.update(zip(layers, [*layers[1:], None], strict=True))
        self._in_block = bool(chains)
        try:
            yield
        finally:
            self._in_block, self._pending = False, None

    def next_layer(self, layer: Any) -> Any:
        """The layer that reads the output of `layer`; None where a hook or another module may read it too."""
        follower = self._next.get(layer) if self._in_block or _recomputes() else None
        hooked = layer._forward_hooks or layer._backward_hooks or layer._backward_pre_hooks
        # Megatron's pre-hooks for parameter gathers get no keyword arguments, so they do not read the input.
        return None if follower is None or hooked or follower._forward_pre_hooks_with_kwargs else follower

    def is_unread(self, layer: Any) -> bool:
        """Whether backward recomputes `layer` as the last of its chain. Megatron's `checkpoint` ignores its output."""
        return _recomputes() and self._next.get(layer, layer) is None

    def put(self, pending: PendingOutput) -> torch.Tensor:
        """Stores the output of a layer for the next one; returns the placeholder."""
        self._pending = pending
        return pending.placeholder

    def take(self, x: torch.Tensor) -> PendingOutput | None:
        """The stored output whose placeholder is `x`; None if there is none."""
        pending, self._pending = self._pending, None
        return pending if pending is not None and pending.placeholder is x else None


def _recomputes() -> bool:
    """Whether backward runs a forward again, inside Megatron's `checkpoint`."""
    return bool(megatron_random.IS_CHECKPOINTING) and torch.is_grad_enabled()
