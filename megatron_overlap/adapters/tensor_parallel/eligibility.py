"""Every reason that keeps a tensor-parallel call on the stock path. The report prints these texts."""

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.extensions import transformer_engine as te_extension
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel.layers import RowParallelLinear
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_overlap.adapters.wrapping import is_hooked, is_pre_hooked, recomputed_by_torch
from megatron_overlap.schedules.gather_scatter import MAX_RANKS

CAPTURED = "a CUDA graph is being captured"
GENERATION = "generation: the KV cache is that of the whole batch; its linear layers are overlapped one by one"
EXPERT = "expert layer: the token dispatcher communicates, not the layer"
_GTP = "generalized tensor parallel weights"
_OFFLOADED = "activations are offloaded to the CPU"
_READS_SCORES = "--qk-clip or --log-max-attention-logit reads the scores"
_INDIVISIBLE = "sequence length is not divisible by the tensor-parallel size {}"

# Keyword arguments of `ColumnParallelLinear._forward_impl` in the supported releases.
_COLUMN_ARGUMENTS = {
    "bias",
    "gradient_accumulation_fusion",
    "allreduce_dgrad",
    "sequence_parallel",
    "grad_output_buffer",
    "wgrad_deferral_limit",
    "tp_group",
    "gtp_remat_size",
    "output_dtype",
}
# TransformerEngine features that change what a layer computes or sends: field of the layer's config, reason.
_TE_FEATURES = (
    ("tp_comm_overlap", "--tp-comm-overlap: TransformerEngine overlaps communication itself"),
    ("delay_wgrad_compute", "deferred weight gradient (--delay-wgrad-compute)"),
    ("symmetric_ar_type", "TransformerEngine's all-reduce in symmetric memory (symmetric_ar_type)"),
    ("cpu_offloading", _OFFLOADED),
)
# Arguments of `TransformerLayer.forward` that can be split: the batch dimension; None where there is none.
BATCH_DIMENSION = {"attention_mask": 0, "rotary_pos_emb": None, "rotary_pos_cos": None, "rotary_pos_sin": None}
_CORES = (DotProductAttention, getattr(te_extension, "TEDotProductAttention", None))
# Both fused MLPs of TransformerEngine run as `MLP.forward` where they communicate; None where a release has none.
_MLPS = {MLP, *(getattr(te_extension, name, None) for name in ("TEFusedMLP", "TEFusedMLPWithGroupedLinear"))}
# The methods that `TransformerLayer.forward` runs in the supported releases; None where a release has none.
_LAYER_STEPS = {
    name: getattr(TransformerLayer, name, None)
    for name in (
        "_forward_attention",
        "_run_input_layernorm",
        "_apply_self_attn_bda_step",
        "_run_cross_attention",
        "_forward_mlp",
        "_forward_pre_mlp_layernorm",
        "_pre_mlp_layernorm_and_residual",
        "_run_mlp",
        "_apply_mlp_bda_step",
        "_forward_post_mlp",
    )
}
_ROW_GEMM = RowParallelLinear._forward_impl
_RECOMPUTE_FIELDS = ("recompute_input_layernorm", "recompute_pre_mlp_layernorm", "recompute_mlp")
_OFFLOAD_FIELDS = ("offload_attn_norm", "offload_mlp_norm")


def unsupported_tensors_reason(x: torch.Tensor, weight: torch.Tensor, group: dist.ProcessGroup) -> str | None:
    """The reason in the tensors, the group or the state of torch, for any layer."""
    if group.size() > MAX_RANKS:
        return f"more than {MAX_RANKS} tensor-parallel ranks"
    if hasattr(weight, "__fsdp_param__"):
        return "Megatron-FSDP shards the weight"
    if x.dtype != weight.dtype:
        return f"input is {x.dtype}, weight is {weight.dtype}"
    if torch.is_autocast_enabled(x.device.type):
        return "autocast is on"
    backend = dist.get_backend(group)
    if backend not in ("gloo", "nccl"):
        return f"process group backend {backend} has no point-to-point transport"
    return None


