"""Times `method: auto` against every fixed method, over shapes and link rates: does it select well?

    python scripts/bench/autotune.py --json autotune.json

Two hosts, one rank a host, one thread a rank. Megatron's layers run forward and backward on the stock path, by p2p with
each number of chunks, and autotuned after the selection. All methods run in each round in random order, two calls in a
row, of which the second is timed: the first finds threads and caches as another method left them. Successive times are
correlated, so more calls in a row would add little.

A ratio is the Hodges-Lehmann estimate of the ratios of the rounds, with its 95 % interval. The best of many noisy times
is biased, so the odd rounds name the best fixed method for the even rounds, and the other way round. The stock path
runs under two names; the ratio of the two is the control. A point that does not clearly meet the criteria is timed
longer, up to 16 times as long, without methods that are surely more than 3 % slower than the best. A point below the
criteria after that is timed up to 64 times as long. All its rounds count. Points that the file already has are skipped.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import random
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import median
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
from harness import versions

from megatron_overlap.schedules.heuristics import default_chunks
from megatron_overlap.tools.launch.netlab import Netlab
from megatron_overlap.tools.launch.processes import run_workers

HOSTS = 2
SCRIPT = str(Path(__file__).resolve())
BEST, STOCK = 0.97, 0.98
"""Acceptance criteria: fractions of the speed of the best fixed method, and of the stock path."""

CHUNKS = (1, 2, 4, 8)
CONTROL = "stock again"
_POINT = "POINT "
_ALWAYS = ("auto", "stock", CONTROL)
_DOUBLED, _DOUBLED_BELOW = 4, 6
_MOST_CALLS = 1500
OPS = ("ag_gemm", "gemm_rs")
# Rate of the links in Gbit/s, depth of the GEMM and its width over all ranks: GEMM : communication from 1:16 to 16:1.
LINKS = ((0.25, 512, 1024), (1.0, 512, 1024), (4.0, 512, 4096), (8.0, 512, 16384), (8.0, 512, 65536))
ROWS = (8, 32, 128, 256, 512, 1024, 2048)
_MOST_NUMBERS = 2**25
"""Elements of a layer's output over all ranks: autotuning a larger one takes minutes."""


def main() -> None:
    args = parse()
    if args.worker:
        work(args)
        return
    file = Path(args.json)
    points: list[dict[str, Any]] = json.loads(file.read_text())["points"] if file.exists() else []
    for gbps, k, f in [tuple(map(float, link.split(","))) for link in args.links] if args.links else LINKS:
        have = {
            (point["op"], point["rows"]) for point in points if (point["gbps"], point["k"], point["f"]) == (gbps, k, f)
        }
        all_rows = [rows for rows in args.rows if rows * f <= _MOST_NUMBERS]
        wanted = [f"{op},{rows}" for rows, op in itertools.product(all_rows, OPS) if (op, rows) not in have]
        if not wanted:
            continue
        options = ["--shape", str(int(k)), str(int(f)), "--points", *wanted, "--seconds", str(args.seconds)]
        layer = {"gbps": gbps, "k": int(k), "f": int(f)}

        def keep(rank: int, line: str, layer: dict[str, Any] = layer) -> None:
            if rank == 0 and line.startswith(_POINT):
                points.append(layer | json.loads(line.removeprefix(_POINT)))
                show(points[-1])
                text = {"summary": summary(points), "points": points, "versions": versions(), "command": sys.argv}
                file.write_text(json.dumps(text, indent=1) + "\n")

        with Netlab(HOSTS, gbps) as lab:
            run_workers(SCRIPT, [*options, "--worker"], HOSTS, lab=lab, timeout_s=2400, on_line=keep)
    found = summary(points)
    print(json.dumps(found, indent=1))
    sys.exit(0 if found["below_best"] == found["below_stock"] == 0 else 1)


