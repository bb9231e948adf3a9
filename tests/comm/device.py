"""Recording substitutes of CUDA streams, events and an NCCL group, and an executor of the recorded operations.

Recording: every call appends an operation to a stream and returns at once. Functions that block the host are missing,
so that code which calls them fails. Playing: the streams of all ranks run as on devices; a message needs sender and
receiver, and copies its bytes. `connections=1` starts the operations of all streams of a rank in the order in which the
host enqueued them, except that the record of an event delays none: Megatron enqueues the GEMM of wgrad after the
all-reduce of dgrad and the record of its end, and both run at once.

`makespan.py` plays recorded operations against the clock.
"""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

type MessageKey = tuple[object, int, int, int]
"""Communicator, sender, receiver, and the number of the message between these: NCCL matches them in order."""

type Span = tuple[tuple[object, ...], int, int]
"""A memory, its first byte that is used, and the byte after the last."""


@dataclass
class Op:
    """One operation of a stream: `record` or `wait` of an event, `work`, `collective`, `messages` of one NCCL call.

    Copy engines add `copy` to a rank (`label`), and `set` and `reach` of a word to or at a value.

    Attributes:
        seconds: duration of work or of a copy on an otherwise idle device.
        uses_sms: the duration grows where messages occupy SMs.
        members: ranks of a collective.
        reads, writes: the memory that the operation uses (`device_orders`).
    """

    kind: str
    stream: str
    label: Any = None
    sends: tuple[MessageKey, ...] = ()
    recvs: tuple[MessageKey, ...] = ()
    tensors: dict[MessageKey, torch.Tensor] = field(default_factory=dict)
    action: Callable[[], object] | None = None
    done: bool = False
    started: bool = False
    seconds: float = 0.0
    uses_sms: bool = False
    members: tuple[int, ...] = ()
    reads: tuple[Span, ...] = ()
    writes: tuple[Span, ...] = ()


