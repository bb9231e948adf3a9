"""Fused linears on the GPUs of one node, against NCCL + cuBLAS, torch's fused ops, and p2p.

    torchrun --nproc-per-node 8 scripts/bench/fused.py --json fused_8gpu.json
    torchrun --nproc-per-node 8 scripts/bench/fused.py --check-only      results only, small shapes
    torchrun --nproc-per-node 2 scripts/bench/fused.py --check-only --interpret     the same on a machine with no GPU

All methods take the same operands; they are timed in turns, by the slowest rank, forward of both kinds of layer.
`serial` is all-gather, then GEMM (or GEMM, then reduce-scatter), by NCCL and cuBLAS; `gemm` is cuBLAS on resident rows.
What a method lacks on this machine is said by name, and the others are measured. Not run on GPUs yet.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]
REPEATS = 30
PLANS = [
    {"mover": mover, "stores": stores, "chunk_rows": rows}
    for mover, stores in (("push", "remote"), ("pull", "staged"), ("ring", "remote"))
    for rows in (128, 512, 1 << 20)
]


class Bench:
    """The methods of one group on one shape."""

    def __init__(self, group: Any, interpret: bool) -> None:
        import torch

        from megatron_overlap.comm import transport_of
        from megatron_overlap.comm.host_group import HostGroup
        from megatron_overlap.comm.symmetric.transport import SymmetricTransport
        from megatron_overlap.kernels.primitives import wait_all
        from megatron_overlap.ops.tensor_parallel.fused.multi_node import FusedTransport, open_fused
        from scripts.kernels.cpu_backend import CpuBackend

        self.torch, self.group, self.interpret = torch, group, interpret
        self.rank, self.size = group.rank(), group.size()
        self.device = "cpu" if interpret else f"cuda:{torch.cuda.current_device()}"
        # The interpreter's bf16 is cut off where a GPU rounds.
        self.dtype = torch.float16 if interpret else torch.bfloat16
        self.p2p = transport_of(group)
        self.missing = {}
        opened: FusedTransport | str
        if interpret:
            opened = SymmetricTransport(CpuBackend(HostGroup(group)), wait_all)
        else:
            opened = open_fused(group, transport_of)
        if isinstance(opened, str):
            self.missing["fused"] = opened
        self.fused = None if isinstance(opened, str) else opened

    def operands(self, op: str, m: int, n: int, k: int) -> tuple[Any, Any]:
        """Own rows (or all rows) of the input, and the weight; everybody's from its own seed."""
        generator = self.torch.Generator().manual_seed(self.rank)
        rows = m // self.size if op == "ag" else m
        x, w = (self.torch.randn(shape, generator=generator) for shape in ((rows, k), (n, k)))
        return x.to(self.device, self.dtype), w.to(self.device, self.dtype)

    def methods(self, op: str, x: Any, w: Any) -> dict[str, Callable[[], Any]]:
        """What each method runs; each returns the output."""
        import torch
        import torch.distributed as dist

        # Registers torch's fused ops.
        from torch.distributed import _symmetric_memory  # noqa: F401

        from megatron_overlap.ops import LinearPlan, all_gather_linear, linear_reduce_scatter
        from megatron_overlap.ops.tensor_parallel.fused.kernels import FusedPlan
        from megatron_overlap.ops.tensor_parallel.fused.linear import FusedMethod

        gathering = op == "ag"
        full = x.new_empty(x.shape[0] * self.size, x.shape[1]) if gathering else x

        def serial() -> Any:
            if gathering:
                dist.all_gather_into_tensor(full, x, group=self.group)
                return full @ w.t()
            y = x @ w.t()
            out = y.new_empty(y.shape[0] // self.size, y.shape[1])
            dist.reduce_scatter_tensor(out, y, group=self.group)
            return out

        found: dict[str, Callable[[], Any]] = {"serial": serial, "gemm": lambda: full @ w.t()}
        linear = all_gather_linear if gathering else linear_reduce_scatter
        for chunks in (1, 2):
            plan = LinearPlan(chunks_per_rank=chunks)
            found[f"p2p {chunks}"] = lambda plan=plan: linear(x, w, group=self.p2p, plan=plan)  # type: ignore[misc]
        name = self.group.group_name

        def torchs() -> Any:
            if gathering:
                return torch.ops.symm_mem.fused_all_gather_matmul(x, [w.t()], 0, name)[1][0]
            return torch.ops.symm_mem.fused_matmul_reduce_scatter(x, w.t(), "sum", 0, name)

        found["torch fused"] = torchs
        if self.fused is not None:
            for values in PLANS:
                method = FusedMethod(self.fused, FusedPlan(**values))  # type: ignore[arg-type]
                run = lambda method=method: linear(x, w, group=method)  # type: ignore[misc]  # noqa: E731
                found[f"fused {values['mover']} {values['stores']} {values['chunk_rows']}"] = run
        return found

    def together(self, text: str) -> str:
        """The first rank's objection that is not empty, on all ranks."""
        import torch.distributed as dist

        texts: list[str] = [""] * self.size
        dist.all_gather_object(texts, text, group=self.group)
        return next((each for each in texts if each), "")

    def time_ms(self, run: Callable[[], Any]) -> float:
        """Milliseconds of one call on the slowest rank."""
        import torch
        import torch.distributed as dist

        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        dist.barrier(self.group)
        torch.cuda.synchronize()
        start.record()
        run()
        stop.record()
        stop.synchronize()
        slowest = torch.tensor(start.elapsed_time(stop), device=self.device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=self.group)
        return float(slowest)


def measure(bench: Bench, shape: Any, check_only: bool) -> dict[str, Any]:
    """One shape: which methods agree with float64, and how long each takes."""
    import torch
    import torch.distributed as dist

    x, w = bench.operands(shape.op, shape.m, shape.n, shape.k)
    row: dict[str, Any] = {"shape": shape.name, "op": shape.op, "mnk": [shape.m, shape.n, shape.k]}
    row |= {"ranks": bench.size, "missing": dict(bench.missing), "wrong": [], "ms": {}}
    shards = [torch.empty_like(x) for _ in range(bench.size)]
    dist.all_gather(shards, x, group=bench.group)
    if shape.op == "ag":
        exact = torch.cat(shards).double() @ w.double().t()
    else:
        weights = [torch.empty_like(w) for _ in range(bench.size)]
        dist.all_gather(weights, w, group=bench.group)
        own = slice(bench.rank * shape.m // bench.size, (bench.rank + 1) * shape.m // bench.size)
        exact = sum(a[own].double() @ b.double().t() for a, b in zip(shards, weights, strict=True))
    methods = bench.methods(shape.op, x, w)
    scale = float(exact.abs().max())
    for name, run in list(methods.items()):
        problem, wrong = "", ""
        try:
            got = run()
            if name != "gemm":
                error = float((got.double() - exact).abs().max())
                wrong = "" if error <= 8 * torch.finfo(x.dtype).eps * scale else f"{name}: off by {error:.3g}"
        except (RuntimeError, ValueError, AttributeError, NotImplementedError) as error:
            problem = f"{type(error).__name__}: {(str(error) or 'no text').splitlines()[0][:200]}"
        if problem := bench.together(problem):
            row["missing"][name] = problem
            del methods[name]
        if wrong := bench.together(wrong):
            row["wrong"].append(wrong)
    if not check_only:
        times: dict[str, list[float]] = {name: [] for name in methods}
        for _ in range(REPEATS):
            for name, run in methods.items():
                times[name].append(bench.time_ms(run))
        row["ms"] = {name: median(each) for name, each in times.items()}
        gemm, serial = row["ms"].get("gemm"), row["ms"].get("serial")
        if gemm and serial and serial > gemm:
            # Flux's metric: 1 hides everything, 0 is serial.
            row["overlap_efficiency"] = {
                name: 1 - (each - gemm) / (serial - gemm) for name, each in row["ms"].items() if name != "gemm"
            }
    return row


def shapes_for(size: int, interpret: bool, check_only: bool) -> Sequence[Any]:
    from one_gpu.shapes import Shape, shapes

    if interpret or check_only:
        m, n, k = (16 * size, 40, 24) if interpret else (512 * size, 1024, 512)
        return [Shape("check", "ag", m, n, k, size), Shape("check", "rs", m, n, k, size)]
    # Global sizes stay: what one of 8 ranks has is what one of `size` ranks has more of.
    return [
        Shape(each.name, each.op, each.m, *_scaled(each, 8 / size), size) for each in shapes() if each.m % size == 0
    ]


def _scaled(shape: Any, factor: float) -> tuple[int, int]:
    if shape.op == "ag":
        return int(shape.n * factor), shape.k
    return shape.n, int(shape.k * factor)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where the figures go, after every shape")
    parser.add_argument("--check-only", action="store_true", help="are the results right; nothing is timed")
    parser.add_argument("--interpret", action="store_true", help="kernels in the interpreter, on CPUs; to check only")
    options = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start it with torchrun --nproc-per-node N (docs/fused_kernels.md)")
    if options.interpret:
        if not options.check_only:
            parser.error("--interpret: the interpreter's times mean nothing: add --check-only")
        os.environ["TRITON_INTERPRET"] = "1"
    import torch
    import torch.distributed as dist

    rank, local = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    if not options.interpret and torch.cuda.device_count() <= local:
        if rank == 0:
            print(
                f"{torch.cuda.device_count()} CUDA devices for {os.environ['LOCAL_WORLD_SIZE']} ranks of this node: "
                "this measures one a rank; --check-only --interpret checks without",
                file=sys.stderr,
            )
        return 2

    from megatron_overlap.comm import destroy_process_groups

    if options.interpret:
        dist.init_process_group("gloo")
    else:
        torch.cuda.set_device(local)
        dist.init_process_group("nccl", device_id=torch.device("cuda", local))
    group = dist.group.WORLD
    bench = Bench(group, options.interpret)
    figures: dict[str, Any] = {"torch": torch.__version__, "ranks": bench.size, "rows": []}
    figures["device"] = "CPU, interpreter" if options.interpret else torch.cuda.get_device_name()
    for shape in shapes_for(bench.size, options.interpret, options.check_only):
        row = measure(bench, shape, options.check_only)
        figures["rows"].append(row)
        if rank == 0:
            print(json.dumps(row), flush=True)
            if options.json:
                options.json.write_text(json.dumps(figures, indent=1) + "\n")
    wrong = [text for row in figures["rows"] for text in row["wrong"]]
    missing = [f"{name}: {text}" for name, text in figures["rows"][0]["missing"].items()]
    if rank == 0:
        for line in missing:
            print(f"not measured: {line}")
        print("wrong: " + "; ".join(wrong) if wrong else "all results are right")
    destroy_process_groups()
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
