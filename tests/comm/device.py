"""Recording substitutes of CUDA streams, events and an NCCL group, and an executor of the recorded operations.

Recording: every call appends an operation to a stream and returns at once. Functions that block the host are missing,
so that code which calls them fails. Playing: the streams of all ranks run as on devices; a message needs sender and
receiver, and copies its bytes. `connections=1` starts the operations of all streams of a rank in the order in which the
host enqueued them.

Timing: `Work` records the kernels of an operation on tensors without data, with their durations on a model of a GPU,
and `makespan` plays them against the clock. The model compares orders of the same work. It predicts no real time: it
has no host time, no module loads and no caches, and links of one constant rate.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import ceil, inf
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


@dataclass
class Op:
    """One operation of a stream: `record` or `wait` of an event, `work`, `collective`, `messages` of one NCCL call.

    Attributes:
        seconds: duration of work on an otherwise idle device.
        uses_sms: the duration grows where messages occupy SMs.
    """

    kind: str
    stream: str
    label: Any = None
    sends: tuple[tuple[int, int, int], ...] = ()
    recvs: tuple[tuple[int, int, int], ...] = ()
    tensors: dict[tuple[int, int, int], torch.Tensor] = field(default_factory=dict)
    action: Callable[[], object] | None = None
    done: bool = False
    started: bool = False
    seconds: float = 0.0
    uses_sms: bool = False


class Recorder:
    """The device of one rank, in place of `torch` and `torch.distributed`."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.ops: list[Op] = []
        self.current = "compute"
        self._num_events = 0
        self.buffers: list[str] = []
        self._messages: dict[tuple[int, int], int] = defaultdict(int)

    def put(self, kind: str, label: Any = None, **fields: Any) -> None:
        self.ops.append(Op(kind, self.current, label, **fields))

    def event(self) -> Any:
        """An event: records and waits name the record that counts, as on a device."""
        state = SimpleNamespace(last=None)

        def record() -> None:
            self._num_events += 1
            state.last = self._num_events
            self.put("record", state.last)

        return SimpleNamespace(record=record, state=state)

    def wait(self, event: Any) -> None:
        if event.state.last is not None:
            self.put("wait", event.state.last)

    @contextlib.contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, stream.name
        yield
        self.current = before

    def stream(self, name: str) -> Any:
        def wait_event(event: Any) -> None:
            with self.on(SimpleNamespace(name=name)):
                self.wait(event)

        return SimpleNamespace(name=name, cuda_stream=name, wait_event=wait_event)

    @property
    def torch(self) -> Any:
        made: list[dict[str, Any]] = []

        def new_stream(device: Any, **options: Any) -> Any:
            made.append(options)
            return self.stream(f"stream {len(made)}")

        self.made_streams = made
        cuda = SimpleNamespace(
            Stream=new_stream,
            Event=self.event,
            current_device=lambda: 0,
            current_stream=lambda: self.stream(self.current),
            stream=self.on,
            MemPool=lambda allocator: f"pool of {allocator}",
            use_mem_pool=self.use_mem_pool,
        )
        return SimpleNamespace(cuda=cuda, device=torch.device, __version__=torch.__version__)

    @property
    def dist(self) -> Any:
        def backend(store: Any, rank: int, size: int, options: Any) -> Any:
            self.options = options
            # The names and arguments of torch's own, which test_nccl.py looks at.
            return SimpleNamespace(
                mem_allocator="nccl's",
                eager_connect_single_device=lambda device: self.buffers.append("connect"),
                register_mem_pool=lambda pool: self.buffers.append(f"register {pool}"),
                deregister_mem_pool=lambda pool: self.buffers.append(f"deregister {pool}"),
                shutdown=lambda: self.buffers.append("shutdown"),
            )

        backend.Options = lambda **options: SimpleNamespace(**options)  # type: ignore[attr-defined]

        def group(store: Any, rank: int, size: int) -> Any:
            return NcclGroup(self)

        group.BackendType = SimpleNamespace(NCCL="nccl")  # type: ignore[attr-defined]
        return SimpleNamespace(
            ProcessGroupNCCL=backend,
            ProcessGroup=group,
            get_rank=lambda _: self.rank,
            get_world_size=lambda _: self.size,
            get_process_group_ranks=lambda _: list(range(self.size)),
        )

    @contextlib.contextmanager
    def use_mem_pool(self, pool: str) -> Iterator[None]:
        self.buffers.append(f"from {pool}")
        yield

    def message(self, source: int, target: int) -> tuple[int, int, int]:
        """Return the number of the next message between two ranks: NCCL matches them in order."""
        number = self._messages[source, target]
        self._messages[source, target] += 1
        return source, target, number


