"""Times `method: auto` against everything it chooses from, over shapes and link rates: does it choose well?

    python scripts/bench/choice.py --json choice.json

Two hosts, one rank a host, one thread a rank. Megatron's own layers run forward and backward: by its own path, by p2p
with each number of chunks, and as chosen, after the choice has been made. All take their turn in each round, two
calls in a row, of which the second is timed: the first finds threads and caches as another way has left them. More in a
row would say little more: what one call of 2 ms takes, 1.4 or 2.8, the next ones take too, until others have been at
work. A ratio is what the rounds' ratios scatter about, with the interval that holds it with 95 % probability.
The best of many figures is always too good: the best fixed method is told by the odd rounds and
compared in the even ones, and the other way round. Megatron's own path takes part twice, under two names: what comes
out of one against the other is what comes out of nothing. A point that does not clearly reach what is asked is
timed on, up to 16 times as long, without what is more than 3 % slower than the best for sure; one that is below it even
then, 64 times. All its rounds count.
Figures that the file has already are not taken again.
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
from megatron_overlap.tools.launch.ranks import run_workers

HOSTS = 2
SCRIPT = str(Path(__file__).resolve())
BEST, STOCK = 0.97, 0.98
"""What the choice has to reach of the best fixed method, and of Megatron's own path."""

CHUNKS = (1, 2, 4, 8)
CONTROL = "megatron again"
_POINT = "POINT "
_ALWAYS = ("auto", "megatron", CONTROL)
_DOUBLED, _DOUBLED_BELOW = 4, 6
_MOST_CALLS = 1500
OPS = ("ag_gemm", "gemm_rs")
# Rate of the links in Gbit/s, depth of the GEMM and its width over all ranks: GEMM : communication from 1:16 to 16:1.
LINKS = ((0.25, 512, 1024), (1.0, 512, 1024), (4.0, 512, 4096), (8.0, 512, 16384), (8.0, 512, 65536))
ROWS = (8, 32, 128, 256, 512, 1024, 2048)
_MOST_NUMBERS = 2**25
"""Of a layer's output over all ranks: a choice for more takes minutes."""


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
    sys.exit(0 if found["below_best"] == found["below_own"] == 0 else 1)


def summary(points: list[dict[str, Any]]) -> dict[str, Any]:
    """What is asked of the choice, over all points."""
    wrong = [p for p in points if p["times_ms"][p["chosen"]] > p["times_ms"][p["best"]] / BEST]
    shares = sorted(p["gemm_ms"] / p["comm_ms"] for p in points)
    return {
        "points": len(points),
        "gemm_over_comm": [shares[0], shares[-1]],
        "worst_of_best": min(p["of_best"] for p in points),
        "worst_of_own": min(p["of_own"] for p in points),
        "median_of_best": median(p["of_best"] for p in points),
        "median_of_own": median(p["of_own"] for p in points),
        "best_of_own": max(p["of_own"] for p in points),
        "below_best": sum(p["of_best"] < BEST for p in points),
        "below_best_for_sure": sum(p["of_best_high"] < BEST for p in points),
        "below_own": sum(p["of_own"] < STOCK for p in points),
        "below_own_for_sure": sum(p["of_own_high"] < STOCK for p in points),
        "control_below_own": sum(p["of_control"] < STOCK for p in points),
        "control_below_own_for_sure": sum(p["of_control_high"] < STOCK for p in points),
        "worst_control": min(p["of_control"] for p in points),
        "median_control": median(p["of_control"] for p in points),
        "same_code": [sum(p["chosen"] == "megatron" for p in points), *_spread(points)],
        "wrong_choices": len(wrong),
        "wrong_for_sure": sum(p["chosen_of_best_high"] < BEST for p in points),
        "wrong_choice_rate": len(wrong) / len(points),
    }


def _spread(points: list[dict[str, Any]]) -> list[float]:
    """The least, median and largest of what Megatron's own path is of itself, where it was chosen."""
    same = [p["of_own"] for p in points if p["chosen"] == "megatron"]
    return [min(same), median(same), max(same)] if same else []


