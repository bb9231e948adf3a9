"""Measures a cluster profile of this machine for `megatron-overlap simulate`, and the error of its cost model.

    python scripts/calibrate.py [--output calibrated.yaml] [--ranks 2] [--precision fp32|bf16|fp16]

The ranks run together over loopback: GEMMs of the processor, messages and collectives of gloo, also on a machine with
GPUs. The figures that are not measured are those of the profile `netlab`. `step_times.py` calibrates with it too.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron_overlap.comm import Transport, destroy_process_groups, transport_of
from megatron_overlap.comm.transport import Transfer
from megatron_overlap.schedules import all_gather_plan
from megatron_overlap.tools.gemm_rate import DTYPES, default_precision, gemm_tflops
from megatron_overlap.tools.launch.netlab import Netlab
from megatron_overlap.tools.launch.processes import RunError, run_workers

sys.path.insert(0, str(Path(__file__).parent))  # for an import as `scripts.calibrate`
from measured_profile import (
    CHECK_GEMM,
    CHECK_MESSAGE,
    FFN,
    HEADS,
    HIDDEN,
    LAYER,
    LAYER_PRODUCT,
    MESSAGES,
    ROWS,
    checks,
    profile_tree,
    write_profile,
)

DEADLINE_S = 60.0
_COLLECTIVE_BYTES, _COPY_BYTES, _CONTENTION_BYTES = 2 << 20, 8 << 20, 1 << 18
_EVICT_BYTES = 512 << 20
"""More than any cache: a training step uses a weight once in each direction."""
_LATE_ROWS, _LATE_COLUMNS, _LATE_AFTER_US, _LATE_FACTOR, _LATE_MESSAGES = 256, 2048, 1e4, 4, 4
_REPEATS, _MIN_REPEATS, _ENOUGH_S, _OUTLIER = 9, 4, 0.25, 2.0
_TOGETHER_REPEATS, _LAUNCHES, _BUSY_REPEATS = 11, 100, 20
_APART_US = 1e3
_FEW_GEMMS, _MAX_GEMMS, _MAX_CONTENTION_GEMMS, _CONTENTION_US = 8, 10_000, 40, 5e4

Group = dist.ProcessGroup
Run = Callable[[], object]


def measure(group: Group, dtype: torch.dtype) -> dict[str, Any]:
    """The figures that `profile_tree` needs: times in microseconds, on all ranks at once."""
    transport, size = transport_of(group), dist.get_world_size(group)
    whole = torch.empty(_COLLECTIVE_BYTES, dtype=torch.uint8)
    shard = torch.empty(_COLLECTIVE_BYTES // size, dtype=torch.uint8)
    # Layers scatter sums in their own type. Data parallelism reduces fp32 gradients.
    partial_sums, gradients = (
        torch.zeros(_COLLECTIVE_BYTES // dtype.itemsize, dtype=dtype),
        torch.zeros(_COLLECTIVE_BYTES // 4),
    )
    scattered = partial_sums[: len(partial_sums) // size].clone()
    source, copied = (torch.zeros(_COPY_BYTES, dtype=torch.uint8) for _ in range(2))
    evicted, one = torch.zeros(_EVICT_BYTES // 4), torch.zeros(1)

    def cold_us(run: Run) -> float:
        return alone_us(run, group, evicted.sum)

    gemm_us = {rows: sum(cold_us(_gemm(rows, *shape, dtype)) for shape in LAYER) for rows in ROWS}
    message_us = {count: _message_us(transport, count, group) for count in MESSAGES}
    late_counts = late_gemms(gemm_us[_LATE_ROWS] * _LATE_COLUMNS * HIDDEN / LAYER_PRODUCT)
    return {
        "ranks": size,
        "peak_tflops": max(gemm_tflops(rows, "cpu", dtype) for rows in (512, 1024)),
        "gemm_us": gemm_us,
        "message_us": message_us,
        "late_us": [_late_us(transport, count, message_us[MESSAGES[0]], dtype, group) for count in late_counts],
        "busy_us": _busy_us(transport, dtype, group),
        "all_gather_us": apart_us(lambda: dist.all_gather_into_tensor(whole, shard, group=group), group),
        "reduce_scatter_us": apart_us(lambda: dist.reduce_scatter_tensor(scattered, partial_sums, group=group), group),
        "all_reduce_us": apart_us(lambda: dist.all_reduce(gradients, group=group), group),
        "collective_bytes": _COLLECTIVE_BYTES,
        "memory_gbps": 2 * _COPY_BYTES / alone_us(lambda: copied.copy_(source), group) / 1e3,
        "launch_us": alone_us(lambda: [one.add_(1) for _ in range(_LAUNCHES)], group) / _LAUNCHES,
        **_contention(transport, dtype, group),
        "elementwise_us": _elementwise_us(cold_us, dtype),
        "check": {
            "gemm": cold_us(_gemm(*CHECK_GEMM, dtype)),
            "message": _message_us(transport, CHECK_MESSAGE, group),
        },
    }


def alone_us(run: Run, group: Group, before: Run = lambda: None) -> float:
    """Mean time of a computation over ranks and repeats; `before` runs before each repeat and is not timed.

    A training step is a sum of such times, so the mean counts. Repeats above twice the median are left out.
    """
    dist.barrier(group)
    times: list[float] = []
    begin = time.perf_counter()
    for number in range(_REPEATS + 2):
        if len(times) >= _MIN_REPEATS and time.perf_counter() - begin > _ENOUGH_S:
            break
        before()
        start = time.perf_counter()
        run()
        if number >= 2:
            times.append((time.perf_counter() - start) * 1e6)
    limit = _OUTLIER * statistics.median(times)
    return _mean_over_ranks(statistics.fmean(each for each in times if each <= limit), group)


def together_us(run: Run, group: Group) -> float:
    """Time of communication that all ranks begin together: the lower quartile over repeats.

    The upper quartiles contain the lateness of ranks, which `_late_us` measures.
    """
    times = [_once_us(run, group) for _ in range(_TOGETHER_REPEATS + 2)]
    return statistics.quantiles(times[2:], n=4)[0]


def apart_us(run: Run, group: Group) -> float:
    """Median time of communication on the rank that begins last, as in a training step; each rank in turn is last.

    In gloo, a rank announces its receive buffer over the connection that carries its data. The announcement of the last
    rank queues behind the data that it receives: an all-gather of two ranks takes 1.5 times as long.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    times = []
    for number in range(_TOGETHER_REPEATS + 2):
        last = number % size == rank
        dist.barrier(group)
        start = time.perf_counter()
        while last and (time.perf_counter() - start) * 1e6 < _APART_US:
            pass
        run()
        elapsed_us = (time.perf_counter() - start) * 1e6 - _APART_US
        times.append(_mean_over_ranks(size * elapsed_us if last else 0.0, group))  # the time of the last rank
    return statistics.median(times[2:])


