"""Shared by the benchmarks: interleaved timing over all ranks, figures from it, and jobs on several hosts."""

from __future__ import annotations

import json
import os
import platform
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from megatron_overlap.tools.launch.netlab import Netlab
from megatron_overlap.tools.launch.ranks import run_workers

Run = Callable[[], object]


def in_turn(first: Mapping[str, Run], second: Mapping[str, Run]) -> dict[str, Run]:
    """Each variant of the first pass, then of the second, as in training; a variant of one pass runs alone."""

    def both(name: str) -> Run:
        runs = [passes[name] for passes in (first, second) if name in passes]

        def run() -> None:
            for each in runs:
                each()

        return run

    return {name: both(name) for name in {**second, **first}}


class Timings:
    """Wall times in ms of several variants. Each round runs all of them, in an order that rotates.

    One value for each round and variant: from a barrier to the end of the slowest rank. Ratios are of times of the same
    round: a change of the machine's speed that lasts longer cancels.
    """

    def __init__(self, variants: Mapping[str, Callable[[], object]], rounds: int, warmup: int) -> None:
        names = list(variants)
        self.rounds: dict[str, list[float]] = {name: [] for name in names}
        for number in range(-warmup, rounds):
            for name in names[number % len(names) :] + names[: number % len(names)]:
                dist.barrier()
                start = time.perf_counter()
                variants[name]()
                took = torch.tensor((time.perf_counter() - start) * 1e3, dtype=torch.float64)
                dist.all_reduce(took, op=dist.ReduceOp.MAX)
                if number >= 0:
                    self.rounds[name].append(took.item())

    def ms(self, name: str) -> float:
        """Median over rounds."""
        return median(self.rounds[name])

    def ratio(self, name: str, other: str) -> float:
        """Median over rounds of `name` / `other` in the same round."""
        return median(a / b for a, b in zip(self.rounds[name], self.rounds[other], strict=True))


def versions() -> dict[str, Any]:
    """Versions, kernel and processor."""
    processor = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo") as lines:
            processor = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    return {
        "megatron_overlap": version("megatron-overlap"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "kernel": platform.release(),
        "processor": processor,
        "cores": len(os.sched_getaffinity(0)),
    }


def run_job(script: str, argv: Sequence[str], hosts: int, gbps: float | None, timeout_s: float) -> dict[str, Any]:
    """Runs `script` with `--worker --json FILE` added on every host, over links of one rate or over loopback.

    Returns:
        The content of FILE, which rank 0 writes.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        options = [*argv, "--worker", "--json", str(out)]
        if gbps is None:
            run_workers(script, options, hosts, timeout_s=timeout_s)
        else:
            with Netlab(hosts, gbps) as lab:
                run_workers(script, options, hosts, lab=lab, timeout_s=timeout_s)
        result: dict[str, Any] = json.loads(out.read_text())
    return result
