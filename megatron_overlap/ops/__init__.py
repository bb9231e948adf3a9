"""Layers and data parallel buckets whose communication is hidden: schedule x transport x what consumes it."""

from megatron_overlap.ops.all_reduce import copy_linear, linear_all_reduce
from megatron_overlap.ops.buckets import Gathering, GradientReduce, Reduction
from megatron_overlap.ops.linear import all_gather_linear, linear_reduce_scatter
from megatron_overlap.ops.plan import LinearPlan
from megatron_overlap.ops.query_split import attention_linear_reduce_scatter
from megatron_overlap.ops.ulysses import UlyssesPlan, ulysses_attention
from megatron_overlap.ops.ulysses_layer import Projection, ulysses_self_attention

__all__ = [
    "Gathering",
    "GradientReduce",
    "LinearPlan",
    "Projection",
    "Reduction",
    "UlyssesPlan",
    "all_gather_linear",
    "attention_linear_reduce_scatter",
    "copy_linear",
    "linear_all_reduce",
    "linear_reduce_scatter",
    "ulysses_attention",
    "ulysses_self_attention",
]