def late_gemms(gemm_us: float) -> tuple[int, int]:
    """Numbers of GEMMs that take about 10 and 40 ms."""
    count = max(1, round(_LATE_AFTER_US / gemm_us))
    return count, _LATE_FACTOR * count


def _gemm(rows: int, columns: int, depth: int, dtype: torch.dtype) -> Run:
    x, w, y = (torch.randn(*shape).to(dtype) for shape in ((rows, depth), (columns, depth), (rows, columns)))
    return lambda: torch.mm(x, w.t(), out=y)


def _begin(transport: Transport, count: int) -> Any:
    messages = all_gather_plan(transport.size, transport.rank).messages[:1]
    send, recv = torch.empty(count, dtype=torch.uint8), torch.empty(count, dtype=torch.uint8)
    return transport.begin([Transfer(message, send, recv) for message in messages], "doctor")


def _message_us(transport: Transport, count: int, group: Group) -> float:
    return together_us(lambda: _begin(transport, count).wait_all(), group)


def _late_us(
    transport: Transport, gemms: int, message_us: float, dtype: torch.dtype, group: Group
) -> tuple[float, float]:
    """Time of some GEMMs, and the extra time of a small message after them compared with one after a barrier."""
    gemm = _gemm(_LATE_ROWS, _LATE_COLUMNS, HIDDEN, dtype)

    def rounds(with_messages: bool) -> None:
        for _ in range(_LATE_MESSAGES):
            for _ in range(gemms):
                gemm()
            if with_messages:
                _begin(transport, MESSAGES[0]).wait_all()

    pairs = [(_once_us(partial(rounds, False), group), _once_us(partial(rounds, True), group)) for _ in range(_REPEATS)]
    extra = statistics.median(messages - alone for alone, messages in pairs) / _LATE_MESSAGES
    return statistics.median(alone for alone, _ in pairs) / _LATE_MESSAGES, max(0.0, extra - message_us)


