"""Replacements of the forward methods of Megatron's column- and row-parallel linear layers.

In TransformerEngine's layers parameters, initialisation, checkpoints, norm and low precision stay TransformerEngine's;
only the forward of a bf16, fp16 or fp32 layer that communicates is replaced. Tested on CPU ranks with the kernels of
`adapters/cpu/te_kernels.py`. Not yet run on several GPUs.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TENorm, TERowParallelLinear
from megatron.core.transformer.mlp import MLP
from megatron.core.utils import get_tensor_model_parallel_group_if_none

from megatron_overlap.adapters.tensor_parallel import eligibility
from megatron_overlap.adapters.tensor_parallel.call import NO_MAIN_GRAD, LayerOutput, LinearCall, main_grad_of
from megatron_overlap.adapters.tensor_parallel.dispatch import LinearAdapter
from megatron_overlap.adapters.tensor_parallel.forward_only import is_forward_only
from megatron_overlap.adapters.wrapping import Method, tracing, untraced
from megatron_overlap.session import Session

_OPS = {
    ("column", True): "ag_gemm",
    ("column", False): "copy_gemm",
    ("row", True): "gemm_rs",
    ("row", False): "gemm_ar",
}
"""Operations by kind of layer and sequence parallelism."""
_NORM = "_overlap_norm"
_DUPLICATED = "every rank holds the whole weight: the layer does not communicate"
_FUSED = "Megatron fuses reduce-scatter, norm and all-gather of this layer"


def column_forward_impl(original: Method, session: Session) -> Method:
    """Replacement of `ColumnParallelLinear._forward_impl`.

    Equals `all_gather(input) @ weight.T + bias` under sequence parallelism. Without it equals `input @ weight.T +
    bias`, whose input gradient is summed over ranks.
    """
    adapter = session.adapter(LinearAdapter)
    tuned, runs_stock = adapter.autotuner.enabled, adapter.autotuner.runs_stock

    def run_column(
        layer: Any, x: torch.Tensor, weight: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> LayerOutput:
        group: dist.ProcessGroup | None = get_tensor_model_parallel_group_if_none(kwargs.get("tp_group"))
        if group is None or (group.size() == 1 and not adapter.tp_invariant):
            return original(layer, x, weight, *args, **kwargs)
        op = _OPS["column", bool(kwargs.get("sequence_parallel"))]
        into = main_grad_of(weight) if kwargs.get("gradient_accumulation_fusion") else NO_MAIN_GRAD
        hooks, bias = adapter.hooks("column", op, x, weight), kwargs.get("bias")
        run_stock = functools.partial(original, layer, x, weight, *args, **kwargs)
        call = LinearCall(layer, op, x, weight, bias, group, *into, hooks, run_stock, lambda output: output)
        reason = eligibility.unsupported_column_reason(layer, args, kwargs)
        silent = op == "copy_gemm" and not kwargs.get("allreduce_dgrad")
        if reason is None and silent and not adapter.tp_invariant:
            return call.run_not_communicating()
        return adapter.run(call, reason)

    eager = torch.compiler.disable(run_column)  # `untraced` by hand: one call less

    def _forward_impl(self: Any, input: torch.Tensor, weight: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if tracing():
            return eager(self, input, weight, args, kwargs)
        if tuned and not adapter.assigned and runs_stock(self, input, weight):
            return original(self, input, weight, *args, **kwargs)
        return run_column(self, input, weight, args, kwargs)

    return _forward_impl


def row_forward(original: Method, session: Session) -> Method:
    """Replacement of `RowParallelLinear.forward`.

    Equals `reduce_scatter(input @ weight.T)` under sequence parallelism, otherwise `all_reduce(input @ weight.T)`. The
    bias is added, or returned with `skip_bias_add`.
    """
    adapter = session.adapter(LinearAdapter)
    tuned, runs_stock = adapter.autotuner.enabled, adapter.autotuner.runs_stock

    @untraced
    def forward(self: Any, input_: torch.Tensor) -> LayerOutput:
        if tuned and not adapter.assigned and runs_stock(self, input_):
            return original(self, input_)
        group = self.tp_group
        if group is None or (group.size() == 1 and not adapter.tp_invariant):
            return original(self, input_)
        op, weight = _OPS["row", self.sequence_parallel], self.weight
        into = main_grad_of(weight) if self.gradient_accumulation_fusion else NO_MAIN_GRAD
        hooks = adapter.hooks("row", op, input_, weight)
        run_stock, result = functools.partial(original, self, input_), functools.partial(add_row_bias, self)
        call = LinearCall(self, op, input_, weight, None, group, *into, hooks, run_stock, result)
        return adapter.run(call, eligibility.unsupported_row_reason(self, input_))

    return forward


def linear_forward(original: Method, session: Session) -> Method:
    """Replacement of the `forward` of `TELinear` and of `TELayerNormColumnParallelLinear`.

    A column- or row-parallel layer computes what `column_forward_impl` and `row_forward` do; a norm before it runs on
    `x`. Either bias is returned instead of added with `skip_bias_add`.
    """
    adapter = session.adapter(LinearAdapter)
    tuned, runs_stock = adapter.autotuner.enabled, adapter.autotuner.runs_stock

    @untraced
    def forward(self: Any, x: torch.Tensor) -> LayerOutput:
        if tuned and not adapter.assigned and runs_stock(self, x):
            return original(self, x)
        if eligibility.te_communicates(self):
            return adapter.run(_call(self, x, original, adapter), eligibility.unsupported_te_reason(self, x))
        if self.parallel_mode is None and self.config.tensor_model_parallel_size > 1:
            is_expert = isinstance(self, TEColumnParallelLinear | TERowParallelLinear)
            session.counters.exclude(type(self).__name__, eligibility.EXPERT if is_expert else _DUPLICATED)
        return original(self, x)

    return forward


def grouped_linear_forward(original: Method, session: Session) -> Method:
    """Replacement of `TEGroupedLinear.forward`: runs the original, and records that it has nothing to overlap."""

    @untraced
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        session.counters.exclude(type(self).__name__, eligibility.EXPERT)
        return original(self, *args, **kwargs)

    return forward


def fused_mlp_forward(original: Method, session: Session) -> Method:
    """Replacement of `TEFusedMLP.forward`: `MLP.forward` computes the same by both linear layers.

    Where one of them is not supported, the original runs, and both are counted as fallbacks.
    """
    adapter = session.adapter(LinearAdapter)

    @untraced
    def forward(self: Any, hidden_states: torch.Tensor, **kwargs: Any) -> Any:
        linears = self.linear_fc1, self.linear_fc2
        if not all(map(eligibility.te_communicates, linears)):
            return original(self, hidden_states, **kwargs)
        reason = next(filter(None, map(eligibility.unsupported_te_reason, linears)), None)
        if reason is None:
            return MLP.forward(self, hidden_states, **kwargs)
        for layer in linears:
            kind = layer.parallel_mode
            adapter.hooks(kind, _OPS[kind, layer.sequence_parallel], hidden_states, layer.weight).fallback(reason)
        return original(self, hidden_states, **kwargs)

    return forward


def inference_linear_forward(original: Method, session: Session) -> Method:
    """Replacement of `forward` of the three parallel linear layers of `inference_optimized`.

    It has no bias; an RMSNorm may precede it. Megatron's kernels run communication and GEMM one after the other.
    Training, one tensor-parallel rank, CUDA graphs and calls below the threshold of forward-only calls run the
    original. Not yet run on a GPU.
    """
    from megatron.core.tensor_parallel.inference_layers import _te_rms_norm_kernel  # it needs TransformerEngine

    adapter = session.adapter(LinearAdapter)
    tuned, runs_stock = adapter.autotuner.enabled, adapter.autotuner.runs_stock

    @untraced
    def forward(self: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        weight, kind = self.weight, self.parallel_mode
        if self.training or eligibility.is_capturing(x) or not eligibility.te_communicates(self):
            return original(self, x, *args, **kwargs)
        if not isinstance(weight, torch.Tensor):
            session.counters.exclude(type(self).__name__, "the weight is MXFP8")
            return original(self, x, *args, **kwargs)
        if args or kwargs or not is_forward_only(x, weight):
            return original(self, x, *args, **kwargs)
        if tuned and not adapter.assigned and runs_stock(self, x, weight):
            return original(self, x)
        op = _OPS[kind, True]
        scale = self._parameters.get("layer_norm_weight")
        norm = None if scale is None else functools.partial(_te_rms_norm_kernel, weight=scale, eps=self.eps)
        hooks, run_stock = adapter.hooks(kind, op, x, weight), functools.partial(original, self, x)
        call = LinearCall(
            self, op, x, weight, None, self.tp_group, None, None, hooks, run_stock, lambda output: (output, None), norm
        )
        fused = getattr(self, "skip_norm_and_all_gather", False)
        fused = fused or getattr(self, "next_layer_norm_weights", None) is not None
        return adapter.run(call, _FUSED if fused else eligibility.unsupported_te_reason(self, x))

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


def add_row_bias(layer: Any, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The result of a row-parallel layer: the output with its bias, or both with `skip_bias_add`."""
    if eligibility.is_te_linear(layer):
        if layer.te_return_bias:
            return output, layer.bias
        return (output + layer.bias if layer.use_bias else output), None
    if layer.skip_bias_add:
        return output, layer.bias
    return (output if layer.bias is None else output + layer.bias), None
