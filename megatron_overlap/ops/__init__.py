"""Linear layers whose communication is hidden: schedule x transport x GEMM, with autograd."""

from megatron_overlap.ops.all_reduce import copy_linear, linear_all_reduce
from megatron_overlap.ops.linear import all_gather_linear, linear_reduce_scatter
from megatron_overlap.ops.plan import LinearPlan

__all__ = ["LinearPlan", "all_gather_linear", "copy_linear", "linear_all_reduce", "linear_reduce_scatter"]
