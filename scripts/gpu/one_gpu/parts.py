"""What is measured on one device. Each part yields rows as it gets them, and stops at its deadline."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from megatron_overlap.kernels import gemm_rs
from megatron_overlap.kernels.launch import GemmConfig
from megatron_overlap.schedules import ChunkLayout
from one_gpu.device import device
from one_gpu.problem import Kernels, copies_to, gather, is_wrong, scatter
from one_gpu.shapes import Shape, overlap_figures, shapes

Rows = Iterator[dict[str, Any]]
REPEATS = 30


def correct(dry: bool, deadline: float) -> Rows:
    """Each kernel once, both types, whole and odd shapes, two and four ranks; a mutant must be noticed."""
    problems = [(64, 48, 40), (37, 19, 35)] if dry else [(2048, 1024, 512), (1000, 515, 331), (777, 256, 256)]
    dtypes = [torch.float16] if dry else [torch.bfloat16, torch.float16]
    yield from correct_rows(Kernels(device(dry)), dtypes, problems, deadline)


def correct_rows(
    kernels: Kernels, dtypes: list[torch.dtype], problems: list[tuple[int, int, int]], deadline: float
) -> Rows:
    """A row for each type, problem (rows, columns, depth) and number of ranks."""
    for dtype in dtypes:
        for m, n, k in problems:
            for ranks in (2, 4):
                if time.perf_counter() > deadline:
                    return
                layout = ChunkLayout(m, ranks, 2)
                rates = [200.0] * ranks
                # First what does not wait, so that nothing is compiled while a kernel waits.
                noticed = gather(kernels, layout, n, k, dtype, rates, mutant=True)
                wrong = gather(kernels, layout, n, k, dtype, rates)
                wrong_sums = scatter(kernels, layout, n, k, dtype)
                yield {
                    "mnk": [m, n, k],
                    "dtype": str(dtype),
                    "ranks": ranks,
                    "mutant_noticed": bool(noticed),
                    "wrong": wrong + wrong_sums,
                    "gave_up": int(kernels.status),
                }
                kernels.status.zero_()


def stress(dry: bool, deadline: float) -> Rows:
    """Random shapes, cuts and paces, over and over; a quarter with more blocks than there are SMs."""
    kernels, draw = Kernels(device(dry)), random.Random(1)
    problems = [(37, 19, 35)] if dry else [(1000, 515, 331), (2048, 1024, 512), (777, 256, 256), (4096, 2048, 1024)]
    warm: set[Any] = set()
    total = {"launches": 0, "wrong": 0, "oversubscribed": 0, "gave_up": 0}
    while time.perf_counter() < deadline and total["launches"] < (16 if dry else 10_000):
        ranks, (m, n, k) = draw.choice([2, 4]), draw.choice(problems)
        dtype = torch.float16 if dry else draw.choice([torch.bfloat16, torch.float16])
        layout = ChunkLayout(m, ranks, draw.choice([1, 2, 4]))
        rates = [draw.choice([5.0, 20.0, 200.0]) for _ in range(ranks)]
        if (m, n, k, dtype, ranks) not in warm:
            gather(kernels, layout, n, k, dtype, rates, mutant=True)
            warm.add((m, n, k, dtype, ranks))
        over = draw.random() < 0.25
        programs = kernels.device.num_sms * 2 if over else None
        total["wrong"] += gather(kernels, layout, n, k, dtype, rates, programs=programs)
        total["wrong"] += scatter(kernels, layout, n, k, dtype)
        total["launches"] += 4 * ranks
        total["oversubscribed"] += 2 * ranks * over
        total["gave_up"] += int(int(kernels.status) > 0)
        kernels.status.zero_()
        # A row now and then: what was seen must outlive whatever ends this process.
        if total["launches"] % 64 < 4 * ranks:
            yield dict(total)
    yield dict(total)


def _candidates(dry: bool, arch: int) -> list[GemmConfig]:
    if dry:
        return [GemmConfig(32, 32, 32, 2, 2, 4)]
    if arch == 80:
        shapes_ = [(128, 128, 32, 4, 4), (128, 256, 32, 3, 8), (256, 128, 32, 3, 8), (64, 128, 32, 4, 4)]
    else:
        shapes_ = [(128, 256, 64, 3, 8), (128, 128, 64, 4, 8), (128, 128, 64, 4, 4), (256, 128, 64, 3, 8)]
        shapes_ += [(128, 256, 64, 4, 8)]
    return [GemmConfig(m, n, k, 8, stages, warps) for m, n, k, stages, warps in shapes_]


def gemm(dry: bool, deadline: float) -> Rows:
    """The package's GEMM with nothing to wait for against cuBLAS: the rule's tile shape, then beside it each other one.

    A tile shape takes seconds to compile. It runs all shapes before the next one is compiled.
    """
    kernels = Kernels(device(dry))
    for other in (None, *_candidates(dry, kernels.arch)):
        for shape in shapes(dry):
            if time.perf_counter() > deadline:
                return
            yield gemm_row(kernels, shape, dry, other)


def _operands(kernels: Kernels, shape: Shape) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A, a weight, and where the product goes."""
    # The interpreter's bf16 is cut off where a GPU rounds.
    dtype = torch.float16 if kernels.device.interpreted else torch.bfloat16
    a, w = kernels.random(shape.m, shape.k, dtype=dtype), kernels.random(shape.n, shape.k, dtype=dtype)
    return a, w, kernels.nan(shape.m, shape.n, dtype=dtype)


