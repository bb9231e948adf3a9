"""TransformerEngine's column- and row-parallel linears on the overlapped ops, by Megatron's backend spec provider.

The provider gives Megatron the classes that a layer is built of. It gives subclasses of TransformerEngine's own here:
parameters, their names, initialisation, checkpoints and everything in low precision stay TransformerEngine's, and so do
norm and attention. Only the forward of a bf16, fp16 or fp32 layer that communicates is another one.

Not run: there was no GPU. The tests hold every attribute that is read here against TransformerEngine's and Megatron's
sources.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from megatron_overlap.adapters.tensor_parallel.linear import LinearAdapter
from megatron_overlap.adapters.wrapping import Method, untraced
from megatron_overlap.session import Session

_OPS = {
    ("column", True): "ag_gemm",
    ("column", False): "copy_gemm",
    ("row", True): "gemm_rs",
    ("row", False): "gemm_ar",
}
# Features of TransformerEngine that change what a layer computes or sends: field of the layer's config, reason.
_ONLY_THERE = (
    ("fp8", "fp8: TransformerEngine quantizes what it sends"),
    ("fp4", "fp4: TransformerEngine quantizes what it sends"),
    ("tp_comm_overlap", "--tp-comm-overlap: TransformerEngine overlaps by itself"),
    ("delay_wgrad_compute", "deferred weight gradient (--delay-wgrad-compute)"),
    ("symmetric_ar_type", "TransformerEngine's all-reduce in symmetric memory (symmetric_ar_type)"),
    ("cpu_offloading", "activations are offloaded to the CPU"),
)
_NORM = "_overlap_norm"


def column_parallel_linear(original: Method, session: Session) -> Method:
    """Replacement of `TESpecProvider.column_parallel_linear`: a subclass of the class that the original names.

    The layer equals `all_gather(x) @ weight.T + bias` under sequence parallelism; without it `x @ weight.T + bias`,
    whose input gradient is summed over ranks.
    """
    return _provider(original, session, "column")


def column_parallel_layer_norm_linear(original: Method, session: Session) -> Method:
    """Replacement of `TESpecProvider.column_parallel_layer_norm_linear`: as above, of `norm(x)`.

    The norm is TransformerEngine's, as a module of its own that shares the layer's parameters, before the gather.
    """
    return _provider(original, session, "column")


def row_parallel_linear(original: Method, session: Session) -> Method:
    """Replacement of `TESpecProvider.row_parallel_linear`: a subclass of the class that the original names.

    The layer equals `reduce_scatter(x @ weight.T)` under sequence parallelism, without it `all_reduce(x @ weight.T)`;
    then the bias, which is returned instead of added with `skip_bias_add`.
    """
    return _provider(original, session, "row")


def _provider(original: Method, session: Session, kind: str) -> Method:
    adapter = LinearAdapter.of(session)
    made: dict[type, type] = {}  # layer specs are compared, and tested by identity

    @functools.wraps(original)
    def provided(self: Any) -> Any:
        base = original(self)
        if not isinstance(base, type) or not issubclass(base, torch.nn.Module):
            return base  # TransformerEngine is not installed: nothing is built of this
        if base not in made:
            made[base] = overlapped(base, kind, session, adapter)
        return made[base]

    return provided


def overlapped(base: type, kind: str, session: Session, adapter: LinearAdapter) -> type:
    """A subclass of one of Megatron's TransformerEngine linears whose forward is overlapped where it can be.

    Args:
        base: `TEColumnParallelLinear`, `TELayerNormColumnParallelLinear` or `TERowParallelLinear`.
        kind: `column` or `row`.
        session: while it is not active, and where something does not fit, the base's own forward runs.
        adapter: the plan, transports and counting of the session's linears.
    """
    own_forward = base.forward

    @untraced
    def forward(self: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        if not session.active or communicates_not(self):
            return own_forward(self, x)
        op = _OPS[kind, self.sequence_parallel]
        reason = unsupported_reason(self, kind, x) or adapter.unsupported_reason(x, self.weight, self.tp_group, op)
        if reason is not None:
            adapter.fall_back(kind, op, self.weight, reason)
            return own_forward(self, x)
        return _run(self, kind, op, x, adapter)

    # The name stays: Megatron-FSDP looks layers up by it.
    return type(base.__name__, (base,), {"forward": forward, "__module__": __name__, "__doc__": base.__doc__})


def communicates_not(layer: Any) -> bool:
    """One rank, or a layer of an expert, for which the token dispatcher communicates: `parallel_mode` is None there."""
    return bool(layer.tp_size == 1 or layer.parallel_mode is None or layer.tp_group is None)


def unsupported_reason(layer: Any, kind: str, x: torch.Tensor) -> str | None:
    """What of TransformerEngine's, or of Megatron's use of it, keeps a layer from the overlapped op."""
    for field, reason in _ONLY_THERE:
        if getattr(layer.config, field, None):
            return reason
    if getattr(layer, "te_quant_params", None) is not None:
        return "a quantization recipe names this layer"
    if layer.weight_names != ["weight"]:
        return "the weight is split into several parameters"
    if getattr(layer.weight, "gtp_remat_size", 1) > 1:
        return "generalized tensor parallel weights"
    if getattr(layer.weight, "overwrite_main_grad", False):
        return "the weight gradient overwrites main_grad"
    if layer.fsdp_group is not None:
        return "TransformerEngine shards the weight (FSDP)"
    if kind == "row" and layer.sequence_parallel and x.shape[0] % layer.tp_size:
        return f"sequence length is not divisible by the tensor-parallel size {layer.tp_size}"
    return None


def _run(
    layer: Any, kind: str, op: str, x: torch.Tensor, adapter: LinearAdapter
) -> tuple[torch.Tensor, torch.Tensor | None]:
    if getattr(layer, "layer_norm_weight", None) is not None:
        x = norm_of(layer)(x)
    bias = layer.bias if layer.use_bias else None
    added = None if layer.te_return_bias else bias
    # A row-parallel bias is added once, to the sum.
    inside = added if kind == "column" else None
    output = adapter.linear(kind, op, x, layer.weight, inside, layer.tp_group, layer.fuse_wgrad_accumulation)
    if kind == "row" and added is not None:
        output = output + added
    layer.is_first_microbatch = False  # as Megatron's wrapper does after every forward
    return output, bias if layer.te_return_bias else None


def norm_of(layer: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """TransformerEngine's norm with the parameters of `layer`, which holds both norm and linear.

    It is kept beside the layer's modules, not among them: checkpoints and optimizers know its parameters already.
    """
    from megatron.core.extensions.transformer_engine import TENorm

    norm: Any = layer.__dict__.get(_NORM)
    if norm is None:
        norm = layer.__dict__[_NORM] = TENorm(config=layer.config, hidden_size=layer.in_features, eps=layer.eps)
    # Every time: deferred initialisation makes new parameters. Its backward reads them from the module, too.
    norm._parameters["weight"] = layer.layer_norm_weight
    if layer.layer_norm_bias is not None:
        norm._parameters["bias"] = layer.layer_norm_bias
    return norm
