"""A transformer layer on two parts of its micro-batch, or of each sequence.

The modules of the layer run unchanged, once for each part. A step is the attention or the MLP of one part. While it
runs, `LinearAdapter.assign` changes what runs its linear layers. Under sequence parallelism it starts the next step of
the other part in its middle, else at its end. See `ops/tensor_parallel/batch_overlap.py` for the order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from megatron_overlap.adapters.diagnostics.consistency import open_transport
from megatron_overlap.adapters.tensor_parallel.call import LayerOutput, LinearCall
from megatron_overlap.adapters.tensor_parallel.dispatch import LinearAdapter
from megatron_overlap.adapters.tensor_parallel.division import SequenceDivision, SplitCoreAttention
from megatron_overlap.adapters.tensor_parallel.layer_handoff import PendingOutput, PendingPart
from megatron_overlap.adapters.tensor_parallel.linear import norm_of
from megatron_overlap.adapters.wrapping import run_pre_hooks
from megatron_overlap.comm import PART_CHANNELS
from megatron_overlap.ops.call import Observer
from megatron_overlap.ops.tensor_parallel.batch_overlap import (
    column_part,
    part_input,
    part_output,
    reserve_slot,
    row_part,
)
from megatron_overlap.ops.tensor_parallel.part_messages import AllReduceMessages, GatherScatterMessages, PartMessages
from megatron_overlap.ops.wgrad import DeferredWgrad, WgradTarget


@dataclass(frozen=True, slots=True)
class _Block:
    """The attention or the MLP of a layer, the norm before it, and its first and last linear layer.

    In TransformerEngine `column` may hold the norm. `num_wgrads` is `AllReduceMessages.num_wgrads` of both parts: in
    backward the first all-reduce of a layer has only the MLP of the other part beside it, so all weight gradients
    postponed until then run there; the remaining ones run at the last.
    """

    layer: Any
    module: Any
    norm: Any
    column: Any
    row: Any
    bias_dropout_add: Any
    num_wgrads: tuple[int | None, int]

    def normalized(self, x: torch.Tensor) -> torch.Tensor:
        """`x` after the norm. All ranks gather the result, so it is computed before `column` runs."""
        normed: torch.Tensor = self.norm(x)
        if "layer_norm_weight" not in self.column._parameters:
            return normed
        # The hooks run again when `column` does.
        run_pre_hooks(self.column, normed, "set overlap.tensor.split to none")
        return norm_of(self.column)(normed)


def _attention(layer: Any) -> _Block:
    attention = layer.self_attention
    linears = getattr(attention, "linear_qkv", None), attention.linear_proj
    return _Block(layer, attention, layer.input_layernorm, *linears, layer.self_attn_bda, (None, 0))


def _mlp(layer: Any) -> _Block:
    linears = layer.mlp.linear_fc1, layer.mlp.linear_fc2
    return _Block(layer, layer.mlp, layer.pre_mlp_layernorm, *linears, layer.mlp_bda, (0, 1))


@dataclass(eq=False, slots=True)
class EmbeddedPart:
    """One part of the output of the embedding, of which `terms` are summed: a `PendingPart`."""

    terms: torch.Tensor
    messages: PartMessages
    observer: Observer
    _sum: torch.Tensor | None = None

    def begin(self) -> torch.Tensor:
        """Starts the sum; returns own rows, incomplete."""
        if self._sum is None:
            self._sum = row_part(self.terms, None, self.messages, observer=self.observer)
        return self._sum

    def complete(self) -> torch.Tensor:
        return part_output(self.begin(), self.messages)


@dataclass(frozen=True, slots=True)
class _StepOutput:
    """Output of a step before dropout and residual: a `PendingPart`.

    `output` is that of the row-parallel layer, whose sum over ranks may not be complete, and the bias. Backward starts
    the all-gather of its gradient at `slot` (see `reserve_slot`).
    """

    block: _Block
    messages: PartMessages
    output: tuple[Any, Any]
    residual: torch.Tensor
    slot: int | None = None

    def complete(self) -> torch.Tensor:
        layer, (output, bias) = self.block.layer, self.output
        summed = part_output(output, self.messages, self.slot), bias
        with layer.bias_dropout_add_exec_handler():
            result: torch.Tensor = self.block.bias_dropout_add(layer.training, layer.config.bias_dropout_fusion)(
                summed, self.residual, layer.hidden_dropout
            )
        return result


@dataclass(eq=False, slots=True)
class _Step:
    """One part in the attention or the MLP of a layer: a `PendingPart` that runs its linear layers.

    `source` is the input of the block. In backward the wait of the next step of the other part runs at `slot` (see
    `reserve_slot`).
    """

    block: _Block
    adapter: LinearAdapter
    source: PendingPart
    messages: PartMessages
    slot: int | None = None
    _input_slot: int | None = None
    _x: torch.Tensor | None = None
    _normed: torch.Tensor | None = None
    _other: _Step | None = None

    def complete(self) -> torch.Tensor:
        """See `PendingPart`: the input of the block, for a layer that runs on the whole micro-batch."""
        self.messages.abandon()
        return self.source.complete() if self._x is None else self._x

    def start(self, slot: int | None = None) -> None:
        """Completes the input, runs the norm, and starts the all-gather. `slot` is their position in backward."""
        if self._x is not None:
            return
        self._x, self._input_slot = self.source.complete(), slot
        if self.messages.gathers:
            self._normed = part_input(self.block.normalized(self._x), self.messages, slot)
        else:
            self._normed = self.block.norm(self._x)
            self.slot = reserve_slot()

    def compute(self, other: _Step | None, arguments: dict[str, Any]) -> _StepOutput:
        """Runs the block with `arguments`, and starts its sum and the step `other`."""
        self.start()
        assert self._x is not None
        assert self._normed is not None
        block, self._other = self.block, other
        with self.adapter.assign((block.column, block.row), self._run), self._polling(self._normed):
            output = block.module(self._normed, **arguments)
        self._start_other(now=True)
        return _StepOutput(block, self.messages, output, self._x)

    def _run(self, call: LinearCall) -> LayerOutput:
        messages, hooks = self.messages, call.hooks
        into = WgradTarget(call.main_grad, call.weight_done, messages.buffer_pool)
        if call.op in ("gemm_rs", "gemm_ar"):
            if messages.gathers:
                # The last position in this step from which the gather of the other part is hidden.
                self._start_other(now=True)
            y = row_part(call.x, call.weight, messages, into, hooks.overlapped, call.skip_output)
            return call.result(y)
        if not messages.gathers:
            call = call.normalized()
            x = part_input(call.x, messages, self._input_slot)
            return call.result(column_part(x, call.weight, call.bias, messages, into, hooks.overlapped))
        if call.x is not self._normed:
            text = f"an unknown operation changes the input of {type(call.layer).__name__}"
            raise RuntimeError(f"{text}: set overlap.tensor.split to none")
        output = column_part(call.x, call.weight, call.bias, messages, into, hooks.overlapped)
        self.slot = reserve_slot()
        # A device does not report received messages.
        self._start_other(now=call.x.is_cuda)
        return call.result(output)

    @contextmanager
    def _polling(self, x: torch.Tensor) -> Iterator[None]:
        """On the host, attention inside the context can start the other part's step before and after its softmax."""
        polls = self.messages.gathers and not x.is_cuda
        core = getattr(self.block.module, "core_attention", None) if polls else None
        modules = () if core is None else core.named_modules()
        softmax = next((module for name, module in modules if name.endswith("scale_mask_softmax")), None)
        if softmax is None:
            yield
            return
        records = torch.is_grad_enabled()

        def poll(*arguments: object) -> None:
            # In the first pass of activation recomputation autograd would not record the other step.
            if torch.is_grad_enabled() == records:
                self._start_other(now=False)

        handles = softmax.register_forward_pre_hook(poll), softmax.register_forward_hook(poll)
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _start_other(self, *, now: bool) -> None:
        """Starts the other part's step: at once, or only if the output of its step before has arrived."""
        other = self._other
        if other is None:
            return
        before = other.source.messages if isinstance(other.source, _StepOutput) else None
        if now or before is None or before.is_ready("output"):
            other.start(self.slot)
            self._other = None