class Recorder:
    """The device of one rank, in place of `torch` and `torch.distributed`."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.ops: list[Op] = []
        self.current = "compute"
        self._num_events = 0
        self.buffers: list[str] = []
        self._num_groups, self._num_streams = Counter[range](), 0
        # By the identity of a storage, which its weak reference keeps unique.
        self.memories: dict[int, tuple[object, ...]] = {}
        self._references: list[StorageWeakRef] = []
        self._allocated: list[tuple[StorageWeakRef, str, Span]] = []

    def span(self, tensor: torch.Tensor) -> Span:
        """The bytes of a tensor, with those between its rows."""
        storage = tensor.untyped_storage()
        memory = self.memories.get(storage._cdata)
        if memory is None:
            memory = self.memories[storage._cdata] = (self.rank, len(self.memories))
            self._references.append(StorageWeakRef(storage))
            self._allocated.append((self._references[-1], self.current, (memory, 0, storage.nbytes())))
        extent = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        start = tensor.storage_offset() * tensor.itemsize
        return memory, start, start + extent * tensor.itemsize * (tensor.numel() > 0)

    def free(self) -> list[tuple[str, Span]]:
        """The memories that have ended since the last call, and the streams in which they were first used."""
        ended = [(stream, whole) for reference, stream, whole in self._allocated if reference.expired()]
        self._allocated = [each for each in self._allocated if not each[0].expired()]
        return ended

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

        def wait_stream(other: Any) -> None:
            event = self.event()
            with self.on(other):
                event.record()
            wait_event(event)

        return SimpleNamespace(name=name, cuda_stream=name, wait_event=wait_event, wait_stream=wait_stream)

    @property
    def torch(self) -> Any:
        made: list[dict[str, Any]] = []

        def new_stream(device: Any, **options: Any) -> Any:
            made.append(options)
            self._num_streams += 1
            return self.stream(f"stream {self._num_streams}")

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

        def ranks_of(group: Any) -> range:
            """The ranks of a group, as of the store that `store_beside` returns; by default all."""
            return getattr(group, "ranks", range(self.size))

        def group(store: Any, rank: int, size: int) -> Any:
            ranks = ranks_of(store)
            self._num_groups[ranks] += 1
            # A rank may have communicators that others have not: each is known by its ranks.
            communicator = ranks, self._num_groups[ranks]
            return NcclGroup(self, self._num_groups.total(), communicator, ranks=ranks)

        group.BackendType = SimpleNamespace(NCCL="nccl")  # type: ignore[attr-defined]
        return SimpleNamespace(
            ProcessGroupNCCL=backend,
            ProcessGroup=group,
            get_rank=lambda group: ranks_of(group).index(self.rank),
            get_world_size=lambda group: len(ranks_of(group)),
            get_process_group_ranks=lambda group: list(ranks_of(group)),
        )

    @contextlib.contextmanager
    def use_mem_pool(self, pool: str) -> Iterator[None]:
        self.buffers.append(f"from {pool}")
        yield


@dataclass
class NcclGroup:
    """A communicator: calls between start and end are one kernel on its own stream, ordered after the current one."""

    recorder: Recorder
    number: int = 1
    communicator: object = None
    sends: list[Any] = field(default_factory=list)
    recvs: list[Any] = field(default_factory=list)
    tensors: dict[MessageKey, torch.Tensor] = field(default_factory=dict)
    backend: Any = None
    num_collectives: int = 0
    ranks: range | None = None
    num_messages: dict[tuple[int, int], int] = field(default_factory=lambda: defaultdict(int))

    def _set_default_backend(self, kind: str) -> None: ...

    def _register_backend(self, device: Any, kind: str, backend: Any) -> None:
        self.backend = backend

    def _get_backend(self, device: Any) -> Any:
        return self.backend

    def _start_coalescing(self, device: Any) -> None:
        self.sends, self.recvs, self.tensors = [], [], {}

    def send(self, tensors: Sequence[torch.Tensor], to: int, tag: int) -> None:
        self.sends.append(self._message(self.recorder.rank, self._all[to]))
        self.tensors[self.sends[-1]] = tensors[0]

    def recv(self, tensors: Sequence[torch.Tensor], source: int, tag: int) -> None:
        self.recvs.append(self._message(self._all[source], self.recorder.rank))
        self.tensors[self.recvs[-1]] = tensors[0]

    @property
    def _all(self) -> range:
        return range(self.recorder.size) if self.ranks is None else self.ranks

    def _message(self, source: int, target: int) -> MessageKey:
        self.num_messages[source, target] += 1
        return self.communicator or self.number, source, target, self.num_messages[source, target]

    def _end_coalescing(self, device: Any) -> Any:
        span, tensors = self.recorder.span, self.tensors
        used = {
            "reads": tuple(span(tensors[each]) for each in self.sends),
            "writes": tuple(span(tensors[each]) for each in self.recvs),
        }
        return self._put("messages", sends=tuple(self.sends), recvs=tuple(self.recvs), tensors=tensors, **used)

    def _allgather_base(self, into: torch.Tensor, shard: torch.Tensor) -> Any:
        return self._collective("all_gather", into.nbytes - shard.nbytes, shard, into)

    def _reduce_scatter_base(self, into: torch.Tensor, rows: torch.Tensor) -> Any:
        return self._collective("reduce_scatter", rows.nbytes - into.nbytes, rows, into)

    def _collective(self, name: str, num_bytes: int, read: torch.Tensor, written: torch.Tensor) -> Any:
        self.num_collectives += 1
        span = self.recorder.span
        used = {"members": tuple(self._all), "reads": (span(read),), "writes": (span(written),)}
        return self._put("collective", (name, self.num_collectives, num_bytes), **used)

    def _put(self, kind: str, label: Any = None, **fields: Any) -> Any:
        recorder = self.recorder
        before, after = recorder.event(), recorder.event()
        before.record()
        with recorder.on(SimpleNamespace(name="nccl" if self.number == 1 else f"nccl {self.number}")):
            recorder.wait(before)
            recorder.put(kind, label, **fields)
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
    copied: set[MessageKey] = set()
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
    copied: set[MessageKey],
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
            if connections == 1 and not op.started and op.kind != "record":
                break
    return progress


def _execute(op: Op, ranks: Sequence[Recorder], copied: set[MessageKey]) -> None:
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