def summary(points: list[dict[str, Any]]) -> dict[str, Any]:
    """The acceptance criteria over all points."""
    wrong = [p for p in points if p["times_ms"][p["selected"]] > p["times_ms"][p["best"]] / BEST]
    shares = sorted(p["gemm_ms"] / p["comm_ms"] for p in points)
    return {
        "points": len(points),
        "gemm_over_comm": [shares[0], shares[-1]],
        "worst_of_best": min(p["of_best"] for p in points),
        "worst_of_stock": min(p["of_stock"] for p in points),
        "median_of_best": median(p["of_best"] for p in points),
        "median_of_stock": median(p["of_stock"] for p in points),
        "best_of_stock": max(p["of_stock"] for p in points),
        "below_best": sum(p["of_best"] < BEST for p in points),
        "surely_below_best": sum(p["of_best_high"] < BEST for p in points),
        "below_stock": sum(p["of_stock"] < STOCK for p in points),
        "surely_below_stock": sum(p["of_stock_high"] < STOCK for p in points),
        "control_below_stock": sum(p["of_control"] < STOCK for p in points),
        "control_surely_below_stock": sum(p["of_control_high"] < STOCK for p in points),
        "worst_control": min(p["of_control"] for p in points),
        "median_control": median(p["of_control"] for p in points),
        "same_code": [sum(p["selected"] == "stock" for p in points), *_spread(points)],
        "wrong_selections": len(wrong),
        "surely_wrong": sum(p["selected_of_best_high"] < BEST for p in points),
        "wrong_selection_rate": len(wrong) / len(points),
    }


def _spread(points: list[dict[str, Any]]) -> list[float]:
    """The least, median and largest ratio to the stock path where that was selected."""
    same = [p["of_stock"] for p in points if p["selected"] == "stock"]
    return [min(same), median(same), max(same)] if same else []


def interval(ratios: list[float]) -> tuple[float, float, float]:
    """The Hodges-Lehmann estimate of the ratios on logarithms, and its 95 % interval."""
    logs = torch.tensor(ratios, dtype=torch.float64).log().sort().values
    n = len(ratios)
    pairs = n * (n + 1) // 2
    # From Wilcoxon's signed ranks.
    skip = max(0, int(pairs / 2 - 1.96 * math.sqrt(pairs * (2 * n + 1) / 12)))

    def mean_of_pairs(rank: int) -> float:
        """The mean of two, or of one with itself, that has so many below it; found by bisection, for they are many."""
        low, high = logs[0].item(), logs[-1].item()
        for _ in range(50):
            middle = (low + high) / 2
            ordered = torch.searchsorted(logs, 2 * middle - logs, right=True).sum()
            alone = torch.searchsorted(logs, middle, right=True)
            if (ordered + alone) // 2 > rank:
                high = middle
            else:
                low = middle
        return math.exp(high)

    return mean_of_pairs((pairs - 1) // 2), mean_of_pairs(skip), mean_of_pairs(pairs - 1 - skip)


def against_best(rounds: dict[str, list[float]], method: str = "auto") -> list[float]:
    """Ratios of the best fixed method to `method`; each half of the rounds names the best for the other half."""
    ratios: list[float] = []
    whole = len(rounds["auto"])
    for half in (0, 1):
        fixed = {
            name: median(values[half::2])
            for name, values in rounds.items()
            if name not in ("auto", CONTROL) and len(values) == whole
        }
        best = min(fixed, key=lambda name: fixed[name])
        ratios += [a / b for a, b in zip(rounds[best][1 - half :: 2], rounds[method][1 - half :: 2], strict=True)]
    return ratios


def show(p: dict[str, Any]) -> None:
    times = "  ".join(f"{name} {ms:.2f}" for name, ms in p["times_ms"].items())
    print(
        f"{p['op']:8} {p['rows']:5} rows  {p['gbps']:g} Gbit/s {p['k']}x{p['f']}  gemm:comm "
        f"{p['gemm_ms'] / p['comm_ms']:.2f}  {times} ms  selected {p['selected']}  "
        f"of best {p['of_best']:.3f} ({p['of_best_low']:.3f}..{p['of_best_high']:.3f})  "
        f"of stock {p['of_stock']:.3f} ({p['of_stock_low']:.3f}..{p['of_stock_high']:.3f})",
        flush=True,
    )


def work(args: argparse.Namespace) -> None:
    """One rank: every shape at one rate."""
    from megatron_overlap.adapters import cpu

    cpu.install()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())
    model_parallel_cuda_manual_seed(1)
    for text in args.points:
        op, rows = text.split(",")
        print(_POINT + json.dumps(Point(op, int(rows), *args.shape).measure(args.seconds)), flush=True)
    dist.barrier()
    # The threads of the transports are daemons; the process does not wait for them.
    sys.stdout.flush()
    os._exit(0)


