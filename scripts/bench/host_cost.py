"""Times the host's part of the overlapped linear layers over copy engines: Python and torch's dispatcher.

    python scripts/bench/host_cost.py --ranks 8 --json host_cost.json

One rank runs the operations of the package on tiny fp32 tensors. The queues of the device do nothing, so the calls of
the CUDA driver are not in the figures; `calls` counts them. `gemms_us` is the time of the GEMM calls alone.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from harness import versions

from megatron_overlap.comm.symmetric.backend import FlagStep
from megatron_overlap.comm.symmetric.copies import CopyTransport
from megatron_overlap.ops import all_gather_linear, linear_reduce_scatter
from megatron_overlap.ops.tensor_parallel.p2p import LinearPlan, P2PMethod

WIDTH = 16
CALLS = 200


class CountedQueue:
    """See `backend.Queue`; does nothing but count."""

    def __init__(self, calls: Counter[str]) -> None:
        self._calls = calls

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        self._calls["copy"] += 1

    def write(self, words: torch.Tensor, index: int, value: int) -> None:
        raise AssertionError("copies write flags in batches")

    def wait(self, words: torch.Tensor, index: int, value: int) -> None:
        raise AssertionError("copies wait for flags in batches")

    def prepare(self, steps: Sequence[FlagStep]) -> object:
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

    def close(self) -> None:
        """Free nothing."""


def operations(backend: Any, ranks: int) -> dict[str, tuple[Callable[[], object], int]]:
    """The passes of both kinds of layer, and the numbers of their GEMMs."""
    method = P2PMethod(CopyTransport(backend, ring_bytes=1 << 16), LinearPlan(pattern="direct", split="edge"))
    rows = 8 * ranks
    shard, whole = torch.randn(8, WIDTH), torch.randn(rows, WIDTH)
    weight = torch.randn(WIDTH, WIDTH, requires_grad=True)
    main_grad = torch.zeros(WIDTH, WIDTH)

    def forward(function: Any, x: torch.Tensor) -> object:
        with torch.no_grad():
            return function(x.detach(), weight, group=method)

    def both(function: Any, x: torch.Tensor, dy: torch.Tensor) -> None:
        leaf = x.detach().requires_grad_()
        function(leaf, weight, group=method, main_grad=main_grad).backward(dy)

    return {
        "all_gather_linear forward": (lambda: forward(all_gather_linear, shard), ranks),
        "linear_reduce_scatter forward": (lambda: forward(linear_reduce_scatter, whole), ranks),
        "all_gather_linear both passes": (lambda: both(all_gather_linear, shard, whole), 2 * ranks + 1),
        "linear_reduce_scatter both passes": (lambda: both(linear_reduce_scatter, whole, shard), 2 * ranks + 1),
    }


def microseconds(call: Callable[[], object], repeats: int) -> float:
    """The shortest time of a call over some repeats of many: the host's other work only adds."""
    found = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        found.append((time.perf_counter() - start) / CALLS * 1e6)
    return min(found)


def main() -> None:
    """Prints and stores the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", type=Path, help="file for the figures")
    args = parser.parse_args()
    torch.set_num_threads(1)
    backend = CountedBackend(args.ranks)
    a, b, out = torch.randn(8, WIDTH), torch.randn(WIDTH, WIDTH), torch.empty(8, WIDTH)
    gemm = microseconds(lambda: torch.mm(a, b, out=out), args.repeats)
    rows = []
    for name, (call, gemms) in operations(backend, args.ranks).items():
        for _ in range(3):
            call()
        backend.calls.clear()
        call()
        row = {"operation": name, "ranks": args.ranks, "calls": dict(backend.calls)}
        row |= {"us": microseconds(call, args.repeats), "gemms_us": gemms * gemm}
        rows.append(row)
        print(f"{name:36} {row['us']:6.0f} us, of them GEMM calls {row['gemms_us']:4.0f}  {row['calls']}", flush=True)
    if args.json:
        figures = {"rows": rows, "versions": versions(), "command": sys.argv}
        args.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
