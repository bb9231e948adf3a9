"""Megatron's MLP without sequence parallelism: both layers by parts of the rows, so that both hide the all-reduce.

`MLP.forward` calls the first layer, an activation in one of many forms, and the second layer. The activation is all
that is wanted of it: for the length of a call the two layers hand a part's rows in, and take them out.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLP

from megatron_overlap.adapters.tensor_parallel.linear import LinearAdapter, unsupported_row_reason
from megatron_overlap.adapters.wrapping import Method, own_forward
from megatron_overlap.ops import LayerOptions, mlp_all_reduce
from megatron_overlap.session import Session

# What `MLP.forward` is given and does not read.
_UNUSED = ("padding_mask",)


def mlp_forward(original: Method, session: Session) -> Method:
    """Replacement of `MLP.forward`.

    Equals the original: `linear_fc2(activation(linear_fc1(hidden_states)))`. Where the two layers cannot be joined the
    original runs, and each layer is overlapped, or not, by itself.
    """
    adapter = LinearAdapter.of(session)
    own_gemm = RowParallelLinear._forward_impl

    @functools.wraps(original)
    def forward(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        given = [name for name, value in kwargs.items() if value is not None and name not in _UNUSED]
        if args or given or not _joinable(self, hidden_states, adapter, own_gemm):
            return original(self, hidden_states, *args, **kwargs)
        first, second = self.linear_fc1, self.linear_fc2
        with own_forward(first, lambda rows: (rows, None)):
            first(hidden_states)  # For its hooks alone: Megatron waits there for parameters that are being gathered.

        def between(rows: torch.Tensor) -> torch.Tensor:
            with (
                own_forward(first, lambda _: (rows, first.bias)),
                own_forward(second, lambda middle: (middle, None)),
            ):
                middle: torch.Tensor = original(self, rows, **kwargs)[0]
            return middle

        of_first, of_second = (
            adapter.options("mlp", op, layer.weight, layer.gradient_accumulation_fusion)
            for op, layer in (("copy_gemm", first), ("gemm_ar", second))
        )
        output = mlp_all_reduce(
            hidden_states,
            first.weight,
            second.weight,
            between,
            group=adapter.transport(second.tp_group),
            plan=of_second["plan"],
            first=_layer_options(of_first),
            second=_layer_options(of_second),
            deferred_wgrad=of_second["deferred_wgrad"],
        )
        if second.skip_bias_add:
            return output, second.bias
        return (output if second.bias is None else output + second.bias), None

    return forward


def _joinable(mlp: Any, x: torch.Tensor, adapter: LinearAdapter, own_gemm: Method) -> bool:
    """Whether the layers are Megatron's own, with an all-reduce, and nobody looks at what goes through them."""
    if torch.compiler.is_compiling():  # What is between the layers is worth more compiled.
        return False
    first, second = mlp.linear_fc1, mlp.linear_fc2
    if type(mlp) is not MLP or x.dim() != 3 or not x.numel() or adapter.fused.wanted:
        return False
    if adapter.autotuner.enabled or adapter.check.due or adapter.half is not None:  # Each layer by itself.
        return False
    for layer, kind in ((first, ColumnParallelLinear), (second, RowParallelLinear)):
        if not isinstance(layer, kind) or type(layer).forward is not kind.forward or "forward" in vars(layer):
            return False
        if layer._forward_hooks or layer._backward_hooks or layer._backward_pre_hooks:
            return False
    group = second.tp_group
    if group is None or group.size() == 1 or group is not first.tp_group or second.sequence_parallel:
        return False
    if not first.allreduce_dgrad or first.gather_output or not first.skip_bias_add or first.explicit_expert_comm:
        return False
    if type(first)._forward_impl is not ColumnParallelLinear._forward_impl or first.weight is None:
        return False
    config = mlp.config
    if config.defer_embedding_wgrad_compute or getattr(first, "gtp_remat_size", 1) > 1:
        return False
    return (
        unsupported_row_reason(second, x, group, own_gemm)
        or adapter.unsupported_reason(x, first.weight, group, "copy_gemm")
        or adapter.unsupported_reason(x, second.weight, group, "gemm_ar")
    ) is None


def _layer_options(options: dict[str, Any]) -> LayerOptions:
    return LayerOptions(**{key: options[key] for key in ("main_grad", "weight_done", "observer") if key in options})
