"""Times the host's part of the overlapped linear layers over copy engines: Python and torch's dispatcher.

    python scripts/bench/host_cost.py --ranks 8 --json host_cost.json

One rank runs the operations of the package on tiny fp32 tensors. The queues of the device do nothing, so the calls of
the CUDA driver are not in the figures; `calls` counts them. `gemms_us` is the time of the GEMM calls alone. On the host
torch adds the partial sums of a reduce-scatter, where CUDA launches a kernel. The figures are CPU time: other programs
on the host add less to it than to wall-clock time.

A column-parallel layer has three operations in both passes, a row-parallel layer two. Without sequence parallelism each
has one, an all-reduce: two messages to each peer. A call of `backward` starts
torch's autograd engine once. The blocks show the layers as in a training step: one call runs many backward passes.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from harness import versions

from megatron_overlap.comm.symmetric.backend import Copy, FlagStep
from megatron_overlap.comm.symmetric.copies import CopyTransport
from megatron_overlap.ops import all_gather_linear, copy_linear, linear_all_reduce, linear_reduce_scatter
from megatron_overlap.ops.tensor_parallel.p2p import LinearPlan, P2PMethod

WIDTH = 16
CALLS = 20  # a window that is short enough to pass while no other program shares the core
BLOCKS = 4


class CountedQueue:
    """See `backend.Queue`; does nothing but count."""

    def __init__(self, calls: Counter[str]) -> None:
        self._calls = calls

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        self._calls["copy"] += 1

    def prepare_copies(self, copies: Sequence[Copy], *, captured: bool = False) -> object:
        return copies

    def copy_all(self, prepared: object, tensors: Sequence[torch.Tensor]) -> None:
        self._calls["copies"] += 1

    def write(self, words: torch.Tensor, index: int, value: int) -> None:
        raise AssertionError("copies write flags in batches")

    def wait(self, words: torch.Tensor, index: int, value: int) -> None:
        raise AssertionError("copies wait for flags in batches")

    def prepare(self, steps: Sequence[FlagStep], *, captured: bool = False) -> object:
        return tuple(steps)

    def run(self, prepared: object) -> None:
        self._calls["batch of flags"] += 1

    def mark(self) -> object:
        self._calls["event"] += 1
        return self._calls["event"]

    def after(self, mark: object) -> None:
        self._calls["wait for an event"] += 1


class CountedBackend:
    """`SymmetricBackend` of rank 0; its memory is on the host, its peers are absent."""

    rank = 0

    def __init__(self, size: int) -> None:
        self.size, self.ranks, self.device = size, range(size), torch.device("cuda")
        self.calls: Counter[str] = Counter()
        self.computing = CountedQueue(self.calls)

    def queue(self) -> CountedQueue:
        return CountedQueue(self.calls)

    def map(self, num_bytes: int, name: str = "") -> list[torch.Tensor]:
        return [torch.zeros(num_bytes, dtype=torch.uint8) for _ in self.ranks]

    def barrier(self) -> None:
        """Return: there is one rank."""

    def all_gather_text(self, text: str) -> list[str]:
        return [text]

    def is_capturing(self) -> bool:
        return False

    def close(self) -> None:
        """Free nothing."""


class Case(NamedTuple):
    """Passes of layers.

    Attributes:
        call: runs them.
        gemms: number of GEMMs.
        operations: number of overlapped operations.
    """

    call: Callable[[], object]
    gemms: int
    operations: int


def cases(backend: Any, ranks: int) -> dict[str, Case]:
    """The passes of both kinds of layer, alone and in blocks of one column-parallel and one row-parallel layer."""
    method = P2PMethod(CopyTransport(backend), LinearPlan(pattern="direct", split="edge"))
    rows = 8 * ranks
    shard, whole = torch.randn(8, WIDTH), torch.randn(rows, WIDTH)
    weight = torch.randn(WIDTH, WIDTH, requires_grad=True)
    main_grad = torch.zeros(WIDTH, WIDTH)

    def forward(function: Any, x: torch.Tensor, group: P2PMethod = method) -> object:
        with torch.no_grad():
            return function(x.detach(), weight, group=group)

    def both(functions: Sequence[Any], x: torch.Tensor, dy: torch.Tensor, group: P2PMethod = method) -> None:
        y = x.detach().requires_grad_()
        for function in functions:
            y = function(y, weight, group=group, main_grad=main_grad)
        y.backward(dy)

    column, row = all_gather_linear, linear_reduce_scatter
    # An all-reduce has one GEMM for each owner.
    reducing = P2PMethod(method.transport, LinearPlan(pattern="direct", split="all"))
    return {
        "all_gather_linear forward": Case(lambda: forward(column, shard), ranks, 1),
        "linear_reduce_scatter forward": Case(lambda: forward(row, whole), ranks, 1),
        "all_gather_linear both passes": Case(lambda: both([column], shard, whole), 2 * ranks + 1, 3),
        "linear_reduce_scatter both passes": Case(lambda: both([row], whole, shard), 2 * ranks + 1, 2),
        "linear_all_reduce forward": Case(lambda: forward(linear_all_reduce, whole, reducing), ranks, 1),
        "copy_linear both passes": Case(lambda: both([copy_linear], whole, whole, reducing), ranks + 2, 1),
        f"{BLOCKS} blocks, both passes": Case(
            lambda: both([column, row] * BLOCKS, shard, shard), BLOCKS * (4 * ranks + 2), BLOCKS * 5
        ),
        f"{BLOCKS} blocks of all-reduces, both passes": Case(
            lambda: both([copy_linear, linear_all_reduce] * BLOCKS, whole, whole, reducing),
            BLOCKS * (2 * ranks + 4),
            BLOCKS * 2,
        ),
    }


def microseconds(call: Callable[[], object], repeats: int) -> list[float]:
    """The CPU time of a call, on average over `CALLS` calls, in each of the repeats."""
    found = []
    for _ in range(repeats):
        start = time.process_time()
        for _ in range(CALLS):
            call()
        found.append((time.process_time() - start) / CALLS * 1e6)
    return found


def main() -> None:
    """Prints and stores the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=90)
    parser.add_argument("--json", type=Path, help="file for the figures")
    args = parser.parse_args()
    torch.set_num_threads(1)
    backend = CountedBackend(args.ranks)
    a, b, out = torch.randn(8, WIDTH), torch.randn(WIDTH, WIDTH), torch.empty(8, WIDTH)
    gemm = min(microseconds(lambda: torch.mm(a, b, out=out), args.repeats))
    rows = []
    for name, case in cases(backend, args.ranks).items():
        for _ in range(3):
            case.call()
        backend.calls.clear()
        case.call()
        row = {"operation": name, "ranks": args.ranks, "operations": case.operations, "calls": dict(backend.calls)}
        times = microseconds(case.call, args.repeats)
        row |= {"us": min(times), "median_us": median(times), "gemms_us": case.gemms * gemm}
        rows.append(row)
        each = f"{row['us'] / case.operations:6.1f} us an operation, median {row['median_us'] / case.operations:6.1f}"
        print(f"{name:40} {each}, of them GEMM calls {row['gemms_us'] / case.operations:4.1f}", flush=True)
    if args.json:
        figures = {"rows": rows, "versions": versions(), "command": sys.argv}
        args.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
