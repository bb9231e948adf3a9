"""Exposed communication: time in which a rank waited for messages instead of computing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from megatron_overlap.tracing.events import Kind, RankEvents, merged

_DIRECTIONS = ("forward", "backward", "dgrad", "wgrad")


@dataclass(frozen=True)
class Exposed:
    """Waits of one rank in one step, in milliseconds.

    Attributes:
        total_ms: time with at least one wait.
        by_op: time by operation and direction, longest first.
    """

    total_ms: float
    by_op: Mapping[tuple[str, str], float]


def exposed_in(found: RankEvents, start_ns: int, stop_ns: int) -> Exposed:
    """Return the waits between two times of the rank's clock; a longer wait counts with the part inside."""
    events = found.events
    waits = events[(events["kind"] == Kind.WAIT) | (events["kind"] == Kind.COLLECTIVE_WAIT)]
    starts = np.maximum(waits["start_ns"], start_ns)
    stops = np.minimum(waits["stop_ns"], stop_ns)
    inside = stops > starts
    starts, stops, ops = starts[inside], stops[inside], waits["op"][inside]
    by_op = {
        direction_of(found.names[number]): int((stops - starts)[ops == number].sum()) / 1e6 for number in np.unique(ops)
    }
    total = sum(stop - start for start, stop in merged(starts, stops))
    return Exposed(total / 1e6, dict(sorted(by_op.items(), key=lambda item: -item[1])))


def direction_of(op: str) -> tuple[str, str]:
    """Return operation and direction from an operation name; the direction of gradients and parameters is `-`."""
    name, _, last = op.rpartition(" ")
    if last in _DIRECTIONS:
        return name, last
    return op, "-" if name else "forward"
