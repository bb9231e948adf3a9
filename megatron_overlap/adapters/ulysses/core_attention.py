"""Context parallelism for Megatron's attention, local and TransformerEngine's: Ulysses with overlapped all-to-alls.

Stock `DotProductAttention` refuses context parallelism; `TEDotProductAttention` has its own. The rest of Megatron
splits batches, positions and rotary embeddings in zigzag order, and reduces losses and gradients over context ranks.
"""

import copy
import functools
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.utils import is_layer_window_attention

from megatron_overlap.adapters.diagnostics.consistency import open_device_transport, training_arguments
from megatron_overlap.adapters.tensor_parallel.eligibility import te_quantizes
from megatron_overlap.adapters.wrapping import Method, untraced
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
        num_groups = None if wanted.head_groups == "auto" else wanted.head_groups
        self.plan = UlyssesPlan(num_groups=num_groups, pattern="serial" if wanted.schedule == "serial" else "direct")

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, group: dist.ProcessGroup, **options: Any
    ) -> torch.Tensor:
        """Causal attention of the own rows of a zigzag layout, `[rows, B, heads x D]`; `options` of the operation."""
        rows, _, heads, size = query.shape
        layout = SequenceLayout.zigzag(rows * group.size(), group.size())
        observer = functools.partial(self.session.counters.overlapped, "attention", f"{heads}x{size}", "ulysses")
        transport = open_device_transport(self.session, group)
        context = ulysses_attention(
            query, key, value, group=transport, layout=layout, plan=self.plan, observer=observer, **options
        )
        return context.flatten(2)