class Point:
    """One layer on one rank, with every method to run it."""

    def __init__(self, op: str, rows: int, k: int, f: int) -> None:
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
        from megatron.core.transformer.transformer_config import TransformerConfig

        self.op, self.rows = op, rows
        self._order = random.Random(rows)  # the same on all ranks
        self.group = parallel_state.get_tensor_model_parallel_group()
        size = self.group.size()
        config = TransformerConfig(
            num_layers=1,
            hidden_size=512,
            num_attention_heads=4,
            tensor_model_parallel_size=size,
            sequence_parallel=True,
            use_cpu_initialization=True,
            params_dtype=torch.bfloat16,
        )
        common: dict[str, Any] = {"config": config, "init_method": torch.nn.init.normal_, "bias": False}
        common |= {"skip_bias_add": False, "tp_group": self.group}
        self.column = op == "ag_gemm"
        if self.column:
            self.layer = ColumnParallelLinear(k, f, gather_output=False, **common)
            shapes = (rows // size, k), (rows, f // size)
        else:
            # It scatters rows of width k, as the column-parallel layer gathers them.
            self.layer = RowParallelLinear(f, k, input_is_parallel=True, **common)
            shapes = (rows, f // size), (rows // size, k)
        self.x, self.dy = (torch.randn(n, 1, width).to(torch.bfloat16) for n, width in shapes)
        self.full = torch.randn(rows, k).to(torch.bfloat16)

    def _forwards(self) -> dict[str, Any]:
        """The method of the layer's class for each way to run it; the original for the stock path."""
        from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

        from megatron_overlap import OverlapConfig
        from megatron_overlap.adapters.tensor_parallel.dispatch import LinearAdapter
        from megatron_overlap.adapters.tensor_parallel.linear import column_forward_impl, row_forward
        from megatron_overlap.session import Session

        original = ColumnParallelLinear._forward_impl if self.column else RowParallelLinear.forward
        patch = column_forward_impl if self.column else row_forward
        # A copy: assigning a class attribute its present value would be cheaper than assigning another one.
        forwards = {
            name: FunctionType(original.__code__, original.__globals__, name=original.__name__)
            for name in ("stock", CONTROL)
        }
        most = max(1, self.rows // self.group.size() // 4)
        # The same for a scatter and a gather between two ranks.
        default = default_chunks("all_gather", self.group.size(), self.rows, 2 * self.full.shape[1])
        counts = sorted({default, *(count for count in CHUNKS if count <= most)})
        configs: dict[str, dict[str, Any]] = {f"p2p x {c}": {"method": "p2p", "chunks_per_rank": c} for c in counts}
        configs["auto"] = {"method": "auto", "autotune_cache": None}
        for name, tensor in configs.items():
            session = Session(OverlapConfig(tensor=tensor))
            forwards[name] = patch(original, session)
            self.autotuner = session.adapter(LinearAdapter).autotuner
        return forwards

    @contextmanager
    def _patched(self, forward: Any) -> Iterator[None]:
        cls = type(self.layer)
        name = "_forward_impl" if self.column else "forward"
        original = getattr(cls, name)
        setattr(cls, name, forward)
        try:
            yield
        finally:
            setattr(cls, name, original)

    def _run(self) -> None:
        y, _ = self.layer(self.x.detach().requires_grad_())
        y.backward(self.dy)
        self.layer.weight.grad = None

    def measure(self, seconds: float) -> dict[str, Any]:
        """The figures of this point."""
        forwards = self._forwards()
        calls = 0
        with self._patched(forwards["auto"]):
            while not calls or (self.autotuner.lines()[0].reason.startswith("being measured") and calls < _MOST_CALLS):
                self._run()
                calls += 1
        (line,) = self.autotuner.lines()
        method = line.method.replace("p2p direct", "p2p")
        runs = {name: (self._run, lambda forward=forward: self._patched(forward)) for name, forward in forwards.items()}
        rounds: dict[str, list[float]] = {name: [] for name in runs}
        below = False
        for number in range(_DOUBLED_BELOW + 1):
            for name, values in self._rounds(runs, seconds * 2 ** max(0, number - 1)).items():
                rounds[name] += values
            of_stock = interval([a / b for a, b in zip(rounds["stock"], rounds["auto"], strict=True)])
            of_best = interval(against_best(rounds))
            if number == _DOUBLED:
                below = of_stock[0] < STOCK or of_best[0] < BEST
            clear = of_stock[1] >= STOCK and of_best[1] >= BEST
            ends = torch.tensor(float(clear or (number >= _DOUBLED and not below)))
            dist.broadcast(ends, 0)
            if ends.item():
                break
            # A method that is surely slower is not timed any longer.
            least = rounds[min(runs, key=lambda name: median(rounds[name]))]
            stay = [
                name
                for name in runs
                if interval([a / b for a, b in zip(rounds[name], least, strict=True)])[1] < 1 / BEST
            ]
            runs = {name: run for name, run in runs.items() if name in {*stay, method, *_ALWAYS}}
        times = {name: median(values) for name, values in rounds.items()}
        of_control = interval([a / b for a, b in zip(rounds["stock"], rounds[CONTROL], strict=True)])
        fixed = {name: ms for name, ms in times.items() if name not in ("auto", CONTROL)}
        best = min(fixed, key=lambda name: fixed[name])
        alone = self._rounds({"gemm": (self._gemm, nullcontext), "comm": (self._comm, nullcontext)}, seconds / 8)
        return {
            "op": self.op,
            "rows": self.rows,
            "gemm_ms": median(alone["gemm"]),
            "comm_ms": median(alone["comm"]),
            "times_ms": times,
            "selected": method,
            "best": best,
            **dict(zip(("of_best", "of_best_low", "of_best_high"), of_best, strict=True)),
            **dict(zip(("of_stock", "of_stock_low", "of_stock_high"), of_stock, strict=True)),
            **dict(zip(("of_control", "of_control_low", "of_control_high"), of_control, strict=True)),
            "selected_of_best_high": interval(against_best(rounds, method))[2],
            "calls_until_selected": calls,
            "rounds": len(rounds["auto"]),
        }

    def _gemm(self) -> None:
        a, w = (self.full, self.layer.weight.t()) if self.column else (self.x.flatten(0, 1), self.layer.weight.t())
        torch.mm(a, w.detach())

    def _comm(self) -> None:
        shard = self.rows // self.group.size()
        dist.all_gather_into_tensor(self.full, self.full[:shard].clone(), group=self.group)

    def _rounds(self, runs: dict[str, Any], seconds: float) -> dict[str, list[float]]:
        """Times of the slowest rank in ms; every round runs all, and the number of rounds is odd and at least 7."""
        names = list(runs)
        rounds: dict[str, list[float]] = {name: [] for name in names}
        start, number, more = time.perf_counter(), -2, True
        while more or number % 2 == 0:
            # A random order: no method always follows the same one.
            took = torch.empty(len(names), dtype=torch.float64)
            for index in self._order.sample(range(len(names)), len(names)):
                run, prepared = runs[names[index]]
                with prepared():
                    run()
                    begin = time.perf_counter()
                    run()
                    took[index] = (time.perf_counter() - begin) * 1e3
            dist.all_reduce(took, op=dist.ReduceOp.MAX)
            if number >= 0:
                for name, ms in zip(names, took.tolist(), strict=True):
                    rounds[name].append(ms)
            number += 1
            # The clock of rank 0 ends the rounds of all ranks.
            ends = torch.tensor(float(number >= 7 and time.perf_counter() - start > seconds))
            dist.broadcast(ends, 0)
            more = not ends.item()
        return rounds


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--json", default="autotune.json", help="file for the results; its points are skipped")
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    parser.add_argument("--links", nargs="+", help="GBPS,K,F of links and layers, instead of the defaults")
    parser.add_argument("--seconds", type=float, default=4.0, help="of timing for each point")
    parser.add_argument("--shape", type=int, nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--points", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
