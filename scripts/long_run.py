"""Compares a long training that is killed and resumed, with the plugin on and off in turn, with an undisturbed one.

    python scripts/prepare_data.py --output data/stdlib
    python scripts/long_run.py --data data/stdlib --json docs/results/long_run.json --png docs/images/long_run.png
    python scripts/long_run.py --experts --kills 0 --json docs/results/long_run_experts.json

A LLaMA on text, TP2 + SP x DP2 with the distributed optimizer, four CPU ranks, fp32. At random steps a random rank gets
SIGKILL; the other ranks must end, and the next launch resumes from the last checkpoint with the plugin switched on or
off. The reference deviation is that of stock Megatron between two layouts, which add the same terms in another order:
one rank, and the layout above. Loss and grad-norm of the disturbed run may deviate by 1e-5 plus twice the largest
reference deviation up to the same step. Exit code 1 if they deviate more.

`--experts` trains eight experts and a shared one, EP2 on two ranks; the training changes their routing. The reference
is then stock with one sequence per micro-batch, because a single rank initialises other experts. Without kills the peak
memory of a rank may grow after the first fifth of the steps by 8 MiB more than that of stock.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shlex
import shutil
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from megatron_overlap.config import LaunchConfig
from megatron_overlap.tools.launch.plan import execute, plan
from megatron_overlap.tools.launch.processes import RunError

NAMES = ("loss", "grad_norm")
EXPERTS = shlex.split(
    "--num-experts 8 --moe-router-topk 2 --moe-token-dispatcher-type alltoall --moe-shared-expert-intermediate-size 64 "
    "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.001"
)
BALANCE = re.compile(r"seq_load_balancing_loss: (\S+)")
MORE_MIB = 8.0
FLOOR, FACTOR = 1e-5, 2.0
SAVE_EVERY = 10
Curves = dict[int, dict[str, float]]


@dataclass
class Launch:
    """One start of the disturbed run."""

    plugin: bool
    first: int
    killed_at: int | None
    victim: int | None
    overlapped: int = 0
    ended_s: float = 0.0


def config(options: argparse.Namespace, name: str, *, layout: bool, plugin: bool, save: Path | None) -> LaunchConfig:
    """The training; without `layout` on one rank, with experts by one sequence per micro-batch."""
    places = {"save": str(save), "load": str(save), "save_interval": SAVE_EVERY} if save else {}
    args = ["--use-cpu-initialization", "--ddp-bucket-size", "100000"]
    width, ranks, tensor, length, methods = 128, 4, 2, 128, {"tensor": "p2p", "data": "p2p", "expert": "none"}
    if options.experts:
        args += [*EXPERTS, "--expert-model-parallel-size", "2"]
        width, ranks, tensor, length, methods = 64, 2, 1, 256, {"tensor": "none", "data": "stock", "expert": "p2p"}
    divided = layout or options.experts
    if not plugin:
        methods = {"tensor": "none", "data": "stock", "expert": "none"}
    return LaunchConfig.model_validate(
        {
            "name": name,
            "model": {
                "arch": "llama",
                "num_layers": 2,
                "hidden_size": width,
                "ffn_hidden_size": 128 if options.experts else 344,
                "num_attention_heads": 8,
                "num_query_groups": 4,
                "vocab_size": 4000,
                "max_position_embeddings": length,
            },
            "parallel": {"tensor": tensor if divided else 1, "sequence_parallel": divided and tensor > 1},
            "train": {
                "seq_length": length,
                "micro_batch_size": 2 if layout or not options.experts else 1,
                "global_batch_size": 4 if options.experts else 8,
                "iterations": options.iterations,
                "precision": "fp32",
                "lr": 1e-3,
                "min_lr": 1e-4,
                "lr_warmup_iterations": 10,
                "distributed_optimizer": divided,
                **places,
            },
            "data": {"kind": "text", "path": str(options.data)},
            "overlap": {
                "tensor": {"method": methods["tensor"], "chunks_per_rank": 2},
                "data": {"method": methods["data"]},
                "expert": {"method": methods["expert"]},
                "timeout_s": 20.0,
            },
            "launch": {"device": "cpu", "ranks_per_node": ranks if divided else 1, "timeout_s": 3600.0},
            "megatron_args": args,
        }
    )


def steps(run_dir: Path) -> Curves:
    """What rank 0 has recorded so far."""
    path = run_dir / "steps-rank0.jsonl"
    lines = path.read_text().splitlines() if path.is_file() else []
    rows = [json.loads(line) for line in lines if line.endswith("}")]
    return {row["iteration"]: {name: row[name] for name in NAMES} for row in rows}


def overlapped(run_dir: Path) -> int:
    """Calls of rank 0 that were overlapped; 0 where the run was killed before it reported."""
    path = run_dir / "report-rank0.json"
    return int(json.loads(path.read_text())["totals"]["overlapped"]) if path.is_file() else 0


def kill_at(run_dir: Path, step: int, victim: int, stop: threading.Event) -> None:
    """SIGKILL to a rank as soon as the step is recorded."""
    while not stop.wait(0.02):
        if max(steps(run_dir), default=0) >= step:
            # A rank has three kinds: the launcher's, which looks after it, its own, and what that has started.
            own = {
                process.pid: process for process in psutil.Process().children(recursive=True) if _is(process, victim)
            }
            for process in own.values():
                with suppress(psutil.Error):
                    if process.ppid() in own and own[process.ppid()].ppid() not in own:
                        process.kill()
            return


def _is(process: psutil.Process, rank: int) -> bool:
    try:
        return bool(process.environ().get("RANK") == str(rank))
    except psutil.Error:  # it has ended meanwhile
        return False


def undisturbed(options: argparse.Namespace, name: str, *, layout: bool) -> Curves:
    """Stock Megatron from the first step to the last."""
    run_dir = options.runs / name
    start = time.monotonic()
    execute(plan(config(options, name, layout=layout, plugin=False, save=None), run_dir))
    print(f"{name}: {time.monotonic() - start:.0f} s", flush=True)
    return steps(run_dir)


def disturbed(options: argparse.Namespace) -> tuple[Curves, list[Launch]]:
    """The run that is killed `--kills` times.

    Raises:
        RunError: a launch failed by itself, or did not go on from the checkpoint.
    """
    draw = random.Random(options.seed)
    moments = sorted(draw.sample(range(SAVE_EVERY + 2, options.iterations - 2), options.kills))
    saved, curves, launches = options.runs / "saved" if options.kills else None, {}, []
    for number, moment in enumerate([*moments, None]):
        ranks = 2 if options.experts else 4
        launch = Launch(number % 2 == 0, 0, moment, draw.randrange(ranks) if moment is not None else None)
        name = f"disturbed-{number}"
        run_dir, stop, failed = options.runs / name, threading.Event(), ""
        launched = plan(config(options, name, layout=True, plugin=launch.plugin, save=saved), run_dir)
        if moment is not None:
            threading.Thread(target=kill_at, args=(run_dir, moment, launch.victim, stop), daemon=True).start()
        start = time.monotonic()
        try:
            execute(launched)
        except RunError as error:
            failed = str(error)
        stop.set()
        made = steps(run_dir)
        launch.first, launch.ended_s = min(made, default=0), time.monotonic() - start
        launch.overlapped = overlapped(run_dir)
        expected = (max(curves) // SAVE_EVERY) * SAVE_EVERY + 1 if curves else 1
        if bool(failed) != (moment is not None) or not expected - SAVE_EVERY <= launch.first <= expected:
            raise RunError(f"{name}: began at step {launch.first} (expected {expected}): {failed or 'was not killed'}")
        curves |= made
        launches.append(launch)
        what = f"rank {launch.victim} killed at {moment}" if moment is not None else "to the end"
        word = "on" if launch.plugin else "off"
        print(f"{name}: plugin {word}, steps {launch.first} .. {max(made)}, {what}, {launch.ended_s:.0f} s", flush=True)
    return curves, launches


def growth_mib(run_dir: Path) -> float:
    """Growth of the peak memory after the first fifth of the steps, of the rank whose peak grows most."""
    grown = []
    for path in run_dir.glob("steps-rank*.jsonl"):
        peaks = [json.loads(line)["peak_memory_bytes"] for line in path.read_text().splitlines()]
        grown.append((peaks[-1] - peaks[len(peaks) // 5]) / 2**20)
    return max(grown)


def imbalance(run_dir: Path) -> list[float]:
    """Balance loss of every step, as the last rank logs it: 1 if all experts have the same number of tokens."""
    return [float(value) for value in BALANCE.findall((run_dir / "logs" / "rank1.log").read_text())]


def deviation(curves: Curves, from_: Curves, name: str) -> list[float]:
    """Relative, of every step."""
    return [abs(curves[step][name] - from_[step][name]) / abs(from_[step][name]) for step in sorted(from_)]


def bound(yardstick: Sequence[float]) -> list[float]:
    """What is allowed at every step."""
    allowed, so_far = [], 0.0
    for value in yardstick:
        so_far = max(so_far, value)
        allowed.append(FACTOR * so_far + FLOOR)
    return allowed


def draw_png(path: Path, curves: dict[str, Curves], result: dict[str, Any], launches: Sequence[Launch]) -> None:
    """Loss of all runs, and how far apart they are."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(2, 1, figsize=(9, 6.5), sharex=True, layout="constrained")
    numbers = sorted(curves["stock"])
    above.plot(
        numbers, [curves["stock"][step]["loss"] for step in numbers], color="0.6", lw=4, label="stock, undisturbed"
    )
    above.plot(
        numbers, [curves["disturbed"][step]["loss"] for step in numbers], color="C0", lw=1, label="killed, switched"
    )
    for launch in launches:
        last = launch.killed_at if launch.killed_at is not None else numbers[-1]
        for place in (above, below):
            if launch.plugin:
                place.axvspan(launch.first, last, color="C2", alpha=0.12, lw=0)
            if launch.killed_at is not None:
                place.axvline(launch.killed_at, color="C3", lw=0.8, ls=":")
    above.set(ylabel="loss", title="green: plugin on; red: a rank is killed, resumed from the last checkpoint")
    above.legend()
    for name, color in zip(NAMES, ("C0", "C1"), strict=True):
        below.semilogy(numbers, [value + 1e-12 for value in result[name]["deviation"]], color=color, lw=1, label=name)
        below.semilogy(numbers, result[name]["bound"], color=color, ls="--", lw=1, label=f"{name}: bound")
    below.set(xlabel="step", ylabel="relative deviation from stock")
    below.legend(ncols=2)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("data/stdlib"), help="folder made by prepare_data.py")
    parser.add_argument("--iterations", type=int, default=500)
    parser.add_argument("--kills", type=int, default=8)
    parser.add_argument("--experts", action="store_true", help="a mixture of experts on two ranks")
    parser.add_argument("--seed", type=int, default=0, help="seed of the steps and ranks that are killed")
    parser.add_argument("--runs", type=Path, default=Path("runs/long_run"), help="folder of the trainings; replaced")
    parser.add_argument("--json", type=Path, help="write the result here")
    parser.add_argument("--png", type=Path, help="draw it here")
    options = parser.parse_args(argv)
    if options.iterations < SAVE_EVERY + 4 + options.kills:
        parser.error(f"--iterations: {options.iterations}: too few for {options.kills} kills")
    if not (options.data / "data.json").is_file():
        parser.error(f"--data: {options.data}: no data; run: python scripts/prepare_data.py --output {options.data}")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """0: within the bound at every step; 1: not."""
    options = parse(argv)
    options.runs = options.runs.resolve()
    shutil.rmtree(options.runs, ignore_errors=True)
    start = time.monotonic()
    other = "one sequence" if options.experts else "one rank"
    try:
        curves = {
            "stock": undisturbed(options, "stock", layout=True),
            other: undisturbed(options, other.replace(" ", "-"), layout=False),
        }
        curves["disturbed"], launches = disturbed(options)
    except RunError as error:
        print(error, file=sys.stderr)
        return 1
    result: dict[str, Any] = {}
    for name in NAMES:
        yardstick = deviation(curves[other], curves["stock"], name)
        off, allowed = deviation(curves["disturbed"], curves["stock"], name), bound(yardstick)
        worst = max(range(len(off)), key=lambda at: off[at] / allowed[at])
        ok = all(value <= limit for value, limit in zip(off, allowed, strict=True))
        result[name] = {"ok": ok, "deviation": off, "bound": allowed, f"stock, {other}": yardstick}
        share = off[worst] / allowed[worst]
        print(
            f"{name}: largest deviation {max(off):.1e} (stock by {other}: {max(yardstick):.1e}); "
            f"at its worst, step {worst + 1}, {share:.2f} of what is allowed: {'ok' if ok else 'NOT EQUAL'}"
        )
    if not options.kills:
        stock, plugin = (growth_mib(options.runs / name) for name in ("stock", "disturbed-0"))
        result["memory"] = {"ok": plugin <= stock + MORE_MIB, "growth_mib": plugin, "stock, growth_mib": stock}
        print(f"peak memory of a rank: grows by {plugin:.1f} MiB, stock by {stock:.1f} MiB")
    if options.json:
        content = {"command": sys.argv, "seconds": time.monotonic() - start, "cores": os.cpu_count()}
        content |= {"launches": [asdict(launch) for launch in launches], "result": result}
        if options.experts and not options.kills:
            content["imbalance"] = {name: imbalance(options.runs / name) for name in ("stock", "disturbed-0")}
        content["losses"] = {
            name: [round(found[step]["loss"], 6) for step in sorted(found)] for name, found in curves.items()
        }
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(content) + "\n")
    if options.png:
        draw_png(options.png, curves, result, launches)
    return int(not all(each["ok"] for each in result.values()))


if __name__ == "__main__":
    sys.exit(main())
