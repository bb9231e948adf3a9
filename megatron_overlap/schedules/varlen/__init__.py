"""Plans for attention over documents of very different lengths: token placement, rings, and their messages.

Source: Zeppelin (arXiv 2509.21841). The planners import neither torch nor Megatron. Every rank that calls a planner
with the same arguments computes the same plan.
"""

from megatron_overlap.schedules.varlen.partition import CapacityError, partition
from megatron_overlap.schedules.varlen.plan import Balance, Plan, Zone, balance, describe
from megatron_overlap.schedules.varlen.topology import CostModel, Topology

__all__ = ["Balance", "CapacityError", "CostModel", "Plan", "Topology", "Zone", "balance", "describe", "partition"]