def is_capturing(x: torch.Tensor) -> bool:
    """Whether a CUDA graph captures a call with the input `x`."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def unsupported_column_reason(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """The reason in a `ColumnParallelLinear` or in the arguments of its `_forward_impl`."""
    if args or not kwargs.keys() <= _COLUMN_ARGUMENTS:
        unknown = sorted(kwargs.keys() - _COLUMN_ARGUMENTS)
        return f"unknown arguments: {', '.join(unknown) or 'positional'}"
    if layer.explicit_expert_comm:
        return EXPERT
    if kwargs.get("sequence_parallel") and kwargs.get("allreduce_dgrad"):
        return "sequence parallelism together with an all-reduce of dgrad"
    if kwargs.get("grad_output_buffer") is not None:
        return "deferred weight gradient of the embedding (--defer-embedding-wgrad-compute)"
    if kwargs.get("gtp_remat_size", 1) > 1:
        return _GTP
    if kwargs.get("output_dtype") is not None:
        return "--output-logit-dtype: TransformerEngine computes the GEMM"
    return None


def unsupported_row_reason(layer: Any, x: torch.Tensor) -> str | None:
    """The reason in a `RowParallelLinear`, or in the input `x` of a call."""
    if layer.explicit_expert_comm:
        return EXPERT
    if not layer.input_is_parallel:
        return "input is not parallel"
    if type(layer)._forward_impl is not _ROW_GEMM:
        return f"{type(layer).__name__} overrides the GEMM (_forward_impl)"
    if getattr(layer, "gtp_remat_size", 1) > 1:
        return _GTP
    context = layer.config._cpu_offloading_context
    if context is not None and context.inside_context is True:
        return _OFFLOADED
    if layer.sequence_parallel and x.shape[0] % layer.tp_group.size():
        return _INDIVISIBLE.format(layer.tp_group.size())
    return None


def is_te_linear(layer: Any) -> bool:
    """Whether a linear layer is one of Megatron's TransformerEngine classes."""
    return "te_return_bias" in getattr(layer, "__dict__", ())


def te_quantizes() -> bool:
    """Whether TransformerEngine quantizes here (fp8, fp4): not in the bf16 layers of `first_last_layers_bf16`."""
    if not te_extension.HAVE_TE:
        return False
    state = te_extension.FP8GlobalStateManager
    return bool(state.is_fp8_enabled() or state.is_fp8_calibration())


def te_communicates(layer: Any) -> bool:
    """Whether a TransformerEngine linear communicates. In an expert, `parallel_mode` is None."""
    return not (layer.tp_size == 1 or layer.parallel_mode is None or layer.tp_group is None)


def unsupported_te_reason(layer: Any, x: torch.Tensor | None = None) -> str | None:
    """The reason in a TransformerEngine linear, in its configuration, or in the input `x` of a call."""
    if x is not None and layer.parallel_mode == "row" and layer.sequence_parallel and x.shape[0] % layer.tp_size:
        return _INDIVISIBLE.format(layer.tp_size)
    if te_quantizes():
        return "fp8: TransformerEngine quantizes its messages"
    for field, reason in _TE_FEATURES:
        if getattr(layer.config, field, None):
            return reason
    if getattr(layer, "te_quant_params", None) is not None:
        return "a quantization recipe names this layer"
    if layer.weight_names != ["weight"]:
        return "the weight is split into several parameters"
    if type(layer.weight) is not torch.nn.Parameter:
        return f"the weight is a {type(layer.weight).__name__}"
    if getattr(layer.weight, "gtp_remat_size", 1) > 1:
        return _GTP
    if getattr(layer.weight, "overwrite_main_grad", False):
        return "the weight gradient overwrites main_grad"
    if layer.fsdp_group is not None:
        return "TransformerEngine shards the weight (FSDP)"
    return None


def unsupported_attention_reason(layer: Any) -> str | None:
    """The reason in an attention layer that keeps `overlap.tensor.attention: query_split` from it."""
    core, projection = layer.core_attention, layer.linear_proj
    if layer.attention_type != "self":
        return f"{layer.attention_type} attention"
    if type(core) not in _CORES:
        return f"core attention is {type(core).__name__}, which query split does not know"
    if layer.config.context_parallel_size > 1:
        return "context parallelism: a rank does not have all keys"
    if getattr(core, "return_max_logit", False):
        return _READS_SCORES
    if not is_te_linear(projection) and not isinstance(projection, RowParallelLinear):
        return f"output projection is {type(projection).__name__}, which query split does not know"
    if not projection.sequence_parallel:
        return "query split needs --sequence-parallel"
    if "forward" in vars(core) or "forward" in vars(projection):
        return "the forward of the core attention or of the output projection is replaced"
    if is_hooked(core):
        return "a hook reads the output of the core attention, or a gradient"
    if is_hooked(projection) or is_pre_hooked(projection):
        return "a hook reads the input or the output of the output projection"
    if layer.checkpoint_core_attention and layer.training:
        return "query split does not support recomputation of core attention (--recompute-granularity selective)"
    if layer.config.attention_output_gate:
        return "the attention output is gated"
    if layer.config.fine_grained_activation_offloading:
        return _OFFLOADED
    return None


