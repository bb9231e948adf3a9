"""Ranks that are processes: operations over torch's symmetric memory, on one device or, dry, over the host's memory.

Correctness only: processes on one device take turns, so that their times mean nothing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from multiprocessing.queues import Queue
from typing import Any

from part_process import SHARED_GPU_ENV

from megatron_overlap.tools.launch.processes import free_port

CASES = ["all_gather_linear", "linear_reduce_scatter", "linear_all_reduce", "copy_linear"]
Rows = Iterator[dict[str, Any]]


def processes(dry: bool, deadline: float) -> Rows:
    """The fused method: every op, forward and backward, with each way to move, against plain collectives."""
    yield from _spawn(_fused_rows, 2, dry, deadline)


def copies(dry: bool, deadline: float) -> Rows:
    """Method p2p over copies: every op, forward and backward, against plain collectives; then ranks that are late."""
    yield from _by_two_and_four(_copy_rows, dry, deadline)


def graphs(dry: bool, deadline: float) -> Rows:
    """Method p2p over copies in CUDA graphs: forward and backward captured apart, replayed, against calls without."""
    yield from _by_two_and_four(_graph_rows, dry, deadline)


def _by_two_and_four(rows: Callable[..., Rows], dry: bool, deadline: float) -> Rows:
    """The rows of 2, then of 4 processes; each gets half of the time."""
    for ranks in (2, 4):
        share = (deadline - time.perf_counter()) / (2 if ranks == 2 else 1)
        yield from _spawn(rows, ranks, dry, time.perf_counter() + share)


def _spawn(rows: Callable[..., Rows], ranks: int, dry: bool, deadline: float) -> Rows:
    """The rows of `ranks` processes."""
    port = free_port()
    context = get_context("spawn")
    answers: Queue[Any] = context.Queue()
    # The workers end with this process, which its parent kills after the deadline.
    workers = [
        context.Process(
            target=_work, args=(rows, rank, ranks, port, dry, deadline - time.perf_counter(), answers), daemon=True
        )
        for rank in range(ranks)
    ]
    for worker in workers:
        worker.start()
    left = ranks
    while left:
        answer = answers.get(timeout=max(1.0, deadline - time.perf_counter()))
        if answer is None:
            left -= 1
        else:
            yield answer


def _work(rows: Callable[..., Rows], rank: int, ranks: int, port: int, dry: bool, seconds: float, answers: Any) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), **SHARED_GPU_ENV)
    try:
        import torch
        import torch.distributed as dist

        # The group's store is all that symmetric memory needs of it.
        dist.init_process_group("gloo", rank=rank, world_size=ranks)
        if not dry:
            torch.cuda.set_device(0)
        for row in rows(rank, dry, time.perf_counter() + seconds):
            answers.put({"rank": rank, "ranks": ranks, **row})
    except Exception as error:
        answers.put({"rank": rank, "ranks": ranks, "failed": f"{type(error).__name__}: {str(error)[:800]}"})
    answers.put(None)


def _all_have_time(deadline: float) -> bool:
    """Whether no rank is past its deadline; the same answer on all ranks."""
    import torch
    import torch.distributed as dist

    more = torch.tensor(float(time.perf_counter() < deadline))
    dist.all_reduce(more, dist.ReduceOp.MIN)
    return bool(more)


def _unsupported_reason(dry: bool, group: Any) -> str:
    """Why the ranks cannot use symmetric memory, or an empty string."""
    from megatron_overlap.comm.symmetric.cuda import open_backend

    opened = "" if dry else open_backend(group)
    if isinstance(opened, str):
        return opened
    opened[0].close()
    return ""


def _backend(dry: bool, group: Any) -> Any:
    from megatron_overlap.comm.host_group import HostGroup
    from megatron_overlap.comm.symmetric.cuda import CudaBackend
    from scripts.kernels.cpu_backend import CpuBackend

    return (CpuBackend if dry else CudaBackend)(HostGroup(group))


def _copy_rows(rank: int, dry: bool, deadline: float) -> Rows:
    import random

    import torch
    import torch.distributed as dist

    from megatron_overlap.comm.symmetric.copies import CopyTransport
    from megatron_overlap.ops.tensor_parallel.p2p import LinearPlan, P2PMethod

    group = dist.group.WORLD
    if reason := _unsupported_reason(dry, group):
        yield {"failed": reason}
        return
    transport = CopyTransport(_backend(dry, group))
    plans = {"direct": LinearPlan(pattern="direct"), "ring": LinearPlan(pattern="ring")}
    torch.set_num_threads(2)  # the reference runs on the host
    for pattern, plan in plans.items():
        for op in CASES:
            if (pattern == "ring" and op in CASES[2:]) or not _all_have_time(deadline - 12):
                continue
            for seed, rows in enumerate((32, 37) if dry else (1024, 1021, 2048)):
                start = time.perf_counter()
                errors = _compare(op, P2PMethod(transport, plan), group, dry, seed, rows)
                row = {"op": op, "pattern": pattern, "rows": rows, "errors": errors}
                row["seconds"] = time.perf_counter() - start
                yield row | {"right": max(errors.values()) < 1.0}
    # Repeated operations with ranks that are late on the device give the same bits.
    draw, different, steps = random.Random(rank), 0, 0
    generator = torch.Generator().manual_seed(rank)
    shape = (8, 24) if dry else (512, 512)
    device = "cpu" if dry else "cuda"
    x, w = (torch.randn(shape, generator=generator).to(device, torch.bfloat16) for _ in range(2))
    from megatron_overlap.ops import all_gather_linear, linear_reduce_scatter

    w = w if dry else w[:384]
    first: list[torch.Tensor] = []
    method = P2PMethod(transport, plans["direct"])
    while steps < (3 if dry else 500) and _all_have_time(deadline - 6):
        if not dry and draw.random() < 0.3:
            torch.cuda._sleep(draw.randrange(2_000_000))
        y = all_gather_linear(x.clone(), w, group=method)
        results = [y, linear_reduce_scatter(y, w.t().contiguous(), group=method)]
        first = first or [each.clone() for each in results]
        different += sum(not torch.equal(*pair) for pair in zip(results, first, strict=True))
        steps += 1
    yield {"late": True, "steps": steps, "wrong": different}


class _Layers:
    """A column- and a row-parallel layer on static tensors."""

    def __init__(self, method: Any, rows: int) -> None:
        import torch

        generator = torch.Generator().manual_seed(method.rank)
        sizes = {
            "x": (rows // method.size, 384),
            "up": (512, 384),
            "down": (384, 512),
            "dy": (rows // method.size, 384),
        }
        for name, shape in sizes.items():
            setattr(self, name, torch.randn(shape, generator=generator).to("cuda", torch.bfloat16))
        self.leaves = [tensor.requires_grad_() for tensor in (self.x, self.up, self.down)]
        self._method, self._output = method, self.x

    def forward(self) -> list[Any]:
        from megatron_overlap.ops import all_gather_linear, linear_reduce_scatter

        between = all_gather_linear(self.x, self.up, group=self._method)
        self._output = linear_reduce_scatter(between, self.down, group=self._method)
        return [self._output.detach()]

    def backward(self) -> list[Any]:
        import torch

        return list(torch.autograd.grad(self._output, self.leaves, self.dy))


def _graph_rows(rank: int, dry: bool, deadline: float) -> Rows:
    import random

    import torch
    import torch.distributed as dist

    from megatron_overlap.comm.symmetric.copies import CopyTransport
    from megatron_overlap.ops.tensor_parallel.p2p import LinearPlan, P2PMethod

    group = dist.group.WORLD
    if dry:
        yield {"left_out": "the host has no CUDA graphs"}
        return
    if reason := _unsupported_reason(dry, group):
        yield {"failed": reason}
        return
    method = P2PMethod(CopyTransport(_backend(dry, group)), LinearPlan(pattern="direct"))
    captured, plain = (_Layers(method, 1024) for _ in range(2))
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            captured.forward()
            captured.backward()
    torch.cuda.current_stream().wait_stream(aside)
    recorded, results = [], []
    for run in (captured.forward, captured.backward):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results += run()
        recorded.append(graph)
    draw, generator = random.Random(rank), torch.Generator().manual_seed(rank)
    steps = different = unchanged = 0
    last = [torch.empty(0, device="cuda")] * len(results)
    while steps < 200 and _all_have_time(deadline - 6):
        with torch.no_grad():
            for name in ("x", "dy"):
                getattr(captured, name).copy_(torch.randn(captured.x.shape, generator=generator))
                getattr(plain, name).copy_(getattr(captured, name))
        if draw.random() < 0.3:
            torch.cuda._sleep(draw.randrange(2_000_000))
        for graph in recorded:
            graph.replay()
        expected = plain.forward() + plain.backward()
        different += not all(map(torch.equal, results, expected))
        unchanged += any(map(torch.equal, results, last))
        last = [result.clone() for result in results]
        steps += 1
    yield {"replays": steps, "different": different, "unchanged": unchanged, "right": not different and not unchanged}


def _fused_rows(rank: int, dry: bool, deadline: float) -> Rows:
    import torch.distributed as dist

    from megatron_overlap.comm.symmetric.transport import SymmetricTransport
    from megatron_overlap.kernels.primitives import wait_all
    from megatron_overlap.ops.tensor_parallel.fused.kernels import FusedPlan
    from megatron_overlap.ops.tensor_parallel.fused.linear import FusedMethod

    group = dist.group.WORLD
    if reason := _unsupported_reason(dry, group):
        yield {"failed": reason}
        return
    for mover, stores in (("push", "remote"), ("pull", "staged"), ("ring", "remote")):
        transport = SymmetricTransport(_backend(dry, group), wait_all)
        plan = FusedPlan(mover=mover, stores=stores, chunk_rows=8 if dry else 128)  # type: ignore[arg-type]
        for op in CASES:
            if not _all_have_time(deadline):
                return
            for repeat in range(1 if dry else 4):
                errors = _compare(op, FusedMethod(transport, plan), group, dry, repeat, 32 if dry else 1024)
                worst = max(errors.values())
                row = {"op": op, "mover": mover, "stores": stores, "repeat": repeat}
                yield row | {"right": worst < 1.0, "errors": errors, "gave_up": int(transport.status)}
        transport.close()


def _compare(op: str, method: Any, group: Any, dry: bool, seed: int, rows: int) -> dict[str, float]:
    """The largest error of each result, over what sums of rounded terms may be off by."""
    import torch

    from megatron_overlap import ops
    from megatron_overlap.ops import reference
    from megatron_overlap.schedules import ChunkLayout

    device, dtype = ("cpu", torch.float16) if dry else ("cuda", torch.bfloat16)
    k, f = (24, 40) if dry else (384, 512)
    size, rank = method.size, method.rank
    own = ChunkLayout(rows, size).shard_rows(rank)
    of_rank, of_all = torch.Generator().manual_seed(seed * 64 + rank + 1), torch.Generator().manual_seed(seed * 64)
    sharded = op == "all_gather_linear"
    options: Any = {"num_rows": rows} if sharded else {}
    x = torch.randn(own if sharded else rows, k, generator=of_all if op == "copy_linear" else of_rank)
    w = torch.randn(f, k, generator=of_rank)
    out_rows = own if op == "linear_reduce_scatter" else rows
    dy = torch.randn(out_rows, f, generator=of_all if op == "linear_all_reduce" else of_rank)
    mine = [tensor.to(device, dtype).requires_grad_() for tensor in (x, w)]
    y = getattr(ops, op)(*mine, group=method, **options)
    y.backward(dy.to(device, dtype))
    if not dry:
        torch.cuda.synchronize()
    plain = [tensor.detach().cpu().double().requires_grad_() for tensor in mine]
    exact = getattr(reference, op)(*plain, group=group, **options)
    exact.backward(dy.to(dtype).double())
    results = {"y": (y, exact.detach()), "dx": (mine[0].grad, plain[0].grad), "dw": (mine[1].grad, plain[1].grad)}
    eps = torch.finfo(dtype).eps
    return {
        name: float((got.detach().cpu().double() - true).abs().max() / (8 * eps * true.abs().max()))
        for name, (got, true) in results.items()
    }
