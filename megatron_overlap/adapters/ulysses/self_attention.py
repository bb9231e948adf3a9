"""Megatron's whole self-attention layer under Ulysses: projections of one head group hide the messages of others.

A supported layer gets an instance attribute `forward` when it is built. Other layers run the stock forward, whose core
attention is also Ulysses (`adapters/ulysses/core_attention.py`) and hides its messages behind attention alone.
"""

import functools
import inspect
import weakref
from typing import Any

import torch
from megatron.core.extensions import transformer_engine as te_extension
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import _yarn_get_concentration_factor_from_config
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp

from megatron_overlap.adapters.diagnostics.consistency import open_device_transport
from megatron_overlap.adapters.tensor_parallel.call import projection_of
from megatron_overlap.adapters.tensor_parallel.eligibility import is_te_linear, unsupported_te_reason
from megatron_overlap.adapters.tensor_parallel.linear import norm_of
from megatron_overlap.adapters.ulysses import core_attention
from megatron_overlap.adapters.ulysses.core_attention import UlyssesAdapter
from megatron_overlap.adapters.wrapping import Method, is_hooked, is_pre_hooked, run_pre_hooks, untraced
from megatron_overlap.ops import ulysses_self_attention
from megatron_overlap.schedules import SequenceLayout
from megatron_overlap.session import Session


def self_attention_init(original: Method, session: Session) -> Method:
    """Replacement of `SelfAttention.__init__`: it gives supported layers the fused forward."""
    adapter = session.adapter(UlyssesAdapter)
    layers: weakref.WeakSet[Any] = weakref.WeakSet()

    def restore() -> None:
        for layer in layers:
            layer.__dict__.pop("forward", None)
        layers.clear()

    session.add_close(restore)

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if session.config.ulysses.fuse_projections and _is_supported(self):
            # On the instance, because other layers of the class may be unsupported. The weak reference avoids a cycle.
            self.forward = functools.partial(_forward, adapter, weakref.ref(self))
            layers.add(self)

    return init


def _is_supported(layer: Any) -> bool:
    config = layer.config
    if config.context_parallel_size == 1 or layer.pg_collection.tp.size() > 1:
        return False
    kv_heads, left = divmod(layer.num_query_groups_per_partition, config.context_parallel_size)
    # With one key/value head per rank, `ulysses_attention` has more head groups, because it also cuts the queries.
    if left or (kv_heads == 1 and layer.num_attention_heads_per_partition > layer.num_query_groups_per_partition):
        return False
    norms = layer.q_layernorm, layer.k_layernorm
    plain = (_is_local(layer) or _is_te(layer)) and all(isinstance(norm, IdentityOp | None) for norm in norms)
    switches = ("attention_output_gate", "fine_grained_activation_offloading", "cpu_offloading", "test_mode", "fp8")
    return (
        plain
        and not layer.checkpoint_core_attention
        and not any(getattr(config, name, False) for name in switches)
        and getattr(layer.linear_qkv, "gtp_remat_size", 1) == getattr(layer.linear_proj, "gtp_remat_size", 1) == 1
        and _yarn_get_concentration_factor_from_config(config) == 1.0
    )


def _is_local(layer: Any) -> bool:
    modules = layer.linear_qkv, layer.linear_proj, layer.core_attention
    return tuple(map(type, modules)) == (ColumnParallelLinear, RowParallelLinear, DotProductAttention)


def _is_te(layer: Any) -> bool:
    return (
        type(layer.linear_qkv) in (te_extension.TELayerNormColumnParallelLinear, te_extension.TEColumnParallelLinear)
        and type(layer.linear_proj) is te_extension.TERowParallelLinear
        and type(layer.core_attention) is te_extension.TEDotProductAttention
        and layer.attn_mask_type is AttnMaskType.causal
        and core_attention.unsupported_te_core_reason(layer.core_attention) is None
    )


@untraced
def _forward(
    adapter: UlyssesAdapter, reference: weakref.ref[Any], hidden_states: torch.Tensor, *args: Any, **kwargs: Any
) -> Any:
    """`forward` of one layer: equals the stock forward on the whole sequence; every context rank gets its rows."""
    layer: Any = reference()
    cls = type(layer)
    # Bind the arguments to find those that are passed by position.
    call = inspect.signature(cls.forward).bind(layer, hidden_states, *args, **kwargs)
    given = {name for name, value in call.arguments.items() if value is not None}
    known = {"self", "hidden_states", "attention_mask", "rotary_pos_emb"}
    freqs = call.arguments.get("rotary_pos_emb")
    modules = (layer.linear_qkv, layer.linear_proj)
    if (
        given - known
        # Since the layer was built, adapters such as LoRA may have replaced a module or its forward.
        or not (_is_local(layer) or _is_te(layer))
        or any("forward" in vars(module) for module in (*modules, layer.core_attention))
        or (isinstance(freqs, tuple) and (len(freqs) != 2 or freqs[0] is not freqs[1]))
        or hidden_states.dtype != layer.linear_qkv.weight.dtype
        or torch.is_autocast_enabled(hidden_states.device.type)
        or any(is_hooked(module) or is_pre_hooked(module) for module in (*modules, layer.core_attention))
        or any(hasattr(module.weight, "__fsdp_param__") for module in modules)
        or any(is_te_linear(module) and unsupported_te_reason(module) for module in modules)
    ):
        return cls.forward(layer, hidden_states, *args, **kwargs)
    for module in modules:
        run_pre_hooks(module, hidden_states, "set overlap.ulysses.fuse_projections to false")
    config = layer.config
    if config.no_rope_freq and config.no_rope_freq[layer.layer_number - 1]:
        freqs = None
    freqs = freqs[0] if isinstance(freqs, tuple) else freqs
    group = core_attention.context_group(layer)

    def rotate(heads: torch.Tensor) -> torch.Tensor:
        return apply_rotary_pos_emb(heads, freqs, config=config, cp_group=group)

    core, (qkv, out) = layer.core_attention, modules
    kernel = None
    if is_te_linear(qkv):
        kernel = functools.partial(core_attention.te_kernel, core)
        if "layer_norm_weight" in qkv._parameters:
            hidden_states = norm_of(qkv)(hidden_states)
        qkv.is_first_microbatch = out.is_first_microbatch = False  # As Megatron's wrappers do after every forward.
    heads = f"{layer.num_attention_heads_per_partition}x{layer.hidden_size_per_attention_head}"
    output = ulysses_self_attention(
        hidden_states,
        projection_of(qkv, qkv.weight),
        _bias(qkv),
        projection_of(out, out.weight),
        num_heads=layer.num_attention_heads_per_partition,
        num_kv_heads=layer.num_query_groups_per_partition,
        group=open_device_transport(adapter.session, group),
        rotate=None if freqs is None else rotate,
        softmax_scale=core_attention.scale_of(core) if kernel is None else None,
        layout=SequenceLayout.zigzag(hidden_states.shape[0] * group.size(), group.size()),
        plan=adapter.plan,
        observer=functools.partial(adapter.session.counters.overlapped, "attention", heads, "ulysses_layer"),
        kernel=kernel,
    )
    return output, _bias(out)


def _bias(linear: Any) -> torch.Tensor | None:
    """The bias; TransformerEngine has an empty tensor in place of none."""
    bias: torch.Tensor | None = linear.bias
    return None if is_te_linear(linear) and not linear.use_bias else bias
