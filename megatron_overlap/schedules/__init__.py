"""Who sends which chunk when, and what is computed meanwhile. Pure: no torch, no megatron."""

from megatron_overlap.schedules.all_reduce import all_reduce_plan
from megatron_overlap.schedules.build import all_gather_plan, reduce_scatter_plan
from megatron_overlap.schedules.checker import Proof, ScheduleError, check
from megatron_overlap.schedules.chunks import Chunk, ChunkLayout, PartLayout
from megatron_overlap.schedules.plan import Exchange, Plan, Work

__all__ = [
    "Chunk",
    "ChunkLayout",
    "Exchange",
    "PartLayout",
    "Plan",
    "Proof",
    "ScheduleError",
    "Work",
    "all_gather_plan",
    "all_reduce_plan",
    "check",
    "reduce_scatter_plan",
]
