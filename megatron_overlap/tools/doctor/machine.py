"""`python -m megatron_overlap.tools.doctor.machine FOLDER TASK PRECISION`: what `doctor` runs on every rank.

`test` runs overlapped layers forward and backward and holds them against plain collectives; `calibrate` measures what
the cost model needs, and a few things that it has to predict; `beside` only what computation loses beside messages.
Rank r writes `rank{r}.json`.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_overlap.comm import Transport, close_transport, transport_of
from megatron_overlap.comm.transport import Transfer
from megatron_overlap.config.cluster import load_cluster_profile
from megatron_overlap.ops import all_gather_linear, linear_reduce_scatter, reference
from megatron_overlap.schedules import all_gather_plan
from megatron_overlap.tools.doctor.elementwise_rates import FFN, HIDDEN, rates
from megatron_overlap.tools.doctor.gemm_rate import DTYPES, gemm_tflops
from megatron_overlap.tools.doctor.timed import alone_us, apart_us, mean_over_ranks, once_us, together_us

ROWS = (32, 64, 128, 256, 512, 1024)
LAYER = ((HIDDEN, HIDDEN), (HIDDEN, HIDDEN // 2), (2 * FFN, HIDDEN), (HIDDEN, FFN))
"""Columns and depth of the GEMMs that are timed by rows: a layer's on one of two ranks. They are not equally fast."""
PRODUCT = sum(columns * depth for columns, depth in LAYER)
"""Twice this many operations for each row, all four together."""
_WIDTH = 1024
MESSAGES = (1 << 10, 1 << 18, 1 << 20, 1 << 22)
CHECK_GEMM, CHECK_MESSAGE, CHECK_PIECES = (384, 1536, 768), 3 << 20, 4
BASE = "netlab"
"""The profile whose figures stand for what is not measured here."""
_COLLECTIVE, _COPIED = 2 << 20, 8 << 20
_REPEATS = 9
_LAUNCHES = 100
_LONG_US, _MOST_BESIDE, _BESIDE = 5e4, 40, 1 << 18
_MESSAGES_BESIDE, _FEW_GEMMS, _MOST_GEMMS = 20, 8, 10_000
# More than any cache: a step uses a weight once in each direction, and all others before it comes to it again.
_EVICTED_BYTES = 512 << 20
_LATE_ROWS, _LATE_COLUMNS, _LATE_AFTER_US, _LONGER, _MEETINGS = 256, 2048, 1e4, 4, 4


def self_test(group: dist.ProcessGroup) -> dict[str, Any]:
    """Largest relative difference to plain collectives, over outputs and gradients of both layers."""
    torch.manual_seed(dist.get_rank(group))
    size, worst = dist.get_world_size(group), 0.0
    for overlapped, plain, rows in (
        (all_gather_linear, reference.all_gather_linear, 48),
        (linear_reduce_scatter, reference.linear_reduce_scatter, 48 * size),
    ):
        x, w = torch.randn(rows, 40), torch.randn(24, 40)
        results = []
        for function in (overlapped, plain):
            leaves = [tensor.clone().requires_grad_() for tensor in (x, w)]
            y = function(leaves[0], leaves[1], group=group)
            torch.autograd.backward(y.square().sum())
            results.append([y.detach(), *(leaf.grad for leaf in leaves)])
        for ours, theirs in zip(*results, strict=True):
            worst = max(worst, float((ours - theirs).abs().max() / theirs.abs().max()))
    return {"difference": worst}