def gemm_row(kernels: Kernels, shape: Shape, dry: bool, other: GemmConfig | None = None) -> dict[str, Any]:
    """One shape against cuBLAS, with the rule's tile shape and with `other`."""
    a, w, out = _operands(kernels, shape)
    waits, layout = kernels.waits(kernels.flags(1), 0), ChunkLayout(shape.m, 1, 1)
    theirs = kernels.device.timed_ms(lambda: torch.mm(a, w.t(), out=out), None, REPEATS)
    exact = out.clone()
    rule = kernels.config(shape.m, shape.n, shape.k)
    own: list[dict[str, Any]] = []
    for config in [rule] if other in (None, rule) else [rule, other]:
        if shape.n % config.block_n and not dry:
            continue
        launch = partial(
            kernels.ag_gemm,
            a,
            w.t(),
            out,
            tiles=kernels.table(layout, 0, "arrival", config.block_m),
            waits=waits,
            config=config,
            num_programs=kernels.device.num_sms,
        )
        tile = [config.block_m, config.block_n, config.block_k, config.num_stages, config.num_warps]
        try:
            out.fill_(torch.nan)
            launch()
            kernels.device.synchronize()
            close = bool(torch.allclose(out.float(), exact.float(), rtol=2e-2, atol=2e-2 * shape.k**0.5))
            mine = kernels.device.timed_ms(launch, None, REPEATS if config == rule else 10)
        except Exception as error:
            # Too much shared memory, or a compiler's fault: the others are still to be measured.
            own.append({"tile": tile, "failed": f"{type(error).__name__}: {str(error)[:200]}"})
            continue
        own.append({"tile": tile, "ms": mine, "of_cublas": theirs / mine, "close": close})
    ratios = [each["of_cublas"] for each in own if each.get("close")]
    return {
        "shape": shape.name,
        "op": shape.op,
        "mnk": [shape.m, shape.n, shape.k],
        "cublas_ms": theirs,
        "cublas_tflops": shape.flops / theirs / 1e9,
        "own": own,
        "of_cublas": own[0].get("of_cublas"),
        "best_of_cublas": max(ratios, default=None),
        "right": all(each.get("close", True) for each in own),
    }


