"""A transformer layer on two parts of its micro-batch, or of each sequence.

The modules of the layer run unchanged, once for each part. While the attention or the MLP of a part runs,
`LinearAdapter.assign` changes what runs its linear layers.

- `SplitLayer`: without sequence parallelism. See `ops/tensor_parallel/batch_overlap.py` for the order.
- `SplitShardedLayer`: with it. A step is the attention or the MLP of one part. In its middle it starts the next step of
  the other part. See `ops/tensor_parallel/split_linear.py` for the order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from megatron_overlap.adapters.tensor_parallel.call import LayerOutput, LinearCall
from megatron_overlap.adapters.tensor_parallel.dispatch import LinearAdapter
from megatron_overlap.adapters.tensor_parallel.division import SequenceDivision, SplitCoreAttention
from megatron_overlap.adapters.tensor_parallel.layer_handoff import PendingAdd, PendingOutput, PendingPart
from megatron_overlap.adapters.tensor_parallel.transformer_engine import norm_of
from megatron_overlap.ops.call import Observer
from megatron_overlap.ops.tensor_parallel.batch_overlap import Reduction, Slots, arrived, column_half, entered, row_half
from megatron_overlap.ops.tensor_parallel.part_messages import PartMessages
from megatron_overlap.ops.tensor_parallel.split_linear import column_part, gathered, row_part, scattered, summed_part
from megatron_overlap.ops.wgrad import DeferredWgrad, WgradTarget


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
        attention, mlp, run_wgrad = _attention(self._layer), _mlp(self._layer), self._deferred_wgrad.run
        (a, b), slot, division = pending.parts, pending.slot, pending.division
        attended_a, slot = self._compute(attention, a, division.arguments(arguments, 0), partial(run_wgrad, None), slot)
        attended_b, slot = self._compute(attention, b, division.arguments(arguments, 1), None, slot)
        output_a, slot = self._compute(mlp, attended_a, {}, None, slot)
        output_b, slot = self._compute(mlp, attended_b, {}, partial(run_wgrad, 1), slot)
        return PendingOutput(arguments["hidden_states"], (output_a, output_b), slot, division)

    def _compute(
        self,
        block: _Block,
        source: PendingPart,
        arguments: dict[str, Any],
        before: Callable[[], object] | None,
        slot: int | None,
    ) -> tuple[PendingAdd, int | None]:
        """One part in the attention or the MLP; returns its output, and the slot of the next one.

        Backward calls `before`, and then waits for the sum of the input gradient, at `slot`.
        """
        x = source.complete()
        forward, backward = (Reduction(self._group, serial=self._adapter.serial) for _ in range(2))

        def run(call: LinearCall) -> LayerOutput:
            """Runs a linear layer. The all-reduce of a row-parallel layer is in flight when this returns."""
            call = call.normalized()
            target = WgradTarget(call.main_grad, call.weight_done, self._buffer_pool)
            options = self._deferred_wgrad, target, call.hooks.overlapped
            if call.op == "gemm_ar":
                return call.result(row_half(call.x, call.weight, forward, *options, call.skip_output))
            inside = entered(call.x, backward, before, slot)
            return call.result(column_half(inside, call.weight, call.bias, backward, *options))

        with self._adapter.assign((block.column, block.row), run):
            normed = block.norm(x)
            next_slot = Slots.reserve()
            output = block.module(normed, **arguments)
        arrive = partial(arrived, reduction=forward)
        return PendingAdd(block.layer, block.bias_dropout_add, output, arrive, x), next_slot


@dataclass(frozen=True, slots=True)
class _Block:
    """The attention or the MLP of a layer, the norm before it, and its first and last linear layer.

    In TransformerEngine `column` may hold the norm.
    """

    layer: Any
    module: Any
    norm: Any
    column: Any
    row: Any
    bias_dropout_add: Any

    def normalized(self, x: torch.Tensor) -> torch.Tensor:
        """`x` after the norm. All ranks gather the result, so it is computed before `column` runs."""
        normed: torch.Tensor = self.norm(x)
        if "layer_norm_weight" not in self.column._parameters:
            return normed
        for number, hook in list(self.column._forward_pre_hooks.items()):
            # Such as Megatron's, which wait for the all-gather of the parameters. They run again with `column`.
            keywords: tuple[dict[str, Any], ...] = ({},) if number in self.column._forward_pre_hooks_with_kwargs else ()
            hook(self.column, (normed,), *keywords)
        return norm_of(self.column)(normed)


def _attention(layer: Any) -> _Block:
    attention = layer.self_attention
    linears = getattr(attention, "linear_qkv", None), attention.linear_proj
    return _Block(layer, attention, layer.input_layernorm, *linears, layer.self_attn_bda)


def _mlp(layer: Any) -> _Block:
    linears = layer.mlp.linear_fc1, layer.mlp.linear_fc2
    return _Block(layer, layer.mlp, layer.pre_mlp_layernorm, *linears, layer.mlp_bda)


@dataclass(eq=False, slots=True)
class EmbeddedPart:
    """One part of the output of the embedding, the arguments of `summed_part`: a `PendingPart`."""

    terms: torch.Tensor
    messages: PartMessages
    observer: Observer
    _sum: torch.Tensor | None = None

    def begin(self) -> torch.Tensor:
        """Starts the sum; returns own rows, incomplete."""
        if self._sum is None:
            self._sum = summed_part(self.terms, self.messages, self.observer)
        return self._sum

    def complete(self) -> torch.Tensor:
        return scattered(self.begin(), self.messages)


@dataclass(eq=False, slots=True)
class _Step:
    """One part in the attention or the MLP of a layer: a `PendingPart` that runs its linear layers.

    Attributes:
        source: the input of the block.
        before: the messages of the same part's step before, whose output `source` completes; None if it is complete.
        slot: where backward runs the nodes of another step: before the column-parallel GEMM of this one; see `Slots`.
    """

    block: _Block
    adapter: LinearAdapter
    source: PendingPart
    messages: PartMessages
    before: PartMessages | None = None
    slot: int | None = None
    _x: torch.Tensor | None = None
    _gathered: torch.Tensor | None = None
    _other: _Step | None = None

    def complete(self) -> torch.Tensor:
        """See `PendingPart`: the input of the block, for a layer that runs on the whole micro-batch."""
        self.messages.abandon()
        return self.source.complete() if self._x is None else self._x

    def start(self, slot: int | None = None) -> None:
        """Completes the input, runs the norm, and starts the all-gather. `slot` is their position in backward."""
        if self._gathered is None:
            self._x = self.source.complete()
            self._gathered = gathered(self.block.normalized(self._x), self.messages, slot)

    def compute(self, other: _Step | None, arguments: dict[str, Any]) -> PendingAdd:
        """Runs the block with `arguments`, and in its middle starts `other`. Starts its reduce-scatter."""
        self.start()
        assert self._x is not None
        assert self._gathered is not None
        block, self._other = self.block, other
        with self.adapter.assign((block.column, block.row), self._run), self._polling(self._gathered):
            output = block.module(self._gathered, **arguments)
        arrive = partial(scattered, messages=self.messages)
        return PendingAdd(block.layer, block.bias_dropout_add, output, arrive, self._x)

    def _run(self, call: LinearCall) -> LayerOutput:
        hooks, buffer_pool = call.hooks, self.messages.transport.buffer_pool
        into = WgradTarget(call.main_grad, call.weight_done, buffer_pool)
        if call.op == "gemm_rs":
            # The last position in this step from which the gather of the other part is hidden.
            self._start_other(now=True)
            y = row_part(call.x, call.weight, self.messages, into, hooks.overlapped, call.skip_output)
            return call.result(y)
        if call.x is not self._gathered:
            raise RuntimeError(
                f"an unknown operation changes the input of {type(call.layer).__name__}: "
                "set overlap.tensor.split to none"
            )
        output = column_part(call.x, call.weight, call.bias, self.messages, into, hooks.overlapped, on_save=hooks.saved)
        self.slot = Slots.reserve()
        # A device does not report received messages.
        self._start_other(now=call.x.is_cuda)
        return call.result(output)

    @contextmanager
    def _polling(self, x: torch.Tensor) -> Iterator[None]:
        """On the host, attention inside the context can start the other part's step before and after its softmax."""
        core = getattr(self.block.module, "core_attention", None)
        modules = () if core is None or x.is_cuda else core.named_modules()
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
        if other is not None and (now or other.before is None or other.before.is_ready("output")):
            other.start(self.slot)
            self._other = None


