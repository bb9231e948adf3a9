"""The device that is measured: a GPU with its events, streams and links, or, for a dry run, the interpreter."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

Copies = list[tuple[torch.Tensor, torch.Tensor, int | None]]
"""`(to, from, address of a flag or None)`."""


def pace_s(num_bytes: int, gbps: float) -> float:
    """Seconds that `num_bytes` need on a link of `gbps` gigabytes a second."""
    return num_bytes / (gbps * 1e9)


class Gpu:
    """A GPU whose time is taken on the device, with nothing of the host in it.

    All work of a measurement is enqueued behind a word that the host then raises: enqueueing dozens of copies takes
    longer than they do. Words are written and awaited by streams, without a kernel.
    """

    name = "cuda"
    interpreted = False

    def __init__(self) -> None:
        self._driver = ctypes.CDLL("libcuda.so.1")
        properties = torch.cuda.get_device_properties(0)
        self.num_sms = properties.multi_processor_count
        self.capability = properties.major * 10 + properties.minor
        self._go = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        self._turn = 0
        self.host_us = 0.0
        """Median microseconds for which the host enqueued in the last `timed_ms`."""

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def stream(self) -> Any:
        """A context: what is enqueued inside runs beside what is outside."""
        return torch.cuda.stream(torch.cuda.Stream())

    def timed_ms(self, enqueue: Callable[[], object], pace: Callable[[], object] | None, repeats: int) -> float:
        """Median milliseconds on the device from the first to the last thing that `enqueue` puts on the current stream.

        `pace` is called by the host once the device runs.
        """
        times, hosts = [], []
        for number in range(repeats + 3):
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize()
            self._turn += 1
            self.word("Wait", torch.cuda.current_stream(), self._go.data_ptr(), self._turn)
            start.record()
            begun = time.perf_counter()
            try:
                enqueue()
                hosts.append((time.perf_counter() - begun) * 1e6)
                stop.record()
            finally:
                # Whatever happened: a stream that waits for ever would hang the process.
                self._go[0] = self._turn
            if pace is not None:
                pace()
            stop.synchronize()
            if number >= 3:
                times.append(start.elapsed_time(stop))
        self.host_us = median(hosts)
        return median(times)

    def word(self, what: str, stream: Any, address: int, value: int) -> None:
        """The stream waits until the word is at least `value`, or writes it, after a fence of the whole system."""
        function = getattr(self._driver, f"cuStream{what}Value32_v2")
        arguments = (ctypes.c_void_p(stream.cuda_stream), ctypes.c_uint64(address), ctypes.c_uint32(value))
        status = function(*arguments, ctypes.c_uint(0))
        if status:
            raise RuntimeError(f"cuStream{what}Value32: CUDA driver error {status}")

    def link(self, gbps: float | None = None, share: int = 1) -> GpuLink:
        return GpuLink(self, gbps, share)


class GpuLink:
    """Copies of chunks from pinned host memory over PCIe, on a stream of their own; a flag is raised after each.

    Not copies on the device: those need processors, which a persistent grid that waits for them may hold.

    Args:
        gbps: the host releases the copies at this rate; None releases them at once.
        share: copies one `share`th of each chunk: the time of a link that is `share` times as fast. The rest of the
            chunk keeps its content.
    """

    def __init__(self, gpu: Gpu, gbps: float | None, share: int) -> None:
        self._gpu, self._gbps, self._share = gpu, gbps, share
        self._stream = torch.cuda.Stream(priority=-1)
        self._gate = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        self._raised = 0
        self._sizes: list[int] = []

    def source(self, tensor: torch.Tensor) -> torch.Tensor:
        """Where peers' rows come from."""
        return tensor.cpu().pin_memory()

    def start(self, copies: Copies, epoch: int) -> None:
        """Enqueues all copies, behind what the current stream holds. `pace` lets them go."""
        self._stream.wait_stream(torch.cuda.current_stream())
        self._sizes = [to.numel() * to.element_size() for to, _, _ in copies]
        for number, (to, source, flag) in enumerate(copies, start=1):
            if self._gbps is not None:
                self._gpu.word("Wait", self._stream, self._gate.data_ptr(), self._raised + number)
            count = to.numel() // self._share
            with torch.cuda.stream(self._stream):
                to.view(-1)[:count].copy_(source.view(-1)[:count], non_blocking=True)
            if flag is not None:
                self._gpu.word("Write", self._stream, flag, epoch)

    def pace(self) -> None:
        """Lets the copies go at the link's rate; returns when the last may go."""
        if self._gbps is None:
            return
        due = time.perf_counter()
        for num_bytes in self._sizes:
            due += pace_s(num_bytes, self._gbps)
            while time.perf_counter() < due:
                pass
            self._raised += 1
            self._gate[0] = self._raised
        self._sizes = []

    def join(self) -> None:
        """Orders the current stream after all copies."""
        torch.cuda.current_stream().wait_stream(self._stream)


class Dry:
    """The interpreter: the same calls, to see that every line of a part runs. Its times mean nothing."""

    name = "cpu"
    interpreted = True
    num_sms = 2
    capability = 90
    host_us = 0.0

    def synchronize(self) -> None:
        pass

    def stream(self) -> Any:
        import contextlib

        return contextlib.nullcontext()

    def timed_ms(self, enqueue: Callable[[], object], pace: Callable[[], object] | None, repeats: int) -> float:
        start = time.perf_counter()
        enqueue()
        if pace is not None:
            pace()
        return (time.perf_counter() - start) * 1e3

    def link(self, gbps: float | None = None, share: int = 1) -> DryLink:
        return DryLink()


class DryLink:
    """Copies at once."""

    def source(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    def start(self, copies: Copies, epoch: int) -> None:
        for to, source, flag in copies:
            to.copy_(source)
            if flag is not None:
                ctypes.c_int32.from_address(flag).value = epoch

    def pace(self) -> None:
        pass

    def join(self) -> None:
        pass


def device(dry: bool) -> Gpu | Dry:
    """The GPU, or the interpreter."""
    return Dry() if dry else Gpu()
