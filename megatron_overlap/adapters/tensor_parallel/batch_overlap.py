"""A Megatron transformer layer without sequence parallelism, in two halves of its micro-batch.

`TransformerLayer.forward` goes through norm, attention, sum, add, norm, MLP, sum, add. Here both halves do, each by
the layer's own modules, one while the other's sum is on its way; for the length of a half's attention or MLP the linear
layers in it are told so (`LinearAdapter.half`). See `ops/tensor_parallel/batch_overlap.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP
from megatron.core.utils import make_viewless_tensor

from megatron_overlap.adapters.tensor_parallel.layer_handoff import PendingOutput
from megatron_overlap.adapters.tensor_parallel.linear import LinearAdapter
from megatron_overlap.adapters.wrapping import Method, untraced
from megatron_overlap.comm import BufferPool
from megatron_overlap.ops.tensor_parallel.batch_overlap import (
    Reduction,
    Slots,
    arrived,
    can_be_ordered,
    column_half,
    entered,
    row_half,
)
from megatron_overlap.ops.wgrad import DeferredWgrad, WgradTarget
from megatron_overlap.session import Session

# What a layer is given of a batch, by where the batch is; None: it has none.
_BATCH_AT = {"attention_mask": 0, "rotary_pos_emb": None, "rotary_pos_cos": None, "rotary_pos_sin": None}
# Parts of a layer that it may have and that are not done here.
_RECOMPUTED = ("recompute_input_layernorm", "recompute_pre_mlp_layernorm", "recompute_mlp")
_OFFLOADED = ("offload_attn_norm", "offload_mlp_norm")


def block_forward(original: Method, session: Session) -> Method:
    """Replacement of `TransformerBlock.forward`. Equals the original, which runs: it tells its layers who follows."""
    layer_handoff = LinearAdapter.of(session).layer_handoff

    @untraced
    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        # More than input and mask by position: what they are is not looked at.
        alone = len(args) > 2 or self.config.cpu_offloading or kwargs.get("extract_layer_indices")
        with layer_handoff.block(() if alone else self.layers):
            return original(self, *args, **kwargs)

    return forward


def layer_forward(original: Method, session: Session) -> Method:
    """Replacement of `TransformerLayer.forward`.

    Equals the original: every row of a micro-batch goes through a layer without the others.
    """
    adapter = LinearAdapter.of(session)
    layer_handoff = adapter.layer_handoff

    @untraced
    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        names = ("hidden_states", "attention_mask")
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        x = given["hidden_states"]
        carried = layer_handoff.take(x)
        if carried is None:
            reason = "positional arguments" if len(args) > len(names) else _unsupported_reason(self, given, adapter)
            if reason is not None:
                if reason:
                    session.counters.fallback("layer", "transformer layer", "batch_overlap", "forward", reason)
                return original(self, *args, **kwargs)
            carried = PendingOutput(x, [half.contiguous for half in x.chunk(2, dim=1)], Slots.reserve())
        result = _Layer(self, adapter).forward(carried, given)
        follower = layer_handoff.after(self)
        if follower is not None and _unsupported_reason(follower, given, adapter) is None:
            return layer_handoff.hand_on(result), None
        whole = torch.cat([half() for half in result.halves], dim=1)
        return make_viewless_tensor(inp=whole, requires_grad=whole.requires_grad, keep_graph=True), None

    return forward


def _unsupported_reason(layer: Any, given: dict[str, Any], adapter: LinearAdapter) -> str | None:
    """Why a call is not cut in halves: a reason, the empty word where nothing would be gained, None if it is."""
    x, config = given["hidden_states"], layer.config
    if config.tensor_model_parallel_size == 1 or adapter.check.due:
        return ""
    if config.sequence_parallel:
        return "sequence parallelism: all-gathers and reduce-scatters are hidden by themselves"
    if adapter.autotuner.enabled or adapter.fused.wanted:
        return "method auto or fused: each layer is served whole"
    if not can_be_ordered():
        return f"torch {torch.__version__} does not let a node say when it runs"
    if x.shape[1] < 2 or x.shape[1] % 2:
        return f"a micro-batch of {x.shape[1]} has no two equal halves"
    others = [name for name, value in given.items() if value is not None and name not in {"hidden_states", *_BATCH_AT}]
    if others:
        return f"arguments that are not known here: {', '.join(others)}"
    if type(layer.mlp) is not MLP or not isinstance(layer.self_attention, SelfAttention):
        return "its MLP or its attention is of another kind"
    if not isinstance(layer.cross_attention, IdentityOp):
        return "cross-attention"
    if not layer.self_attention.linear_proj.skip_bias_add or not layer.mlp.linear_fc2.skip_bias_add:
        return "a row-parallel layer adds its bias itself"
    if getattr(config, "fused_residual_rmsnorm", False) or getattr(config, "inference_fuse_tp_communication", False):
        return "the residual is added in another layer's kernel"
    if getattr(config, "mlp_chunks_for_training", 1) > 1:
        return "--mlp-chunks-for-training"
    if config.recompute_granularity is not None or any(getattr(layer, name, False) for name in _RECOMPUTED):
        return "activation recomputation"
    if config.cpu_offloading or any(getattr(layer, name, False) for name in _OFFLOADED):
        return "activations are offloaded to the CPU"
    if layer.training and (layer.hidden_dropout > 0.0 or config.attention_dropout > 0.0):
        return "dropout: halves would draw other masks"
    if config.fp32_residual_connection or config.fp8 or getattr(config, "fp4", None):
        return "--fp32-residual-connection, fp8 or fp4"
    return None


@dataclass(frozen=True)
class Half:
    """One half of a micro-batch in a layer's attention, or in its MLP.

    Attributes:
        forward: sums the row-parallel layer's output.
        backward: sums the column-parallel layer's input gradient.
        gradients: where weight gradients are put.
        before: called in backward before that sum is waited for.
        slot: when that wait comes.
    """

    forward: Reduction
    backward: Reduction
    gradients: DeferredWgrad
    before: Callable[[], object] | None
    slot: int | None

    def linear(
        self,
        op: str,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: Any,
        options: dict[str, Any],
        buffer_pool: BufferPool,
    ) -> torch.Tensor:
        """What a linear layer does in here: the sum it needs is begun, and waited for elsewhere."""
        into = WgradTarget(options.get("main_grad"), options.get("weight_done"), buffer_pool)
        if op == "gemm_ar":
            return row_half(x, weight, self.forward, self.gradients, into, options["observer"])
        x = entered(x, self.backward, self.before, self.slot)
        return column_half(x, weight, bias, self.backward, self.gradients, into, options["observer"])


class _Layer:
    """One layer's call."""

    def __init__(self, layer: Any, adapter: LinearAdapter) -> None:
        self._layer, self._adapter = layer, adapter
        self._gradients = DeferredWgrad()
        self._group = layer.self_attention.linear_proj.tp_group

    def forward(self, carried: PendingOutput, given: dict[str, Any]) -> PendingOutput:
        layer = self._layer
        # Backward goes the other way: b's MLP, a's MLP, b's attention, a's attention, b's MLP of the layer before. A
        # half's sum is waited for after the next of these. The first has the other half's MLP beside it and no
        # attention; weight gradients are computed there, and what is left of them at the last.
        slots = [carried.slot]
        on_way: list[tuple[Any, Reduction, torch.Tensor]] = []
        for number, ready in enumerate(carried.halves):
            x = ready()
            before = functools.partial(self._gradients.run, None) if number == 0 else None
            with self._half(before, slots[-1]) as half:
                normed = layer.input_layernorm(x)
                slots.append(Slots.reserve())
                output = layer.self_attention(normed, **_half_of(given, number))
            on_way.append((output, half.forward, x))
        results: list[Callable[[], torch.Tensor]] = []
        for number, each in enumerate(on_way):
            x = self._added(layer.self_attn_bda, *each)
            before = functools.partial(self._gradients.run, 1) if number == 1 else None
            with self._half(before, slots[-1]) as half:
                normed = layer.pre_mlp_layernorm(x)
                slots.append(Slots.reserve())
                output = layer.mlp(normed)
            results.append(functools.partial(self._added, layer.mlp_bda, output, half.forward, x))
        return PendingOutput(given["hidden_states"], results, slots[-1])

    @contextmanager
    def _half(self, before: Any, slot: int | None) -> Iterator[Half]:
        forward, backward = (Reduction(self._group, serial=self._adapter.serial) for _ in range(2))
        half = Half(forward, backward, self._gradients, before, slot)
        self._adapter.half = half
        try:
            yield half
        finally:
            self._adapter.half = None

    def _added(self, add: Any, output: tuple[Any, Any], reduction: Reduction, residual: torch.Tensor) -> torch.Tensor:
        layer = self._layer
        summed = arrived(output[0], reduction), output[1]
        with layer.bias_dropout_add_exec_handler():
            result: torch.Tensor = add(layer.training, layer.config.bias_dropout_fusion)(
                summed, residual, layer.hidden_dropout
            )
        return result


def _half_of(given: dict[str, Any], number: int) -> dict[str, Any]:
    """A half's part of what the layer was given besides the input."""
    context = {}
    for name, dim in _BATCH_AT.items():
        value = given.get(name)
        if value is not None and dim is not None and value.shape[dim] > 1:
            value = value.chunk(2, dim=dim)[number]
        context[name] = value
    return context