def unsupported_core_attention_reason(
    core: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, kwargs: dict[str, Any]
) -> str | None:
    """The reason in the arguments of one call of the core attention that keeps query split from it."""
    unknown = sorted(name for name, argument in kwargs.items() if name != "attn_mask_type" and argument is not None)
    if unknown:
        return f"core attention is called with {', '.join(unknown)}"
    is_local = isinstance(core, DotProductAttention)
    mask = core.attn_mask_type if is_local else kwargs["attn_mask_type"]
    if mask is not AttnMaskType.causal:
        return f"the attention mask is {mask.name}, not causal"
    if attention_mask is not None:
        return "an attention mask is given: add --no-create-attention-mask-in-dataloader if it is only causal"
    if core.training and (core.attention_dropout.p if is_local else core.attention_dropout) > 0:
        return "attention dropout: add --attention-dropout 0"
    if reason := _core_feature(core):
        return reason
    if query.shape[0] != key.shape[0]:
        return "keys come from a cache"
    if query.shape[3] != value.shape[3]:
        return "values and keys have different head sizes"
    if query.is_cuda and (query.dtype == torch.float32 or query.shape[3] % 8 or query.shape[3] > 256):
        return "flash attention on CUDA needs bf16 or fp16, and a head size that is a multiple of 8 and at most 256"
    return None


def _core_feature(core: Any) -> str | None:
    is_local = isinstance(core, DotProductAttention)
    if core.softmax_offset is not None if is_local else core.softmax_type != "vanilla":
        return "the softmax has an offset"
    # TransformerEngine has (-1, 0) for no window.
    if core.scale_mask_softmax.window_size is not None if is_local else core.window_size[0] >= 0:
        return "sliding-window attention"
    return None


def _unsupported_sequence_reason(layer: Any, arguments: dict[str, Any]) -> str | None:
    """The reason that a transformer layer does not run on two parts of the sequence."""
    config, attention = layer.config, layer.self_attention
    core, rows = attention.core_attention, arguments["hidden_states"].shape[0]
    if not config.sequence_parallel:
        return "a split sequence needs --sequence-parallel"
    if config.context_parallel_size > 1:
        return "a split sequence does not support context parallelism"
    if rows < 2:
        return "a sequence of one row per rank does not split into two parts"
    if type(core) not in _CORES:
        return f"core attention is {type(core).__name__}, which a split sequence does not support"
    if "forward" in vars(core) or is_hooked(core) or is_pre_hooked(core):
        return "a hook reads the input or the output of the core attention"
    if attention.attn_mask_type is not AttnMaskType.causal:
        return f"the attention mask is {attention.attn_mask_type.name}, not causal"
    if getattr(core, "return_max_logit", False):
        return _READS_SCORES
    if arguments.get("rotary_pos_cos") is not None or arguments.get("rotary_pos_sin") is not None:
        return "rotary_pos_cos and rotary_pos_sin are given"
    return _core_feature(core)


def _overridden_step(layer: Any) -> str | None:
    """A method of `_LAYER_STEPS` that the class of a layer overrides; None if it overrides none."""
    kind = type(layer)
    return next((name for name, step in _LAYER_STEPS.items() if getattr(kind, name, None) is not step), None)


def reads_only_sum(layer: Any) -> bool:
    """Whether a transformer layer adds the output of its MLP to the residual, and reads it nowhere else."""
    standard = _overridden_step(layer) is None
    standard &= type(layer.mlp) in _MLPS and layer.mlp_bda is get_bias_dropout_add
    if not standard or any(map(is_hooked, (layer, layer.mlp, layer.mlp.linear_fc2))):
        return False
    fused = getattr(layer.config, "fused_residual_rmsnorm", False)
    return not fused and getattr(layer.config, "mlp_chunks_for_training", 1) == 1


