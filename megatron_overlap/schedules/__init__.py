"""Plans as data: the order in which each rank sends, receives and computes chunks. Needs neither torch nor Megatron."""

from megatron_overlap.schedules.gather_scatter import all_gather_plan, all_reduce_plan, reduce_scatter_plan
from megatron_overlap.schedules.plan import Chunk, ChunkLayout, Message, PartLayout, Plan, Work
from megatron_overlap.schedules.ulysses import AllToAllPlan, HeadLayout, SequenceLayout, ulysses_plan

__all__ = [
    "AllToAllPlan",
    "Chunk",
    "ChunkLayout",
    "HeadLayout",
    "Message",
    "PartLayout",
    "Plan",
    "SequenceLayout",
    "Work",
    "all_gather_plan",
    "all_reduce_plan",
    "reduce_scatter_plan",
    "ulysses_plan",
]