def attention_init(original: Method, session: Session) -> Method:
    """Replacement of `DotProductAttention.__init__` for context parallelism. Unsupported options raise UlyssesError."""
    session.adapter(UlyssesAdapter)

    def init(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        if config.context_parallel_size == 1:
            original(self, config, *args, **kwargs)
            return
        # Stock reads the size only to refuse it.
        alone = copy.copy(config)
        alone.context_parallel_size = 1
        original(self, alone, *args, **kwargs)
        self.config = config
        heads, kv_heads = self.num_attention_heads_per_partition, self.num_query_groups_per_partition
        dropout, mask = self.attention_dropout.p, self.attn_mask_type
        text = _unsupported_reason(self, context_group(self), self.tp_group.size(), heads, kv_heads, dropout, mask)
        if is_layer_window_attention(config.window_size, config.window_attn_skip_freq, self.layer_number):
            text = f"--window-size {config.window_size}: not with Ulysses; leave it out"
        if text is not None:
            raise UlyssesError(f"overlap.ulysses: {text}")

    return init


def attention_forward(original: Method, session: Session) -> Method:
    """Replacement of `DotProductAttention.forward`.

    Equals the original on the whole sequence and the tensor-parallel heads of the rank. Every context rank gets its own
    rows of the result.
    """
    adapter = session.adapter(UlyssesAdapter)

    @untraced
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
        mask = attn_mask_type or self.attn_mask_type
        text = _unsupported_call_reason(query, key, value, mask, attention_bias, packed_seq_params)
        if text is not None:
            raise UlyssesError(f"overlap.ulysses: {text}")
        return adapter.attend(query, key, value, group, softmax_scale=scale_of(self))

    return forward


def context_group(layer: Any) -> dist.ProcessGroup:
    """The context-parallel ranks of an attention layer."""
    group = getattr(layer.pg_collection, "cp", None)
    return parallel_state.get_context_parallel_group() if group is None else group


def scale_of(core: Any) -> float:
    """The factor of the scores. Layer scaling divides before the softmax and multiplies inside it: it cancels out."""
    scale: float = core.softmax_scale
    return scale * core.layer_number if core.config.apply_query_key_layer_scaling else scale


def te_attention_forward(original: Method, session: Session) -> Method:
    """Replacement of `TEDotProductAttention.forward`; equals the original with TransformerEngine's context parallelism.

    The kernel of each head group is the original without context parallelism, so TransformerEngine selects flash, fused
    or unfused attention. A call that Ulysses does not support runs the original and is counted.
    """
    adapter = session.adapter(UlyssesAdapter)

    @untraced
    def forward(
        self: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: AttnMaskType,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
        **kwargs: Any,
    ) -> Any:
        arguments = query, key, value, attention_mask, attn_mask_type, attention_bias, packed_seq_params
        group = self.cp_group
        if group is None:
            return original(self, *arguments, **kwargs)
        reason = unsupported_te_core_reason(self) or _unsupported_call_reason(
            query, key, value, attn_mask_type, attention_bias, packed_seq_params
        )
        if reason is not None:
            heads = f"{query.shape[2]}x{query.shape[3]}"
            session.counters.fallback("attention", heads, "ulysses", "forward", reason)
            if query.device.type == "cpu":
                text = "TransformerEngine's own context parallelism needs a GPU"
                raise UlyssesError(f"overlap.ulysses: {reason}. {text}")
            return original(self, *arguments, **kwargs)
        return adapter.attend(query, key, value, group, kernel=functools.partial(te_kernel, self, **kwargs))

    return forward


def te_kernel(core: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """`ops.flash_attention.Kernel` of a TransformerEngine attention: its forward on some heads of one rank."""
    before = core.cp_group, core.num_gqa_groups_per_partition
    # TransformerEngine checks the number of key/value heads.
    core.cp_group, core.num_gqa_groups_per_partition = None, key.shape[2]
    try:
        context: torch.Tensor = core.forward(query, key, value, None, AttnMaskType.causal, **kwargs)
    finally:
        core.cp_group, core.num_gqa_groups_per_partition = before
    return context.view(query.shape)


def unsupported_te_core_reason(core: Any) -> str | None:
    """The reason in a TransformerEngine attention under context parallelism that keeps Ulysses from it."""
    config, group = core.config, core.cp_group
    if isinstance(group, list):
        return "--cp-comm-type a2a+p2p: not with Ulysses"
    if te_quantizes():
        return "fp8: TransformerEngine quantizes its messages"
    if getattr(config, "qk_clip", False) or getattr(config, "log_max_attention_logit", False):
        return "--qk-clip or --log-max-attention-logit: not with Ulysses"
    heads, kv_heads = config.num_attention_heads // core.tp_size, core.num_gqa_groups_per_partition
    mask = AttnMaskType[core.attn_mask_type]
    return _unsupported_reason(core, group, core.tp_size, heads, kv_heads, core.attention_dropout, mask)


def _unsupported_reason(
    core: Any, group: dist.ProcessGroup, tensor_size: int, heads: int, kv_heads: int, dropout: float, mask: AttnMaskType
) -> str | None:
    """The reason in an attention layer; `heads` and `kv_heads` are those of one tensor-parallel rank."""
    config, kind, size, backend = core.config, core.attention_type, group.size(), dist.get_backend(group)
    softmax = getattr(config, "softmax_type", "vanilla")
    resets_mask = getattr(training_arguments(), "reset_attention_mask", False)
    multiple = f"must be a multiple of tensor x context parallel size = {tensor_size} x {size}"
    problems = (
        (size > MAX_RANKS, f"--context-parallel-size {size}: use at most {MAX_RANKS}"),
        (heads % size != 0, f"--num-attention-heads {config.num_attention_heads}: {multiple}"),
        (heads % kv_heads != 0, f"--num-query-groups {config.num_query_groups}: must divide --num-attention-heads"),
        (dropout > 0, f"--attention-dropout {dropout}: use 0 with Ulysses"),
        (mask is not AttnMaskType.causal, f"attention mask {mask.name}: use causal self-attention with Ulysses"),
        (kind != "self", f"{kind}-attention: use self-attention with Ulysses"),
        (softmax != "vanilla", f"--softmax-type {softmax}: use vanilla with Ulysses"),
        (resets_mask, "--reset-attention-mask: not with Ulysses; leave it out"),
        (backend not in ("gloo", "nccl"), f"--distributed-backend {backend}: use gloo or nccl"),
    )
    return next((text for wrong, text in problems if wrong), None)


def _unsupported_call_reason(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: AttnMaskType, bias: Any, packed: Any
) -> str | None:
    """The reason in the arguments of one call: mask type, attention bias and parameters of packed sequences."""
    problems = (
        (packed is not None, "packed sequences: not with Ulysses; train unpacked"),
        (bias is not None, "attention bias: not with Ulysses"),
        (mask is not AttnMaskType.causal, f"attention mask {mask}: use causal with Ulysses"),
        (query.shape[0] != key.shape[0], "key/value cache: generate without context parallelism"),
        (key.shape != value.shape, "keys and values of different head sizes: not with Ulysses"),
    )
    return next((text for wrong, text in problems if wrong), None)
