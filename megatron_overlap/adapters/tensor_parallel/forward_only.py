"""Selects the candidate of forward-only calls under `method: auto` by their rows, before anything is measured.

A forward-only call has no backward pass: evaluation, log-probabilities, the prefill and decode of generation. The first
one of a kind of layer measures its GEMM, and for the first kind of an operation the link of the group, in some
milliseconds. Calls of fewer rows than `min_rows` run the stock path, larger ones p2p.
"""

import math
import time
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import random as megatron_random

from megatron_overlap.adapters.tensor_parallel.call import LinearCall
from megatron_overlap.autotune.candidates import Call, Candidate
from megatron_overlap.comm import Transport
from megatron_overlap.counters import AutotuneLine
from megatron_overlap.ops import LinearPlan
from megatron_overlap.ops.tensor_parallel.linear import LINEAR_OPS
from megatron_overlap.schedules.heuristics import default_chunks, default_parts

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

    def __str__(self) -> str:
        return f"{self.latency_us:.0f} us, {self.bytes_per_us:.0f} bytes/us"


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

    The `rows` of the kind `call` are not read. `stock` is the link of the stock collective, `p2p` that of p2p with one
    message to each peer, and `item_bytes` the size of an element.
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
        parts = default_parts(rows, num_ranks, 0, on_device=False)
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
    return low + bisect_left(range(low, high), True, key=holds)


_FEW_ROWS, _MANY_ROWS = 8, 128
_FEW_BYTES, _MANY_BYTES = 4096, 1024 * 1024
_FEATURES = 8  # of the GEMM beside the measured communication
_REPEATS = {_FEW_BYTES: 8, _MANY_BYTES: 3}
_GEMM_REPEATS = 3
_ONE_MESSAGE = LinearPlan(chunks_per_rank=1)
_grad_enabled = torch.is_grad_enabled

type Slowest = Callable[[list[float]], list[float]]
"""Exchanges numbers between the ranks of a group: the largest of each."""


