"""Megatron's experts as `ops.MLPExperts`, and every reason that keeps a mixture-of-experts layer on the stock path."""

import copy
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.extensions import transformer_engine as te_extension
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe import experts as moe_experts
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

from megatron_overlap.adapters.tensor_parallel import eligibility
from megatron_overlap.adapters.tensor_parallel.call import projection_of
from megatron_overlap.adapters.wrapping import run_pre_hooks
from megatron_overlap.config.megatron_args import TWO_MICROBATCHES
from megatron_overlap.ops import MLPExperts
from megatron_overlap.schedules.gather_scatter import MAX_RANKS

_GROUPED = getattr(moe_experts, "TEGroupedMLP", None)
# Fields of the config of a layer that change what it computes or sends, and the reason.
_FEATURES = {
    "moe_latent_size": "--moe-latent-size: latent projections around the experts",
    "fp8": "--fp8-format: TransformerEngine quantizes the rows of the experts",
    "fp4": "--fp4-format: TransformerEngine quantizes the rows of the experts",
    "overlap_moe_expert_parallel_comm": f"{TWO_MICROBATCHES}: Megatron overlaps two micro-batches itself",
    "overlap_dispatch_backward_with_experts_wgrad": (
        "--overlap-dispatch-backward-with-experts-wgrad: Megatron overlaps the backward of dispatch itself"
    ),
    "moe_use_grouped_tensor": "--moe-use-grouped-tensor: TransformerEngine computes the experts on padded rows",
    "delay_wgrad_compute": "--delay-wgrad-compute: deferred weight gradient",
    "moe_apply_probs_on_input": "--moe-apply-probs-on-input: probabilities scale the input of the experts",
    "add_bias_linear": "the experts have biases: add --disable-bias-linear",
    "cpu_offloading": "activations are offloaded to the CPU",
    "fine_grained_activation_offloading": "activations are offloaded to the CPU",
}
# The methods of a layer that the plugin replaces, and `forward`, which calls them.
_STEPS = "forward", "shared_experts_compute", "dispatch", "routed_experts_compute", "combine", "postprocess"
_LINEARS = (
    (ColumnParallelLinear, RowParallelLinear),
    (getattr(te_extension, "TEColumnParallelLinear", None), getattr(te_extension, "TERowParallelLinear", None)),
)


def unsupported_layer_reason(layer: Any) -> str | None:
    """The reason in a `MoELayer` for all of its calls; None if it has none."""
    config, dispatcher, kind = layer.config, layer.token_dispatcher, type(layer)
    for name in _STEPS:
        if getattr(kind, name) is not getattr(MoELayer, name) or name in vars(layer):
            return f"{kind.__name__} overrides {name}"
    if type(dispatcher) is not MoEAlltoAllTokenDispatcher:
        return f"token dispatcher {config.moe_token_dispatcher_type}: use --moe-token-dispatcher-type alltoall"
    if dispatcher.ep_size > MAX_RANKS:
        return f"more than {MAX_RANKS} expert-parallel ranks"
    if dispatcher.tp_size > 1:
        return f"--expert-tensor-parallel-size {dispatcher.tp_size}: use 1"
    if dispatcher.drop_and_pad:
        return "--moe-pad-expert-input-to-capacity: every expert gets padding rows"
    if dispatcher.shared_experts is not None:
        return "--moe-shared-expert-overlap: remove it, the plugin overlaps shared experts too"
    if getattr(config, "cuda_graph_impl", "none") != "none":
        return f"--cuda-graph-impl {config.cuda_graph_impl}: the counts of a step select the messages"
    reason = next((reason for field, reason in _FEATURES.items() if getattr(config, field, None)), None)
    return reason or _unsupported_experts_reason(layer.experts)


def _unsupported_experts_reason(experts: Any) -> str | None:
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


class _Middle:
    """What an MLP of Megatron computes between its two linear layers, by its own forward.

    The MLP is a copy that shares all attributes but the linear layers, which are replaced by the identity. Activation,
    fusions, clamping and probabilities thereby stay those of the installed release.
    """

    def __init__(self, mlp: Any) -> None:
        self._mlp = copy.copy(mlp)
        self._mlp.__dict__["_modules"] = {**mlp._modules, "linear_fc1": _Identity(), "linear_fc2": _Identity()}
        self.recompute = getattr(mlp, "activation_recompute", False)  # --recompute-modules moe_act
        if self.recompute:
            # The operation computes the activation again.
            self._mlp.activation_recompute = False

    def __call__(self, hidden: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
        # A `TEGroupedMLP` wants the number of rows of each expert.
        rows = (torch.tensor([hidden.shape[0]]),) if type(self._mlp) is _GROUPED else ()
        activated: torch.Tensor = type(self._mlp).forward(self._mlp, hidden, *rows, probs)[0]
        return activated


class LayerExperts:
    """The experts of a layer without `unsupported_layer_reason`: what cannot change between its calls."""

    def __init__(self, experts: Any) -> None:
        grouped = type(experts) is _GROUPED
        owners = [experts] if grouped else list(experts.local_experts)
        names = [f"weight{expert}" for expert in range(experts.num_local_experts)] if grouped else ["weight"]
        # For each expert its weight: `linear._parameters[name]`, which loading a checkpoint may replace.
        self.fc1 = [(owner.linear_fc1, owner.linear_fc1._parameters, name) for owner in owners for name in names]
        self.fc2 = [(owner.linear_fc2, owner.linear_fc2._parameters, name) for owner in owners for name in names]
        # The operation calls none of these modules.
        self.modules = tuple(experts.modules())
        self.attributes = tuple(map(vars, self.modules))
        # Those that read an output, keyword arguments or a gradient.
        self.hooks = tuple(
            hooks
            for each in self.modules
            for hooks in (each._forward_hooks, each._forward_pre_hooks_with_kwargs)
            + (each._backward_hooks, each._backward_pre_hooks)
        )
        self.flagged = [each for each in self.modules if hasattr(each, "is_first_microbatch")]
        self.middle = _Middle(owners[0])

    def unsupported_reason(self, hidden_states: torch.Tensor, group: dist.ProcessGroup) -> str | None:
        """The reason in one call; None if it is overlapped."""
        if eligibility.te_quantizes():
            return "fp8: TransformerEngine quantizes the rows of the experts"
        if any(self.hooks) or any("forward" in attributes for attributes in self.attributes):
            return "a hook reads the output of an expert, or its forward is replaced"
        if eligibility.is_capturing(hidden_states):
            return eligibility.CAPTURED
        _, parameters, name = self.fc1[0]
        return eligibility.unsupported_tensors_reason(hidden_states, parameters[name], group)

    def begin(self, hidden_states: torch.Tensor) -> MLPExperts:
        """Runs the pre-hooks of all modules; returns the weights with the destinations of their gradients."""
        for module in self.modules:
            if module._forward_pre_hooks:
                run_pre_hooks(module, hidden_states, "set overlap.expert.method to none")
        fc1 = tuple(projection_of(linear, parameters[name]) for linear, parameters, name in self.fc1)
        fc2 = tuple(projection_of(linear, parameters[name]) for linear, parameters, name in self.fc2)
        return MLPExperts(fc1, fc2, self.middle, self.middle.recompute)

    def end(self) -> None:
        """Sets what Megatron's wrappers of TransformerEngine set after every forward."""
        for linear in self.flagged:
            linear.is_first_microbatch = False
