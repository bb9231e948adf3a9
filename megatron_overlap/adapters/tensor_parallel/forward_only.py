"""Selects the candidate of forward-only calls under `method: auto` by their rows, before anything is measured.

The first forward-only call of a kind of layer measures its GEMM, and for the first kind of an operation the link of the
group, in some milliseconds. Smaller calls than `autotune.forward_only.min_rows` run the stock path, larger ones p2p.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import random as megatron_random

from megatron_overlap.adapters.tensor_parallel.call import LinearCall
from megatron_overlap.autotune.candidates import Call, Candidate
from megatron_overlap.autotune.forward_only import TRIAL_CALLS, Gemm, Link, min_rows
from megatron_overlap.comm import Transport
from megatron_overlap.counters import AutotuneLine
from megatron_overlap.ops import LinearPlan, all_gather_linear, linear_all_reduce, linear_reduce_scatter

_FEW_ROWS, _MANY_ROWS = 8, 128
_FEW_BYTES, _MANY_BYTES = 4096, 1024 * 1024
_FEATURES = 8  # of the GEMM beside the measured communication
_REPEATS = {_FEW_BYTES: 8, _MANY_BYTES: 3}
_GEMM_REPEATS = 3
_P2P: dict[str, Callable[..., torch.Tensor]] = {
    "ag_gemm": all_gather_linear,
    "gemm_rs": linear_reduce_scatter,
    "gemm_ar": linear_all_reduce,
}
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
    """The thresholds of all groups of one session.

    Args:
        transport: returns the transport of a group for an operation.
    """

    def __init__(self, transport: Callable[[dist.ProcessGroup, str], Transport]) -> None:
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
        return [_line(threshold) for threshold in self._thresholds.values()]

    def _stock_and_p2p(self, call: LinearCall, slowest: Slowest) -> tuple[Link, Link]:
        key = call.group, call.op, call.x.dtype
        links = self._links.get(key)
        if links is None:
            ways, sizes = (None, self._transport(call.group, call.op)), (_FEW_BYTES, _MANY_BYTES)
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
    """Microseconds of the operation of `call` with `num_bytes` of rows and a GEMM of almost nothing.

    Args:
        call: names group, operation and dtype.
        num_bytes: of the gathered or reduced rows.
        transport: of the group, for p2p; None runs the collective.
    """
    group, size, wide = call.group, call.group.size(), 128
    rows = max(1, num_bytes // (size * wide * call.x.itemsize)) * size
    gathers = call.op == "ag_gemm"
    x = call.weight.new_zeros(rows // size if gathers else rows, wide if gathers else _FEATURES)
    weight = call.weight.new_zeros((_FEATURES, wide) if gathers else (wide, _FEATURES))
    gathered, own = x.new_zeros(rows, wide), x.new_zeros(rows // size, wide)

    def run() -> None:
        if transport is not None:
            _P2P[call.op](x, weight, group=transport, plan=_ONE_MESSAGE)
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
    fastest = math.inf
    for number in range(1 + repeats):
        if x.is_cuda:
            torch.cuda.synchronize(x.device)
        start = time.perf_counter()
        run()
        if x.is_cuda:
            torch.cuda.synchronize(x.device)
        if number:
            fastest = min(fastest, time.perf_counter() - start)
    return fastest * 1e6


def _line(threshold: Threshold) -> AutotuneLine:
    call, gemm = threshold.call, threshold.gemm
    name = f"{'column' if call.op == 'ag_gemm' else 'row'} {call.in_features}->{call.out_features}"
    reason = (
        f"GEMM {gemm.fixed_us:.0f} us + {gemm.row_us:.2f} us a row; "
        f"collective {_line_of(threshold.stock)}; p2p {_line_of(threshold.p2p)}"
    )
    if threshold.measured:
        reason = f"measured: none is faster with fewer rows; {reason}"
    if math.isinf(threshold.rows):
        return AutotuneLine(name, call.op, 0, call.dtype, "forward only", "stock", None, None, f"modelled: {reason}")
    method = f"p2p from {threshold.rows:.0f} rows on"
    return AutotuneLine(
        name, call.op, int(threshold.rows), call.dtype, "forward only", method, None, None, f"modelled: {reason}"
    )


def _line_of(link: Link) -> str:
    return f"{link.latency_us:.0f} us, {link.bytes_per_us:.0f} bytes/us"