def overlap(dry: bool, deadline: float) -> Rows:
    """Both fused kernels over PCIe and links like NVLink: copies alone, cuBLAS on resident data, fused."""
    kernels = Kernels(device(dry))
    for share in (8, 1):
        for shape in shapes(dry):
            if time.perf_counter() > deadline:
                return
            for rows in (512,) if shape.m < 8192 else (512, 128):
                yield overlap_row(kernels, shape, share, rows)
            if not dry:
                torch.cuda.empty_cache()


def overlap_row(kernels: Kernels, shape: Shape, share: int, chunk_rows: int) -> dict[str, Any]:
    """One shape over one link, in chunks of `chunk_rows`. Results are checked with whole chunks (`share` of 1)."""
    return (_gather_row if shape.op == "ag" else _scatter_row)(kernels, shape, share, chunk_rows)


def _row(kernels: Kernels, shape: Shape, share: int, link: Any, parts: int, runs: Any, right: bool) -> Any:
    """Times of copies alone, cuBLAS alone and the fused kernel, interleaved by the caller's order."""
    communicate, resident, fused = runs
    timed = kernels.device.timed_ms
    comm_ms = timed(communicate, link.pace, REPEATS)
    gemm_ms = timed(resident, None, REPEATS)
    fused_ms = timed(fused, link.pace, REPEATS)
    gave_up = int(kernels.status)
    kernels.status.zero_()
    return {
        "link": "PCIe" if share == 1 else f"PCIe, 1/{share} of the bytes",
        "shape": shape.name,
        "op": shape.op,
        "mnk": [shape.m, shape.n, shape.k],
        "parts": parts,
        "comm_ms": comm_ms,
        "cublas_ms": gemm_ms,
        "fused_ms": fused_ms,
        "link_gbps": shape.link_bytes / comm_ms / 1e6,
        **overlap_figures(gemm_ms, comm_ms, fused_ms),
        "right": right,
        "gave_up": gave_up,
    }


