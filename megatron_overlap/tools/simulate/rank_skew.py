"""Operations of one rank, one after the other, and where its tensor parallel peers are waited for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

Meeting = Literal["before", "after"]
"""Where an operation waits for all ranks of its group: for its input, or for its result."""


@dataclass(frozen=True, slots=True)
class Op:
    """One operation of a layer in the order they run.

    Attributes:
        name: module and what it does.
        time_us: from start to end.
        tensor_us: part of it that waits for tensor parallel messages with nothing to compute.
        context_us: the same, of context parallel ones.
        meets: where the tensor ranks wait for each other: for its input, or for its result.
        slack_us: how late the others may be without being waited for.
    """

    name: str
    time_us: float
    tensor_us: float = 0.0
    context_us: float = 0.0
    meets: Meeting | None = None
    slack_us: float = 0.0

    @property
    def computed_us(self) -> float:
        """The rest."""
        return self.time_us - self.tensor_us - self.context_us


@dataclass(frozen=True, slots=True)
class Pass:
    """Operations that run one after the other."""

    ops: tuple[Op, ...]

    @property
    def time_us(self) -> float:
        return sum(op.time_us for op in self.ops)

    @property
    def tensor_us(self) -> float:
        return sum(op.tensor_us for op in self.ops)

    @property
    def context_us(self) -> float:
        return sum(op.context_us for op in self.ops)

    def __add__(self, other: Pass) -> Pass:
        return Pass(self.ops + other.ops)


def together(ops: Sequence[Op], late_us: Callable[[float], float]) -> Pass:
    """A pass in which every wait for others takes longer by what they are late.

    Args:
        ops: in their order.
        late_us: by how much, from the time that all have computed since they waited for each other last. A pass of the
            same kind is taken to come before this one.
    """
    last = max((index for index, op in enumerate(ops) if op.meets), default=None)
    if last is None:
        return Pass(tuple(ops))
    computed = sum(op.computed_us for op in ops[last + 1 :]) + _after_meeting(ops[last])
    made = []
    for op in ops:
        if op.meets is None:
            computed += op.computed_us
            made.append(op)
            continue
        late = max(0.0, late_us(computed + op.computed_us - _after_meeting(op)) - op.slack_us)
        made.append(replace(op, time_us=op.time_us + late, tensor_us=op.tensor_us + late))
        computed = _after_meeting(op)
    return Pass(tuple(made))


def _after_meeting(op: Op) -> float:
    return op.computed_us if op.meets == "before" else 0.0
