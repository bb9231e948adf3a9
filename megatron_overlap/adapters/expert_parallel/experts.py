"""Megatron's experts as `ops.MLPExperts`, and every reason that keeps a mixture-of-experts layer on the stock path."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.extensions import transformer_engine as te_extension
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe import experts as moe_experts
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

from megatron_overlap.adapters.tensor_parallel.call import MainGradTarget
from megatron_overlap.adapters.tensor_parallel.eligibility import (
    is_te_linear,
    te_quantizes,
    unsupported_tensors_reason,
)
from megatron_overlap.ops import MLPExperts, Projection
from megatron_overlap.schedules.gather_scatter import MAX_RANKS

_GROUPED = getattr(moe_experts, "TEGroupedMLP", None)
# Fields of the config of a layer that change what it computes or sends, and the reason.
_FEATURES = (
    ("moe_latent_size", "--moe-latent-size: latent projections around the experts"),
    ("fp8", "--fp8-format: TransformerEngine quantizes the rows of the experts"),
    ("fp4", "--fp4-format: TransformerEngine quantizes the rows of the experts"),
    (
        "overlap_moe_expert_parallel_comm",
        "--overlap-moe-expert-parallel-comm: Megatron overlaps two micro-batches itself",
    ),
    (
        "overlap_dispatch_backward_with_experts_wgrad",
        "--overlap-dispatch-backward-with-experts-wgrad: Megatron overlaps the backward of dispatch itself",
    ),
    ("delay_wgrad_compute", "--delay-wgrad-compute: deferred weight gradient"),
    ("moe_apply_probs_on_input", "--moe-apply-probs-on-input: probabilities scale the input of the experts"),
    ("add_bias_linear", "the experts have biases: add --disable-bias-linear"),
    ("cpu_offloading", "activations are offloaded to the CPU"),
    ("fine_grained_activation_offloading", "activations are offloaded to the CPU"),
)
_LINEARS = (
    (ColumnParallelLinear, RowParallelLinear),
    (getattr(te_extension, "TEColumnParallelLinear", None), getattr(te_extension, "TERowParallelLinear", None)),
)


def unsupported_reason(layer: Any, hidden_states: torch.Tensor) -> str | None:
    """The reason in a `MoELayer` or its dispatched tokens; None if the layer is overlapped."""
    config, dispatcher = layer.config, layer.token_dispatcher
    if type(dispatcher) is not MoEAlltoAllTokenDispatcher:
        return f"token dispatcher {config.moe_token_dispatcher_type}: use --moe-token-dispatcher-type alltoall"
    if dispatcher.ep_size > MAX_RANKS:
        return f"more than {MAX_RANKS} expert-parallel ranks"
    if dispatcher.tp_size > 1:
        return f"--expert-tensor-parallel-size {dispatcher.tp_size}: use 1"
    if dispatcher.drop_and_pad:
        return "--moe-pad-expert-input-to-capacity: every expert gets padding rows"
    if dispatcher.shared_experts is not None:
        return "--moe-shared-expert-overlap: Megatron overlaps shared experts with the same messages"
    if getattr(config, "cuda_graph_impl", "none") != "none":
        return f"--cuda-graph-impl {config.cuda_graph_impl}: the counts of a step select the messages"
    reason = next((reason for field, reason in _FEATURES if getattr(config, field, None)), None)
    if reason is not None:
        return reason
    return _unsupported_experts_reason(layer.experts) or unsupported_tensors_reason(
        hidden_states, next(layer.experts.parameters()), dispatcher.ep_group
    )


def _unsupported_experts_reason(experts: Any) -> str | None:
    if te_quantizes():
        return "fp8: TransformerEngine quantizes the rows of the experts"
    if type(experts) is _GROUPED:
        if getattr(experts, "_with_fused_impl", False):
            return "--use-transformer-engine-op-fuser: one fused operation computes the experts"
        linears = [experts.linear_fc1, experts.linear_fc2]
        if not all(hasattr(linear, "weight0") for linear in linears):
            return "the weights of all experts are one parameter"
    elif type(experts) is moe_experts.SequentialMLP and all(type(mlp) is MLP for mlp in experts.local_experts):
        pairs = [(mlp.linear_fc1, mlp.linear_fc2) for mlp in experts.local_experts]
        if any((type(fc1), type(fc2)) not in _LINEARS for fc1, fc2 in pairs):
            return f"the linear layers of the experts are {type(pairs[0][0]).__name__} and {type(pairs[0][1]).__name__}"
        linears = [linear for pair in pairs for linear in pair]
    else:
        return f"the experts are {type(experts).__name__}"
    if any(module._forward_hooks or "forward" in vars(module) for module in experts.modules()):
        return "a forward hook reads the output of an expert, or its forward is replaced"
    for weight in experts.parameters():
        if type(weight) is not torch.nn.Parameter:
            return f"the weight is a {type(weight).__name__}"
        if getattr(weight, "gtp_remat_size", 1) > 1 or getattr(weight, "overwrite_main_grad", False):
            return "generalized tensor parallel weights, or a weight gradient that overwrites main_grad"
    if any(getattr(linear, "te_quant_params", None) is not None for linear in linears):
        return "a quantization recipe names the experts"
    return None


class _Identity(torch.nn.Module):
    """In place of a linear layer: returns its input, and no bias."""

    def forward(self, x: torch.Tensor, *_: Any) -> tuple[torch.Tensor, None]:
        return x, None


@dataclass(frozen=True, slots=True)
class _Middle:
    """What an MLP of Megatron computes between its two linear layers, by its own forward.

    The MLP is a copy that shares all attributes but the linear layers, which are replaced by the identity. Activation,
    fusions, clamping and probabilities thereby stay those of the installed release.

    Attributes:
        mlp: the copy.
        grouped: it is a `TEGroupedMLP`, which wants the number of rows of each expert.
    """

    mlp: Any
    grouped: bool

    @classmethod
    def of(cls, mlp: Any) -> "_Middle":
        middle = copy.copy(mlp)
        middle.__dict__["_modules"] = {**mlp._modules, "linear_fc1": _Identity(), "linear_fc2": _Identity()}
        if hasattr(middle, "activation_recompute"):
            # Backward computes the activation again anyway.
            middle.activation_recompute = False
        return cls(middle, type(mlp) is _GROUPED)

    def __call__(self, hidden: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
        rows = (torch.tensor([hidden.shape[0]]),) if self.grouped else ()
        activated: torch.Tensor = type(self.mlp).forward(self.mlp, hidden, *rows, probs)[0]
        return activated


def experts_of(experts: Any) -> MLPExperts:
    """The weights of supported experts, with the destinations of their gradients."""
    if type(experts) is _GROUPED:
        count = range(experts.num_local_experts)
        fc1, fc2 = (
            tuple(_projection(linear, getattr(linear, f"weight{expert}")) for expert in count)
            for linear in (experts.linear_fc1, experts.linear_fc2)
        )
        return MLPExperts(fc1, fc2, _Middle.of(experts))
    mlps = experts.local_experts
    fc1, fc2 = (
        tuple(_projection(getattr(mlp, name), getattr(mlp, name).weight) for mlp in mlps)
        for name in ("linear_fc1", "linear_fc2")
    )
    return MLPExperts(fc1, fc2, _Middle.of(mlps[0]))


def linears_of(experts: Any) -> Iterator[Any]:
    """The linear layers of supported experts."""
    owners = [experts] if type(experts) is _GROUPED else experts.local_experts
    for owner in owners:
        yield from (owner.linear_fc1, owner.linear_fc2)


def _projection(linear: Any, weight: torch.Tensor) -> Projection:
    is_te = is_te_linear(linear) or hasattr(linear, "fuse_wgrad_accumulation")
    fused = linear.fuse_wgrad_accumulation if is_te else linear.gradient_accumulation_fusion
    if fused and weight.requires_grad and hasattr(weight, "main_grad"):
        return Projection(weight, weight.main_grad, MainGradTarget(weight, weight.main_grad).written)
    return Projection(weight)