@dataclass
class NcclGroup:
    """A communicator: calls between start and end are one kernel on its own stream, ordered after the current one."""

    recorder: Recorder
    sends: list[Any] = field(default_factory=list)
    recvs: list[Any] = field(default_factory=list)
    tensors: dict[tuple[int, int, int], torch.Tensor] = field(default_factory=dict)
    backend: Any = None

    def _set_default_backend(self, kind: str) -> None: ...

    def _register_backend(self, device: Any, kind: str, backend: Any) -> None:
        self.backend = backend

    def _get_backend(self, device: Any) -> Any:
        return self.backend

    def _start_coalescing(self, device: Any) -> None:
        self.sends, self.recvs, self.tensors = [], [], {}

    def send(self, tensors: Sequence[torch.Tensor], to: int, tag: int) -> None:
        self.sends.append(self.recorder.message(self.recorder.rank, to))
        self.tensors[self.sends[-1]] = tensors[0]

    def recv(self, tensors: Sequence[torch.Tensor], source: int, tag: int) -> None:
        self.recvs.append(self.recorder.message(source, self.recorder.rank))
        self.tensors[self.recvs[-1]] = tensors[0]

    def _end_coalescing(self, device: Any) -> Any:
        recorder, nccl = self.recorder, SimpleNamespace(name="nccl")
        before, after = recorder.event(), recorder.event()
        before.record()
        with recorder.on(nccl):
            recorder.wait(before)
            recorder.put("messages", sends=tuple(self.sends), recvs=tuple(self.recvs), tensors=self.tensors)
            after.record()
        return SimpleNamespace(wait=lambda: recorder.wait(after))


def play(ranks: Sequence[Recorder], *, connections: int | None = None, slow: str | None = None) -> list[str]:
    """Run all recorded operations; return those that remain in a deadlock.

    Args:
        ranks: recorded devices.
        connections: 1 starts the operations of a rank in the order in which the host enqueued them.
        slow: stream whose operations run only when no other stream can continue.
    """
    recorded: list[set[Any]] = [set() for _ in ranks]
    copied: set[tuple[int, int, int]] = set()
    progress = True
    while progress:
        progress = _step(ranks, recorded, copied, connections, slow)
        if not progress and slow is not None:
            progress = _step(ranks, recorded, copied, connections, None, one=True)
    return [
        f"rank {r}: {op.stream}: {op.kind} {op.label or ''}" for r, d in enumerate(ranks) for op in d.ops if not op.done
    ]


def _step(
    ranks: Sequence[Recorder],
    recorded: list[set[Any]],
    copied: set[tuple[int, int, int]],
    connections: int | None,
    slow: str | None,
    *,
    one: bool = False,
) -> bool:
    """Run operations that can run, or only `one`; return whether any did."""
    progress = False
    for rank, device in enumerate(ranks):
        blocked = {slow}
        for op in device.ops:
            if op.done:
                continue
            if op.stream not in blocked and not op.started and (op.kind != "wait" or op.label in recorded[rank]):
                op.started = progress = True
            if op.started and op.stream not in blocked and _finished(op, ranks):
                op.done = progress = True
                _execute(op, ranks, copied)
                if op.kind == "record":
                    recorded[rank].add(op.label)
                if one:
                    return True
            else:
                blocked.add(op.stream)
            if connections == 1 and not op.started:
                break
    return progress


def _execute(op: Op, ranks: Sequence[Recorder], copied: set[tuple[int, int, int]]) -> None:
    """Run the work of an operation, or copy its messages before either rank may reuse the buffers."""
    if op.action is not None:
        op.action()
    for message in {*op.sends, *op.recvs} - copied:
        sent = next(each.tensors[message] for device in ranks for each in device.ops if message in each.sends)
        received = next(each.tensors[message] for device in ranks for each in device.ops if message in each.recvs)
        received.copy_(sent)
        copied.add(message)


def _finished(op: Op, ranks: Sequence[Recorder]) -> bool:
    if op.kind == "messages":
        there = {message for device in ranks for other in device.ops if other.started for message in other.recvs}
        sent = {message for device in ranks for other in device.ops if other.started for message in other.sends}
        return set(op.sends) <= there and set(op.recvs) <= sent
    if op.kind == "collective":
        return all(any(o.started for o in d.ops if o.kind == op.kind and o.label == op.label) for d in ranks)
    return True