def linears_of(layer: Any) -> tuple[Any, Any, Any, Any]:
    """The linear layers of a transformer layer with QKV in one of them, column- and row-parallel in turn."""
    attention, mlp = layer.self_attention, layer.mlp
    return attention.linear_qkv, attention.linear_proj, mlp.linear_fc1, mlp.linear_fc2


def repeats_weights(layer: Any) -> bool:
    """Whether a forward pass may use the weights of a layer several times: their gradients cannot be postponed."""
    return getattr(layer.config, "mtp_use_repeated_layer", False) is True


def unsupported_gradient_reason(module: torch.nn.Module, x: torch.Tensor) -> str | None:
    """The reason in the input `x` that the layers of `module` run whole: the graph of two parts begins at the input."""
    if x.requires_grad or not torch.is_grad_enabled() or not any(each.requires_grad for each in module.parameters()):
        return None
    return "the input requires no gradient, but a weight does"


def unsupported_layer_reason(layer: Any, arguments: dict[str, Any], split: str) -> str | None:
    """The reason in a transformer layer or its arguments that it does not run in two parts of `split`."""
    config = layer.config
    known = {"hidden_states", *BATCH_DIMENSION}
    unknown = [name for name, value in arguments.items() if value is not None and name not in known]
    if unknown:
        return f"unknown arguments: {', '.join(unknown)}"
    if overridden := _overridden_step(layer):
        return f"{type(layer).__name__} overrides {overridden}"
    if reason := recomputed_by_torch():
        return reason
    attention, mlp = layer.self_attention, layer.mlp
    if any("forward" in vars(module) for module in (layer, attention, mlp)):
        return "the forward of the layer, its attention or its MLP is replaced"
    if type(mlp) not in _MLPS or not isinstance(attention, SelfAttention):
        return "the MLP is not an MLP or the attention is not a SelfAttention of Megatron"
    if not isinstance(layer.cross_attention, IdentityOp):
        return "cross-attention"
    for linear in (getattr(attention, "linear_qkv", None), attention.linear_proj, mlp.linear_fc1, mlp.linear_fc2):
        if is_te_linear(linear) and (reason := unsupported_te_reason(linear)):
            return reason
        if linear is not None and (is_hooked(linear) or is_pre_hooked(linear)):
            return "a hook reads the input or the output of a linear layer"
    if any(is_hooked(module) or is_pre_hooked(module) for module in (attention, mlp)):
        return "a hook reads the input or the output of the attention or the MLP"
    for row in (attention.linear_proj, mlp.linear_fc2):
        if not is_te_linear(row) and not isinstance(row, RowParallelLinear):
            return f"a row-parallel layer is a {type(row).__name__}, which batch overlap does not know"
        if not (not row.use_bias or row.te_return_bias if is_te_linear(row) else row.skip_bias_add):
            return "a row-parallel layer adds its bias itself"
    if repeats_weights(layer):
        return "--mtp-use-repeated-layer: a weight has several gradients in a pass"
    angles = arguments.get("rotary_pos_emb")  # `[S, 1 or B, 1, D]`, or those of queries and those of keys
    if any(each is not None and each.shape[1] > 1 for each in (angles if isinstance(angles, tuple) else (angles,))):
        return "each sequence has rotary angles of its own"
    if getattr(config, "fused_residual_rmsnorm", False) or getattr(config, "inference_fuse_tp_communication", False):
        return "the kernel of another layer adds the residual"
    if getattr(config, "mlp_chunks_for_training", 1) > 1:
        return "--mlp-chunks-for-training"
    if any(getattr(layer, name, False) for name in _RECOMPUTE_FIELDS):
        return "activation recomputation of a norm or the MLP (--recompute-modules)"
    if config.recompute_granularity == "full" and (config.fp8 or config.fp4):
        return "TransformerEngine recomputes the activations (fp8)"
    if config.cpu_offloading or any(getattr(layer, name, False) for name in _OFFLOAD_FIELDS):
        return _OFFLOADED
    if layer.training and (layer.hidden_dropout > 0.0 or config.attention_dropout > 0.0):
        return "dropout: the parts of a split batch would draw other masks"
    if config.fp32_residual_connection:
        return "--fp32-residual-connection"
    if split == "sequence":
        return _unsupported_sequence_reason(layer, arguments)
    size = arguments["hidden_states"].shape[1]
    if size < 2 or size % 2:
        return f"a micro-batch of {size} does not split into two equal parts"
    return None
