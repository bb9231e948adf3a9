"""Fused kernels on one GPU: are they right, how fast is the GEMM, and how much of a link's time is hidden.

    python scripts/bench/fused_one_gpu.py --json fused_one_gpu.json          less than 8 minutes, needs only torch
    python scripts/bench/fused_one_gpu.py --only correct --json out.json     one part: correct, gemm or overlap

Ranks are virtual: R streams of one process, each with a part of the SMs, so that all blocks that wait are resident.
Links: `P`, peers' shards in pinned host memory over PCIe, a real link off the SMs; `D`, device copies that a host
thread paces by a pinned word the copy stream waits for, at 200 and 450 GB/s. One GPU stands for one rank here: no
figure of this script is one of several GPUs. The scattering GEMM is checked here and not timed over a link yet.
Never run on a GPU so far.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
# A module that is loaded while a kernel waits would wait for that kernel.
os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")

BUDGET_S = 460.0
REPEATS = 30


@dataclass(frozen=True)
class Shape:
    """One layer on one rank of `ranks`: `m` gathered rows; `n` and `k` of the local GEMM."""

    name: str
    op: str
    m: int
    n: int
    k: int
    ranks: int = 8

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k

    @property
    def link_bytes(self) -> int:
        """Bytes in bf16 that this rank receives: others' rows of the input, or others' sums of its rows."""
        width = self.k if self.op == "ag" else self.n
        return (self.ranks - 1) * (self.m // self.ranks) * width * 2


def shapes() -> list[Shape]:
    """Flux's shapes (global n, k of 49152 x 12288 over 8) and LLaMA-3 70B's with tensor parallelism of 8."""
    found = []
    for m in (1024, 2048, 4096, 8192):
        found.append(Shape(f"flux m{m}", "ag", m, 49152 // 8, 12288))
        found.append(Shape(f"flux m{m}", "rs", m, 12288, 49152 // 8))
    for m in (4096, 8192):
        found.append(Shape(f"llama70b qkv m{m}", "ag", m, 10240 // 8, 8192))
        found.append(Shape(f"llama70b fc1 m{m}", "ag", m, 57344 // 8, 8192))
        found.append(Shape(f"llama70b proj m{m}", "rs", m, 8192, 8192 // 8))
        found.append(Shape(f"llama70b fc2 m{m}", "rs", m, 8192, 28672 // 8))
    return found


def overlap_figures(gemm_ms: float, comm_ms: float, fused_ms: float) -> dict[str, float]:
    """Flux's effective communication time and overlap efficiency, and eta; see docs/fused.md.

    `gemm_ms` is cuBLAS on resident data, `comm_ms` the same copies alone, `fused_ms` both in one.
    """
    ect = fused_ms - gemm_ms
    return {
        "ect_ms": ect,
        "overlap_efficiency": 1 - ect / comm_ms,
        "eta": (comm_ms + gemm_ms - fused_ms) / min(comm_ms, gemm_ms),
        "over_serial": fused_ms / (gemm_ms + comm_ms),
    }


def pace_s(num_bytes: int, gbps: float) -> float:
    """Seconds that `num_bytes` need on a link of `gbps` gigabytes a second."""
    return num_bytes / (gbps * 1e9)


def timed_ms(torch: Any, run: Callable[[], object], repeats: int = REPEATS) -> float:
    """Median milliseconds on the device from start to end of everything `run` enqueues on the current stream."""
    for _ in range(3):
        run()
    times = []
    for _ in range(repeats):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        run()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    return median(times)


class StreamWords:
    """Words that streams write and wait for, through the driver: no kernel, so no SM."""

    def __init__(self) -> None:
        self._driver = ctypes.CDLL("libcuda.so.1")

    def _call(self, name: str, stream: Any, address: int, value: int, flags: int) -> None:
        function = getattr(self._driver, name)
        arguments = (ctypes.c_void_p(stream.cuda_stream), ctypes.c_uint64(address), ctypes.c_uint32(value))
        status = function(*arguments, ctypes.c_uint(flags))
        if status:
            raise RuntimeError(f"{name}: CUDA driver error {status}")

    def write(self, stream: Any, address: int, value: int) -> None:
        """The stream writes after a fence of the whole system."""
        self._call("cuStreamWriteValue32_v2", stream, address, value, 0)

    def wait(self, stream: Any, address: int, value: int) -> None:
        """The stream goes on when the word is at least `value`."""
        self._call("cuStreamWaitValue32_v2", stream, address, value, 0)


class Link:
    """Copies of chunks into the gathered rows on a stream of their own; a flag is raised after each.

    Args:
        gbps: None for pinned host memory over PCIe (link P); else device copies paced to this rate (link D).
    """

    def __init__(self, torch: Any, gbps: float | None) -> None:
        self._torch, self._gbps = torch, gbps
        self._stream = torch.cuda.Stream(priority=-1)
        self._words = StreamWords()
        self._gate = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        self._pacer: threading.Thread | None = None

    def source(self, tensor: Any) -> Any:
        """Where peers' rows come from: pinned on the host, or the device."""
        return tensor.cpu().pin_memory() if self._gbps is None else tensor.clone()

    def start(self, copies: list[tuple[Any, Any, int | None]], epoch: int) -> None:
        """Enqueues `(to, from, address of a flag)`, all before what waits for them."""
        if self._pacer is not None:
            self._pacer.join()
        self._stream.wait_stream(self._torch.cuda.current_stream())
        paced = self._gbps is not None
        self._gate[0] = 0
        for number, (to, source, flag) in enumerate(copies, start=1):
            if paced:
                self._words.wait(self._stream, self._gate.data_ptr(), number)
            with self._torch.cuda.stream(self._stream):
                to.copy_(source, non_blocking=True)
            if flag is not None:
                self._words.write(self._stream, flag, epoch)
        if paced:
            sizes = [to.numel() * to.element_size() for to, _, _ in copies]
            self._pacer = threading.Thread(target=self._pace, args=(sizes,), daemon=True)
            self._pacer.start()

    def _pace(self, sizes: list[int]) -> None:
        due = time.perf_counter()
        for number, num_bytes in enumerate(sizes, start=1):
            due += pace_s(num_bytes, self._gbps or 1.0)
            while time.perf_counter() < due:
                pass
            self._gate[0] = number

    def join(self) -> None:
        """Orders the current stream after all copies."""
        self._torch.cuda.current_stream().wait_stream(self._stream)