def measure(group: dist.ProcessGroup, dtype: torch.dtype) -> dict[str, Any]:
    """Times of GEMMs, messages, collectives, and of GEMMs beside messages, all ranks at once, in microseconds."""
    update_bytes = load_cluster_profile(BASE).device.optimizer_bytes.value
    peak = max(gemm_tflops(size, "cpu", dtype) for size in (512, 1024))
    transport = transport_of(group)
    size = transport.size
    whole = torch.empty(_COLLECTIVE, dtype=torch.uint8)
    shard = torch.empty(_COLLECTIVE // size, dtype=torch.uint8)
    # What layers scatter are sums of their own type; what is reduced over copies of the model are fp32 gradients.
    rows = torch.zeros(_COLLECTIVE // dtype.itemsize, dtype=dtype)
    sums, part = torch.zeros(_COLLECTIVE // 4), rows[: len(rows) // size].clone()
    source, copied = (torch.zeros(_COPIED, dtype=torch.uint8) for _ in range(2))
    one = torch.zeros(1)

    def message() -> tuple[Callable[[], bool], Callable[[], object]]:
        p2p_work = _begin(transport, MESSAGES[0])
        return partial(p2p_work.is_completed, 0), p2p_work.wait_all

    def gather() -> tuple[Callable[[], bool], Callable[[], object]]:
        work = dist.all_gather_into_tensor(
            whole[: size * MESSAGES[0]], shard[: MESSAGES[0]], group=group, async_op=True
        )
        return work.is_completed, work.wait

    evicted = torch.zeros(_EVICTED_BYTES // 4)

    def cold_us(run: Callable[[], object]) -> float:
        """As in a step, where every cache was filled with something else since."""
        return alone_us(run, group, evicted.sum)

    def layer(rows: int, *, weight_gradient: bool = False) -> float:
        """What a layer's GEMMs take."""
        return sum(cold_us(_gemm((rows, *of), dtype, weight_gradient=weight_gradient)) for of in LAYER)

    gemm_us = {rows: layer(rows) for rows in ROWS}
    message_us = _messages(transport, group)
    return {
        "ranks": size,
        "peak_tflops": peak,
        "gemm_us": gemm_us,
        "weight_gradient_us": layer(ROWS[-1], weight_gradient=True),
        "message_us": message_us,
        "late_us": [
            _late(transport, gemms, message_us[MESSAGES[0]], dtype, group)
            for gemms in late_gemms(gemm_us[_LATE_ROWS] * _LATE_COLUMNS * _WIDTH / PRODUCT)
        ],
        "busy_us": _busy(message, dtype, group),
        "busy_collective_us": _busy(gather, dtype, group),
        "all_gather_us": apart_us(lambda: dist.all_gather_into_tensor(whole, shard, group=group), group),
        "reduce_scatter_us": apart_us(lambda: dist.reduce_scatter_tensor(part, rows, group=group), group),
        "all_reduce_us": apart_us(lambda: dist.all_reduce(sums, group=group), group),
        "collective_bytes": _COLLECTIVE,
        "memory_gbps": 2 * _COPIED / alone_us(lambda: copied.copy_(source), group) / 1e3,
        "launch_us": alone_us(lambda: [one.add_(1) for _ in range(_LAUNCHES)], group) / _LAUNCHES,
        **_contention(transport, dtype, group),
        **rates(cold_us, dtype, update_bytes),
        "check": {
            "gemm": cold_us(_gemm(CHECK_GEMM, dtype)),
            "split gemm": cold_us(_gemm(CHECK_GEMM, dtype, pieces=CHECK_PIECES)),
            "message": _message(transport, CHECK_MESSAGE, group),
        },
    }


def beside(group: dist.ProcessGroup, dtype: torch.dtype) -> dict[str, Any]:
    """GEMMs alone and beside messages, and messages alone, as `measure` has them."""
    transport = transport_of(group)
    return {"message_us": _messages(transport, group), **_contention(transport, dtype, group)}


def _messages(transport: Transport, group: dist.ProcessGroup) -> dict[int, float]:
    return {count: _message(transport, count, group) for count in MESSAGES}


def _gemm(
    shape: tuple[int, int, int], dtype: torch.dtype, *, pieces: int = 1, weight_gradient: bool = False
) -> Callable[[], None]:
    """What runs `x @ w.T` in pieces along its rows, or `dy.T @ x`."""
    rows, columns, depth = shape
    x, w, y = (torch.randn(*of).to(dtype) for of in ((rows, depth), (columns, depth), (rows, columns)))

    def run() -> None:
        if weight_gradient:
            torch.mm(y.t(), x, out=w)
            return
        for some, into in zip(x.chunk(pieces), y.chunk(pieces), strict=True):
            torch.mm(some, w.t(), out=into)

    return run


def _begin(transport: Transport, count: int) -> Any:
    messages = all_gather_plan(transport.size, transport.rank).messages[:1]
    send, recv = torch.empty(count, dtype=torch.uint8), torch.empty(count, dtype=torch.uint8)
    return transport.begin([Transfer(message, send, recv) for message in messages], "doctor")


def _message(transport: Transport, count: int, group: dist.ProcessGroup) -> float:
    return together_us(lambda: _begin(transport, count).finish(), group)


def late_gemms(gemm_us: float) -> tuple[int, int]:
    """How many make about 10 ms, and four times as many."""
    count = max(1, round(_LATE_AFTER_US / gemm_us))
    return count, _LONGER * count


def _late(
    transport: Transport, gemms: int, message_us: float, dtype: torch.dtype, group: dist.ProcessGroup
) -> tuple[float, float]:
    """What so many GEMMs take, and how much longer a small message after them than right after a barrier."""
    gemm = _gemm((_LATE_ROWS, _LATE_COLUMNS, _WIDTH), dtype)

    def meetings(with_messages: bool) -> None:
        for _ in range(_MEETINGS):
            for _ in range(gemms):
                gemm()
            if with_messages:
                _begin(transport, MESSAGES[0]).finish()

    pairs = [
        (once_us(partial(meetings, False), group), once_us(partial(meetings, True), group)) for _ in range(_REPEATS)
    ]
    more = statistics.median(met - alone for alone, met in pairs) / _MEETINGS
    return statistics.median(alone for alone, _ in pairs) / _MEETINGS, max(0.0, more - message_us)


def _busy(
    begin: Callable[[], tuple[Callable[[], bool], Callable[[], object]]], dtype: torch.dtype, group: dist.ProcessGroup
) -> float:
    """How much longer something small takes while all ranks compute: its threads have to wait for a core.

    Args:
        begin: starts it; returns what says whether it is done, and what waits for it.
        dtype: of what is computed.
        group: whose ranks take part.
    """
    gemm = _gemm((ROWS[0], _LATE_COLUMNS, _WIDTH), dtype)

    def once(computing: bool) -> float:
        dist.barrier(group)
        start, (done, finish) = time.perf_counter(), begin()
        for _ in range(_MOST_GEMMS if computing else 0):  # what is never done is told of by `finish`
            if done():
                break
            gemm()
        if not computing:
            finish()
        took = (time.perf_counter() - start) * 1e6
        # A peer's part may not be done: it needs a core too.
        for _ in range(_FEW_GEMMS if computing else 0):
            gemm()
        if computing:
            finish()
        return took

    alone, beside = ([once(computing) for _ in range(_MESSAGES_BESIDE)] for computing in (False, True))
    return max(0.0, mean_over_ranks(statistics.fmean(beside) - statistics.median(alone), group))


def _contention(transport: Transport, dtype: torch.dtype, group: dist.ProcessGroup) -> dict[str, float]:
    """GEMMs alone, and beside messages both ways that land before the last of them ends, in turn."""
    a, out = torch.randn(_WIDTH, _WIDTH).to(dtype), torch.empty(_WIDTH, _WIDTH, dtype=dtype)
    weights = [torch.randn(_WIDTH, _WIDTH).to(dtype) for _ in range(4)]

    def gemms(messages: int, count: int) -> float:
        dist.barrier(group)
        p2p_works = [_begin(transport, _BESIDE) for _ in range(messages)]
        start = time.perf_counter()
        for number in range(count):
            torch.mm(a, weights[number % len(weights)], out=out)
        took = (time.perf_counter() - start) * 1e6
        for p2p_work in p2p_works:
            p2p_work.wait_all()
        slowest = torch.tensor(took, dtype=torch.float64)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group)
        return float(slowest.item())

    few = statistics.median(gemms(0, _FEW_GEMMS) for _ in range(3))
    count = min(_MOST_BESIDE, max(_FEW_GEMMS, round(_LONG_US / few * _FEW_GEMMS)))
    messages = max(1, int(0.9 * few / _FEW_GEMMS * count / _message(transport, _BESIDE, group)))
    pairs = [(gemms(0, count), gemms(messages, count)) for _ in range(_REPEATS)]
    alone = statistics.median(alone for alone, _ in pairs)
    lost = statistics.median(beside - alone for alone, beside in pairs)
    return {"gemm_alone_us": alone, "gemm_beside_us": alone + lost, "beside_bytes": messages * _BESIDE}


def main(folder: str, task: str, precision: str) -> None:
    """Runs one task on this rank."""
    dist.init_process_group("gloo")
    world = dist.group.WORLD
    assert world is not None
    dtype = DTYPES[precision]
    tasks: dict[str, Callable[[dist.ProcessGroup], dict[str, Any]]] = {
        "test": self_test,
        "calibrate": partial(measure, dtype=dtype),
        "beside": partial(beside, dtype=dtype),
    }
    result = tasks[task](world)
    Path(folder, f"rank{dist.get_rank()}.json").write_text(json.dumps(result))
    dist.barrier()
    close_transport(world)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
