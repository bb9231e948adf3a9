"""Questions about the device that the design of the copy transport rests on: what starts while something else runs.

Each row gives the milliseconds after which an operation was complete, and those for which the device was kept busy.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

from megatron_overlap.comm.symmetric.backend import Copy
from megatron_overlap.comm.symmetric.stream_queue import StreamQueue
from megatron_overlap.kernels.gemm_rs import add_terms
from one_gpu.device import Gpu

Rows = Iterator[dict[str, Any]]
BUSY_MS = 30.0
THREADS_PER_SM = 2048
NUM_WARPS = 32


@triton.jit(do_not_specialize=["microseconds"])
def spin_kernel(microseconds):
    """Keeps its processors busy."""
    start = globaltimer()
    while globaltimer() - start < microseconds * 1000:
        pass


@triton.jit
def unused_kernel(x_ptr, VALUE: tl.constexpr):  # noqa: N803
    """A module that no earlier work has loaded."""
    tl.store(x_ptr, VALUE)


def _spin(blocks: int, milliseconds: float) -> None:
    spin_kernel[(blocks,)](int(milliseconds * 1000), num_warps=NUM_WARPS)


class _Questions:
    """Operations on streams of their own, while another stream keeps the device busy."""

    def __init__(self) -> None:
        self.gpu = Gpu()
        self.busy, self.other, self.third = torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.Stream()
        self.word = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        self.turn = 0
        self.a, self.b = (torch.randn(2048, 2048, device="cuda").bfloat16() for _ in range(2))
        self.out = torch.empty_like(self.a)
        self.to, self.source = (torch.ones(32 << 20, dtype=torch.uint8, device="cuda") for _ in range(2))
        self.pinned = torch.ones(32 << 20, dtype=torch.uint8, pin_memory=True)
        self.flag = torch.zeros(1, dtype=torch.int32, device="cuda")
        _spin(1, 0.01)
        for operation in (self.gemm, self.copy_on_device, self.copy_from_host, self.write):
            operation()
        self.pend(self.busy)
        self.release()
        torch.cuda.synchronize()

    def gemm(self) -> None:
        torch.mm(self.a, self.b, out=self.out)

    def copy_on_device(self) -> None:
        self.to.copy_(self.source, non_blocking=True)

    def copy_from_host(self) -> None:
        self.to.copy_(self.pinned, non_blocking=True)

    def write(self) -> None:
        self.gpu.word("Write", torch.cuda.current_stream(), self.flag.data_ptr(), 1)

    def load_module(self) -> None:
        self.turn += 1
        unused_kernel[(1,)](self.flag, VALUE=self.turn)

    def pend(self, stream: torch.cuda.Stream) -> None:
        """The stream waits for the host."""
        self.turn += 1
        self.gpu.word("Wait", stream, self.word.data_ptr(), self.turn)

    def release(self) -> None:
        self.word[0] = self.turn

    def ask(self, what: str, prepare: Callable[[], object], operation: Callable[[], object]) -> dict[str, Any]:
        """Whether `operation`, on another stream, completes before the work of `prepare` ends."""
        times, hosts = [], []
        for _ in range(3):
            torch.cuda.synchronize()
            done = torch.cuda.Event()
            start = time.perf_counter()
            prepare()
            with torch.cuda.stream(self.other):
                before = time.perf_counter()
                operation()
                hosts.append((time.perf_counter() - before) * 1e3)
                done.record()
            while not done.query() and time.perf_counter() - start < 2 * BUSY_MS / 1e3:
                pass
            times.append((time.perf_counter() - start) * 1e3)
            self.release()
            torch.cuda.synchronize()
        found = median(times)
        return {
            "question": what,
            "connections": os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "default"),
            "done_ms": found,
            "host_ms": median(hosts),
            "busy_ms": BUSY_MS,
            "waits": found > 0.8 * BUSY_MS,
        }


def physics(dry: bool, deadline: float) -> Rows:
    """What completes while a grid fills the device, and what a GEMM loses beside occupied processors."""
    if dry:
        yield {"left_out": "nothing interprets the clock of the device"}
        return
    asked = _Questions()
    full = asked.gpu.num_sms * THREADS_PER_SM // (32 * NUM_WARPS)

    def fill() -> None:
        with torch.cuda.stream(asked.busy):
            _spin(full, BUSY_MS)

    operations = {
        "a GEMM beside a full grid": asked.gemm,
        "a copy on the device beside a full grid": asked.copy_on_device,
        "a copy from the host beside a full grid": asked.copy_from_host,
        "a stream write beside a full grid": asked.write,
        "loading a module beside a full grid": asked.load_module,
    }
    for what, operation in operations.items():
        yield asked.ask(what, fill, operation)

    def pend() -> None:
        asked.pend(asked.busy)
        threading.Timer(BUSY_MS / 1e3, asked.release).start()

    yield asked.ask("loading a module beside a stream that waits for a word", pend, asked.load_module)
    yield _captured(asked)
    yield _host_costs(asked)
    yield from _batches(asked)
    yield from _occupied(asked, deadline)
    yield _bandwidth(asked)
    yield from _sums(asked)
    yield from _wide_gradients(asked)


def _host_costs(asked: _Questions) -> dict[str, Any]:
    """Microseconds for which the host is busy with each call that an overlapped operation makes."""
    queue, stream = StreamQueue(asked.other), asked.other
    event = torch.cuda.Event()
    whole = torch.empty(8192, 64, device="cuda", dtype=torch.bfloat16)
    calls: dict[str, Callable[[], object]] = {
        "a Python call": lambda: None,
        "a slice": lambda: whole[1024:2048],
        "a GEMM": asked.gemm,
        "a copy": lambda: queue.copy(asked.to, asked.source),
        "a write": lambda: queue.write(asked.flag, 0, 1),
        "a wait": lambda: queue.wait(asked.flag, 0, 1),
        "record an event": queue.mark,
        "wait for an event": lambda: queue.after(event),
        "record the use of a tensor": lambda: asked.source.record_stream(stream),
    }
    event.record()
    asked.write()
    return {"host_us": {name: _host_us(call) for name, call in calls.items()}}


def _host_us(call: Callable[[], object], repeats: int = 200) -> float:
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(repeats):
        call()
    found = (time.perf_counter() - begun) / repeats * 1e6
    torch.cuda.synchronize()
    return found


def _batches(asked: _Questions) -> Rows:
    """Seven copies from the host, one by one and in one call of the driver, where it has such a call."""
    queue = StreamQueue(asked.other)
    for num_bytes in (4 << 10, 1 << 20):
        copies: list[Copy] = [
            (to, source)
            for to, source in zip(asked.to.split(num_bytes)[:7], asked.pinned.split(num_bytes)[:7], strict=True)
        ]
        for what, calls in ("one by one", [[copy] for copy in copies]), ("in one call", [copies]):
            prepared = [queue.prepare_copies(call) for call in calls]

            def enqueue(prepared: list[object] = prepared) -> None:
                for each in prepared:
                    queue.copy_all(each, ())

            with torch.cuda.stream(asked.other):
                device_us = 1e3 * _event_ms(enqueue)
            yield {
                "copies": what,
                "bytes_each": num_bytes,
                "device_us": device_us,
                "host_us": _host_us(enqueue),
                "calls": len(prepared),
            }


def _captured(asked: _Questions) -> dict[str, Any]:
    """Whether a CUDA graph holds waits and writes of words: it waits for 1, copies, and writes 0, at every replay."""
    row: dict[str, Any] = {"question": "waits and writes of words in a CUDA graph"}
    word = torch.zeros(1, dtype=torch.int32, pin_memory=True)
    asked.pinned.fill_(7)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            stream = torch.cuda.current_stream()
            asked.gpu.word("Wait", stream, word.data_ptr(), 1)
            asked.copy_from_host()
            asked.gpu.word("Write", stream, word.data_ptr(), 0)
    except RuntimeError as error:
        torch.cuda.synchronize()
        return row | {"captured": False, "reason": str(error)[:300]}
    waited, right = True, True
    for value in (8, 9, 10):
        asked.to.zero_()
        asked.pinned.fill_(value)
        torch.cuda.synchronize()
        done = torch.cuda.Event()
        graph.replay()
        done.record()
        time.sleep(0.005)
        waited &= not done.query()
        word[0] = 1
        torch.cuda.synchronize()
        right &= bool((asked.to == value).all()) and int(word) == 0
    return row | {"captured": True, "waited": waited, "right": waited and right}


def queues(dry: bool, deadline: float) -> Rows:
    """What one stream delays in another; the number of hardware queues is that of this process."""
    if dry:
        yield {"left_out": "nothing interprets the clock of the device"}
        return
    asked = _Questions()

    def kernels() -> None:
        with torch.cuda.stream(asked.busy):
            _spin(1, BUSY_MS)
            asked.gemm()

    def pend() -> None:
        asked.pend(asked.busy)

    def pend_then_work() -> None:
        asked.pend(asked.busy)
        with torch.cuda.stream(asked.busy):
            asked.gemm()

    def copies() -> None:
        with torch.cuda.stream(asked.third):
            _spin(1, BUSY_MS)
            reached = torch.cuda.Event()
            reached.record()
        asked.busy.wait_event(reached)
        with torch.cuda.stream(asked.busy):
            asked.copy_from_host()
            asked.write()

    def pend_then_copy() -> None:
        asked.pend(asked.busy)
        with torch.cuda.stream(asked.busy):
            asked.copy_from_host()

    situations = {
        "a chain of kernels": kernels,
        "a stream that waits for a word": pend,
        "a stream that waits for a word, then a GEMM": pend_then_work,
        "a stream that waits for a word, then a copy": pend_then_copy,
        "a copy that waits for the event of a kernel": copies,
    }
    for behind, prepare in situations.items():
        for what, operation in (("GEMM", asked.gemm), ("copy from the host", asked.copy_from_host)):
            if time.perf_counter() > deadline:
                return
            yield asked.ask(f"a {what} behind {behind}", prepare, operation)


def _event_ms(operation: Callable[[], object], repeats: int = 20) -> float:
    times = []
    for number in range(repeats + 3):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        operation()
        stop.record()
        stop.synchronize()
        if number >= 3:
            times.append(start.elapsed_time(stop))
    return median(times)


def _occupied(asked: _Questions, deadline: float) -> Rows:
    """A GEMM of LLaMA-3 70B at TP8 beside blocks that hold whole processors, as communication kernels do."""
    a, w = torch.randn(8192, 8192, device="cuda").bfloat16(), torch.randn(7168, 8192, device="cuda").bfloat16()
    out = torch.empty(8192, 7168, device="cuda", dtype=torch.bfloat16)
    alone = 0.0
    for blocks in (0, 4, 8, 16, 32, 64):
        if time.perf_counter() > deadline:
            return
        times = []
        for _ in range(11):
            torch.cuda.synchronize()
            if blocks:
                with torch.cuda.stream(asked.busy):
                    _spin(blocks, 8.0)
                time.sleep(0.001)
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            torch.mm(a, w.t(), out=out)
            stop.record()
            stop.synchronize()
            times.append(start.elapsed_time(stop))
        found = median(times)
        alone = alone or found
        yield {"occupied_sms": blocks, "gemm_ms": found, "of_alone": found / alone}


def _bandwidth(asked: _Questions) -> dict[str, Any]:
    """GB/s of a copy of 32 MiB from the host, to the host, and on the device (bytes read plus bytes written)."""
    num_bytes = asked.to.nbytes
    inward = _event_ms(asked.copy_from_host)
    outward = _event_ms(lambda: asked.pinned.copy_(asked.to, non_blocking=True))
    inside = _event_ms(asked.copy_on_device)
    return {
        "host_to_device_gbps": num_bytes / inward / 1e6,
        "device_to_host_gbps": num_bytes / outward / 1e6,
        "on_device_gbps": 2 * num_bytes / inside / 1e6,
    }


def _sums(asked: _Questions) -> Rows:
    """The sum after a reduce-scatter at TP8: seven additions to an fp32 total, two kernels of torch, or one kernel.

    Also two kernels, of which the last one adds the last term to an fp32 total of the others.
    """
    for features in (4096, 8192):
        terms = torch.randn(7, 1024, features, device="cuda").bfloat16()
        own = torch.randn(1024, features, device="cuda").bfloat16()

        def one_by_one(terms: torch.Tensor = terms, own: torch.Tensor = own) -> torch.Tensor:
            total = own.float()
            for term in terms:
                total.add_(term)
            return own.copy_(total)

        def at_once(terms: torch.Tensor = terms, own: torch.Tensor = own) -> torch.Tensor:
            return torch.add(terms.sum(0, dtype=torch.float32), own, out=own)

        def in_one_kernel(terms: torch.Tensor = terms, own: torch.Tensor = own) -> None:
            add_terms(terms, own, own)

        total = torch.empty(own.shape, device="cuda", dtype=torch.float32)

        def early(terms: torch.Tensor = terms[:-1], own: torch.Tensor = own, total: torch.Tensor = total) -> None:
            add_terms(terms, own, total)

        def last(terms: torch.Tensor = terms[-1:], own: torch.Tensor = own, total: torch.Tensor = total) -> None:
            add_terms(terms, total, own)

        in_order = terms[0].float()
        for term in (*terms[1:], own):
            in_order += term
        in_one_kernel()
        right = torch.equal(own, in_order.bfloat16())
        yield {
            "sum_of_terms": 8,
            "mn": [1024, features],
            "one_by_one_ms": _event_ms(one_by_one),
            "at_once_ms": _event_ms(at_once),
            "in_one_kernel_ms": _event_ms(in_one_kernel),
            "early_kernel_ms": _event_ms(early),
            "last_kernel_ms": _event_ms(last),
            "in_one_kernel_right": right,
            "floor_ms": 9 * own.nbytes / 4.3e12 * 1e3,
        }


def _wide_gradients(asked: _Questions) -> Rows:
    """A bf16 product added to an fp32 gradient: by cuBLAS in place, or as a product and an addition; 1 and 8 pieces."""
    for features in (7168, 1280):
        dy, x = (torch.randn(8192, size, device="cuda").bfloat16() for size in (features, 8192))
        total = torch.zeros(features, 8192, device="cuda")
        exact = (dy[:, :64].double().t() @ x.double()).float()

        def in_place(pieces: int, dy: torch.Tensor = dy, x: torch.Tensor = x, total: torch.Tensor = total) -> None:
            for a, b in zip(dy.chunk(pieces), x.chunk(pieces), strict=True):
                torch.addmm(total, a.t(), b, out_dtype=torch.float32, out=total)

        def added(pieces: int, dy: torch.Tensor = dy, x: torch.Tensor = x, total: torch.Tensor = total) -> None:
            for a, b in zip(dy.chunk(pieces), x.chunk(pieces), strict=True):
                total.add_(torch.mm(a.t(), b))

        row: dict[str, Any] = {"wgrad_mnk": [features, 8192, 8192]}
        row["product_alone_ms"] = _event_ms(lambda dy=dy, x=x: torch.mm(dy.t(), x))
        for pieces in (1, 8):
            row[f"product_then_add_{pieces}_ms"] = _event_ms(lambda pieces=pieces: added(pieces), 10)
        try:
            total.zero_()
            in_place(1)
            row["error"] = float((total[:64] - exact).abs().max() / exact.abs().max())
            row["right"] = row["error"] < 1e-3
            for pieces in (1, 8):
                row[f"in_place_{pieces}_ms"] = _event_ms(lambda pieces=pieces: in_place(pieces), 10)
        except (RuntimeError, TypeError) as error:
            row["in_place_unsupported"] = str(error)[:200]
        yield row