class Kernels:
    """The package's kernels with their tables, for the virtual or the only rank of this process."""

    def __init__(self, torch: Any) -> None:
        from megatron_overlap.kernels import ag_gemm, gemm_rs, launch, variants
        from megatron_overlap.schedules import ChunkLayout, tiles

        self.torch, self.ag, self.rs, self.launch, self.variants = torch, ag_gemm, gemm_rs, launch, variants
        self.layout_of, self.tiles = ChunkLayout, tiles
        properties = torch.cuda.get_device_properties(0)
        self.sms = properties.multi_processor_count
        self.capability = properties.major * 10 + properties.minor
        self.status = torch.zeros(1, dtype=torch.int32, device="cuda")

    def config(self, m: int, n: int, k: int) -> Any:
        """What the package would choose."""
        wide = self.variants.ALIGNED[max(a for a in self.variants.ARCHITECTURES if a <= self.capability)]
        aligned = n % wide.block_n == 0 and k % wide.block_k == 0
        num_tiles = -(-m // wide.block_m) * -(-n // wide.block_n)
        return self.variants.config_for(self.capability, aligned=aligned, num_tiles=num_tiles, num_programs=self.sms)

    def table(self, layout: Any, rank: int, order: str, block: int | None) -> Any:
        """Row tiles in `arrival` or `departure` order, or of the `own` rows."""
        chunks = (self.tiles.departure_order if order == "departure" else self.tiles.arrival_order)(layout, rank)
        chunks = [chunk for chunk in chunks if order != "own" or chunk.owner == rank]
        return self.launch.RowTiles.of(self.tiles.row_tiles(layout, rank, chunks, block), "cuda")

    def waits(self, flags: Any, epoch: int) -> Any:
        return self.launch.Waits(flags, epoch, self.status)


def correct(torch: Any, deadline: float) -> dict[str, Any]:
    """Virtual ranks, two epochs and more of everything, late and in random pace, from NaN; stops at the deadline."""
    import random

    kernels, draw = Kernels(torch), random.Random(1)
    launches = wrong = 0
    while time.perf_counter() < deadline and launches < 10_000:
        ranks = draw.choice([2, 4])
        m, n, k = draw.choice([(1000, 515, 331), (2048, 1024, 512), (777, 256, 256), (4096, 2048, 1024)])
        dtype = draw.choice([torch.bfloat16, torch.float16])
        layout = kernels.layout_of(m, ranks, draw.choice([1, 2, 4]))
        wrong += _gather_once(torch, kernels, layout, n, k, dtype, draw)
        wrong += _scatter_once(torch, kernels, layout, n, k, dtype)
        launches += 2 * ranks
    return {"launches": launches, "wrong": wrong, "gave_up": int(kernels.status)}


def _is_wrong(torch: Any, got: Any, exact: Any, terms: Any) -> int:
    bound = 4 * torch.finfo(got.dtype).eps * terms
    return int(not bool(((got.double() - exact).abs() <= bound).all()))


def _gather_once(torch: Any, kernels: Kernels, layout: Any, n: int, k: int, dtype: Any, draw: Any) -> int:
    ranks, parts = layout.num_ranks, layout.chunks_per_rank
    whole = torch.randn(layout.num_rows, k, device="cuda").to(dtype)
    w = torch.randn(n, k, device="cuda").to(dtype)
    config = kernels.config(layout.num_rows, n, k)
    streams = [torch.cuda.Stream() for _ in range(ranks)]
    links = [Link(torch, draw.choice([20.0, 200.0, 2000.0])) for _ in range(ranks)]
    gathered = [torch.full_like(whole, torch.nan) for _ in range(ranks)]
    outs = [torch.full((layout.num_rows, n), torch.nan, device="cuda", dtype=dtype) for _ in range(ranks)]
    flags = [torch.zeros(ranks * parts, dtype=torch.int32, device="cuda") for _ in range(ranks)]
    tables = [kernels.table(layout, rank, "arrival", config.block_m) for rank in range(ranks)]
    torch.cuda.synchronize()
    for rank in range(ranks):
        own = slice(*layout.shard(rank))
        with torch.cuda.stream(streams[rank]):
            gathered[rank][own] = whole[own]
            copies = []
            for chunk in kernels.tiles.arrival_order(layout, rank):
                rows = slice(*layout.rows(chunk))
                flag = flags[rank].data_ptr() + 4 * (chunk.owner * parts + chunk.part)
                if chunk.owner != rank and rows.start < rows.stop:
                    copies.append((gathered[rank][rows], whole[rows], flag))
            links[rank].start(copies, 1)
    for rank in range(ranks):
        with torch.cuda.stream(streams[rank]):
            kernels.ag.ag_gemm(
                gathered[rank],
                w.t(),
                outs[rank],
                tiles=tables[rank],
                waits=kernels.waits(flags[rank], 1),
                config=config,
                num_programs=max(1, kernels.sms // ranks),
            )
    torch.cuda.synchronize()
    exact, terms = whole.double() @ w.double().t(), whole.double().abs() @ w.double().abs().t()
    return sum(_is_wrong(torch, out, exact, terms) for out in outs)


def _scatter_once(torch: Any, kernels: Kernels, layout: Any, n: int, k: int, dtype: Any) -> int:
    ranks, parts, m = layout.num_ranks, layout.chunks_per_rank, layout.num_rows
    slot_rows = -(-m // ranks)
    config = kernels.config(m, n, k)
    operands = [
        (torch.randn(m, k, device="cuda").to(dtype), torch.randn(k, n, device="cuda").to(dtype)) for _ in range(ranks)
    ]
    landings = [torch.full((ranks, slot_rows, n), torch.nan, device="cuda", dtype=dtype) for _ in range(ranks)]
    flags = [torch.zeros(ranks * parts, dtype=torch.int32, device="cuda") for _ in range(ranks)]
    counters = [torch.zeros(ranks * parts, dtype=torch.int32, device="cuda") for _ in range(ranks)]
    outs = [torch.full((layout.shard_rows(r), n), torch.nan, device="cuda", dtype=dtype) for r in range(ranks)]
    to_landing = torch.tensor([tensor.data_ptr() for tensor in landings], device="cuda")
    to_flags = torch.tensor([tensor.data_ptr() for tensor in flags], device="cuda")
    tables = [kernels.table(layout, rank, "departure", config.block_m) for rank in range(ranks)]
    own = [kernels.table(layout, rank, "own", kernels.rs.SUM_ROWS) for rank in range(ranks)]
    programs = max(1, kernels.sms // ranks)
    torch.cuda.synchronize()
    for rank in range(ranks):
        with torch.cuda.stream(torch.cuda.Stream()):
            owners = kernels.rs.Owners(to_landing, to_flags, counters[rank], rank, parts, slot_rows, 1)
            kernels.rs.gemm_to_owners(
                *operands[rank], tiles=tables[rank], owners=owners, config=config, num_programs=programs
            )
            kernels.rs.sum_landed(
                landings[rank],
                outs[rank],
                tiles=own[rank],
                waits=kernels.waits(flags[rank], 1),
                parts=parts,
                num_programs=programs,
            )
    torch.cuda.synchronize()
    exact = sum(a.double() @ b.double() for a, b in operands)
    terms = sum(a.double().abs() @ b.double().abs() for a, b in operands)
    wrong = 0
    for rank in range(ranks):
        rows = slice(*layout.shard(rank))
        wrong += _is_wrong(torch, outs[rank], exact[rows], terms[rows])
    return wrong


def gemm(torch: Any, deadline: float) -> list[dict[str, Any]]:
    """The package's GEMM with nothing to wait for against cuBLAS, same operands."""
    kernels, rows = Kernels(torch), []
    for shape in shapes():
        if time.perf_counter() > deadline:
            break
        a = torch.randn(shape.m, shape.k, device="cuda", dtype=torch.bfloat16)
        w = torch.randn(shape.n, shape.k, device="cuda", dtype=torch.bfloat16)
        out = torch.empty(shape.m, shape.n, device="cuda", dtype=torch.bfloat16)
        layout = kernels.layout_of(shape.m, 1, 1)
        config = kernels.config(shape.m, shape.n, shape.k)
        table = kernels.table(layout, 0, "arrival", config.block_m)
        waits = kernels.waits(torch.zeros(1, dtype=torch.int32, device="cuda"), 1)

        def own(
            a: Any = a, w: Any = w, out: Any = out, table: Any = table, waits: Any = waits, c: Any = config
        ) -> None:
            kernels.ag.ag_gemm(a, w.t(), out, tiles=table, waits=waits, config=c, num_programs=kernels.sms)

        def cublas(a: Any = a, w: Any = w, out: Any = out) -> None:
            torch.mm(a, w.t(), out=out)

        mine, theirs = timed_ms(torch, own), timed_ms(torch, cublas)
        rows.append(
            {
                "shape": shape.name,
                "op": shape.op,
                "mnk": [shape.m, shape.n, shape.k],
                "own_ms": mine,
                "cublas_ms": theirs,
                "of_cublas": theirs / mine,
                "own_tflops": shape.flops / mine / 1e9,
            }
        )
    return rows


def overlap(torch: Any, deadline: float) -> list[dict[str, Any]]:
    """All-gather + GEMM over links P and D: alone, cuBLAS, fused."""
    kernels, rows = Kernels(torch), []
    epoch = 0
    for gbps in (None, 450.0, 200.0):
        for shape in shapes():
            if shape.op != "ag" or time.perf_counter() > deadline:
                continue
            link = Link(torch, gbps)
            layout = kernels.layout_of(shape.m, shape.ranks, max(1, shape.m // shape.ranks // 512))
            a = torch.randn(shape.m, shape.k, device="cuda", dtype=torch.bfloat16)
            w = torch.randn(shape.n, shape.k, device="cuda", dtype=torch.bfloat16)
            out = torch.empty(shape.m, shape.n, device="cuda", dtype=torch.bfloat16)
            far = link.source(a)
            flags = torch.zeros(shape.ranks * layout.chunks_per_rank, dtype=torch.int32, device="cuda")
            config = kernels.config(shape.m, shape.n, shape.k)
            table = kernels.table(layout, 0, "arrival", config.block_m)
            copies = []
            for chunk in kernels.tiles.arrival_order(layout, 0):
                if chunk.owner:
                    span = slice(*layout.rows(chunk))
                    flag = flags.data_ptr() + 4 * (chunk.owner * layout.chunks_per_rank + chunk.part)
                    copies.append((a[span], far[span], flag))

            def communicate(link: Any = link, copies: Any = copies) -> None:
                nonlocal epoch
                epoch += 1
                link.start(copies, epoch)
                link.join()

            def fused(
                link: Any = link,
                copies: Any = copies,
                a: Any = a,
                w: Any = w,
                out: Any = out,
                table: Any = table,
                flags: Any = flags,
                config: Any = config,
            ) -> None:
                nonlocal epoch
                epoch += 1
                link.start(copies, epoch)
                kernels.ag.ag_gemm(
                    a,
                    w.t(),
                    out,
                    tiles=table,
                    waits=kernels.waits(flags, epoch),
                    config=config,
                    num_programs=kernels.sms,
                )
                link.join()

            def resident(a: Any = a, w: Any = w, out: Any = out) -> None:
                torch.mm(a, w.t(), out=out)

            comm_ms, gemm_ms, fused_ms = (timed_ms(torch, run) for run in (communicate, resident, fused))
            rows.append(
                {
                    "link": "P" if gbps is None else f"D {gbps:g} GB/s",
                    "shape": shape.name,
                    "op": shape.op,
                    "comm_ms": comm_ms,
                    "cublas_ms": gemm_ms,
                    "fused_ms": fused_ms,
                    "link_gbps": shape.link_bytes / comm_ms / 1e6,
                    **overlap_figures(gemm_ms, comm_ms, fused_ms),
                }
            )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument("--only", choices=("correct", "gemm", "overlap"), help="one part")
    options = parser.parse_args()
    import torch

    if not torch.cuda.is_available():
        print("no CUDA device: this script measures one; tests/kernels checks the kernels without", file=sys.stderr)
        return 2
    import triton

    start = time.perf_counter()
    figures: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "what": "one GPU standing for one rank; not a figure of several GPUs",
    }
    # Right before fast, and the deadlines of all parts add up to the budget.
    for share, (name, part) in zip(
        (0.3, 0.6, 1.0), {"correct": correct, "gemm": gemm, "overlap": overlap}.items(), strict=True
    ):
        if options.only in (None, name):
            figures[name] = part(torch, start + BUDGET_S * (1.0 if options.only else share))
            print(json.dumps({name: figures[name]}, indent=1), flush=True)
            if name == "correct" and (figures[name]["wrong"] or figures[name]["gave_up"]):
                print("results are wrong: nothing is timed", file=sys.stderr)
                break
    figures["seconds"] = time.perf_counter() - start
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    return int("correct" in figures and bool(figures["correct"]["wrong"] or figures["correct"]["gave_up"]))


if __name__ == "__main__":
    raise SystemExit(main())
