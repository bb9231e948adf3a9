"""Shared by the benchmarks: interleaved timing over all ranks, figures from it, and jobs on several hosts."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
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
from megatron_overlap.tools.launch.processes import run_workers

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for `tests.helpers`

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


def link_parser(doc: str | None, ratios: str = "", *, rounds: int = 15, warmup: int = 3) -> argparse.ArgumentParser:
    """The options of every benchmark over links with a limited rate: hosts, rates, rounds and files.

    Args:
        doc: of the script.
        ratios: which times `--ratios` compares; empty: the script has no such option.
        rounds, warmup: defaults.
    """
    parser = argparse.ArgumentParser(description=doc.split("\n")[0] if doc else None)
    parser.add_argument("--hosts", type=int, default=2, help="ranks, one a host")
    parser.add_argument("--gbps", type=float, nargs="+", default=[1.0], help="rate of each host's link, Gbit/s")
    if ratios:
        parser.add_argument("--ratios", type=float, nargs="+", help=f"{ratios}; sets the rates")
    parser.add_argument("--loopback", action="store_true", help="no hosts and no rate: a check, not a measurement")
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--warmup", type=int, default=warmup)
    parser.add_argument("--timeout", type=float, default=900, help="seconds for one rate")
    parser.add_argument("--json", help="file for the figures")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--probe", action="store_true", help=argparse.SUPPRESS)
    return parser


def run_rates(
    script: str, args: argparse.Namespace, rates: Sequence[float | None], print_row: Callable[[dict[str, Any]], None]
) -> None:
    """Runs `script` at each rate, prints its rows, and writes those so far to the file of `--json`."""
    rows: list[dict[str, Any]] = []
    for gbps in rates:
        for row in run_job(script, sys.argv[1:], args.hosts, gbps, args.timeout)["rows"]:
            rows.append({**row, "gbps": gbps})
            print_row(rows[-1])
        write_rows(args, rows)


def write_rows(args: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    """Writes rows with link, versions and command to the file of `--json`."""
    if args.json:
        link = {"hosts": args.hosts, "kind": "loopback" if args.loopback else "netlab"}
        text = json.dumps({"rows": rows, "link": link, "versions": versions(), "command": sys.argv}, indent=1)
        Path(args.json).write_text(text + "\n")


def rates_for(moved_bytes: float, alone_ms: float, ratios: Sequence[float]) -> list[float | None]:
    """The rates in Gbit/s at which `moved_bytes` of a rank take `ratio` times `alone_ms`."""
    return [round(moved_bytes * 8 / (ratio * alone_ms * 1e6), 3) for ratio in ratios]


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