@dataclass(frozen=True)
class Gpu:
    """Rates of the model, in bytes and FLOP per second; as of an H100 with NVLink.

    Attributes:
        num_sms: SMs of the device.
        sm_flops: rate of one SM in a GEMM.
        tile: rows and columns of a GEMM tile.
        memory: rate of memory.
        link: rate of one direction of the link.
        latency_s: fixed part of a kernel or message, in seconds.
        nccl_sms: SMs that a message on NCCL occupies.
    """

    num_sms: int = 132
    sm_flops: float = 5e12
    tile: tuple[int, int] = (128, 256)
    memory: float = 2.5e12
    link: float = 350e9
    latency_s: float = 5e-6
    nccl_sms: int = 16

    def gemm_s(self, m: int, n: int, k: int) -> float:
        """Duration of a GEMM: full waves of tiles."""
        waves = ceil(ceil(m / self.tile[0]) * ceil(n / self.tile[1]) / self.num_sms)
        return self.latency_s + waves * 2 * self.tile[0] * self.tile[1] * k / self.sm_flops

    def move_s(self, num_bytes: int) -> float:
        """Duration of an elementwise kernel that reads and writes `num_bytes`."""
        return self.latency_s + num_bytes / self.memory

    def message_s(self, num_bytes: int) -> float:
        """Duration of a message."""
        return self.latency_s + num_bytes / self.link


class Work(TorchDispatchMode):
    """Records the GEMMs, additions and copies of fake tensors as work of the current stream of `device`."""

    def __init__(self, device: Recorder, gpu: Gpu) -> None:
        super().__init__()
        self._device, self._gpu = device, gpu

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in ("mm", "addmm", "addmm_"):
            a, b = args[-2:]
            seconds = self._gpu.gemm_s(a.shape[0], b.shape[1], a.shape[1])
            self._device.put("work", f"{name} {tuple(a.shape)} {tuple(b.shape)}", seconds=seconds, uses_sms=True)
        elif name in ("add", "add_", "copy_", "mul", "sum"):
            moved = sum(tensor.nbytes for tensor in (*args, result) if isinstance(tensor, torch.Tensor))
            self._device.put("work", name, seconds=self._gpu.move_s(moved), uses_sms=True)
        return result


def makespan(ranks: Sequence[Recorder], gpu: Gpu, *, connections: int | None = None) -> float:
    """Return the time in seconds until all recorded operations are complete.

    A message needs its sender and its receiver, and moves its bytes from the moment at which both have started.

    Args:
        ranks: recorded devices.
        gpu: rates.
        connections: hardware queues, as of `play`.
    """
    now = 0.0
    for op in (op for device in ranks for op in device.ops):
        op.started = op.done = False
    recorded: list[set[Any]] = [set() for _ in ranks]
    pending = [list(device.ops) for device in ranks]
    started_at: dict[tuple[str, tuple[int, int, int]], float] = {}
    left: dict[int, float] = {}  # remaining seconds of running work, by identity

    def ends(op: Op) -> float:
        """Time at which a started operation ends if nothing changes."""
        if op.kind != "messages":
            return now + left[id(op)] / speed(op)
        both = [
            max(started_at.get(("send", each), inf), started_at.get(("recv", each), inf))
            + gpu.message_s(op.tensors[each].nbytes)
            for each in (*op.sends, *op.recvs)
        ]
        return max(both, default=now)

    rank_of = {id(op): rank for rank, device in enumerate(ranks) for op in device.ops}
    busy = [0] * len(ranks)

    def speed(op: Op) -> float:
        return 1 - busy[rank_of[id(op)]] / gpu.num_sms if op.uses_sms else 1.0

    while any(pending):
        progress = True
        while progress:
            progress = False
            for rank, ops in enumerate(pending):
                blocked: set[str] = set()
                for op in ops:
                    if (
                        op.stream not in blocked
                        and not op.started
                        and (op.kind != "wait" or op.label in recorded[rank])
                    ):
                        op.started = progress = True
                        left[id(op)] = op.seconds
                        started_at.update({("send", each): now for each in op.sends})
                        started_at.update({("recv", each): now for each in op.recvs})
                        busy[rank] += gpu.nccl_sms * (op.kind == "messages")
                    if op.started and op.stream not in blocked and ends(op) <= now:
                        op.done = progress = True
                        busy[rank] -= gpu.nccl_sms * (op.kind == "messages")
                        if op.kind == "record":
                            recorded[rank].add(op.label)
                    else:
                        blocked.add(op.stream)
                    if connections == 1 and not op.started:
                        break
                pending[rank] = [op for op in ops if not op.done]
        running = [op for ops in pending for op in ops if op.started]
        if not running:
            assert not any(pending), "deadlock"
            break
        until = min(map(ends, running))
        assert until < inf, "deadlock"
        for op in running:
            left[id(op)] -= (until - now) * speed(op)
        # The operation that ends now may have a rest of the size of a rounding error.
        for op in running:
            if op.kind != "messages" and left[id(op)] < 1e-12:
                left[id(op)] = 0.0
        now = until
    return now
