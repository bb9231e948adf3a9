"""From how many rows on a forward-only call is worth overlapping, computed before any candidate is measured. Pure.

A forward-only call has no backward pass: evaluation, log-probabilities, the prefill and decode of generation. The model
has three lines, each through two short measurements: a GEMM is `fixed + row x rows`, a collective and the messages of
p2p are `latency + bytes / rate`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from megatron_overlap.autotune.candidates import Call
from megatron_overlap.schedules.heuristics import MAX_MESSAGES, MIN_CHUNK_ROWS, default_chunks, most_parts

MARGIN = 0.05
"""The model must predict a gain of this fraction: a decode that is slower than stock costs more than a lost gain."""

MOST_GAIN = 2
"""Upper limit of the rate of p2p over that of the collective, because both use the same links. A larger measured ratio
is noise."""

BUSY = 2
"""Factor on the measured latency of a message: the ranks only wait in the measurement. Ranks that compute notice a
message later."""

MOST_ROWS = 1 << 17
TRIAL_CALLS = 256
"""Calls of one kind and number of rows before it is measured. Ragged prompts rarely repeat one so often."""


@dataclass(frozen=True, slots=True)
class Link:
    """The time of the gathered or reduced rows of an operation, without a GEMM: `latency_us` and their bytes / rate."""

    latency_us: float
    bytes_per_us: float

    @classmethod
    def fitted(cls, few_bytes: int, few_us: float, many_bytes: int, many_us: float) -> "Link":
        """The line through two measured times."""
        return cls(few_us, (many_bytes - few_bytes) / max(many_us - few_us, 1e-3))


@dataclass(frozen=True, slots=True)
class Gemm:
    """The GEMM of a layer: `fixed_us` reads the weight, `row_us` is the further time of each row."""

    fixed_us: float
    row_us: float

    @classmethod
    def fitted(cls, few_rows: int, few_us: float, many_rows: int, many_us: float) -> "Gemm":
        """The line through two measured times."""
        row_us = max(0.0, (many_us - few_us) / (many_rows - few_rows))
        return cls(max(0.0, few_us - few_rows * row_us), row_us)

    def us(self, rows: int, gemms: int = 1) -> float:
        """Microseconds of `rows` in some GEMMs."""
        return gemms * self.fixed_us + rows * self.row_us


def min_rows(call: Call, num_ranks: int, item_bytes: int, stock: Link, p2p: Link, gemm: Gemm) -> float:
    """The fewest gathered rows from which p2p with its default settings is faster; infinite if there are none.

    Args:
        call: the kind; its `rows` are not read.
        num_ranks: size of the group.
        item_bytes: bytes of an element.
        stock: of the stock collective.
        p2p: of p2p with one message to each peer.
        gemm: of the layer.
    """
    row_bytes = item_bytes * (call.in_features if call.op == "ag_gemm" else call.out_features)

    latency_us = BUSY * max(p2p.latency_us, stock.latency_us)
    bytes_per_us = min(p2p.bytes_per_us, MOST_GAIN * stock.bytes_per_us)

    def gains(rows: int) -> bool:
        chunks, parts = _parts(call, num_ranks, rows, row_bytes)
        computation_us, messages_us = gemm.us(rows, parts), rows * row_bytes / bytes_per_us
        # A latency is mostly time of the host, which computes nothing meanwhile.
        hidden_us = min(messages_us, computation_us) * (1 - 1 / max(2, parts))
        overlapped_us = computation_us + chunks * latency_us + messages_us - hidden_us
        stock_us = gemm.us(rows) + stock.latency_us + rows * row_bytes / stock.bytes_per_us
        return overlapped_us <= (1 - MARGIN) * stock_us

    return _first(gains, num_ranks)


def _parts(call: Call, num_ranks: int, rows: int, row_bytes: int) -> tuple[int, int]:
    """Messages to each peer, and GEMMs, of p2p with its default settings."""
    if call.all_reduces:
        parts = most_parts(MAX_MESSAGES, rows, MIN_CHUNK_ROWS, "both")
        return parts, 2 * parts
    chunks = default_chunks("all_gather" if call.op == "ag_gemm" else "reduce_scatter", num_ranks, rows, row_bytes)
    return chunks, num_ranks * chunks


def _first(holds: Callable[[int], bool], start: int) -> float:
    """The smallest number from `start` on for which `holds`, assuming that it holds for all larger ones too."""
    low, high = start, start
    while not holds(high):
        low, high = high + 1, 2 * high
        if high > MOST_ROWS:
            return math.inf
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return high
