"""Runs every operation for thousands of steps at changing shapes: memory, file descriptors and threads must not grow.

    python scripts/soak.py --steps 10000 --json docs/results/soak.json --png docs/images/soak.png

Each step is forward and backward of one operation with random sizes and dtypes. The persistent buffers reach their
largest sizes in the first fifth of the steps. Exit code 1 if a rank has more of a resource at the end than after them.

torch itself keeps compiled bf16 kernels on the CPU, up to 1024 of each of two caches: a plain `x @ w` at as many shapes
takes a gigabyte. This script makes both caches small, so that the remaining growth is the plugin's.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

# torch reads them when it is first used: of oneDNN, and of torch's own layer above it.
os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] = "0"
os.environ["LRU_CACHE_CAPACITY"] = "16"

import torch
import torch.distributed as dist
from torch import multiprocessing

from megatron_overlap.comm import TransportOptions
from megatron_overlap.comm.gloo import GlooTransport
from megatron_overlap.ops import (
    GradientReduce,
    LinearPlan,
    all_gather_linear,
    balanced_attention,
    copy_linear,
    linear_all_reduce,
    linear_reduce_scatter,
    ulysses_attention,
)
from megatron_overlap.schedules import SequenceLayout
from megatron_overlap.schedules.varlen import Topology, partition

SAMPLES = 100
WARM_UP = 0.2
MORE_MIB = 8.0
"""Growth of the median resident set from the first to the last tenth after the warm-up that is still called flat."""

Draw = random.Random


def linear(op: Any, group: GlooTransport, draw: Draw) -> None:
    """A tensor parallel linear layer."""
    dtype, scattered = draw.choice([torch.float32, torch.bfloat16]), op is linear_reduce_scatter
    rows, k, f = draw.randint(1, 512), draw.choice([16, 64, 129, 256]), draw.choice([16, 64, 130, 256])
    x = torch.randn(rows * group.size if scattered else rows, k, dtype=dtype, requires_grad=True)
    w = torch.randn(f, k, dtype=dtype, requires_grad=True)
    patterns = ["direct"] if op in (copy_linear, linear_all_reduce) else ["direct", "ring"]
    plan = LinearPlan(pattern=draw.choice(patterns), chunks_per_rank=draw.choice([1, 2, 4]))
    y = op(x, w, None, group=group, plan=plan)
    y.backward(torch.ones_like(y))


def bucket(group: GlooTransport, draw: Draw) -> None:
    """A bucket of gradients."""
    size = group.size * draw.randint(1, 20_000)
    GradientReduce(group, pieces=2).begin(torch.randn(size, dtype=draw.choice([torch.float32, torch.bfloat16]))).wait()


def ulysses(group: GlooTransport, draw: Draw) -> None:
    """Attention of heads that change ranks."""
    rows = 2 * draw.randint(1, 40)
    layout = SequenceLayout.zigzag(rows * group.size, group.size)
    attend(partial(ulysses_attention, group=group, layout=layout), (rows, 1, 2 * group.size, 16))


def documents(group: GlooTransport, draw: Draw) -> None:
    """Attention of documents over all ranks."""
    lengths = [draw.randint(0, 200) for _ in range(draw.randint(1, 6))] + [1]
    plan = partition(lengths, Topology(1, group.size), capacity=-(-sum(lengths) // group.size) + 8)
    attend(partial(balanced_attention, plan=plan, group=group), (plan.tokens(0)[group.rank], 2, 16))


def attend(function: Any, shape: Sequence[int]) -> None:
    q, k, v = (torch.randn(*shape, requires_grad=True) for _ in range(3))
    y = function(q, k, v)
    y.backward(torch.ones_like(y))


STEPS: tuple[Callable[[GlooTransport, Draw], None], ...] = (
    *(partial(linear, op) for op in (all_gather_linear, linear_reduce_scatter, copy_linear, linear_all_reduce)),
    bucket,
    ulysses,
    documents,
)


def sample(step: int) -> dict[str, float]:
    """What this process holds now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    descriptors = len(list(Path("/proc/self/fd").iterdir())) - 1  # less the one that lists them
    rss = pages * os.sysconf("SC_PAGE_SIZE") / 2**20
    threads = len(list(Path("/proc/self/task").iterdir()))
    return {"step": step, "rss_mib": rss, "fds": descriptors, "threads": threads}


