"""Layers whose communication is hidden: schedule x transport x computation, with autograd."""

from megatron_overlap.ops.linear import all_gather_linear, linear_reduce_scatter
from megatron_overlap.ops.plan import LinearPlan
from megatron_overlap.ops.ulysses import UlyssesPlan, ulysses_attention
from megatron_overlap.ops.ulysses_layer import Projection, ulysses_self_attention

__all__ = [
    "LinearPlan",
    "Projection",
    "UlyssesPlan",
    "all_gather_linear",
    "linear_reduce_scatter",
    "ulysses_attention",
    "ulysses_self_attention",
]
