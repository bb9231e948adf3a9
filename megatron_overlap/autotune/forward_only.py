"""From how many rows on a forward-only call is worth overlapping, computed before any candidate is measured. Pure.

A forward-only call has no backward pass: evaluation, log-probabilities, the prefill and decode of generation. The model
has four terms, each from a short measurement: a GEMM is `fixed + row x rows`, a collective is `latency + bytes / rate`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from megatron_overlap.autotune.candidates import Call
from megatron_overlap.schedules.heuristics import MAX_MESSAGES, MIN_CHUNK_ROWS, default_chunks, most_parts

MARGIN = 0.05
"""The model must predict a gain of this fraction: a decode that is slower than stock costs more than a lost gain."""

MOST_ROWS = 1 << 17
TRIAL_CALLS = 256
"""Calls of one kind and number of rows before it is measured. Ragged prompts rarely repeat one so often."""


@dataclass(frozen=True, slots=True)
class Link:
    """The stock collective of an operation, and what p2p adds to it.

    Attributes:
        latency_us: a collective of few bytes.
        bytes_per_us: of a collective of many bytes; its bytes are those of the gathered or reduced rows.
        message_us: what the p2p operation of few bytes takes longer, for one message to each peer.
    """

    latency_us: float
    bytes_per_us: float
    message_us: float


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


def min_rows(call: Call, num_ranks: int, item_bytes: int, link: Link, gemm: Gemm) -> float:
    """The fewest gathered rows from which p2p with its default settings is faster; infinite if there are none.

    Args:
        call: the kind; its `rows` are not read.
        num_ranks: size of the group.
        item_bytes: bytes of an element.
        link: of the operation.
        gemm: of the layer.
    """
    row_bytes = item_bytes * (call.in_features if call.op == "ag_gemm" else call.out_features)

    def gains(rows: int) -> bool:
        communication_us = link.latency_us + rows * row_bytes / link.bytes_per_us
        chunks, parts = _parts(call, num_ranks, rows, row_bytes)
        computation_us = parts * gemm.fixed_us + gemm.row_us * rows
        hidden_us = min(communication_us, computation_us) * (1 - 1 / max(2, parts))
        overlapped_us = computation_us + communication_us - hidden_us + chunks * link.message_us
        stock_us = gemm.fixed_us + gemm.row_us * rows + communication_us
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