def work(rank: int, size: int, port: int, steps: int, seed: int, pipe: Any) -> None:
    """One rank; its samples go to the pipe as they are made."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.manual_seed(rank)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    assert dist.group.WORLD is not None
    group, draw = GlooTransport(dist.group.WORLD, TransportOptions(timeout_s=60.0)), Draw(seed)
    for step in range(1, steps + 1):
        draw.choice(STEPS)(group, draw)
        if step % max(1, steps // SAMPLES) == 0:
            pipe.send((rank, sample(step)))
    dist.barrier()
    group.close()
    pipe.close()
    os._exit(0)


def run(size: int, steps: int, seed: int) -> list[list[dict[str, float]]]:
    """Samples by rank; fewer of a rank that failed."""
    context = multiprocessing.get_context("fork")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    read, write = context.Pipe(duplex=False)
    ranks = [context.Process(target=work, args=(r, size, store.port, steps, seed, write)) for r in range(size)]
    for process in ranks:
        process.start()
    write.close()
    found: list[list[dict[str, float]]] = [[] for _ in range(size)]
    start = time.monotonic()
    try:
        while True:
            rank, row = read.recv()
            found[rank].append(row)
            if rank == 0 and len(found[0]) % 10 == 0:
                print(f"[{time.monotonic() - start:4.0f} s] rank 0: {row}", file=sys.stderr, flush=True)
    except EOFError:
        return found
    finally:
        for process in ranks:
            process.join(timeout=10)
            process.kill()


def judge(found: Sequence[Sequence[dict[str, float]]], steps: int) -> list[str]:
    """What is not flat, by rank."""
    wrong = []
    for rank, rows in enumerate(found):
        if not rows or rows[-1]["step"] < steps - steps // SAMPLES:
            wrong.append(f"rank {rank} made {rows[-1]['step'] if rows else 0:.0f} of {steps} steps")
            continue
        after = rows[int(WARM_UP * len(rows)) :]
        tenth = max(1, len(after) // 10)
        more = median(row["rss_mib"] for row in after[-tenth:]) - median(row["rss_mib"] for row in after[:tenth])
        if more > MORE_MIB:
            wrong.append(f"rank {rank}: {more:.1f} MiB more after the warm-up")
        for name in ("fds", "threads"):
            if max(row[name] for row in after) > max(row[name] for row in rows[: len(rows) - len(after)]):
                wrong.append(f"rank {rank}: more {name} after the warm-up: {[row[name] for row in after]}")
    return wrong


def draw_png(found: Sequence[Sequence[dict[str, float]]], path: Path) -> None:
    """Resident set, file descriptors and threads over the steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, places = pyplot.subplots(1, 3, figsize=(11, 3), layout="constrained")
    titles = {"rss_mib": "resident set, MiB", "fds": "file descriptors", "threads": "threads"}
    for place, (name, title) in zip(places, titles.items(), strict=True):
        for rank, rows in enumerate(found):
            place.plot([row["step"] for row in rows], [row[name] for row in rows], label=f"rank {rank}")
        place.set(title=title, xlabel="step")
        place.set_ylim(0, 1.3 * max(row[name] for rows in found for row in rows))
    places[0].legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main() -> int:
    """0: flat; 1: not."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the samples here")
    parser.add_argument("--png", type=Path, help="draw them here")
    options = parser.parse_args()
    torch.set_num_threads(1)
    start = time.monotonic()
    found = run(options.ranks, options.steps, options.seed)
    wrong = judge(found, options.steps)
    if options.json:
        versions = {"torch": torch.__version__, "python": platform.python_version()}
        content = {"command": sys.argv, "versions": versions, "seconds": time.monotonic() - start}
        options.json.parent.mkdir(parents=True, exist_ok=True)
        rounded = [[{name: round(value, 1) for name, value in row.items()} for row in rows] for rows in found]
        options.json.write_text(json.dumps({**content, "wrong": wrong, "ranks": rounded}, indent=None) + "\n")
    if options.png and all(found):
        draw_png(found, options.png)
    for rank, rows in enumerate(found):
        for row in rows[:: max(1, len(rows) // 5)] + rows[-1:]:
            print(f"rank {rank}: {row}")
    print("\n".join(wrong) or f"{options.steps} steps on {options.ranks} ranks: flat")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
