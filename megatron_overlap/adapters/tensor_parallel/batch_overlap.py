"""Batch overlap: a Megatron transformer layer without sequence parallelism runs on two parts of its micro-batch.

One part computes during the all-reduce of the other part. The modules of the layer run unchanged, once for each part.
While the attention or the MLP of a part runs, `LinearAdapter.assign` gives its linear layers a `BatchOverlapBackend`.
See `ops/tensor_parallel/batch_overlap.py` for the order.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.utils import make_viewless_tensor

from megatron_overlap.adapters.tensor_parallel.call import LayerOutput, LinearCall
from megatron_overlap.adapters.tensor_parallel.dispatch import LinearAdapter
from megatron_overlap.adapters.tensor_parallel.eligibility import BATCH_DIMENSION, unsupported_layer_reason
from megatron_overlap.adapters.tensor_parallel.layer_handoff import PendingOutput
from megatron_overlap.adapters.wrapping import Method, tracing, untraced
from megatron_overlap.autotune.candidates import BATCH_OVERLAP, SEPARATE_LAYERS, Candidate
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
from megatron_overlap.session import Session

_POSITIONAL = ("hidden_states", "attention_mask")


def block_forward(original: Method, session: Session) -> Method:
    """Replacement of `TransformerBlock.forward`.

    Runs the original, and records the order of its layers. With `method: auto` the autotuner selects whether the layers
    run in batch overlap.
    """
    adapter = session.adapter(LinearAdapter)
    layer_handoff = adapter.layer_handoff

    @untraced
    @functools.wraps(original)
    def split(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Further positional arguments are not known, and may let the block read the outputs of its layers.
        unknown = len(args) > len(_POSITIONAL)
        reads_outputs = unknown or self.config.cpu_offloading or kwargs.get("extract_layer_indices")
        with layer_handoff.block(() if reads_outputs else self.layers):
            return original(self, *args, **kwargs)

    if session.config.tensor.split == "batch":
        return split

    def measured(self: Any, *args: Any, **kwargs: Any) -> Any:
        def run(candidate: Candidate) -> Any:
            adapter.splits_batch = candidate == BATCH_OVERLAP
            try:
                return (split if adapter.splits_batch else original)(self, *args, **kwargs)
            finally:
                adapter.splits_batch = False

        arguments = {**dict(zip(_POSITIONAL, args, strict=False)), **kwargs}
        if not self.pre_process:
            arguments["hidden_states"] = self.input_tensor
        x = arguments["hidden_states"]
        reasons = (_unsupported_reason(layer, arguments, adapter) for layer in self.layers)
        unknown = len(args) > len(_POSITIONAL) or not isinstance(x, torch.Tensor)
        reason = "positional arguments" if unknown else next(filter(None, reasons), None)
        if reason is None:
            return adapter.autotuner.run_block(self.layers, x, run)
        session.counters.exclude("batch overlap", reason)
        return run(SEPARATE_LAYERS)

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        config = self.config
        communicates = config.tensor_model_parallel_size > 1 and not config.sequence_parallel and self.layers
        runs_measured = communicates and adapter.autotuner.enabled and not tracing()
        return (measured if runs_measured else original)(self, *args, **kwargs)

    return forward


def layer_forward(original: Method, session: Session) -> Method:
    """Replacement of `TransformerLayer.forward`.

    Equals the original: the layer computes each row of a micro-batch independently of the others.
    """
    adapter = session.adapter(LinearAdapter)
    layer_handoff = adapter.layer_handoff

    @untraced
    def split(self: Any, *args: Any, **kwargs: Any) -> Any:
        arguments = {**dict(zip(_POSITIONAL, args, strict=False)), **kwargs}
        x = arguments["hidden_states"]
        pending = layer_handoff.take(x)
        if pending is None and (self.config.tensor_model_parallel_size == 1 or adapter.check.due):
            return original(self, *args, **kwargs)
        # Also for a pending output: the layer before it cannot see in which precision this one runs.
        unknown = len(args) > len(_POSITIONAL)
        reason = "positional arguments" if unknown else _unsupported_reason(self, arguments, adapter)
        if reason is not None:
            session.counters.fallback("layer", "transformer layer", "batch_overlap", "forward", reason)
            if pending is not None:
                x = _whole(pending)
                args, kwargs = ((x, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": x})
            return original(self, *args, **kwargs)
        if pending is None:
            pending = PendingOutput(x, [_InputPart(part) for part in x.chunk(2, dim=1)], Slots.reserve())
        output = _SplitLayer(self, adapter).forward(pending, arguments)
        follower = layer_handoff.next_layer(self)
        if follower is not None and _unsupported_reason(follower, arguments, adapter) is None:
            return layer_handoff.put(output), None
        return _whole(output), None

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return (split if adapter.splits_batch else original)(self, *args, **kwargs)

    return forward


def _whole(pending: PendingOutput) -> torch.Tensor:
    """The complete output of a layer, for the whole micro-batch."""
    whole = torch.cat([part.complete() for part in pending.parts], dim=1)
    viewless: torch.Tensor = make_viewless_tensor(inp=whole, requires_grad=whole.requires_grad, keep_graph=True)
    return viewless


def _unsupported_reason(layer: Any, arguments: dict[str, Any], adapter: LinearAdapter) -> str | None:
    """The reason that a layer runs on the whole micro-batch; None if batch overlap supports it."""
    if layer.config.sequence_parallel:
        return "sequence parallelism: each linear layer overlaps its all-gather or reduce-scatter"
    if adapter.fused:
        return "method fused does not split the batch"
    return unsupported_layer_reason(layer, arguments)


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

    def unsupported_reason(self, call: LinearCall) -> str | None:
        """See `LinearBackend`: the transformer layer was checked as a whole."""
        return None

    def run(self, call: LinearCall) -> LayerOutput:
        """See `LinearBackend`. The all-reduce of a row-parallel layer is in flight when this returns."""
        target, observer = call.wgrad_target, call.hooks.overlapped
        if target is None:
            into = WgradTarget(buffer_pool=self.buffer_pool)
        else:
            into = WgradTarget(target.main_grad, target.written, self.buffer_pool)
        if call.op == "gemm_ar":
            return call.result(row_half(call.x, call.weight, self.forward, self.deferred_wgrad, into, observer))
        x = entered(call.x, self.backward, self.before, self.slot)
        output = column_half(x, call.weight, call.bias, self.backward, self.deferred_wgrad, into, observer)
        return call.result(output)


@dataclass(frozen=True, slots=True)
class _InputPart:
    """One part of the input of the first layer."""

    part: torch.Tensor

    def complete(self) -> torch.Tensor:
        """See `PendingPart`."""
        return self.part.contiguous()


@dataclass(frozen=True, slots=True)
class _PendingAdd:
    """Output of the attention or the MLP for one part, before dropout and residual.

    Attributes:
        layer: the transformer layer.
        bias_dropout_add: of the layer, for this output.
        output: output and bias of the row-parallel layer; its all-reduce may be in flight.
        reduction: that all-reduce.
        residual: added to the output.
    """

    layer: Any
    bias_dropout_add: Any
    output: tuple[Any, Any]
    reduction: Reduction
    residual: torch.Tensor

    def complete(self) -> torch.Tensor:
        """See `PendingPart`."""
        layer = self.layer
        summed = arrived(self.output[0], self.reduction), self.output[1]
        with layer.bias_dropout_add_exec_handler():
            result: torch.Tensor = self.bias_dropout_add(layer.training, layer.config.bias_dropout_fusion)(
                summed, self.residual, layer.hidden_dropout
            )
        return result


class _SplitLayer:
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
        attended: list[_PendingAdd] = []
        for number, part in enumerate(pending.parts):
            x = part.complete()
            before = functools.partial(self._deferred_wgrad.run, None) if number == 0 else None
            backend = self._backend(before, slots[-1])
            linears = getattr(attention, "linear_qkv", None), attention.linear_proj
            with self._adapter.assign(linears, backend):
                normed = layer.input_layernorm(x)
                slots.append(Slots.reserve())
                output = attention(normed, **_part_of(arguments, number))
            attended.append(_PendingAdd(layer, layer.self_attn_bda, output, backend.forward, x))
        outputs: list[_PendingAdd] = []
        for number, added in enumerate(attended):
            x = added.complete()
            before = functools.partial(self._deferred_wgrad.run, 1) if number == 1 else None
            backend = self._backend(before, slots[-1])
            with self._adapter.assign((mlp.linear_fc1, mlp.linear_fc2), backend):
                normed = layer.pre_mlp_layernorm(x)
                slots.append(Slots.reserve())
                output = mlp(normed)
            outputs.append(_PendingAdd(layer, layer.mlp_bda, output, backend.forward, x))
        return PendingOutput(arguments["hidden_states"], outputs, slots[-1])

    def _backend(self, before: Callable[[], object] | None, slot: int | None) -> BatchOverlapBackend:
        forward, backward = (Reduction(self._group, serial=self._adapter.serial) for _ in range(2))
        return BatchOverlapBackend(forward, backward, self._deferred_wgrad, self._buffer_pool, before, slot)


def _part_of(arguments: dict[str, Any], number: int) -> dict[str, Any]:
    """The arguments of the attention, besides the input, for one part of the micro-batch."""
    part = {}
    for name, dim in BATCH_DIMENSION.items():
        value = arguments.get(name)
        if value is not None and dim is not None and value.shape[dim] > 1:
            value = value.chunk(2, dim=dim)[number]
        part[name] = value
    return part
