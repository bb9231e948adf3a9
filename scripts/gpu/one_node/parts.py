"""The parts of node.py: what each rank does in the process of a part."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from one_gpu.shapes import MODELS, Shape, llama_layers, overlap_figures
from part_process import BAD_ROWS, is_bad
from torch.profiler import ProfilerActivity, profile

from megatron_overlap.ops.numerics_check import Subject, checked_linear
from one_node.methods import FAILURES, Collectives, Linear, Node, broken, open_method, text_of

GATE, SMS, DRY = "gate", "sms", "dry"
TIMED = {f"{model} m{m}": (model, m) for m in (8192, 4096) for model in MODELS}
"""Parts that time, with model and gathered rows; largest first."""
REPEATS, WARMUP = 30, 3
GATE_ROWS, GATE_FEATURES = 512, 1024
"""Rows of each rank, and features of the weight on each rank, of the first comparison."""
PASSES = "forward", "backward"
COMMUNICATES = re.compile(r"nccl|userbuffers|symm|multimem|barrier", re.IGNORECASE)
"""Names of kernels that only communicate."""
CYCLES_PER_US = 2000
"""At least the clock of current GPUs."""
Row = dict[str, Any]
Prepare = Callable[[], Callable[[], object]]
"""Does what is not timed, and returns what is."""


def run_part(options: argparse.Namespace) -> int:
    """Run one part on this rank. Rank 0 prints its rows."""
    if options.dry_run:
        dist.init_process_group("gloo")
    else:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    group = dist.group.WORLD
    assert group is not None
    node, bad = Node(group, options.dry_run), False
    part = {GATE: gate, SMS: count_sms}.get(options.part, time_layers)
    for row in part(node, options):
        bad |= is_bad(row)
        if node.rank == 0:
            print(json.dumps(row), flush=True)
    print(json.dumps({"rank": node.rank, "finished": True}), flush=True)
    node.host.barrier()
    return BAD_ROWS if bad and node.rank == 0 else 0


def gate(node: Node, options: argparse.Namespace) -> Iterator[Row]:
    """Open each method and compare both layers with the plain program."""
    m, features = (16 * node.size, 40) if node.dry else (GATE_ROWS * node.size, GATE_FEATURES)
    for index, method in enumerate(options.methods):
        if index < options.skip:
            continue
        yield {"begin": index, "method": method}
        linear = open_checked(method, node, options)
        if isinstance(linear, str):
            yield {"method": method, "left_out": linear}
            continue
        for op in ("ag", "rs"):
            yield {"method": method, **compare(node, linear, Shape(GATE, op, m, features, features, node.size))}
        if is_late(node, options):
            return


def time_layers(node: Node, options: argparse.Namespace) -> Iterator[Row]:
    """Compare and time every method at the shapes of one model and number of rows."""
    shapes = layers(options.part, node.size)
    linears: dict[str, Linear] = {}
    for method in options.methods:
        yield {"begin": options.skip, "method": method}
        linear = open_checked(method, node, options)
        if isinstance(linear, str):
            yield {"method": method, "left_out": linear}
        else:
            linears[method] = linear
    for index, shape in enumerate(shapes):
        if index < options.skip:
            continue
        if is_late(node, options):
            yield {"shape": shape.name, "left_out": "no time left"}
            continue
        checked: list[Row] = []
        for method, linear in linears.items():
            yield {"begin": index, "method": method, "shape": shape.name}
            checked.append({"method": method, **compare(node, linear, shape)})
        yield {"begin": index, "shape": shape.name}
        yield from checked
        right = {row["method"]: linears[row["method"]] for row in checked if not is_bad(row)}
        for name in PASSES:
            yield from timed_rows(node, shape, name, right)


def count_sms(node: Node, options: argparse.Namespace) -> Iterator[Row]:
    """Profile one call of each method."""
    shapes = layers(DRY if node.dry else SMS, node.size)
    for index, method in enumerate(options.methods):
        if index < options.skip or is_late(node, options):
            continue
        yield {"begin": index, "method": method}
        linear = open_checked(method, node, options)
        if isinstance(linear, str):
            yield {"method": method, "left_out": linear}
            continue
        for shape in shapes:
            for name in PASSES:
                prepare = passes(node, shape, {method: linear})[name][method]
                prepare()()
                yield {"method": method, "op": shape.op, "pass": name, "sms": comm_sms(kernels_of(node, prepare()))}


def open_checked(method: str, node: Node, options: argparse.Namespace) -> Linear | str:
    """The method, made wrong if that is asked for, or why it cannot run here."""
    linear = open_method(method, node)
    return broken(linear) if method == options.break_method and not isinstance(linear, str) else linear


def is_late(node: Node, options: argparse.Namespace) -> bool:
    """Whether a rank is past the deadline of the part; the same answer on all ranks."""
    return bool(node.first_text("late" if time.time() > options.until else ""))


def layers(part: str, ranks: int) -> list[Shape]:
    """The shapes of a part that times or profiles.

    Raises:
        ValueError: the shapes do not divide by the number of ranks.
    """
    if part == DRY:
        return [Shape("dry fc1", "ag", 16 * ranks, 40, 24, ranks), Shape("dry fc2", "rs", 16 * ranks, 24, 40, ranks)]
    if part == SMS:
        return llama_layers(*next(iter(TIMED.values())), ranks)[:2]
    return llama_layers(*TIMED[part], ranks)


def operands(node: Node, shape: Shape) -> tuple[torch.Tensor, ...]:
    """Input, weight and output gradient of this rank."""
    generator = torch.Generator(node.device).manual_seed(1 + node.rank)
    own = shape.m // node.size
    rows = (own, shape.m) if shape.op == "ag" else (shape.m, own)
    sizes = (rows[0], shape.k), (shape.n, shape.k), (rows[1], shape.n)
    x, w, dy = (torch.randn(size, generator=generator, device=node.device).to(node.dtype) for size in sizes)
    return x, w, dy


def compare(node: Node, linear: Linear, shape: Shape) -> Row:
    """Largest error of each result on any rank, as a share of its bound (`ops.numerics_check`)."""
    x, w, dy = operands(node, shape)
    x, w = x.requires_grad_(), w.requires_grad_()
    shares: dict[str, float] = {}
    op = {"ag": "ag_gemm", "rs": "gemm_rs"}[shape.op]

    def judge(found: Mapping[str, float]) -> bool:
        shares.update(found)
        return False

    subject, problem = Subject(op, node.group, None, judge), ""
    try:
        checked_linear(lambda x, w, bias, main_grad: linear(shape.op, x, w), x, w, None, subject).backward(dy)
        if not node.dry:
            torch.cuda.synchronize()
    except FAILURES as error:
        problem = text_of(error)
    row: Row = {"op": shape.op, "shape": shape.name}
    if problem := node.first_text(problem):
        return row | {"failed": problem}
    worst = map(max, zip(*node.host.all_gather_floats(list(shares.values())), strict=True))
    row["shares"] = {name: share if math.isfinite(share) else "inf" for name, share in zip(shares, worst, strict=True)}
    return row | {"right": all(share != "inf" and share <= 1 for share in row["shares"].values())}


def passes(node: Node, shape: Shape, linears: dict[str, Linear]) -> dict[str, dict[str, Prepare]]:
    """By pass: what is timed for each method, the GEMMs alone, the collectives alone, and both together."""
    x, w, dy = operands(node, shape)
    gathers, collectives = shape.op == "ag", Collectives(node.group)
    wide, work = collectives.gather(x if gathers else dy)
    work.wait()

    def fresh(linear: Linear) -> torch.Tensor:
        return linear(shape.op, x.detach().requires_grad_(), w.detach().requires_grad_())

    def backward(linear: Linear) -> Callable[[], object]:
        y = fresh(linear)
        return lambda: y.backward(dy)

    def gemms(name: str) -> list[Any]:
        if name == "forward":
            return [torch.mm(wide if gathers else x, w.t())]
        d, rows = (dy, wide) if gathers else (wide, x)
        return [torch.mm(d, w), torch.mm(d.t(), rows)]

    def started(name: str) -> list[Callable[[], Any]]:
        gather, scatter = lambda: collectives.gather(x if gathers else dy), lambda: collectives.scatter(wide)
        if name == "forward":
            return [gather if gathers else scatter]
        return [gather, scatter] if gathers else [gather]

    def together(name: str) -> None:
        works = [start() for start in started(name)]
        results = gemms(name)
        for _, work in works:
            work.wait()
        del results

    def alone(name: str) -> None:
        for start in started(name):
            start()[1].wait()

    found: dict[str, dict[str, Prepare]] = {}
    for name in PASSES:
        found[name] = {
            "gemm": lambda name=name: lambda: gemms(name),  # type: ignore[misc]
            "comm": lambda name=name: lambda: alone(name),  # type: ignore[misc]
            "together": lambda name=name: lambda: together(name),  # type: ignore[misc]
        }
    for method, linear in linears.items():
        found["forward"][method] = lambda linear=linear: lambda: fresh(linear)  # type: ignore[misc]
        found["backward"][method] = lambda linear=linear: backward(linear)  # type: ignore[misc]
    return found


def timed_rows(node: Node, shape: Shape, name: str, linears: dict[str, Linear]) -> Iterator[Row]:
    """Times of one pass: a row of what bounds it, and a row for each method."""
    runs = passes(node, shape, linears)[name]
    timer, order = Timer(node), list(runs)
    times: dict[str, list[tuple[float, float]]] = {run: [] for run in runs}
    repeats, warmup = (1, 1) if node.dry else (REPEATS, WARMUP)
    for number in range(-warmup, repeats):
        first = number % len(order)
        for run in order[first:] + order[:first]:
            took = timer(run, runs[run])
            if number >= 0:
                times[run].append(took)
    # Of each call the slowest rank.
    flat = node.host.all_gather_floats([value for run in order for took in times[run] for value in took])
    slowest = [max(values) for values in zip(*flat, strict=True)]
    ms, host_us = {}, {}
    for number, run in enumerate(order):
        mine = slowest[2 * repeats * number : 2 * repeats * (number + 1)]
        ms[run], host_us[run] = median(mine[::2]), median(mine[1::2])
    gemm, comm, ranks = ms["gemm"], ms["comm"], node.size
    row: Row = {"shape": shape.name, "op": shape.op, "mnk": [shape.m, shape.n, shape.k], "pass": name}
    bounds = {"gemm_ms": gemm, "comm_ms": comm, "together_ms": ms["together"], "roof_ms": max(gemm, comm)}
    if name == "forward":
        bounds["ideal_ms"] = gemm / ranks + max(gemm * (ranks - 1) / ranks, comm)
    yield row | bounds
    for method in linears:
        figures = overlap_figures(gemm, comm, ms[method])
        yield row | {"method": method, "ms": ms[method], "host_us": host_us[method], **figures}


class Timer:
    """Milliseconds on the device, and microseconds in which the host enqueues, of one call."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._one = torch.zeros(1, device=node.device)
        self._host_us: dict[str, float] = {}

    def __call__(self, name: str, prepare: Prepare) -> tuple[float, float]:
        run = prepare()
        if self._node.dry:
            self._node.host.barrier()
            begun = time.perf_counter()
            run()
            took = time.perf_counter() - begun
            return took * 1e3, took * 1e6
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        # The devices start together, and the host is ahead of its device, as in training.
        dist.all_reduce(self._one, group=self._node.group)
        torch.cuda._sleep(int(2 * CYCLES_PER_US * min(self._host_us.get(name, 0.0), 20_000.0)))
        start.record()
        begun = time.perf_counter()
        run()
        self._host_us[name] = host_us = (time.perf_counter() - begun) * 1e6
        stop.record()
        stop.synchronize()
        return start.elapsed_time(stop), host_us


def kernels_of(node: Node, run: Callable[[], object]) -> list[Row]:
    """Events of a profile of one call."""
    with profile(activities=[ProfilerActivity.CPU if node.dry else ProfilerActivity.CUDA]) as profiler:
        run()
        if not node.dry:
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        events: list[Row] = json.loads(file.read_text())["traceEvents"]
    return events


def comm_sms(events: Sequence[Row]) -> int | str:
    """Blocks of the largest kernel that only communicates. Each block occupies at most one SM."""
    kernels = [event for event in events if event.get("cat") == "kernel"]
    if not kernels:
        return "unknown"
    blocks = [math.prod(event["args"]["grid"]) for event in kernels if COMMUNICATES.search(event["name"])]
    return max(blocks, default=0)
