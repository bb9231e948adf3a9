"""Plays recorded operations against the clock of a model of a GPU.

`Work` records the kernels of an operation on tensors without data, with their durations, and `makespan` plays them. The
model compares orders of the same work. It predicts no real time: it has no host time, no module loads and no caches,
and links of one constant rate.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, inf
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.comm.device import MessageKey, Op, Recorder


@dataclass(frozen=True)
class Gpu:
    """Rates of the model, in bytes and FLOP per second; as of an H100 with NVLink.

    Attributes:
        num_sms: SMs of the device.
        sm_flops: rate of one SM in a GEMM.
        tiles: rows and columns of GEMM tiles, and their rates.
        memory: rate of memory, of a kernel and of a local copy by a copy engine.
        link: rate of one direction of the link, shared by the messages of a rank; also of copies from a peer.
        latency_s: fixed part of a kernel, a copy or a message, in seconds.
        further_copy_s: fixed part of each further copy of a batch.
        word_s: duration of the write of a word.
        nccl_sms: SMs that a message on NCCL occupies.
    """

    num_sms: int = 132
    sm_flops: float = 5e12
    tiles: tuple[tuple[int, int, float], ...] = ((128, 256, 1), (128, 128, 0.92), (64, 128, 0.75))
    memory: float = 2.5e12
    link: float = 350e9
    latency_s: float = 5e-6
    further_copy_s: float = 2.3e-6
    word_s: float = 1e-6
    nccl_sms: int = 16

    def gemm_s(self, m: int, n: int, k: int) -> float:
        """Duration of a GEMM: full waves of tiles."""
        return self.latency_s + min(
            ceil(ceil(m / rows) * ceil(n / columns) / self.num_sms) * 2 * rows * columns * k / (rate * self.sm_flops)
            for rows, columns, rate in self.tiles
        )

    def attention_s(self, m: int, n: int, width: int, *, backward: bool) -> float:
        """Duration of attention of m queries with n visible keys, at the rate of a GEMM; `width` is of all heads."""
        return self.latency_s + (10 if backward else 4) * m * n * width / (self.num_sms * self.sm_flops)

    def move_s(self, num_bytes: int) -> float:
        """Duration of an elementwise kernel or a local copy that reads and writes `num_bytes`."""
        return self.latency_s + num_bytes / self.memory

    def message_s(self, num_bytes: int, num_copies: int = 1) -> float:
        """Duration of a message, or of a batch of copies to or from peers."""
        return self.latency_s + (num_copies - 1) * self.further_copy_s + num_bytes / self.link


class Work(TorchDispatchMode):
    """Records the GEMMs, additions and copies of fake tensors as work of the current stream of `device`."""

    def __init__(self, device: Recorder, gpu: Gpu) -> None:
        super().__init__()
        self._device, self._gpu = device, gpu

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in ("mm", "addmm", "addmm_"):
            a, b = args[:2] if name == "mm" else args[1:3]
            seconds = self._gpu.gemm_s(a.shape[0], b.shape[1], a.shape[1])
            self._device.put("work", f"{name} {tuple(a.shape)} {tuple(b.shape)}", seconds=seconds, uses_sms=True)
        elif name in ("_flash_attention_forward", "_flash_attention_backward"):
            backward = name.endswith("backward")
            (m, heads, size), (n, _, _) = (args[backward + each].shape[-3:] for each in range(2))
            seconds = self._gpu.attention_s(m, n, heads * size, backward=backward)
            self._device.put("work", f"{name} {m} {n}", seconds=seconds, uses_sms=True)
        elif name in ("add", "add_", "cat", "copy_", "mul", "sum"):
            read_and_written = args if name == "copy_" else (args, result)
            moved = sum(tensor.nbytes for tensor in tree_leaves(read_and_written) if isinstance(tensor, torch.Tensor))
            self._device.put("work", name, seconds=self._gpu.move_s(moved), uses_sms=True)
        return result


def makespan(ranks: Sequence[Recorder], gpu: Gpu, *, connections: int | None = None) -> float:
    """Return the time in seconds until all recorded operations are complete.

    Args:
        ranks: recorded devices.
        gpu: rates.
        connections: hardware queues, as of `play`.
    """
    return _Clock(ranks, gpu, connections).run()


class _Clock:
    """The state of all ranks at one time.

    A message on NCCL needs its sender and its receiver. Messages of a call share the link, and move their bytes when
    all of these have started.
    A copy needs no receiver. Copies share the link of their source and that of their target.
    """

    def __init__(self, ranks: Sequence[Recorder], gpu: Gpu, connections: int | None) -> None:
        self._gpu, self._connections, self._now = gpu, connections, 0.0
        self._pending = [list(device.ops) for device in ranks]
        self._running: dict[int, Op] = {}  # by identity
        self._rank_of = {id(op): rank for rank, device in enumerate(ranks) for op in device.ops}
        for op in (op for device in ranks for op in device.ops):
            op.started = op.done = False
        self._streams = [{op.stream for op in ops} for ops in self._pending]
        self._recorded: list[set[Any]] = [set() for _ in ranks]
        self._words: dict[object, int] = {}
        self._message_starts: dict[tuple[str, MessageKey], float] = {}
        self._message_bytes: dict[MessageKey, int] = {}
        self._left: dict[int, float] = {}  # remaining seconds of running work, by identity
        self._busy_sms: Counter[int] = Counter()
        # How much of each end of a link, or of a memory, the running copies would use alone; by end and rank.
        self._copies: Counter[tuple[str, int]] = Counter()

    def run(self) -> float:
        """Return the time at which no operation is left."""
        while any(self._pending):
            while any(self._step(rank) for rank in range(len(self._pending))):
                pass
            if not self._running:
                assert not any(self._pending), "deadlock"
                break
            until = min(map(self._end, self._running.values()))
            assert until < inf, "deadlock"
            for op in self._running.values():
                left = self._left[id(op)] - (until - self._now) * self._speed(op)
                # The operation that ends now may have a rest of the size of a rounding error.
                self._left[id(op)] = 0.0 if left < 1e-12 else left
            self._now = until
        return self._now

    def _step(self, rank: int) -> bool:
        """Start and end the operations of a rank that can; return whether any did."""
        progress, blocked, full = False, set[str](), set[bool]()
        # The streams of copies have a hardware queue of their own: seen on an H200.
        queue_of = {stream: stream.startswith("copies") for stream in self._streams[rank]}
        num_queues = len(set(queue_of.values()))
        for op in self._pending[rank]:
            if len(blocked) == len(queue_of) or len(full) == num_queues:
                break
            copies = queue_of[op.stream]
            if copies in full:
                continue
            if op.stream not in blocked and not op.started and self._can_start(op, rank):
                op.started = progress = True
                self._running[id(op)] = op
                self._left[id(op)] = op.seconds
                self._message_starts.update({("send", each): self._now for each in op.sends})
                self._message_starts.update({("recv", each): self._now for each in op.recvs})
                for each, tensor in op.tensors.items():
                    num_bytes = self._message_bytes.setdefault(each, tensor.nbytes)
                    assert num_bytes == tensor.nbytes, f"message {each}: another one is received"
                self._occupy(op, rank, 1)
            if op.started and op.stream not in blocked and self._end(op) <= self._now:
                op.done = progress = True
                del self._running[id(op)]
                self._occupy(op, rank, -1)
                if op.kind == "record":
                    self._recorded[rank].add(op.label)
                if op.kind == "set":
                    self._words[op.label[0]] = op.label[1]
            else:
                blocked.add(op.stream)
            if self._connections == 1 and not op.started and op.kind != "record":
                full.add(copies)
        if progress:
            self._pending[rank] = [op for op in self._pending[rank] if not op.done]
            self._streams[rank] = {op.stream for op in self._pending[rank]}
        return progress

    def _can_start(self, op: Op, rank: int) -> bool:
        if op.kind == "reach":
            return self._words.get(op.label[0], 0) >= op.label[1]
        return op.kind != "wait" or op.label in self._recorded[rank]

    def _occupy(self, op: Op, rank: int, change: int) -> None:
        self._busy_sms[rank] += change * self._gpu.nccl_sms * (op.kind == "messages")
        if op.kind == "copy":
            self._copies.update({end: change * share for end, share in self._ends(op).items()})

    @staticmethod
    def _ends(copy: Op) -> dict[tuple[str, int], float]:
        """The ends of links, or the memory, that a batch of copies uses, and the share of each that it needs."""
        ends = defaultdict[tuple[str, int], float](float)
        for (of, to), num_bytes in copy.label.items():
            for end in (("memory", of),) if of == to else (("out", of), ("in", to)):
                ends[end] += num_bytes / copy.label.total()
        return ends

    def _end(self, op: Op) -> float:
        """Time at which a started operation ends if nothing changes."""
        if op.kind != "messages":
            return self._now + self._left[id(op)] / self._speed(op)
        if not op.tensors:
            return self._now
        ends = [self._message_starts.get((end, each), inf) for each in op.tensors for end in ("send", "recv")]
        sent, received = (sum(op.tensors[each].nbytes for each in some) for some in (op.sends, op.recvs))
        return max(ends) + self._gpu.message_s(max(sent, received))

    def _speed(self, op: Op) -> float:
        rank = self._rank_of[id(op)]
        if op.kind == "copy":
            return 1 / max(1.0, *(self._copies[end] for end in self._ends(op)))
        return 1 - self._busy_sms[rank] / self._gpu.num_sms if op.uses_sms else 1.0
