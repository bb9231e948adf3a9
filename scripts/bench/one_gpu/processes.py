"""Ranks that are processes: the fused ops over torch's symmetric memory, on one device or, dry, over the host's memory.

Correctness only: processes on one device take turns, so that their times mean nothing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from multiprocessing import get_context
from multiprocessing.queues import Queue
from typing import Any

from megatron_overlap.tools.launch.ranks import free_port

RANKS = 2
CASES = ["all_gather_linear", "linear_reduce_scatter", "linear_all_reduce", "copy_linear"]


def processes(dry: bool, deadline: float) -> Iterator[dict[str, Any]]:
    """Every op, forward and backward, with each way to move, against plain collectives."""
    port = free_port()
    context = get_context("spawn")
    answers: Queue[Any] = context.Queue()
    # All of it goes with this process, which is ended if it takes too long.
    workers = [
        context.Process(target=_work, args=(rank, port, dry, deadline - time.perf_counter(), answers), daemon=True)
        for rank in range(RANKS)
    ]
    for worker in workers:
        worker.start()
    left = RANKS
    while left:
        answer = answers.get(timeout=max(1.0, deadline - time.perf_counter()))
        if answer is None:
            left -= 1
        else:
            yield answer


def _work(rank: int, port: int, dry: bool, seconds: float, answers: Any) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES="1")
    try:
        for row in _rows(rank, dry, time.perf_counter() + seconds):
            answers.put(row)
    except Exception as error:
        answers.put({"rank": rank, "failed": f"{type(error).__name__}: {str(error)[:400]}"})
    answers.put(None)


def _rows(rank: int, dry: bool, deadline: float) -> Iterator[dict[str, Any]]:
    import torch
    import torch.distributed as dist

    from megatron_overlap.comm.host_group import HostGroup
    from megatron_overlap.comm.symmetric.cuda import CudaBackend, probe_symmetric_memory
    from megatron_overlap.comm.symmetric.transport import SymmetricTransport
    from megatron_overlap.kernels.primitives import wait_all
    from megatron_overlap.ops.tensor_parallel.fused.kernels import FusedPlan
    from scripts.kernels.cpu_backend import CpuBackend

    # The group's store is all that symmetric memory needs of it.
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    group = dist.group.WORLD
    assert group is not None
    if not dry:
        torch.cuda.set_device(0)
        found = probe_symmetric_memory(group, deadline_s=60)
        yield {"rank": rank, "objection": found if isinstance(found, str) else ""}
        if isinstance(found, str):
            return
    for mover, stores in (("push", "remote"), ("pull", "staged"), ("ring", "remote")):
        transport = SymmetricTransport((CpuBackend if dry else CudaBackend)(HostGroup(group)), wait_all)
        plan = FusedPlan(mover=mover, stores=stores, chunk_rows=8 if dry else 128)  # type: ignore[arg-type]
        for op in CASES:
            if time.perf_counter() > deadline:
                return
            for repeat in range(1 if dry else 4):
                errors = _compare(op, transport, plan, group, dry, repeat)
                worst = max(errors.values())
                row = {"rank": rank, "op": op, "mover": mover, "stores": stores, "repeat": repeat}
                yield row | {"right": worst < 1.0, "errors": errors, "gave_up": int(transport.status)}
        transport.close()


def _compare(op: str, transport: Any, plan: Any, group: Any, dry: bool, seed: int) -> dict[str, float]:
    """The largest error of each result, over what sums of rounded terms may be off by."""
    import torch

    from megatron_overlap import ops
    from megatron_overlap.ops import reference
    from megatron_overlap.ops.tensor_parallel.fused.linear import FusedMethod

    device, dtype = ("cpu", torch.float16) if dry else ("cuda", torch.bfloat16)
    rows, k, f = (32, 24, 40) if dry else (1024, 512, 768)
    size, rank = transport.size, transport.rank
    of_rank, of_all = torch.Generator().manual_seed(seed * 64 + rank + 1), torch.Generator().manual_seed(seed * 64)
    sharded = op == "all_gather_linear"
    x = torch.randn(rows // size if sharded else rows, k, generator=of_all if op == "copy_linear" else of_rank)
    w = torch.randn(f, k, generator=of_rank)
    out_rows = rows // size if op == "linear_reduce_scatter" else rows
    dy = torch.randn(out_rows, f, generator=of_all if op == "linear_all_reduce" else of_rank)
    mine = [tensor.to(device, dtype).requires_grad_() for tensor in (x, w)]
    y = getattr(ops, op)(*mine, group=FusedMethod(transport, plan))
    y.backward(dy.to(device, dtype))
    if not dry:
        torch.cuda.synchronize()
    plain = [tensor.detach().cpu().double().requires_grad_() for tensor in mine]
    exact = getattr(reference, op)(*plain, group=group)
    exact.backward(dy.to(dtype).double())
    results = {"y": (y, exact.detach()), "dx": (mine[0].grad, plain[0].grad), "dw": (mine[1].grad, plain[1].grad)}
    eps = torch.finfo(dtype).eps
    return {
        name: float((got.detach().cpu().double() - true).abs().max() / (8 * eps * true.abs().max()))
        for name, (got, true) in results.items()
    }
