"""Joint MLP: without sequence parallelism both linear layers of an MLP run block by block of rows.

Both GEMMs then hide the all-reduce. `MLP.forward` calls the first layer, an activation of one of many forms, and the
second layer. The original `MLP.forward` runs once for each block as the activation: for the time of that call the first
layer returns the rows of the block, and the second layer returns its input.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import RowParallelLinear

from megatron_overlap.adapters.tensor_parallel.dispatch import LinearAdapter
from megatron_overlap.adapters.tensor_parallel.eligibility import supports_joint_mlp, unsupported_row_reason
from megatron_overlap.adapters.tensor_parallel.linear import add_row_bias
from megatron_overlap.adapters.wrapping import Method, replaced_forward
from megatron_overlap.ops import LayerOptions, mlp_all_reduce
from megatron_overlap.session import Session

# Arguments that `MLP.forward` accepts and does not use.
_UNUSED = ("padding_mask",)


def mlp_forward(original: Method, session: Session) -> Method:
    """Replacement of `MLP.forward`.

    Equals the original: `linear_fc2(activation(linear_fc1(hidden_states)))`. For an unsupported call the original runs,
    and each linear layer is overlapped alone.
    """
    adapter = LinearAdapter.of(session)
    stock_gemm = RowParallelLinear._forward_impl

    @functools.wraps(original)
    def forward(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        unknown = [name for name, value in kwargs.items() if value is not None and name not in _UNUSED]
        if args or unknown or not _runs_joint(self, hidden_states, adapter, stock_gemm):
            return original(self, hidden_states, *args, **kwargs)
        first, second = self.linear_fc1, self.linear_fc2
        with replaced_forward(first, _return_input):
            first(hidden_states)  # For its hooks: one of Megatron's waits for the all-gather of the parameters.
        output = mlp_all_reduce(
            hidden_states,
            first.weight,
            second.weight,
            _Activation(original, self, kwargs),
            group=adapter.transport(second.tp_group),
            plan=adapter.plan,
            first=_layer_options(adapter, "copy_gemm", first),
            second=_layer_options(adapter, "gemm_ar", second),
            deferred_wgrad=adapter.deferred_wgrad,
        )
        return add_row_bias(second, output)

    return forward


@dataclass(frozen=True, slots=True)
class _Activation:
    """Bias and activation between the linear layers of an MLP, as a function of the first layer's output."""

    original: Method
    mlp: Any
    kwargs: dict[str, Any]

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        first, second = self.mlp.linear_fc1, self.mlp.linear_fc2
        with replaced_forward(first, _FirstOutput(rows, first.bias)), replaced_forward(second, _return_input):
            middle: torch.Tensor = self.original(self.mlp, rows, **self.kwargs)[0]
        return middle


@dataclass(frozen=True, slots=True)
class _FirstOutput:
    """A forward of the first layer that returns a given output."""

    rows: torch.Tensor
    bias: torch.Tensor | None

    def __call__(self, _: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self.rows, self.bias


def _return_input(x: torch.Tensor) -> tuple[torch.Tensor, None]:
    return x, None


def _runs_joint(mlp: Any, x: torch.Tensor, adapter: LinearAdapter, stock_gemm: Method) -> bool:
    # torch.compile gains more from the operations between the layers than the joint operation does.
    if (
        torch.compiler.is_compiling()
        or adapter.fused
        or adapter.autotuner.enabled
        or adapter.assigned
        or adapter.check.due
    ):
        return False
    if not supports_joint_mlp(mlp, x):
        return False
    first, second = mlp.linear_fc1, mlp.linear_fc2
    group = second.tp_group
    return (
        unsupported_row_reason(second, x, group, stock_gemm)
        or adapter.unsupported_reason(x, first.weight, group, "copy_gemm")
        or adapter.unsupported_reason(x, second.weight, group, "gemm_ar")
    ) is None


def _layer_options(adapter: LinearAdapter, op: str, layer: Any) -> LayerOptions:
    observer = adapter.hooks("mlp", op, layer.weight).overlapped
    target = adapter.wgrad_target(layer.weight, layer.gradient_accumulation_fusion)
    if target is None:
        return LayerOptions(observer=observer)
    return LayerOptions(main_grad=target.main_grad, weight_done=target.written, observer=observer)