def interval(ratios: list[float]) -> tuple[float, float, float]:
    """What the ratios scatter about (Hodges and Lehmann's estimate on logarithms), and what holds it with 95 %."""
    logs = torch.tensor(ratios, dtype=torch.float64).log().sort().values
    n = len(ratios)
    pairs = n * (n + 1) // 2
    # Of Wilcoxon's signed ranks.
    skip = max(0, int(pairs / 2 - 1.96 * math.sqrt(pairs * (2 * n + 1) / 12)))

    def mean_of_pairs(rank: int) -> float:
        """The one with so many below it, of all means of two and of each with itself: they are too many to list."""
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


def against_best(rounds: dict[str, list[float]], served: str = "auto") -> list[float]:
    """Ratios of `served` to the best fixed method, which is told in each half of the rounds by the other half."""
    ratios: list[float] = []
    whole = len(rounds["auto"])
    for told in (0, 1):
        fixed = {
            name: median(values[told::2])
            for name, values in rounds.items()
            if name not in ("auto", CONTROL) and len(values) == whole
        }
        best = min(fixed, key=lambda name: fixed[name])
        ratios += [a / b for a, b in zip(rounds[best][1 - told :: 2], rounds[served][1 - told :: 2], strict=True)]
    return ratios


def show(p: dict[str, Any]) -> None:
    times = "  ".join(f"{name} {ms:.2f}" for name, ms in p["times_ms"].items())
    print(
        f"{p['op']:8} {p['rows']:5} rows  {p['gbps']:g} Gbit/s {p['k']}x{p['f']}  gemm:comm "
        f"{p['gemm_ms'] / p['comm_ms']:.2f}  {times} ms  chose {p['chosen']}  "
        f"of best {p['of_best']:.3f} ({p['of_best_low']:.3f}..{p['of_best_high']:.3f})  "
        f"of Megatron {p['of_own']:.3f} ({p['of_own_low']:.3f}..{p['of_own_high']:.3f})",
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
    # The threads of the transports are daemons: the process must not wait for them.
    sys.stdout.flush()
    os._exit(0)


class Point:
    """One layer on one rank, with every way to run it."""

    def __init__(self, op: str, rows: int, k: int, f: int) -> None:
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
        from megatron.core.transformer.transformer_config import TransformerConfig

        self.op, self.rows = op, rows
        self._order = random.Random(rows)  # alike on all ranks
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
            # Both gather and scatter rows of width k: the communication is that of the column-parallel layer.
            self.layer = RowParallelLinear(f, k, input_is_parallel=True, **common)
            shapes = (rows, f // size), (rows // size, k)
        self.x, self.dy = (torch.randn(n, 1, width).to(torch.bfloat16) for n, width in shapes)
        self.full = torch.randn(rows, k).to(torch.bfloat16)

    def _forwards(self) -> dict[str, Any]:
        """The patched method of the layer's class for each way; Megatron's own is the original."""
        from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

        from megatron_overlap import OverlapConfig
        from megatron_overlap.adapters.tensor_parallel.linear import LinearAdapter, column_forward_impl, row_forward
        from megatron_overlap.session import Session

        original = ColumnParallelLinear._forward_impl if self.column else RowParallelLinear.forward
        patch = column_forward_impl if self.column else row_forward
        # A copy: to give a class the method that it has already is cheaper than to give it another one.
        forwards = {
            name: FunctionType(original.__code__, original.__globals__, name=original.__name__)
            for name in ("megatron", CONTROL)
        }
        most = max(1, self.rows // self.group.size() // 4)
        # Between two ranks as many for a scatter as for a gather.
        usual = default_chunks("all_gather", self.group.size(), self.rows, 2 * self.full.shape[1])
        counts = sorted({usual, *(count for count in CHUNKS if count <= most)})
        ways: dict[str, dict[str, Any]] = {f"p2p x {c}": {"method": "p2p", "chunks_per_rank": c} for c in counts}
        ways["auto"] = {"method": "auto", "autotune_cache": None}
        for name, tensor in ways.items():
            session = Session(OverlapConfig(tensor=tensor))
            forwards[name] = patch(original, session)
            self.chooser = LinearAdapter.of(session).choice
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
            while not calls or (self.chooser.lines()[0].why.startswith("being measured") and calls < _MOST_CALLS):
                self._run()
                calls += 1
        (line,) = self.chooser.lines()
        method = line.method.replace("Megatron's own", "megatron").replace("p2p direct", "p2p")
        runs = {name: (self._run, lambda forward=forward: self._patched(forward)) for name, forward in forwards.items()}
        rounds: dict[str, list[float]] = {name: [] for name in runs}
        below = False
        for number in range(_DOUBLED_BELOW + 1):
            for name, values in self._rounds(runs, seconds * 2 ** max(0, number - 1)).items():
                rounds[name] += values
            of_own = interval([a / b for a, b in zip(rounds["megatron"], rounds["auto"], strict=True)])
            of_best = interval(against_best(rounds))
            if number == _DOUBLED:
                below = of_own[0] < STOCK or of_best[0] < BEST
            told = of_own[1] >= STOCK and of_best[1] >= BEST
            ends = torch.tensor(float(told or (number >= _DOUBLED and not below)))
            dist.broadcast(ends, 0)
            if ends.item():
                break
            # What is not among the best, for sure, is not timed any longer.
            least = rounds[min(runs, key=lambda name: median(rounds[name]))]
            stay = [
                name
                for name in runs
                if interval([a / b for a, b in zip(rounds[name], least, strict=True)])[1] < 1 / BEST
            ]
            runs = {name: run for name, run in runs.items() if name in {*stay, method, *_ALWAYS}}
        times = {name: median(values) for name, values in rounds.items()}
        of_control = interval([a / b for a, b in zip(rounds["megatron"], rounds[CONTROL], strict=True)])
        fixed = {name: ms for name, ms in times.items() if name not in ("auto", CONTROL)}
        best = min(fixed, key=lambda name: fixed[name])
        alone = self._rounds({"gemm": (self._gemm, nullcontext), "comm": (self._comm, nullcontext)}, seconds / 8)
        return {
            "op": self.op,
            "rows": self.rows,
            "gemm_ms": median(alone["gemm"]),
            "comm_ms": median(alone["comm"]),
            "times_ms": times,
            "chosen": method,
            "best": best,
            **dict(zip(("of_best", "of_best_low", "of_best_high"), of_best, strict=True)),
            **dict(zip(("of_own", "of_own_low", "of_own_high"), of_own, strict=True)),
            **dict(zip(("of_control", "of_control_low", "of_control_high"), of_control, strict=True)),
            "chosen_of_best_high": interval(against_best(rounds, method))[2],
            "calls_until_chosen": calls,
            "rounds": len(rounds["auto"]),
        }

    def _gemm(self) -> None:
        a, w = (self.full, self.layer.weight.t()) if self.column else (self.x.flatten(0, 1), self.layer.weight.t())
        torch.mm(a, w.detach())

    def _comm(self) -> None:
        shard = self.rows // self.group.size()
        dist.all_gather_into_tensor(self.full, self.full[:shard].clone(), group=self.group)

    def _rounds(self, runs: dict[str, Any], seconds: float) -> dict[str, list[float]]:
        """Times in ms of the slowest rank, all in turn in each round, an odd number of rounds, at least 7."""
        names = list(runs)
        rounds: dict[str, list[float]] = {name: [] for name in names}
        start, number, more = time.perf_counter(), -2, True
        while more or number % 2 == 0:
            # What ran before leaves the caches as it likes: no way may always follow the same one.
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
            # Rank 0's clock ends it for all.
            ends = torch.tensor(float(number >= 7 and time.perf_counter() - start > seconds))
            dist.broadcast(ends, 0)
            more = not ends.item()
        return rounds


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--json", default="choice.json", help="file for the figures, and of those that are there")
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    parser.add_argument("--links", nargs="+", help="GBPS,K,F of the links and layers, if not the usual ones")
    parser.add_argument("--seconds", type=float, default=4.0, help="of timing for a point")
    parser.add_argument("--shape", type=int, nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--points", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
