"""Plans as data: the order in which each rank sends, receives and computes chunks. Needs neither torch nor Megatron."""

from megatron_overlap.schedules.all_reduce import all_reduce_plan
from megatron_overlap.schedules.all_to_all import AllToAllPlan, ulysses_plan
from megatron_overlap.schedules.gather_scatter import all_gather_plan, reduce_scatter_plan
from megatron_overlap.schedules.head_layout import HeadLayout, SequenceLayout
from megatron_overlap.schedules.layout import Chunk, ChunkLayout, PartLayout
from megatron_overlap.schedules.plan import Message, Plan, Work
from megatron_overlap.schedules.verify import Proof, ScheduleError, check
from megatron_overlap.schedules.verify_all_to_all import check_all_to_all

__all__ = [
    "AllToAllPlan",
    "Chunk",
    "ChunkLayout",
    "Message",
    "HeadLayout",
    "PartLayout",
    "Plan",
    "Proof",
    "ScheduleError",
    "SequenceLayout",
    "Work",
    "all_gather_plan",
    "all_reduce_plan",
    "check",
    "check_all_to_all",
    "reduce_scatter_plan",
    "ulysses_plan",
]