class SplitShardedLayer:
    """One call of a transformer layer on two parts of its input."""

    def __init__(self, layer: Any, adapter: LinearAdapter) -> None:
        self._layer, self._adapter = layer, adapter
        group = layer.self_attention.linear_proj.tp_group
        self._transports, self._gathers = adapter.part_transports(group), adapter.part_gathers(group)
        # Of the first steps. Later steps take that of the step before.
        self._deferred_wgrad = DeferredWgrad(num_terms=2)

    def embedded(self, terms: Sequence[torch.Tensor]) -> list[EmbeddedPart]:
        """The parts of the input of the first layer, from the terms of an embedding for all rows of each part."""
        observer = self._adapter.count_embedding
        # Not by `_gathers`: autograd gets the gathered gradient.
        messages = [PartMessages(each, self._deferred_wgrad, serial=self._adapter.serial) for each in self._transports]
        return [EmbeddedPart(part, own, observer) for part, own in zip(terms, messages, strict=True)]

    def forward(self, pending: PendingOutput, arguments: dict[str, Any], follower: Any) -> PendingOutput:
        """Runs attention of both parts, then the MLP of both parts.

        The output is the first steps of `follower`, the layer that completes it; None if no other layer does.
        """
        steps = self._first_steps(pending.parts)
        division, attention = pending.division, self._layer.self_attention
        given = [division.arguments(arguments, number) for number in range(2)]
        contexts: list[AbstractContextManager[None]] = [nullcontext(), nullcontext()]
        if isinstance(division, SequenceDivision):
            core = SplitCoreAttention(attention)
            contexts = [core.part(number) for number in range(2)]
        blocks = _mlp(self._layer), None if follower is None else _attention(follower)
        outputs: Sequence[PendingPart] = ()
        for block in blocks:
            first, second = steps
            with contexts[0]:
                added = first.compute(second, given[0])
            other = None if block is None else self._next(block, added, first, 0)
            with contexts[1]:
                last = second.compute(other, given[1])
            if block is None or other is None:
                # In backward the first part's all-gather starts when that of the last part has arrived.
                outputs = replace(added, arrive=partial(added.arrive, slot=second.slot)), last
            else:
                outputs = steps = other, self._next(block, last, second, 1)
            given, contexts = [{}, {}], [nullcontext(), nullcontext()]
        return PendingOutput(arguments["hidden_states"], outputs, None, division)

    def _first_steps(self, parts: Sequence[PendingPart]) -> tuple[_Step, _Step]:
        first, second = parts
        if isinstance(first, _Step) and isinstance(second, _Step):
            return first, second
        block = _attention(self._layer)
        steps = (
            _Step(block, self._adapter, first, self._messages(0, self._deferred_wgrad)),
            _Step(block, self._adapter, second, self._messages(1, self._deferred_wgrad)),
        )
        steps[0].start()
        if isinstance(second, EmbeddedPart):
            # The first step hides this sum.
            second.begin()
        return steps

    def _next(self, block: _Block, output: PendingAdd, before: _Step, number: int) -> _Step:
        """The step that follows `before` on the same part; its input is `output`, the output of `before`."""
        messages = self._messages(number, before.messages.deferred_wgrad)
        return _Step(block, self._adapter, output, messages, before.messages)

    def _messages(self, number: int, deferred_wgrad: DeferredWgrad) -> PartMessages:
        adapter = self._adapter
        return PartMessages(
            self._transports[number],
            deferred_wgrad,
            save_gathered=adapter.plan.save_gathered,
            serial=adapter.serial,
            gathers=self._gathers,
        )
