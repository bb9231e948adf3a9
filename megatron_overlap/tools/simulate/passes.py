"""A pass: the operations of a rank in order, with the rank skew at their synchronization points."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

Sync = Literal["before", "after"]
"""Where an operation synchronizes the ranks of its group: before it (input) or after it (result)."""


@dataclass(frozen=True, slots=True)
class Op:
    """One operation of a layer. Times are in microseconds."""

    name: str
    time_us: float
    tensor_us: float = 0.0  # exposed tensor parallel communication in it
    context_us: float = 0.0  # exposed context parallel communication
    expert_us: float = 0.0  # exposed expert parallel communication
    sync: Sync | None = None  # where the tensor parallel ranks synchronize; None: nowhere
    slack_us: float = 0.0  # skew of the peers that does not delay the rank
    enqueue_us: float = 0.0  # host time of its point-to-point messages

    @property
    def computed_us(self) -> float:
        """Time without exposed communication."""
        return self.time_us - self.tensor_us - self.context_us - self.expert_us


@dataclass(frozen=True, slots=True)
class Pass:
    """Operations in order, and the sums of their times."""

    ops: tuple[Op, ...]
    time_us: float
    tensor_us: float
    context_us: float
    expert_us: float

    @classmethod
    def of(cls, ops: Sequence[Op]) -> "Pass":
        names = ("time_us", "tensor_us", "context_us", "expert_us")
        return cls(tuple(ops), *(sum(getattr(op, name) for op in ops) for name in names))


def with_rank_skew(ops: Sequence[Op], late_us: Callable[[float], float]) -> Pass:
    """A pass in which each synchronization takes longer by the rank skew.

    `late_us` is the skew by the computation time since the last one; the previous pass is assumed to be of this kind.
    """
    computed, made = 0.0, list[Op]()
    for op in (*ops, *ops):
        if op.sync is None:
            computed += op.computed_us
            made.append(op)
        else:
            late = max(0.0, late_us(computed + op.computed_us - _after_sync(op)) - op.slack_us)
            made.append(replace(op, time_us=op.time_us + late, tensor_us=op.tensor_us + late))
            computed = _after_sync(op)
    return Pass.of(made[len(ops) :])


def _after_sync(op: Op) -> float:
    return op.computed_us if op.sync == "before" else 0.0
