"""Attention over documents of very different lengths: who holds which tokens, who exchanges what, in which passes.

The planners are pure: they import neither torch nor megatron, and every rank that calls them with the same arguments
gets the same plan.
"""

from megatron_overlap.schedules.varlen.balance import Balance, balance
from megatron_overlap.schedules.varlen.partition import CapacityError, partition
from megatron_overlap.schedules.varlen.plan import Pass, Piece, Plan, Ring, Zone
from megatron_overlap.schedules.varlen.topology import CostModel, Topology

__all__ = [
    "Balance",
    "CapacityError",
    "CostModel",
    "Pass",
    "Piece",
    "Plan",
    "Ring",
    "Topology",
    "Zone",
    "balance",
    "partition",
]
