"""Pieces that the ways to overlap a linear layer are played of."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_overlap.autotune.cost_model import CostModel
from megatron_overlap.schedules import Chunk, Message, Plan, Work
from megatron_overlap.tools.simulate.program import Stream

NOTHING = Chunk(0, 0)
"""What work is done on where it does not matter."""


@dataclass(frozen=True, slots=True)
class Moves:
    """Collectives as messages: their bytes, and how much slower than an all-gather's."""

    messages: tuple[Message, ...] = ()
    sizes: tuple[float, ...] = ()
    stretch: tuple[float, ...] = ()

    def __add__(self, other: Moves) -> Moves:
        return Moves(self.messages + other.messages, self.sizes + other.sizes, self.stretch + other.stretch)


@dataclass(frozen=True)
class Gemm:
    """Times of `(rows, k) @ (k, n)`, whole and in pieces of its rows, in microseconds."""

    model: CostModel
    rows: int
    n: int
    k: int

    @property
    def whole(self) -> float:
        """All rows at once."""
        return self.model.gemm_us(self.rows, self.n, self.k)

    @property
    def launch_us(self) -> float:
        """The fixed part of it."""
        return self.model.launch_us

    def rows_us(self, rows: int) -> float:
        """A GEMM of its own over some of the rows."""
        return self.model.gemm_us(rows, self.n, self.k)

    def share_us(self, rows: int) -> float:
        """These rows' part of one GEMM over all of them."""
        return (self.whole - self.launch_us) * rows / self.rows


def begun_by(stream: Stream, first_us: float) -> Stream:
    """The stream after a piece of work that its messages wait for."""
    plan = replace(
        stream.plan,
        messages=tuple(replace(each, after_work=each.after_work + 1) for each in stream.plan.messages),
        work=(Work((NOTHING,)), *stream.plan.work),
    )
    return replace(stream, plan=plan, work_us=(first_us, *stream.work_us), add_us=(0.0, *stream.add_us))


def and_then(stream: Stream, then_us: float) -> list[Stream]:
    """The stream, and a piece of work after it."""
    if not then_us:
        return [stream]
    plan = Plan("all_gather", "serial", stream.plan.num_ranks, 0, 1, (), (Work((NOTHING,)),))
    return [stream, Stream(plan, (then_us,), (0.0,), ())]
