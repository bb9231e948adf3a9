"""TransformerEngine's column- and row-parallel linear layers, overlapped through Megatron's backend spec provider.

The provider returns the classes of which Megatron builds a layer. The replacements return subclasses of
TransformerEngine's classes. Parameters, initialisation, checkpoints, norm and low precision stay TransformerEngine's;
only the forward of a bf16, fp16 or fp32 layer that communicates is replaced. Not yet run on a GPU: the tests compare
every attribute that is read here with the sources of TransformerEngine and Megatron.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from megatron_overlap.adapters.tensor_parallel.call import LayerOutput, LinearCall
from megatron_overlap.adapters.tensor_parallel.dispatch import LinearAdapter
from megatron_overlap.adapters.tensor_parallel.eligibility import te_communicates, unsupported_te_reason
from megatron_overlap.adapters.wrapping import Method, untraced
from megatron_overlap.session import Session

_OPS = {
    ("column", True): "ag_gemm",
    ("column", False): "copy_gemm",
    ("row", True): "gemm_rs",
    ("row", False): "gemm_ar",
}
_NORM = "_overlap_norm"


def column_parallel_linear(original: Method, session: Session) -> Method:
    """Replacement of `TESpecProvider.column_parallel_linear`: returns a subclass of the original's class.

    The layer equals `all_gather(x) @ weight.T + bias` under sequence parallelism; without it `x @ weight.T + bias`,
    whose input gradient is summed over ranks.
    """
    return _provider(original, session, "column")


def column_parallel_layer_norm_linear(original: Method, session: Session) -> Method:
    """Replacement of `TESpecProvider.column_parallel_layer_norm_linear`: the same for a layer that starts with a norm.

    The norm is a TransformerEngine module that shares the parameters of the layer. It runs before the all-gather.
    """
    return _provider(original, session, "column")


def row_parallel_linear(original: Method, session: Session) -> Method:
    """Replacement of `TESpecProvider.row_parallel_linear`: returns a subclass of the original's class.

    The layer equals `reduce_scatter(x @ weight.T)` under sequence parallelism, without it `all_reduce(x @ weight.T)`;
    then the bias, which is returned instead of added with `skip_bias_add`.
    """
    return _provider(original, session, "row")


def _provider(original: Method, session: Session, kind: str) -> Method:
    adapter = LinearAdapter.of(session)
    classes: dict[type, type] = {}  # Megatron compares layer specs by identity.

    @functools.wraps(original)
    def provided(self: Any) -> Any:
        base = original(self)
        if not isinstance(base, type) or not issubclass(base, torch.nn.Module):
            return base  # TransformerEngine is not installed, so Megatron builds no such layer.
        if base not in classes:
            classes[base] = overlapped(base, kind, session, adapter)
        return classes[base]

    return provided


def overlapped(base: type, kind: str, session: Session, adapter: LinearAdapter) -> type:
    """A subclass of one of Megatron's TransformerEngine linears whose forward is overlapped.

    Args:
        base: `TEColumnParallelLinear`, `TELayerNormColumnParallelLinear` or `TERowParallelLinear`.
        kind: `column` or `row`.
        session: the forward of `base` runs while the session is not active.
        adapter: runs the calls.
    """
    stock_forward = base.forward

    @untraced
    def forward(self: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        if not session.active or not te_communicates(self):
            return stock_forward(self, x)
        return _run(self, kind, x, stock_forward, adapter)

    # Megatron-FSDP finds layers by class name.
    return type(base.__name__, (base,), {"forward": forward, "__module__": __name__, "__doc__": base.__doc__})


@dataclass(frozen=True, slots=True)
class TECall(LinearCall):
    """A call of a TransformerEngine linear, with the forward of its class."""

    stock_forward: Method

    def run_stock(self) -> LayerOutput:
        """See `LinearCall`."""
        return self.stock_forward(self.layer, self.x)

    def result(self, output: torch.Tensor) -> LayerOutput:
        """See `LinearCall`."""
        layer: Any = self.layer
        bias = layer.bias if layer.use_bias else None
        if self.kind == "row" and bias is not None and not layer.te_return_bias:
            output = output + bias
        layer.is_first_microbatch = False  # As Megatron's wrapper does after every forward.
        return output, bias if layer.te_return_bias else None


def _run(layer: Any, kind: str, x: torch.Tensor, stock_forward: Method, adapter: LinearAdapter) -> LayerOutput:
    op, group = _OPS[kind, layer.sequence_parallel], layer.tp_group
    hooks = adapter.hooks(kind, op, layer.weight)
    reason = unsupported_te_reason(layer, kind, x) or adapter.unsupported_reason(x, layer.weight, group, op)
    if reason is not None:
        hooks.fallback(reason)
        return stock_forward(layer, x)
    if getattr(layer, "layer_norm_weight", None) is not None:
        x = norm_of(layer)(x)
    # A row-parallel bias is added once, to the sum.
    bias = layer.bias if kind == "column" and layer.use_bias and not layer.te_return_bias else None
    target = adapter.wgrad_target(layer.weight, layer.fuse_wgrad_accumulation)
    call = TECall(layer, kind, op, x, layer.weight, bias, group, target, hooks, stock_forward)
    # Without the autotuner: the stock forward includes the norm, so its time cannot be compared.
    return adapter.run_overlapped(call)


def norm_of(layer: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """TransformerEngine's norm with the parameters of `layer`, which holds both norm and linear.

    The norm is stored outside the layer's modules, because checkpoints and optimizers already have its parameters.
    """
    from megatron.core.extensions.transformer_engine import TENorm

    norm: Any = layer.__dict__.get(_NORM)
    if norm is None:
        norm = layer.__dict__[_NORM] = TENorm(config=layer.config, hidden_size=layer.in_features, eps=layer.eps)
    # In every call: deferred initialisation replaces the parameters, and backward reads them from the module.
    norm._parameters["weight"] = layer.layer_norm_weight
    if layer.layer_norm_bias is not None:
        norm._parameters["bias"] = layer.layer_norm_bias
    return norm
