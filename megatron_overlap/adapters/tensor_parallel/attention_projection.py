"""Megatron's self attention by query slice: its core attention and its output projection run as one op.

`Attention.forward` calls them one after the other with nothing in between, in every release read. For the length of
that call the two modules of this layer get a `forward` of their own: the core attention's keeps q, k and v and hands
on a stand-in, the projection's takes them up. Both stay modules, so that hooks on them run. Where something does not
fit, the core attention's own forward runs, and so does the projection's after it.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import RowParallelLinear
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType

from megatron_overlap.adapters.tensor_parallel.linear import LinearAdapter, unsupported_row_reason
from megatron_overlap.adapters.wrapping import Method, own_forward, untraced
from megatron_overlap.ops import attention_linear_reduce_scatter
from megatron_overlap.session import Session

_KIND, _OP = "attention", "query_split"


def attention_forward(original: Method, session: Session) -> Method:
    """Replacement of `Attention.forward`.

    Equals the original: `linear_proj(core_attention(query, key, value))` after the same query, key and value.
    """
    adapter = LinearAdapter.of(session)

    @untraced
    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        group = self.pg_collection.tp
        if group is None or group.size() == 1:
            return original(self, *args, **kwargs)
        reason = _unsupported_layer_reason(self)
        if reason is not None:
            adapter.fall_back(_KIND, _OP, self.linear_proj.weight, reason)
            return original(self, *args, **kwargs)
        joint = _Joint(self.core_attention, self.linear_proj, adapter)
        with own_forward(self.core_attention, joint.core), own_forward(self.linear_proj, joint.projection):
            return original(self, *args, **kwargs)

    return forward


class _Joint:
    """One call of one layer: what the core attention leaves for the projection."""

    def __init__(self, core: Any, projection: Any, adapter: LinearAdapter) -> None:
        self._core, self._projection, self._adapter = core, projection, adapter
        self._core_forward, self._projection_forward = core.forward, projection.forward
        self._waiting: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
        self._stand_in: torch.Tensor | None = None

    def core(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **kwargs: Any
    ) -> torch.Tensor:
        """In place of the core attention's forward."""
        projection = self._projection
        reason = _unsupported_call_reason(
            self._core, projection, query, key, value, attention_mask, kwargs
        ) or self._adapter.unsupported_reason(query, projection.weight, projection.tp_group, _OP)
        if reason is not None:
            self._adapter.fall_back(_KIND, _OP, self._projection.weight, reason)
            return self._core_forward(query, key, value, attention_mask, **kwargs)
        self._waiting = query, key, value
        # The shape of the result, no memory, and NaN for whoever computes with it.
        width = query.shape[2] * query.shape[3]
        self._stand_in = query.new_full((), float("nan")).expand(query.shape[0], query.shape[1], width)
        return self._stand_in

    def projection(self, input_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """In place of the projection's forward."""
        if self._waiting is None:
            return self._projection_forward(input_)
        if input_ is not self._stand_in:
            raise RuntimeError(
                "something stands between core attention and output projection that megatron_overlap does not know: "
                "set overlap.tensor.attention to row"
            )
        layer, core = self._projection, self._core
        options = self._adapter.options(_KIND, _OP, layer.weight, layer.gradient_accumulation_fusion)
        output = attention_linear_reduce_scatter(
            *self._waiting,
            layer.weight,
            group=self._adapter.transport(layer.tp_group),
            # Under query-key layer scaling the first factor was divided by the second.
            softmax_scale=core.softmax_scale * (core.scale_mask_softmax.scale or 1),
            **options,
        )
        if layer.skip_bias_add:
            return output, layer.bias
        return (output if layer.bias is None else output + layer.bias), None


def _unsupported_layer_reason(layer: Any) -> str | None:
    core, projection = layer.core_attention, layer.linear_proj
    if layer.attention_type != "self":
        return f"{layer.attention_type} attention"
    if type(core) is not DotProductAttention:
        return f"the core attention is {type(core).__name__}, not Megatron's local one"
    if not isinstance(projection, RowParallelLinear):
        return f"the output projection is {type(projection).__name__}, not Megatron's local one"
    if not projection.sequence_parallel:
        return "query split needs --sequence-parallel"
    if "forward" in vars(core) or "forward" in vars(projection):
        return "somebody replaced the forward of this layer's core attention or projection"
    if core._forward_hooks:
        return "a forward hook reads the core attention's result"
    if layer.checkpoint_core_attention and layer.training:
        return "the core attention is recomputed (--recompute-granularity selective), which is of no use here"
    if layer.config.attention_output_gate:
        return "the attention's output is gated"
    if layer.config.fine_grained_activation_offloading:
        return "activations are offloaded to the CPU"
    return None


def _unsupported_call_reason(
    core: Any,
    projection: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    kwargs: dict[str, Any],
) -> str | None:
    given = sorted(name for name, argument in kwargs.items() if name != "attn_mask_type" and argument is not None)
    if given:
        return f"core attention is called with {', '.join(given)}"
    if core.attn_mask_type is not AttnMaskType.causal:
        return f"the attention mask is {core.attn_mask_type.name}, not causal"
    if attention_mask is not None:
        return "an attention mask is given: add --no-create-attention-mask-in-dataloader if it is only causal"
    if core.training and core.attention_dropout.p > 0:
        return "attention dropout: add --attention-dropout 0"
    if core.softmax_offset is not None:
        return "the softmax has an offset"
    if core.scale_mask_softmax.window_size is not None:
        return "sliding-window attention"
    if query.shape[0] != key.shape[0]:
        return "keys of a cache"
    if query.shape[3] != value.shape[3]:
        return "values are not as wide as keys"
    if query.is_cuda and (query.dtype == torch.float32 or query.shape[3] % 8 or query.shape[3] > 256):
        return "flash attention on CUDA needs bf16 or fp16, and a head size that 8 divides, at most 256"
    return unsupported_row_reason(projection, query, projection.tp_group, RowParallelLinear._forward_impl)