def _busy_us(transport: Transport, dtype: torch.dtype, group: Group) -> float:
    """Extra time of a small message while all ranks compute: the threads of the message wait for a core."""
    gemm = _gemm(ROWS[0], _LATE_COLUMNS, HIDDEN, dtype)

    def message_us(computing: bool) -> float:
        dist.barrier(group)
        start, work = time.perf_counter(), _begin(transport, MESSAGES[0])
        for _ in range(_MAX_GEMMS if computing else 0):  # if it never completes, `wait_all` raises the error
            if work.is_completed(0):
                break
            gemm()
        if not computing:
            work.wait_all()
        elapsed_us = (time.perf_counter() - start) * 1e6
        if computing:
            for _ in range(_FEW_GEMMS):  # a peer may still wait for its message: this rank stays busy
                gemm()
            work.wait_all()
        return elapsed_us

    alone, beside = ([message_us(computing) for _ in range(_BUSY_REPEATS)] for computing in (False, True))
    return max(0.0, _mean_over_ranks(statistics.fmean(beside) - statistics.median(alone), group))


def _contention(transport: Transport, dtype: torch.dtype, group: Group) -> dict[str, float]:
    """Time of GEMMs alone, and beside messages in both directions that complete before the last GEMM ends."""
    a, out = torch.randn(HIDDEN, HIDDEN).to(dtype), torch.empty(HIDDEN, HIDDEN, dtype=dtype)
    weights = [torch.randn(HIDDEN, HIDDEN).to(dtype) for _ in range(4)]

    def gemms_us(messages: int, count: int) -> float:
        dist.barrier(group)
        works = [_begin(transport, _CONTENTION_BYTES) for _ in range(messages)]
        start = time.perf_counter()
        for number in range(count):
            torch.mm(a, weights[number % len(weights)], out=out)
        elapsed_us = (time.perf_counter() - start) * 1e6
        for work in works:
            work.wait_all()
        slowest = torch.tensor(elapsed_us, dtype=torch.float64)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group)
        return float(slowest.item())

    gemm_us = statistics.median(gemms_us(0, _FEW_GEMMS) for _ in range(3)) / _FEW_GEMMS
    count = min(_MAX_CONTENTION_GEMMS, max(_FEW_GEMMS, round(_CONTENTION_US / gemm_us)))
    messages = max(1, int(0.9 * gemm_us * count / _message_us(transport, _CONTENTION_BYTES, group)))
    pairs = [(gemms_us(0, count), gemms_us(messages, count)) for _ in range(_REPEATS)]
    alone = statistics.median(alone for alone, _ in pairs)
    lost = statistics.median(beside - alone for alone, beside in pairs)
    return {"gemm_alone_us": alone, "gemm_beside_us": alone + lost, "beside_bytes": messages * _CONTENTION_BYTES}


