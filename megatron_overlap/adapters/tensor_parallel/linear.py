"""Replacements of the forward methods of Megatron's column- and row-parallel linear layers."""

import functools
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import RowParallelLinear
from megatron.core.utils import get_tensor_model_parallel_group_if_none

from megatron_overlap.adapters.tensor_parallel.call import NO_MAIN_GRAD, LayerOutput, LinearCall, main_grad_of
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
    tuned, runs_stock = adapter.autotuner.enabled, adapter.autotuner.runs_stock

    def run_column(
        layer: Any, x: torch.Tensor, weight: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> LayerOutput:
        group: dist.ProcessGroup | None = get_tensor_model_parallel_group_if_none(kwargs.get("tp_group"))
        if group is None or (group.size() == 1 and not adapter.tp_invariant):
            return original(layer, x, weight, *args, **kwargs)
        op = "ag_gemm" if kwargs.get("sequence_parallel") else "copy_gemm"
        into = main_grad_of(weight) if kwargs.get("gradient_accumulation_fusion") else NO_MAIN_GRAD
        hooks, bias = adapter.hooks("column", op, x, weight), kwargs.get("bias")
        run_stock = functools.partial(original, layer, x, weight, *args, **kwargs)
        call = LinearCall(layer, op, x, weight, bias, group, *into, hooks, run_stock, lambda output: output)
        reason = unsupported_column_reason(layer, args, kwargs)
        silent = not kwargs.get("sequence_parallel") and not kwargs.get("allreduce_dgrad")
        if reason is None and silent and not adapter.tp_invariant:
            return call.run_not_communicating()
        return adapter.run(call, reason)

    # torch.compile does not trace into the plugin. The wrapper costs microseconds, so it runs under a trace only.
    untraced = torch.compiler.disable(run_column)

    @functools.wraps(original)
    def _forward_impl(self: Any, input: torch.Tensor, weight: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if tracing():
            return untraced(self, input, weight, args, kwargs)
        if tuned and not adapter.assigned and runs_stock(self, input, weight):
            return original(self, input, weight, *args, **kwargs)
        return run_column(self, input, weight, args, kwargs)

    return _forward_impl


def row_forward(original: Method, session: Session) -> Method:
    """Replacement of `RowParallelLinear.forward`.

    Equals the original: `reduce_scatter(input @ weight.T)` under sequence parallelism, without it
    `all_reduce(input @ weight.T)`; then the bias, which is returned instead of added with `skip_bias_add`.
    """
    adapter, stock_gemm = session.adapter(LinearAdapter), RowParallelLinear._forward_impl
    tuned, runs_stock = adapter.autotuner.enabled, adapter.autotuner.runs_stock

    def run_row(layer: Any, x: torch.Tensor) -> LayerOutput:
        group = layer.tp_group
        if group is None or (group.size() == 1 and not adapter.tp_invariant):
            return original(layer, x)
        op, weight = "gemm_rs" if layer.sequence_parallel else "gemm_ar", layer.weight
        into = main_grad_of(weight) if layer.gradient_accumulation_fusion else NO_MAIN_GRAD
        hooks = adapter.hooks("row", op, x, weight)
        run_stock, result = functools.partial(original, layer, x), functools.partial(add_row_bias, layer)
        call = LinearCall(layer, op, x, weight, None, group, *into, hooks, run_stock, result)
        return adapter.run(call, unsupported_row_reason(layer, x, group, stock_gemm))

    untraced = torch.compiler.disable(run_row)

    @functools.wraps(original)
    def forward(self: Any, input_: torch.Tensor) -> Any:
        if tracing():
            return untraced(self, input_)
        if tuned and not adapter.assigned:
            # `self.weight` goes through `nn.Module.__getattr__`, an extra Python call on every forward.
            weight = self._parameters.get("weight")
            if weight is not None and runs_stock(self, input_, weight):
                return original(self, input_)
        return run_row(self, input_)

    return forward


def add_row_bias(layer: Any, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The result of a row-parallel layer: the output with its bias, or both with `skip_bias_add`."""
    if is_te_linear(layer):
        if layer.te_return_bias:
            return output, layer.bias
        return (output + layer.bias if layer.use_bias else output), None
    if layer.skip_bias_add:
        return output, layer.bias
    return (output if layer.bias is None else output + layer.bias), None
