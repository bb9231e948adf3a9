"""Predicts how long each candidate takes for a linear layer, to try the likely ones alone. Pure.

The formulas are those of `docs/choice.md`: alpha-beta messages, GEMMs by a table of rows, and for p2p the larger of
computation and communication plus the one piece that nothing hides. They need not be right, only in the right order:
what is chosen is measured.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_overlap.autotune.candidates import STOCK, Call, Candidate
from megatron_overlap.autotune.cost_model import CostModel, Link
from megatron_overlap.schedules.heuristics import default_chunks, default_pattern
from megatron_overlap.schedules.layout import part_weights
from megatron_overlap.schedules.plan import Pattern

MAX_TRIED = 4
"""Candidates that are measured besides Megatron's own path."""

_CHUNKS = (1, 2, 4, 8)
# Of a candidate that leaves the number to each pass.
_ASSUMED_CHUNKS = 2
# Fewer rows in a message hide less than it costs, whatever the link.
_MIN_ROWS = 4
# Candidates predicted to take so much longer than the best are not tried; the model is off by 30 % for some.
_HOPELESS = 1.6


@dataclass(frozen=True)
class Costs:
    """What one machine's parts cost, in microseconds and bytes per microsecond.

    Attributes:
        rates: floating-point operations per microsecond of a GEMM, by its rows.
        message_us: fixed cost of a point-to-point message, and `message_rate` what it reaches.
        collective_us: fixed cost of a collective, and `collective_rate` what it reaches.
    """

    rates: Mapping[int, float]
    message_us: float
    message_rate: float
    collective_us: float
    collective_rate: float

    @classmethod
    def of_model(cls, model: CostModel, link: Link, shape: tuple[int, int]) -> Costs:
        """The same from a cluster profile, for GEMMs of `shape` (columns, depth)."""
        n, k = shape
        rows = (16, 64, 256, 1024, 4096)
        rates = {m: 2.0 * m * n * k / model.gemm_us(m, n, k) for m in rows}
        return cls(rates, link.latency_us, link.copy_rate, link.ring_latency_us + model.launch_us, link.collective_rate)

    def gemm_us(self, rows: float, n: int, k: int) -> float:
        """A GEMM of `rows`: the rate is linear in the logarithm of the rows between points of the table."""
        if rows <= 0:
            return 0.0
        points = sorted(self.rates.items())
        if rows <= points[0][0]:
            # Below the table a GEMM waits for its weight, whatever the rows: as long as with the least of them.
            return 2.0 * points[0][0] * n * k / points[0][1]
        rate = points[-1][1]
        for (low, first), (high, last) in zip(points, points[1:], strict=False):
            if rows <= high:
                rate = first + (last - first) * math.log(rows / low) / math.log(high / low)
                break
        return 2.0 * rows * n * k / rate

    def messages_us(self, count: int, num_bytes: float) -> float:
        """`count` messages one after another, `num_bytes` in all."""
        return count * self.message_us + num_bytes / self.message_rate

    def collective(self, num_bytes: float) -> float:
        """A gather or scatter that moves `num_bytes` to and from each rank."""
        return self.collective_us + num_bytes / self.collective_rate

    @property
    def felt_rate(self) -> float:
        """Bytes per microsecond of a message of 512 KiB, latency included: by this a link is known again."""
        return 2.0**19 / self.messages_us(1, 2.0**19)