def _elementwise_us(cold_us: Callable[[Run], float], dtype: torch.dtype) -> dict[str, tuple[float, float]]:
    """Forward and backward time of three operations between GEMMs, on inputs of `ELEMENTWISE_OUTPUTS` outputs."""

    def swiglu(x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * (up + 0.0)

    def scores(x: torch.Tensor) -> torch.Tensor:
        mask = torch.triu(torch.ones(ROWS[-1], ROWS[-1]), diagonal=1).bool()
        return torch.softmax(x.masked_fill(mask, -10000.0), dim=-1)

    weight = torch.ones(HIDDEN).to(dtype)
    operations: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], tuple[int, ...]]] = {
        "rms_norm": (lambda x: F.rms_norm(x, (HIDDEN,), weight, 1e-5), (ROWS[-1], HIDDEN)),
        "swiglu": (swiglu, (ROWS[-1], 2 * FFN)),
        "scores": (scores, (HEADS, ROWS[-1], ROWS[-1])),
    }
    found = {}
    for kind, (run, shape) in operations.items():
        x = torch.randn(*shape).to(dtype).requires_grad_()
        forward_us = cold_us(partial(run, x))
        out = run(x)
        backward = partial(torch.autograd.grad, out, x, torch.randn_like(out), retain_graph=True)
        found[kind] = (forward_us, cold_us(backward))
    return found


def _once_us(run: Run, group: Group) -> float:
    dist.barrier(group)
    start = time.perf_counter()
    run()
    return _mean_over_ranks((time.perf_counter() - start) * 1e6, group)


def _mean_over_ranks(us: float, group: Group) -> float:
    total = torch.tensor(us, dtype=torch.float64)
    dist.all_reduce(total, group=group)
    return float(total.item()) / dist.get_world_size(group)


def run_ranks(ranks: int, precision: str, lab: Netlab | None = None, timeout_s: float = DEADLINE_S) -> dict[str, Any]:
    """The figures of rank 0 of `ranks` ranks over loopback, or on the hosts of a lab."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "found.json")
        run_workers(__file__, ["--worker", str(out), "--precision", precision], ranks, lab=lab, timeout_s=timeout_s)
        found: dict[str, Any] = json.loads(out.read_text())
        return found


def _rank(out: Path, precision: str) -> None:
    dist.init_process_group("gloo")
    world = dist.group.WORLD
    assert world is not None
    result = measure(world, DTYPES[precision])
    if dist.get_rank() == 0:
        out.write_text(json.dumps(result))
    destroy_process_groups()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("calibrated.yaml"))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--precision", choices=tuple(DTYPES), default=None)
    parser.add_argument("--worker", type=Path, default=None, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    precision = args.precision or default_precision()
    if args.worker is not None:
        _rank(args.worker, precision)
        return 0
    if args.ranks < 2:
        parser.error(f"--ranks: {args.ranks}: give 2 or more")
    try:  # a path that cannot be written fails before the measurement
        with tempfile.NamedTemporaryFile(dir=args.output.parent):
            fails = "is a folder" if args.output.is_dir() else None
    except OSError as error:
        fails = error.strerror
    if fails is not None:
        parser.error(f"--output: {args.output}: {fails}; give a path that can be written")
    try:
        found = run_ranks(args.ranks, precision)
    except RunError as error:
        print(f"calibrate: {error}", file=sys.stderr)
        return 1
    source = f"scripts/calibrate.py on {socket.gethostname()}, {time.strftime('%Y-%m-%d')}"
    write_profile(args.output, profile_tree(found, precision, source))
    print("not used for calibration: measured, modelled, error")
    for check in checks(args.output, found, precision):
        print(f"  {check.what}: {check.measured_us:.0f} us, {check.modelled_us:.0f} us, {check.error:+.1%}")
    print(f"{args.output}: for simulate --cluster {args.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