def is_forward_only(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether no backward pass follows a call. The first pass of Megatron's activation recomputation has one."""
    needs_grad = _grad_enabled() and (x.requires_grad or weight.requires_grad)
    return not needs_grad and not megatron_random.IS_CHECKPOINTING


@dataclass(slots=True)
class Threshold:
    """The fewest rows of one kind of layer that run overlapped. `measured`: a measured selection has raised it."""

    rows: float
    call: Call
    stock: Link
    p2p: Link
    gemm: Gemm
    measured: bool = False

    def line(self) -> AutotuneLine:
        """The threshold, for the report."""
        call, gemm = self.call, self.gemm
        name = f"{'column' if call.op == 'ag_gemm' else 'row'} {call.in_features}->{call.out_features}"
        reason = f"GEMM {gemm.fixed_us:.0f} us + {gemm.row_us:.2f} us a row; collective {self.stock}; p2p {self.p2p}"
        if self.measured:
            reason = f"measured: none is faster with fewer rows; {reason}"
        rows, method = 0, "stock"
        if not math.isinf(self.rows):
            rows, method = int(self.rows), f"p2p from {self.rows:.0f} rows on"
        return AutotuneLine(name, call.op, rows, call.dtype, "forward only", method, None, None, f"modelled: {reason}")


@dataclass(slots=True)
class Shape:
    """Calls of one kind and number of rows above the threshold. `candidate` runs them until they are measured."""

    candidate: Candidate
    calls: int = 0

    @property
    def repeats(self) -> bool:
        """Whether the number of rows came often enough to measure it."""
        return self.calls > TRIAL_CALLS


class ForwardOnlyCalls:
    """The thresholds of all groups of one session. `transport` returns that of a group."""

    def __init__(self, transport: Callable[[dist.ProcessGroup], Transport]) -> None:
        self._transport = transport
        self._links: dict[tuple[dist.ProcessGroup, str, torch.dtype], tuple[Link, Link]] = {}
        self._thresholds: dict[tuple[dist.ProcessGroup, Call], Threshold] = {}
        self._shapes: dict[tuple[dist.ProcessGroup, Call], Shape] = {}

    def threshold(self, call: LinearCall, kind: Call, slowest: Slowest) -> Threshold:
        """The threshold for calls of `kind` with any number of rows. The first call of each is collective."""
        key = call.group, replace(kind, rows=0)
        threshold = self._thresholds.get(key)
        if threshold is None:
            (stock, p2p), gemm = self._stock_and_p2p(call, slowest), _gemm(call.weight, slowest)
            rows = min_rows(kind, call.group.size(), call.x.itemsize, stock, p2p, gemm)
            threshold = self._thresholds[key] = Threshold(rows, kind, stock, p2p, gemm)
        return threshold

    def shape(self, group: dist.ProcessGroup, kind: Call, candidate: Callable[[], Candidate]) -> Shape:
        """Counts a call above its threshold; `candidate` is called for the first one of its rows."""
        shape = self._shapes.get((group, kind))
        if shape is None:
            shape = self._shapes[group, kind] = Shape(candidate())
        shape.calls += 1
        return shape

    def lines(self) -> list[AutotuneLine]:
        """The thresholds, for the report."""
        return [threshold.line() for threshold in self._thresholds.values()]

    def _stock_and_p2p(self, call: LinearCall, slowest: Slowest) -> tuple[Link, Link]:
        key = call.group, call.op, call.x.dtype
        links = self._links.get(key)
        if links is None:
            ways, sizes = (None, self._transport(call.group)), (_FEW_BYTES, _MANY_BYTES)
            few, many, p2p_few, p2p_many = slowest([_communication(call, size, way) for way in ways for size in sizes])
            stock = Link.fitted(_FEW_BYTES, few, _MANY_BYTES, many)
            links = self._links[key] = stock, Link.fitted(_FEW_BYTES, p2p_few, _MANY_BYTES, p2p_many)
        return links


def _gemm(weight: torch.Tensor, slowest: Slowest) -> Gemm:
    def run(rows: int) -> float:
        x = weight.new_zeros(rows, weight.shape[1])
        return _us(lambda: torch.mm(x, weight.t()), x, _GEMM_REPEATS)

    few_us, many_us = slowest([run(_FEW_ROWS), run(_MANY_ROWS)])
    return Gemm.fitted(_FEW_ROWS, few_us, _MANY_ROWS, many_us)


def _communication(call: LinearCall, num_bytes: int, transport: Transport | None) -> float:
    """Microseconds of the operation of `call` with `num_bytes` of gathered or reduced rows and almost no GEMM.

    By p2p over `transport`, or by the collective if it is None.
    """
    group, size, wide = call.group, call.group.size(), 128
    rows = max(1, num_bytes // (size * wide * call.x.itemsize)) * size
    gathers = call.op == "ag_gemm"
    x = call.weight.new_zeros(rows // size if gathers else rows, wide if gathers else _FEATURES)
    weight = call.weight.new_zeros((_FEATURES, wide) if gathers else (wide, _FEATURES))
    gathered, own = x.new_zeros(rows, wide), x.new_zeros(rows // size, wide)

    def run() -> None:
        if transport is not None:
            LINEAR_OPS[call.op](x, weight, group=transport, plan=_ONE_MESSAGE)
        elif gathers:
            dist.all_gather_into_tensor(gathered, x, group=group)
            torch.mm(gathered, weight.t())
        else:
            torch.mm(x, weight.t(), out=gathered)
            if call.op == "gemm_rs":
                dist.reduce_scatter_tensor(own, gathered, group=group)
            else:
                dist.all_reduce(gathered, group=group)

    return _us(run, x, _REPEATS[num_bytes])


@torch.no_grad()
def _us(run: Callable[[], object], x: torch.Tensor, repeats: int) -> float:
    """Microseconds of the fastest of some runs, after one that is not counted."""
    synchronize = partial(torch.cuda.synchronize, x.device) if x.is_cuda else lambda: None
    times_s = []
    for _ in range(1 + repeats):
        synchronize()
        start = time.perf_counter()
        run()
        synchronize()
        times_s.append(time.perf_counter() - start)
    return min(times_s[1:]) * 1e6
