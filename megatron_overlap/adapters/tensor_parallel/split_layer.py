"""A transformer layer without sequence parallelism on two parts of its micro-batch.

The modules of the layer run unchanged, once for each part. While the attention or the MLP of a part runs,
`LinearAdapter.assign` gives its linear layers a `BatchOverlapBackend`. See `ops/tensor_parallel/batch_overlap.py` for
the order.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from megatron_overlap.adapters.tensor_parallel.call import LayerOutput, LinearCall
from megatron_overlap.adapters.tensor_parallel.dispatch import LinearAdapter
from megatron_overlap.adapters.tensor_parallel.layer_handoff import PendingAdd, PendingOutput
from megatron_overlap.comm import BufferPool
from megatron_overlap.ops.tensor_parallel.batch_overlap import (
    Reduction,
    Slots,
    arrived,
    column_half,
    entered,
    row_half,
)
from megatron_overlap.ops.wgrad import DeferredWgrad, WgradTarget


@dataclass(frozen=True)
class BatchOverlapBackend:
    """Runs the linear layers of one part of a micro-batch in the attention or the MLP of a layer.

    Attributes:
        forward: the all-reduce of the row-parallel layer's output.
        backward: the all-reduce of the column-parallel layer's input gradient.
        deferred_wgrad: postpones the weight gradients.
        buffer_pool: temporary buffers of the weight gradients.
        before: called in backward before the wait for `backward`.
        slot: position of that wait in the order of the backward pass.
    """

    forward: Reduction
    backward: Reduction
    deferred_wgrad: DeferredWgrad
    buffer_pool: BufferPool
    before: Callable[[], object] | None
    slot: int | None

    def arrive(self, output: torch.Tensor) -> torch.Tensor:
        """Waits for the all-reduce of the row-parallel layer's `output`."""
        return arrived(output, self.forward)

    def unsupported_reason(self, call: LinearCall) -> str | None:
        """None: the checks of the whole transformer layer cover its linear layers."""
        return None

    def run(self, call: LinearCall) -> LayerOutput:
        """See `LinearBackend`. The all-reduce of a row-parallel layer is in flight when this returns."""
        if call.norm is not None:
            call = call.normalized()
        target, observer = call.wgrad_target, call.hooks.overlapped
        if target is None:
            into = WgradTarget(buffer_pool=self.buffer_pool)
        else:
            into = WgradTarget(target.main_grad, target.written, self.buffer_pool)
        if call.op == "gemm_ar":
            return call.result(
                row_half(call.x, call.weight, self.forward, self.deferred_wgrad, into, observer, call.skip_output)
            )
        x = entered(call.x, self.backward, self.before, self.slot)
        output = column_half(x, call.weight, call.bias, self.backward, self.deferred_wgrad, into, observer)
        return call.result(output)


class SplitLayer:
    """One call of a transformer layer on two parts of its micro-batch."""

    def __init__(self, layer: Any, adapter: LinearAdapter) -> None:
        self._layer, self._adapter = layer, adapter
        self._deferred_wgrad = DeferredWgrad()
        self._group = layer.self_attention.linear_proj.tp_group
        self._buffer_pool = adapter.transport(self._group).buffer_pool

    def forward(self, pending: PendingOutput, arguments: dict[str, Any]) -> PendingOutput:
        """Runs attention of both parts, then the MLP of both parts.

        Backward runs in the opposite order: MLP of b, MLP of a, attention of b, attention of a, MLP of b in the layer
        before. The wait for the all-reduce of a part comes after the next of these steps. The first all-reduce has only
        the MLP of the other part beside it, so all weight gradients postponed until then run there; the remaining ones
        run at the last.
        """
        layer, attention, mlp = self._layer, self._layer.self_attention, self._layer.mlp
        slots = [pending.slot]
        attended: list[PendingAdd] = []
        for number, part in enumerate(pending.parts):
            x = part.complete()
            before = functools.partial(self._deferred_wgrad.run, None) if number == 0 else None
            backend = self._backend(before, slots[-1])
            linears = getattr(attention, "linear_qkv", None), attention.linear_proj
            with self._adapter.assign(linears, backend):
                normed = layer.input_layernorm(x)
                slots.append(Slots.reserve())
                output = attention(normed, **pending.division.arguments(arguments, number))
            attended.append(PendingAdd(layer, layer.self_attn_bda, output, backend.arrive, x))
        outputs: list[PendingAdd] = []
        for number, added in enumerate(attended):
            x = added.complete()
            before = functools.partial(self._deferred_wgrad.run, 1) if number == 1 else None
            backend = self._backend(before, slots[-1])
            with self._adapter.assign((mlp.linear_fc1, mlp.linear_fc2), backend):
                normed = layer.pre_mlp_layernorm(x)
                slots.append(Slots.reserve())
                output = mlp(normed)
            outputs.append(PendingAdd(layer, layer.mlp_bda, output, backend.arrive, x))
        return PendingOutput(arguments["hidden_states"], outputs, slots[-1], pending.division)

    def _backend(self, before: Callable[[], object] | None, slot: int | None) -> BatchOverlapBackend:
        forward, backward = (Reduction(self._group, serial=self._adapter.serial) for _ in range(2))
        return BatchOverlapBackend(forward, backward, self._deferred_wgrad, self._buffer_pool, before, slot)
