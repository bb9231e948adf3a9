"""Layers and data parallel buckets whose communication is hidden: schedule x transport x what consumes it."""

from megatron_overlap.ops.all_reduce import copy_linear, linear_all_reduce
from megatron_overlap.ops.buckets import Gathering, GradientReduce, Reduction
from megatron_overlap.ops.linear import all_gather_linear, linear_reduce_scatter
from megatron_overlap.ops.mlp import LayerOptions, mlp_all_reduce
from megatron_overlap.ops.plan import LinearPlan
from megatron_overlap.ops.query_split import attention_linear_reduce_scatter
from megatron_overlap.ops.ulysses import UlyssesPlan, ulysses_attention
from megatron_overlap.ops.ulysses_layer import Projection, ulysses_self_attention
from megatron_overlap.ops.varlen import balanced_attention
from megatron_overlap.ops.varlen_remap import remap

__all__ = [
    "Gathering",
    "GradientReduce",
    "LayerOptions",
    "LinearPlan",
    "Projection",
    "Reduction",
    "UlyssesPlan",
    "all_gather_linear",
    "attention_linear_reduce_scatter",
    "balanced_attention",
    "copy_linear",
    "linear_all_reduce",
    "linear_reduce_scatter",
    "mlp_all_reduce",
    "remap",
    "ulysses_attention",
    "ulysses_self_attention",
]
