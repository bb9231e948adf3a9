"""Replacements of the forward methods of Megatron's column- and row-parallel linear layers."""

import functools
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import RowParallelLinear
from megatron.core.utils import get_tensor_model_parallel_group_if_none

from megatron_overlap.adapters.tensor_parallel.call import LayerOutput, LinearCall, MainGradTarget
from megatron_overlap.adapters.tensor_parallel.dispatch import LinearAdapter
from megatron_overlap.adapters.tensor_parallel.eligibility import (
    is_te_linear,
    unsupported_column_reason,
    unsupported_row_reason,
)
from megatron_overlap.adapters.wrapping import Method, tracing
from megatron_overlap.session import Session


def column_forward_impl(original: Method, session: Session) -> Method:
    """Replacement of `ColumnParallelLinear._forward_impl`.

    Equals the original: `all_gather(input) @ weight.T + bias` under sequence parallelism; without it
    `input @ weight.T + bias`, whose input gradient is summed over ranks.
    """
    adapter = session.adapter(LinearAdapter)
    column, tuned, runs_stock = _Column(original, adapter), adapter.autotuner.enabled, adapter.autotuner.runs_stock
    # torch.compile does not trace into the plugin. The wrapper costs microseconds, so it runs under a trace only.
    untraced = torch.compiler.disable(column.forward)

    @functools.wraps(original)
    def _forward_impl(self: Any, input: torch.Tensor, weight: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if tracing():
            return untraced(self, input, weight, args, kwargs)
        if tuned and not adapter.assigned and runs_stock(self, input, weight):
            return original(self, input, weight, *args, **kwargs)
        return column.forward(self, input, weight, args, kwargs)

    return _forward_impl


def row_forward(original: Method, session: Session) -> Method:
    """Replacement of `RowParallelLinear.forward`.

    Equals the original: `reduce_scatter(input @ weight.T)` under sequence parallelism, without it
    `all_reduce(input @ weight.T)`; then the bias, which is returned instead of added with `skip_bias_add`.
    """
    adapter = session.adapter(LinearAdapter)
    row, tuned, runs_stock = _Row(original, adapter), adapter.autotuner.enabled, adapter.autotuner.runs_stock
    untraced = torch.compiler.disable(row.forward)

    @functools.wraps(original)
    def forward(self: Any, input_: torch.Tensor) -> Any:
        if tracing():
            return untraced(self, input_)
        if tuned and not adapter.assigned:
            # `self.weight` goes through `nn.Module.__getattr__`, an extra Python call on every forward.
            weight = self._parameters.get("weight")
            if weight is not None and runs_stock(self, input_, weight):
                return original(self, input_)
        return row.forward(self, input_)

    return forward


@dataclass(frozen=True, slots=True)
class ColumnCall(LinearCall):
    """A call of `ColumnParallelLinear._forward_impl`, with its original and its further arguments."""

    original: Method
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def run_stock(self) -> LayerOutput:
        return self.original(self.layer, self.x, self.weight, *self.args, **self.kwargs)

    def result(self, output: torch.Tensor) -> LayerOutput:
        return output


@dataclass(frozen=True, slots=True)
class RowCall(LinearCall):
    """A call of `RowParallelLinear.forward`, with its original."""

    original: Method

    def run_stock(self) -> LayerOutput:
        return self.original(self.layer, self.x)

    def result(self, output: torch.Tensor) -> LayerOutput:
        return add_row_bias(self.layer, output)


def add_row_bias(layer: Any, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The result of a row-parallel layer: the output with its bias, or both with `skip_bias_add`."""
    if is_te_linear(layer):
        if layer.te_return_bias:
            return output, layer.bias
        return (output + layer.bias if layer.use_bias else output), None
    if layer.skip_bias_add:
        return output, layer.bias
    return (output if layer.bias is None else output + layer.bias), None


class _Column:
    """Runs the calls of column-parallel layers."""

    def __init__(self, original: Method, adapter: LinearAdapter) -> None:
        self._original, self._adapter = original, adapter

    def forward(
        self, layer: Any, x: torch.Tensor, weight: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> LayerOutput:
        adapter, original = self._adapter, self._original
        group: dist.ProcessGroup | None = get_tensor_model_parallel_group_if_none(kwargs.get("tp_group"))
        if group is None or (group.size() == 1 and not adapter.tp_invariant):
            return original(layer, x, weight, *args, **kwargs)
        op = "ag_gemm" if kwargs.get("sequence_parallel") else "copy_gemm"
        target = MainGradTarget.of(weight) if kwargs.get("gradient_accumulation_fusion") else None
        hooks, bias = adapter.hooks("column", op, x, weight), kwargs.get("bias")
        call = ColumnCall(layer, "column", op, x, weight, bias, group, target, hooks, original, args, kwargs)
        reason = unsupported_column_reason(layer, args, kwargs)
        silent = not kwargs.get("sequence_parallel") and not kwargs.get("allreduce_dgrad")
        if reason is None and silent and not adapter.tp_invariant:
            return call.run_not_communicating()
        return adapter.run(call, reason)


class _Row:
    """Runs the calls of row-parallel layers."""

    def __init__(self, original: Method, adapter: LinearAdapter) -> None:
        self._original, self._adapter = original, adapter
        self._stock_gemm = RowParallelLinear._forward_impl

    def forward(self, layer: Any, x: torch.Tensor) -> LayerOutput:
        adapter, original, group = self._adapter, self._original, layer.tp_group
        if group is None or (group.size() == 1 and not adapter.tp_invariant):
            return original(layer, x)
        op, weight = "gemm_rs" if layer.sequence_parallel else "gemm_ar", layer.weight
        target = MainGradTarget.of(weight) if layer.gradient_accumulation_fusion else None
        hooks = adapter.hooks("row", op, x, weight)
        call = RowCall(layer, "row", op, x, weight, None, group, target, hooks, original)
        return adapter.run(call, unsupported_row_reason(layer, x, group, self._stock_gemm))
