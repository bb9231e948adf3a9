"""Context parallelism for Megatron's local attention: Ulysses with overlapped all-to-alls.

Stock `DotProductAttention` refuses context parallelism. The rest of Megatron supports it: it splits batches, positions
and rotary embeddings in zigzag order, and reduces losses and gradients over the context ranks.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.utils import is_layer_window_attention

from megatron_overlap.adapters.diagnostics.consistency import open_transport
from megatron_overlap.adapters.wrapping import Method, untraced
from megatron_overlap.comm import Transport
from megatron_overlap.ops import UlyssesPlan, ulysses_attention
from megatron_overlap.schedules import SequenceLayout
from megatron_overlap.schedules.gather_scatter import MAX_RANKS
from megatron_overlap.session import Adapter, Session


class UlyssesError(ValueError):
    """Ulysses does not support an option of an attention layer; names the flag, its value and the remedy."""


class UlyssesAdapter(Adapter):
    """Plan, transports and counters that the patched attention layers of one session share."""

    def __init__(self, session: Session) -> None:
        self.session = session
        wanted = session.config.ulysses
        self.plan = UlyssesPlan(
            num_groups=None if wanted.head_groups == "auto" else wanted.head_groups,
            pattern="serial" if wanted.schedule == "serial" else "direct",
        )

    @classmethod
    def of(cls, session: Session) -> UlyssesAdapter:
        """The adapter of `session`; made by the first call."""
        return session.adapter(cls)

    def transport(self, group: dist.ProcessGroup) -> Transport:
        """The transport of a context-parallel group; closed with the session."""
        return open_transport(self.session, group)

    def observer(self, op: str, heads: str) -> Callable[[Any, int], None]:
        """An observer that counts the passes of an operation in the report."""

        def observe(direction: Any, num_bytes: int) -> None:
            self.session.counters.overlapped("attention", heads, op, direction, num_bytes)

        return observe


def attention_init(original: Method, session: Session) -> Method:
    """Replacement of `DotProductAttention.__init__`: it accepts context parallelism.

    Raises:
        UlyssesError: the layer has an option that Ulysses does not support.
    """
    UlyssesAdapter.of(session)

    @functools.wraps(original)
    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        if config.context_parallel_size == 1:
            original(self, config, *args, **kwargs)
            return
        # Stock reads the size only to refuse it.
        alone = copy.copy(config)
        alone.context_parallel_size = 1
        original(self, alone, *args, **kwargs)
        self.config = config
        _refuse(self, config)

    return __init__


def attention_forward(original: Method, session: Session) -> Method:
    """Replacement of `DotProductAttention.forward`.

    It equals the original on the whole sequence and the tensor-parallel heads of the rank. Every context rank gets its
    own rows of the result.
    """
    adapter = UlyssesAdapter.of(session)

    @untraced
    @functools.wraps(original)
    def forward(
        self: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Any:
        if self.config.context_parallel_size == 1:
            return original(self, query, key, value, attention_mask, attn_mask_type, attention_bias, packed_seq_params)
        group = context_group(self)
        _refuse_call(query, key, attn_mask_type or self.attn_mask_type, attention_bias, packed_seq_params)
        rows, _, heads, size = query.shape
        context = ulysses_attention(
            query,
            key,
            value,
            group=adapter.transport(group),
            causal=True,
            softmax_scale=scale_of(self),
            layout=SequenceLayout.zigzag(rows * group.size(), group.size()),
            plan=adapter.plan,
            observer=adapter.observer("ulysses", f"{heads}x{size}"),
        )
        return context.flatten(2)

    return forward


def context_group(layer: Any) -> dist.ProcessGroup:
    """The context-parallel ranks of an attention layer."""
    group = getattr(layer.pg_collection, "cp", None)
    return parallel_state.get_context_parallel_group() if group is None else group


def scale_of(core: Any) -> float:
    """The factor of the scores. Layer scaling divides before the softmax and multiplies inside it: it cancels out."""
    scale: float = core.softmax_scale
    return scale * core.layer_number if core.config.apply_query_key_layer_scaling else scale


def _refuse(layer: Any, config: Any) -> None:
    """Refuses options of a layer that Ulysses does not support, when the model is built."""
    group = context_group(layer)
    heads, kv_heads = layer.num_attention_heads_per_partition, layer.num_query_groups_per_partition
    problems = (
        (group.size() > MAX_RANKS, f"--context-parallel-size {group.size()}: use at most {MAX_RANKS}"),
        (
            heads % group.size() != 0,
            f"--num-attention-heads {config.num_attention_heads}: must be a multiple of tensor x context parallel size "
            f"= {layer.tp_group.size()} x {group.size()}",
        ),
        (
            heads % kv_heads != 0,
            f"--num-query-groups {config.num_query_groups}: must divide --num-attention-heads",
        ),
        (
            layer.attention_dropout.p > 0,
            f"--attention-dropout {layer.attention_dropout.p}: use 0 with context parallelism",
        ),
        (
            layer.attn_mask_type is not AttnMaskType.causal,
            f"attention mask {layer.attn_mask_type.name}: use causal self-attention with context parallelism",
        ),
        (
            layer.attention_type != "self",
            f"{layer.attention_type}-attention: use self-attention with context parallelism",
        ),
        (
            is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer.layer_number),
            f"--window-size {config.window_size}: not with context parallelism; leave it out",
        ),
        (
            getattr(config, "softmax_type", "vanilla") != "vanilla",
            f"--softmax-type {getattr(config, 'softmax_type', '')}: use vanilla with context parallelism",
        ),
        (_separates_documents(), "--reset-attention-mask: not with context parallelism; leave it out"),
        (
            dist.get_backend(group) not in ("gloo", "nccl"),
            f"--distributed-backend {dist.get_backend(group)}: use gloo or nccl",
        ),
    )
    for wrong, text in problems:
        if wrong:
            raise UlyssesError(f"overlap.ulysses: {text}")


def _separates_documents() -> bool:
    """Whether the arguments of Megatron's training separate the documents by a mask; False outside its training."""
    try:
        from megatron.training import global_vars
    except ImportError:
        return False
    return bool(getattr(global_vars._GLOBAL_ARGS, "reset_attention_mask", False))


def _refuse_call(
    query: torch.Tensor,
    key: torch.Tensor,
    attn_mask_type: AttnMaskType,
    attention_bias: torch.Tensor | None,
    packed_seq_params: Any,
) -> None:
    problems = (
        (packed_seq_params is not None, "packed sequences: not with context parallelism; train unpacked"),
        (attention_bias is not None, "attention bias: not with context parallelism"),
        (
            attn_mask_type is not AttnMaskType.causal,
            f"attention mask {attn_mask_type}: use causal with context parallelism",
        ),
        (query.shape[0] != key.shape[0], "key/value cache: generate without context parallelism"),
    )
    for wrong, text in problems:
        if wrong:
            raise UlyssesError(f"overlap.ulysses: {text}")