class SplitLayer:
    """One call of a transformer layer on two parts of its input."""

    def __init__(self, layer: Any, adapter: LinearAdapter) -> None:
        self._layer, self._adapter, self._gathers = layer, adapter, layer.config.sequence_parallel
        self._group = group = layer.self_attention.linear_proj.tp_group
        if self._gathers:
            self._transports = [open_transport(adapter.session, group, channel) for channel in PART_CHANNELS]
            self._part_gathers = adapter.part_gathers(group)
        else:
            self._buffer_pool = adapter.transport(group).buffer_pool
        self._deferred_wgrad = DeferredWgrad(num_terms=2)

    def embedded(self, terms: Sequence[torch.Tensor]) -> list[EmbeddedPart]:
        """The parts of the input of the first layer, from the terms of an embedding for all rows of each part."""
        observer, serial = self._adapter.count_embedding, self._adapter.serial
        # Not by `_part_gathers`: autograd gets the gathered gradient.
        messages = [GatherScatterMessages(each, self._deferred_wgrad, serial=serial) for each in self._transports]
        return [EmbeddedPart(part, own, observer) for part, own in zip(terms, messages, strict=True)]

    def forward(self, pending: PendingOutput, arguments: dict[str, Any], follower: Any) -> PendingOutput:
        """Runs attention of both parts, then the MLP of both parts. Backward runs in the opposite order.

        The output is the first steps of `follower`, the layer that completes it; None if no other layer does.
        """
        division, attention = pending.division, self._layer.self_attention
        given = [division.arguments(arguments, number) for number in range(2)]
        contexts: list[AbstractContextManager[None]] = [nullcontext(), nullcontext()]
        if isinstance(division, SequenceDivision):
            core = SplitCoreAttention(attention)
            contexts = [core.part(number) for number in range(2)]
        mlp = _mlp(self._layer)
        attention_a, attention_b = self._first_steps(pending.parts)
        with contexts[0]:
            mlp_a = self._step(mlp, attention_a.compute(attention_b, given[0]), 0)
        with contexts[1]:
            mlp_b = self._step(mlp, attention_b.compute(mlp_a, given[1]), 1)
        output_a = mlp_a.compute(mlp_b, {})
        outputs: Sequence[PendingPart]
        if follower is None:
            output_b = mlp_b.compute(None, {})
            # In backward the first part's all-gather starts when that of the last part has arrived.
            outputs = replace(output_a, slot=mlp_b.slot), output_b
        else:
            if not self._gathers:
                # The first step of a layer has computed its last weight gradients.
                self._deferred_wgrad = DeferredWgrad(num_terms=2)
            next_a = self._step(_attention(follower), output_a, 0)
            outputs = next_a, self._step(next_a.block, mlp_b.compute(next_a, {}), 1)
        return PendingOutput(arguments["hidden_states"], outputs, division)

    def _first_steps(self, parts: Sequence[PendingPart]) -> Sequence[_Step]:
        first, second = parts
        if isinstance(first, _Step) and isinstance(second, _Step):
            self._deferred_wgrad = first.messages.deferred_wgrad
            return first, second
        slot, block = reserve_slot(), _attention(self._layer)
        steps = [self._step(block, part, number) for number, part in enumerate(parts)]
        steps[0].start(slot)
        if isinstance(second, EmbeddedPart):
            # The first step hides this sum.
            second.begin()
        return steps

    def _step(self, block: _Block, source: PendingPart, number: int) -> _Step:
        deferred, serial = self._deferred_wgrad, self._adapter.serial
        messages: PartMessages
        if self._gathers:
            own, gathers = self._transports[number], self._part_gathers
            messages = GatherScatterMessages(own, deferred, serial=serial, gathers=gathers)
        else:
            num_wgrads = block.num_wgrads[number]
            messages = AllReduceMessages(self._group, self._buffer_pool, deferred, num_wgrads=num_wgrads, serial=serial)
        return _Step(block, self._adapter, source, messages)
