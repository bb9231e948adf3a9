"""Overlapped operations: linear layers, attention, experts and buckets. Schedules and transports meet here."""

from megatron_overlap.ops.call import Projection
from megatron_overlap.ops.data_parallel import Gathering, GradientReduce, Reduction
from megatron_overlap.ops.expert_parallel.experts import MLPExperts
from megatron_overlap.ops.expert_parallel.layer import ExpertOptions, expert_parallel
from megatron_overlap.ops.tensor_parallel.attention_projection import attention_linear_reduce_scatter
from megatron_overlap.ops.tensor_parallel.linear import (
    all_gather_linear,
    copy_linear,
    linear_all_reduce,
    linear_reduce_scatter,
)
from megatron_overlap.ops.tensor_parallel.p2p import LinearPlan
from megatron_overlap.ops.ulysses.attention import UlyssesPlan, ulysses_attention
from megatron_overlap.ops.ulysses.self_attention import ulysses_self_attention
from megatron_overlap.ops.varlen.attention import balanced_attention

__all__ = [
    "ExpertOptions",
    "Gathering",
    "GradientReduce",
    "LinearPlan",
    "MLPExperts",
    "Projection",
    "Reduction",
    "UlyssesPlan",
    "all_gather_linear",
    "attention_linear_reduce_scatter",
    "balanced_attention",
    "copy_linear",
    "expert_parallel",
    "linear_all_reduce",
    "linear_reduce_scatter",
    "ulysses_attention",
    "ulysses_self_attention",
]