def _gather_row(kernels: Kernels, shape: Shape, share: int, chunk_rows: int) -> dict[str, Any]:
    link, whole_link = kernels.device.link(share=share), kernels.device.link()
    parts = max(1, min(32, shape.m // shape.ranks // chunk_rows))
    layout = ChunkLayout(shape.m, shape.ranks, parts)
    a, w, out = _operands(kernels, shape)
    far, flags = link.source(a), kernels.flags(shape.ranks * parts)
    config = kernels.config(shape.m, shape.n, shape.k)
    table = kernels.table(layout, 0, "arrival", config.block_m)
    copies = copies_to(layout, 0, a, far, flags)
    epoch = 0

    def multiply(number: int) -> None:
        waits = kernels.waits(flags, number)
        kernels.ag_gemm(a, w.t(), out, tiles=table, waits=waits, config=config, num_programs=kernels.device.num_sms)

    def communicate() -> None:
        nonlocal epoch
        epoch += 1
        link.start(copies, epoch)
        link.join()

    def fused(link: Any = link) -> None:
        nonlocal epoch
        epoch += 1
        link.start(copies, epoch)
        multiply(epoch)
        link.join()

    def resident() -> None:
        torch.mm(a, w.t(), out=out)

    # Nothing may be compiled or set up while something waits.
    multiply(0)
    resident()
    kernels.device.synchronize()
    exact, terms = a.double() @ w.double().t(), a.double().abs() @ w.double().abs().t()
    a[slice(layout.shard(0)[1], None)] = torch.nan
    kernels.device.synchronize()
    fused(whole_link)
    kernels.device.synchronize()
    right = not is_wrong(out, exact, terms)
    del exact, terms
    return _row(kernels, shape, share, link, parts, (communicate, resident, fused), right)


def _scatter_row(kernels: Kernels, shape: Shape, share: int, chunk_rows: int) -> dict[str, Any]:
    """The inbound half and the sum: peers' parts of the own rows arrive while the GEMM stores others' rows."""
    name, link, whole_link = kernels.device.name, kernels.device.link(share=share), kernels.device.link()
    parts = max(1, min(32, shape.m // shape.ranks // chunk_rows))
    layout, slot_rows = ChunkLayout(shape.m, shape.ranks, parts), shape.m // shape.ranks
    a, w, y = _operands(kernels, shape)
    dtype, out = a.dtype, kernels.nan(slot_rows, shape.n, dtype=a.dtype)
    recv_buffers = [kernels.nan(shape.ranks, slot_rows, shape.n, dtype=dtype) for _ in range(shape.ranks)]
    flags = [kernels.flags(shape.ranks * parts) for _ in range(shape.ranks)]
    counters = kernels.flags(shape.ranks * parts)
    sent = kernels.random(shape.ranks, slot_rows, shape.n, dtype=dtype)
    far = link.source(sent)
    to_recv_buffers = torch.tensor([tensor.data_ptr() for tensor in recv_buffers], device=name)
    to_flags = torch.tensor([tensor.data_ptr() for tensor in flags], device=name)
    config = kernels.config(shape.m, shape.n, shape.k)
    departures = kernels.table(layout, 0, "departure", config.block_m)
    own = kernels.table(layout, 0, "own", gemm_rs.SUM_ROWS)
    copies = []
    for source in range(shape.ranks - 1, 0, -1):
        for part in range(parts):
            start, stop = part * slot_rows // parts, (part + 1) * slot_rows // parts
            flag = flags[0].data_ptr() + 4 * (source * parts + part)
            copies.append((recv_buffers[0][source, start:stop], far[source, start:stop], flag))
    epoch = 0

    def multiply(number: int) -> None:
        owners = gemm_rs.Owners(to_recv_buffers, to_flags, counters, 0, parts, slot_rows, number)
        kernels.gemm_to_owners(
            a, w.t(), tiles=departures, owners=owners, config=config, num_programs=kernels.device.num_sms
        )

    def add(number: int) -> None:
        waits, programs = kernels.waits(flags[0], number), 4 * kernels.device.num_sms
        gemm_rs.sum_received(recv_buffers[0], out, tiles=own, waits=waits, parts=parts, num_programs=programs)

    def communicate() -> None:
        nonlocal epoch
        epoch += 1
        link.start(copies, epoch)
        link.join()
        add(0)

    def fused(link: Any = link) -> None:
        nonlocal epoch
        epoch += 1
        link.start(copies, epoch)
        multiply(epoch)
        add(epoch)
        link.join()

    def resident() -> None:
        torch.mm(a, w.t(), out=y)

    multiply(0)
    add(0)
    resident()
    kernels.device.synchronize()
    fused(whole_link)
    kernels.device.synchronize()
    # Own rows are the first ones here: virtual rank 0 is measured.
    mine = (a[:slot_rows].double() @ w.double().t()) + sent[1:].double().sum(0)
    terms = a[:slot_rows].double().abs() @ w.double().abs().t() + sent[1:].double().abs().sum(0)
    right = not is_wrong(out, mine, terms)
    return _row(kernels, shape, share, link, parts, (communicate, resident, fused), right)


def split(dry: bool, deadline: float) -> Rows:
    """What cutting the rows of cuBLAS's GEMM into N costs: the price of p2p before any message."""
    kernels = Kernels(device(dry))
    for shape in shapes(dry):
        if time.perf_counter() > deadline:
            return
        operands = _operands(kernels, shape)
        row: dict[str, Any] = {"shape": shape.name, "op": shape.op, "mnk": [shape.m, shape.n, shape.k]}
        for count in (1, 2, 4, 8):
            row[f"in_{count}_ms"] = kernels.device.timed_ms(partial(_cut, *operands, count), None, REPEATS)
        yield row


def _cut(a: torch.Tensor, w: torch.Tensor, out: torch.Tensor, count: int) -> None:
    rows = a.shape[0] // count
    for start in range(0, a.shape[0], rows):
        torch.mm(a[start : start + rows], w.t(), out=out[start : start + rows])


PARTS: dict[str, Callable[[bool, float], Rows]] = {
    "correct": correct,
    "gemm": gemm,
    "overlap": overlap,
    "split": split,
    "stress": stress,
}
