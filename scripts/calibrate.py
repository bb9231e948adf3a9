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
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import yaml

from megatron_overlap.autotune.cost_model import TOUCHED, CostModel
from megatron_overlap.comm import Transport, destroy_process_groups, transport_of
from megatron_overlap.comm.transport import Transfer
from megatron_overlap.config.cluster import Elementwise, Precision, load_cluster_profile, profile_folder
from megatron_overlap.schedules import all_gather_plan
from megatron_overlap.tools.doctor.gemm_rate import DTYPES, default_precision, gemm_tflops
from megatron_overlap.tools.launch.netlab import Netlab
from megatron_overlap.tools.launch.ranks import run_workers

DEADLINE_S = 60.0
BASE = "netlab"
"""The profile with the figures that are not measured."""
ROWS = (32, 64, 128, 256, 512, 1024)
HIDDEN, FFN = 1024, 1408
LAYER = ((HIDDEN, HIDDEN), (HIDDEN, HIDDEN // 2), (2 * FFN, HIDDEN), (HIDDEN, FFN))
"""Columns and depth of the four GEMMs of a layer on one of two ranks."""
LAYER_PRODUCT = sum(columns * depth for columns, depth in LAYER)
"""Multiply-adds of the four GEMMs per row."""
MESSAGES = (1 << 10, 1 << 18, 1 << 20, 1 << 22)
"""Bytes."""
CHECK_GEMM, CHECK_MESSAGE = (384, 1536, 768), 3 << 20
HEADS = 4
ELEMENTWISE_OUTPUTS: dict[Elementwise, int] = {
    "rms_norm": ROWS[-1] * HIDDEN,
    "swiglu": ROWS[-1] * FFN,
    "scores": HEADS * ROWS[-1] ** 2,
}
"""Elements of the outputs of the operations that `_elementwise_us` times."""
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


@dataclass(frozen=True)
class Check:
    """A measurement that the profile does not use, and the time that the cost model computes for it."""

    what: str
    measured_us: float
    modelled_us: float

    @property
    def error(self) -> float:
        """Relative; positive where the modelled time is longer."""
        return self.modelled_us / self.measured_us - 1


def profile_tree(
    found: Mapping[str, Any], precision: Precision, source: str, line_gbit: float | None = None
) -> dict[str, Any]:
    """The content of a profile: measured figures, and the profile `netlab` for all others.

    Args:
        found: the result of `measure` on any rank.
        precision: type of the GEMMs.
        source: time and place of the measurement.
        line_gbit: rate of the line between hosts with one rank each; None: all ranks are on one host.
    """
    figure = partial(_figure, source=source)
    rates = {int(rows): 2.0 * int(rows) * LAYER_PRODUCT / us for rows, us in found["gemm_us"].items()}
    best = max(rates.values())
    peak = max(found["peak_tflops"], best / 1e6)
    latency, copy = fit_line({int(count): us for count, us in found["message_us"].items()})
    moved = found["collective_bytes"] * (found["ranks"] - 1) / found["ranks"]
    link = {
        "latency_us": figure(latency),
        "copy_gbps": figure(copy / 1e3),
        "collective_gbps": figure(_rate(moved, found["all_gather_us"], latency)),
        "reduce_scatter_gbps": figure(_rate(moved, found["reduce_scatter_us"], latency)),
        "all_reduce_gbps": figure(_rate(moved, found["all_reduce_us"], latency)),
    }
    where = f"{found['ranks']} ranks over loopback"
    if line_gbit is not None:
        link["line_gbit"] = figure(line_gbit)
        where = f"{found['ranks']} hosts on one machine, lines of {line_gbit:g} Gbit/s"
    moved_rate, lost = _lost_computation(found, copy)
    return {
        "base": str(profile_folder() / f"{BASE}.yaml"),
        "name": "calibrated",
        "description": f"{where}: {source}; other figures as {BASE}",
        "devices_per_node": found["ranks"] if line_gbit is None else 1,
        "device": {
            "peak_tflops": {key: figure(peak) for key in {"bf16", precision}},
            "gemm": {
                "efficiency": figure(min(1.0, best / 1e6 / peak)),
                "rows": [{"rows": rows, "rate": rate / best} for rows, rate in sorted(rates.items())],
                "source": source,
            },
            "memory_gbps": figure(found["memory_gbps"]),
            "elementwise": _elementwise(found["elementwise_us"], precision, source),
            "launch_us": figure(found["launch_us"]),
        },
        "inside" if line_gbit is None else "between": link,
        "contention": {
            "host_us_per_mb": figure(lost / moved_rate * 1e6),
            "busy_us": figure(found["busy_us"]),
            "late": _lateness(found["late_us"], source),
        },
    }


def fit_line(times_us: Mapping[int, float]) -> tuple[float, float]:
    """Latency in microseconds and bytes per microsecond: the line of least relative error through message times.

    A time longer than that of a larger message is replaced by it: the receiver was late.
    """
    times_us = {count: min(us for other, us in times_us.items() if other >= count) for count in times_us}
    weights = {count: 1 / us**2 for count, us in times_us.items()}
    total = sum(weights.values())
    mean_x = sum(weights[count] * count for count in times_us) / total
    mean_y = sum(weights[count] * us for count, us in times_us.items()) / total
    above = sum(weights[count] * (count - mean_x) * (us - mean_y) for count, us in times_us.items())
    slope = max(above / sum(weights[count] * (count - mean_x) ** 2 for count in times_us), 1e-9)
    return max(0.0, mean_y - slope * mean_x), 1 / slope


def write_profile(path: Path, tree: Mapping[str, Any]) -> None:
    """Write the whole profile or nothing.

    Raises:
        OSError: the file cannot be written.
    """
    new = path.with_name(f"{path.name}.new")
    new.write_text(yaml.safe_dump(dict(tree), sort_keys=False), encoding="utf-8")
    new.replace(path)


def checks(path: Path, found: Mapping[str, Any], precision: Precision) -> list[Check]:
    """The GEMM and the message that the profile at `path` was not made from."""
    model = CostModel(load_cluster_profile(str(path)), precision)
    message_us = model.message_us(CHECK_MESSAGE, model.link(found["ranks"]))
    return [
        Check("GEMM {} x {} x {}".format(*CHECK_GEMM), found["check"]["gemm"], model.gemm_us(*CHECK_GEMM)),
        Check(f"message of {CHECK_MESSAGE >> 20} MiB", found["check"]["message"], message_us),
    ]


def _figure(value: float, source: str) -> dict[str, Any]:
    return {"value": value, "source": source}


def _rate(moved: float, us: float, latency_us: float) -> float:
    """GB/s of a collective without its latency."""
    return moved / max(us - latency_us, 0.1 * us) / 1e3


def _elementwise(times_us: Mapping[str, Any], precision: Precision, source: str) -> dict[str, Any]:
    """All rates of the base profile, scaled by one factor: base time over measured time of the timed operations."""
    base = CostModel(load_cluster_profile(BASE), precision)
    modelled = sum(
        base.memory_us(moved * ELEMENTWISE_OUTPUTS[kind] * base.item_bytes, kind, backward=backward) - base.launch_us
        for kind in ELEMENTWISE_OUTPUTS
        for backward, moved in zip((False, True), TOUCHED[kind], strict=True)
    )
    factor = modelled / sum(sum(times) for times in times_us.values())
    rates = base.profile.device.elementwise.model_dump(exclude_none=True)
    return {
        kind: {key: rate * factor for key, rate in rate_of.items() if key != "source"} | {"source": source}
        for kind, rate_of in rates.items()
    }


def _lateness(points: list[tuple[float, float]], source: str) -> list[dict[str, Any]]:
    """Lateness by the time of computation before it, made monotone: noise must not give it a negative slope."""
    result, least = [], 0.0
    for computed_us, late_us in points:
        least = max(least, late_us)
        result.append({"computed_us": _figure(computed_us, source), "late_us": _figure(least, source)})
    return result


def _lost_computation(found: Mapping[str, Any], copy: float) -> tuple[float, float]:
    """Bytes per microsecond of messages in both directions, and the share of computation that is lost beside them."""
    lost_us = max(0.0, found["gemm_beside_us"] - found["gemm_alone_us"])
    return 2 * copy, lost_us * copy / found["beside_bytes"]


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
    found = run_ranks(args.ranks, precision)
    source = f"scripts/calibrate.py on {socket.gethostname()}, {time.strftime('%Y-%m-%d')}"
    write_profile(args.output, profile_tree(found, precision, source))
    print("not used for calibration: measured, modelled, error")
    for check in checks(args.output, found, precision):
        print(f"  {check.what}: {check.measured_us:.0f} us, {check.modelled_us:.0f} us, {check.error:+.1%}")
    print(f"{args.output}: for simulate --cluster {args.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
