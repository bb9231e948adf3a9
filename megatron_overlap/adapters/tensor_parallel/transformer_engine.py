"""Replacements of the forward methods of TransformerEngine's linear layers, in the classes of Megatron.

Parameters, initialisation, checkpoints, norm and low precision stay TransformerEngine's; only the forward of a bf16,
fp16 or fp32 layer that communicates is replaced. Tested on CPU ranks with the kernels of `adapters/cpu/te_kernels.py`.
Not yet run on several GPUs.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TENorm, TERowParallelLinear
from megatron.core.transformer.mlp import MLP

from megatron_overlap.adapters.tensor_parallel.call import NO_MAIN_GRAD, LayerOutput, LinearCall, main_grad_of
from megatron_overlap.adapters.tensor_parallel.dispatch import LinearAdapter
from megatron_overlap.adapters.tensor_parallel.eligibility import EXPERT, te_communicates, unsupported_te_reason
from megatron_overlap.adapters.tensor_parallel.linear import add_row_bias
from megatron_overlap.adapters.wrapping import Method, replaces
from megatron_overlap.session import Session

_OPS = {
    ("column", True): "ag_gemm",
    ("column", False): "copy_gemm",
    ("row", True): "gemm_rs",
    ("row", False): "gemm_ar",
}
_NORM = "_overlap_norm"
_DUPLICATED = "every rank holds the whole weight: the layer does not communicate"


def linear_forward(original: Method, session: Session) -> Method:
    """Replacement of the `forward` of `TELinear` and of `TELayerNormColumnParallelLinear`.

    Equals the original. A column-parallel layer is `all_gather(x) @ weight.T + bias` under sequence parallelism,
    without it `x @ weight.T + bias`, whose input gradient is summed over ranks; a norm before it runs on `x`. A
    row-parallel layer is `reduce_scatter(x @ weight.T)` under sequence parallelism, without it
    `all_reduce(x @ weight.T)`; then the bias. A bias is returned instead of added with `skip_bias_add`.
    """
    adapter = session.adapter(LinearAdapter)
    tuned, runs_stock = adapter.autotuner.enabled, adapter.autotuner.runs_stock

    @replaces(original)
    def forward(self: Any, x: torch.Tensor) -> LayerOutput:
        if tuned and not adapter.assigned:
            weight = self._parameters.get("weight")
            if weight is not None and runs_stock(self, x, weight):
                return original(self, x)
        if te_communicates(self):
            return adapter.run(_call(self, x, original, adapter), unsupported_te_reason(self, x))
        if self.parallel_mode is None and self.config.tensor_model_parallel_size > 1:
            is_expert = isinstance(self, TEColumnParallelLinear | TERowParallelLinear)
            session.counters.exclude(type(self).__name__, EXPERT if is_expert else _DUPLICATED)
        return original(self, x)

    return forward


def grouped_linear_forward(original: Method, session: Session) -> Method:
    """Replacement of `TEGroupedLinear.forward`: runs the original, and records that it has nothing to overlap."""

    @replaces(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        session.counters.exclude(type(self).__name__, EXPERT)
        return original(self, *args, **kwargs)

    return forward


def fused_mlp_forward(original: Method, session: Session) -> Method:
    """Replacement of `TEFusedMLP.forward`.

    Equals the original: `MLP.forward` computes the same from the same parameters, and calls the `forward` of both
    linear layers. Where one of them is not supported, the original runs and both are counted as fallbacks.
    """
    adapter = session.adapter(LinearAdapter)

    @replaces(original)
    def forward(self: Any, hidden_states: torch.Tensor, **kwargs: Any) -> Any:
        linears = self.linear_fc1, self.linear_fc2
        if not all(map(te_communicates, linears)):
            return original(self, hidden_states, **kwargs)
        reason = next(filter(None, map(unsupported_te_reason, linears)), None)
        if reason is None:
            return MLP.forward(self, hidden_states, **kwargs)
        for layer in linears:
            kind = layer.parallel_mode
            adapter.hooks(kind, _OPS[kind, layer.sequence_parallel], hidden_states, layer.weight).fallback(reason)
        return original(self, hidden_states, **kwargs)

    return forward


def _call(layer: Any, x: torch.Tensor, original: Method, adapter: LinearAdapter) -> LinearCall:
    kind, weight = layer.parallel_mode, layer.weight
    op = _OPS[kind, layer.sequence_parallel]
    # A row-parallel bias is added once, to the sum.
    bias = layer.bias if kind == "column" and layer.use_bias and not layer.te_return_bias else None
    into = main_grad_of(weight) if layer.fuse_wgrad_accumulation else NO_MAIN_GRAD
    norm = norm_of(layer) if "layer_norm_weight" in layer._parameters else None
    hooks, run_stock = adapter.hooks(kind, op, x, weight), functools.partial(original, layer, x)

    def result(output: torch.Tensor) -> LayerOutput:
        layer.is_first_microbatch = False  # As Megatron's wrapper does after every forward.
        if kind == "row":
            return add_row_bias(layer, output)
        return output, layer.bias if layer.te_return_bias else None

    return LinearCall(layer, op, x, weight, bias, layer.tp_group, *into, hooks, run_stock, result, norm)


def norm_of(layer: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """TransformerEngine's norm with the parameters of `layer`, which holds both norm and linear.

    The norm is stored outside the layer's modules, because checkpoints and optimizers already have its parameters.
    """
    norm: Any = layer.__dict__.get(_NORM)
    if norm is None:
        norm = layer.__dict__[_NORM] = TENorm(config=layer.config, hidden_size=layer.in_features, eps=layer.eps)
    # In every call: deferred initialisation replaces the parameters, and backward reads them from the module.
    norm._parameters["weight"] = layer.layer_norm_weight
    if layer.layer_norm_bias is not None:
        norm._parameters["bias"] = layer.layer_norm_bias
    return norm
