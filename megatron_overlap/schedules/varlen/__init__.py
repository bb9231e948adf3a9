"""Plans for attention over documents of very different lengths: token placement, rings, and their messages.

Source: Zeppelin (arXiv 2509.21841).
"""

from megatron_overlap.schedules.varlen.partition import CapacityError, partition
from megatron_overlap.schedules.varlen.plan import Plan, Zone, balance, describe
from megatron_overlap.schedules.varlen.topology import CostModel, Topology

__all__ = ["CapacityError", "CostModel", "Plan", "Topology", "Zone", "balance", "describe", "partition"]