def candidates(
    call: Call, pattern: Pattern | None, chunks: int | None, *, device_type: str, item_bytes: int
) -> list[Candidate]:
    """All ways to serve `call` by p2p, the default one first; with a backward pass under sequence parallelism no two of
    them are the same messages.

    Args:
        call: what is asked for.
        pattern: the only pattern allowed; None allows all.
        chunks: the only number of chunks allowed; None allows all.
        device_type: of the ranks, which have a usual pattern by it.
        item_bytes: bytes of one number.
    """
    patterns: Sequence[Pattern | None] = (pattern,)
    if pattern is None and not call.sums:  # an all-reduce has no ring
        usual = default_pattern(device_type)
        # Between two ranks a ring is the same messages.
        patterns = ("direct",) if call.ranks == 2 else (usual, "direct" if usual == "ring" else "ring")
    if chunks is not None:
        return [Candidate("p2p", each, chunks) for each in patterns]
    default = _usual_count(call, item_bytes)
    most = max(1, call.rows // call.ranks // _MIN_ROWS)
    counts = (default, *(count for count in _CHUNKS if count <= most and count != default))
    return [Candidate("p2p", each, count) for each in patterns for count in counts]


def _usual_count(call: Call, item_bytes: int) -> int | None:
    """The chunks a rank of `call` where nobody says how many; None where they are not one number for all its passes."""
    if call.sums:
        return None
    gathers, scatters = (
        default_chunks(collective, call.ranks, call.rows, call.width * item_bytes)
        for collective in ("all_gather", "reduce_scatter")
    )
    return gathers if gathers == scatters else None


def predict_us(costs: Costs, call: Call, candidate: Candidate, item_bytes: int) -> float:
    """Microseconds of one call, forward and, where it follows, backward.

    Args:
        costs: of this machine.
        call: what is asked for.
        candidate: how it is served.
        item_bytes: bytes of one number.
    """
    others, size = call.ranks - 1, call.ranks
    moved = call.rows * call.width * item_bytes * others / size
    forward = costs.gemm_us(call.rows, call.out_features, call.in_features)
    dgrad = costs.gemm_us(call.rows, call.in_features, call.out_features) if call.backward else 0.0
    wgrad = dgrad if call.weight else 0.0
    column = call.op in ("ag_gemm", "copy_gemm")
    if candidate == STOCK:
        one = costs.collective(moved)
        if call.sums:
            backward = dgrad + max(wgrad, 2 * one) if call.backward else 0.0
            return forward + backward if column else forward + 2 * one + dgrad + wgrad
        if not call.backward:
            return forward + one
        backward = max(dgrad, one) + max(wgrad, one) if column else one + dgrad + wgrad
        return forward + one + backward
    chunks = candidate.chunks_per_rank or _ASSUMED_CHUNKS
    fused = candidate.method == "fused"
    pieces = 1 if fused else size
    parts = part_weights(chunks, "last")
    smallest = call.rows / size * parts[-1] / sum(parts)

    def overlapped(compute: float, passes: int, n: int, k: int) -> float:
        messages = costs.messages_us(passes * others * chunks, passes * moved)
        if candidate.pattern == "serial":
            return compute + messages
        return max(compute, messages + costs.gemm_us(smallest, n, k))

    def split(n: int, k: int) -> float:
        return pieces * costs.gemm_us(call.rows / pieces, n, k)

    ahead = split(call.out_features, call.in_features)
    shape = call.out_features, call.in_features
    behind = (split(call.in_features, call.out_features) + wgrad) if call.backward else 0.0
    if call.sums:
        if column:
            return forward + (overlapped(behind, 2, *shape) if call.backward else 0.0)
        return overlapped(ahead, 2, *shape) + dgrad + wgrad
    total = overlapped(ahead, 1, *shape)
    if call.backward:
        total += overlapped(behind, 2 if column and call.weight else 1, *shape)
    return total


def shortlist(costs: Costs, call: Call, possible: Sequence[Candidate], item_bytes: int) -> list[Candidate]:
    """The few of `possible` worth measuring, likeliest first; at least one."""
    predicted = {each: predict_us(costs, call, each, item_bytes) for each in possible}
    order = sorted(possible, key=lambda each: predicted[each])
    best = predicted[order[0]]
    chosen = [each for each in order if predicted[each] <= _HOPELESS * best][:MAX_TRIED]
    default = possible[0]
    # The rules that LinearPlan chooses by were measured too: what they say is always tried.
    return chosen if default in chosen else [*chosen[: MAX_TRIED - 1], default]
