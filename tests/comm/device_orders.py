"""Checks recorded operations in all orders in which devices may run them: deadlocks, races, reads of undefined bytes.

`Accesses` records the memory that kernels use. `check` derives what every order has in common: an operation follows
those before it in its stream, a wait follows its event, a receive follows its send, and a wait for a flag follows the
step that sets it. With one hardware queue an operation also starts after those that the host enqueued before it.

- A cycle is a deadlock. An operation that can start stays able to, so no choice of an order avoids it.
- Two operations race if neither follows the other, both use the same bytes, and one writes them. The end of a tensor
  is a write in its stream: the allocator gives the memory to later work there. torch protects the tensors of NCCL.
- A buffer that an operation takes has undefined bytes, unless peers copy from it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_overlap.comm import BufferPool
from megatron_overlap.comm.symmetric.heap import HeapPool
from tests.comm.device import MessageKey, Op, Recorder, Span

_ALLOCATIONS = ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided")
_END = "end of a tensor"


class Accesses(TorchDispatchMode):
    """Records the kernels of torch on fake tensors as work of the current stream of `device`, with their memory."""

    def __init__(self, device: Recorder) -> None:
        super().__init__()
        self._device = device
        self._takes = {each: each.take for each in (BufferPool, HeapPool)}

    def __enter__(self) -> Accesses:
        for pool, take in self._takes.items():
            setattr(pool, "take", self._undefined(take))  # noqa: B010
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        for pool, take in self._takes.items():
            setattr(pool, "take", take)  # noqa: B010

    def _undefined(self, take: Any) -> Any:
        def run(*args: Any, **options: Any) -> torch.Tensor:
            taken: torch.Tensor = take(*args, **options)
            # Peers copy sums from `summed`. The rank writes the next sums there after it has the partial sums of all
            # peers, which they send after their copies.
            if args[1] != "summed":
                self._device.put("undefine", f"take {args[1]}", writes=(self._device.span(taken),))
            return taken

        return run

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, device = kwargs or {}, self._device
        if func.namespace == "prim":  # an attribute
            return func(*args, **kwargs)
        for stream, span in device.free():
            device.ops.append(Op("undefine", stream, _END, writes=(span,)))
        result = func(*args, **kwargs)
        schema, name = func._schema, func.overloadpacket.__name__
        named = {argument.name: argument for argument in schema.arguments}
        passed = [*zip(schema.arguments, args, strict=False), *((named[key], value) for key, value in kwargs.items())]
        read, written = list[Span](), list[Span]()
        for argument, value in passed:
            tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
            changes = argument.alias_info is not None and argument.alias_info.is_write
            (written if changes else read).extend(map(device.span, tensors))
        is_split = func is torch.ops.aten.unsafe_split_with_sizes.default  # its schema does not say that it aliases
        if is_split or not written and any(returned.alias_info is not None for returned in schema.returns):
            return result  # a view
        if not written:
            written = [device.span(leaf) for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        elif name in ("add_", "addmm_", "lerp_", "mul_", "div_"):
            read += written
        if name in _ALLOCATIONS:
            device.put("undefine", name, writes=tuple(written))
        else:
            device.put("work", name, reads=tuple(read), writes=tuple(written))
        return result


class OrderError(AssertionError):
    """A deadlock, a race, a read of undefined bytes, or messages that do not fit."""


class _Orders:
    """The operations of all ranks by number, and what starts and ends after what.

    Operation n starts at node 2 n and ends at node 2 n + 1.
    """

    def __init__(self, ranks: Sequence[Recorder]) -> None:
        self.ops = [(device.rank, op) for device in ranks for op in device.ops]
        self.streams: dict[tuple[int, str], int] = {}
        self.stream_of: list[int] = []
        self.position: list[int] = []  # in the stream
        self.after: list[list[int]] = [[] for _ in range(2 * len(self.ops))]
        last, recorded = dict[int, int](), dict[tuple[int, object], int]()
        sets, reaches = (defaultdict[object, list[int]](list) for _ in range(2))
        self.sends, self.recvs = dict[MessageKey, int](), dict[MessageKey, int]()
        collectives = defaultdict[object, list[int]](list)
        for number, (rank, op) in enumerate(self.ops):
            stream = self.streams.setdefault((rank, op.stream), len(self.streams))
            before = last.get(stream)
            self.stream_of.append(stream)
            self.position.append(0 if before is None else self.position[before] + 1)
            if before is not None:
                self._order(2 * before + 1, 2 * number)
            last[stream] = number
            self._order(2 * number, 2 * number + 1)
            if op.kind == "record":
                recorded[rank, op.label] = number
            elif op.kind == "wait":
                self._order(2 * recorded[rank, op.label] + 1, 2 * number)
            elif op.kind == "collective":
                collectives[op.stream, op.members, op.label].append(number)
            elif op.kind == "reach":
                reaches[op.label[0]].append(number)
            elif op.kind == "set" and op.label[1]:
                sets[op.label[0]].append(number)
            self.sends.update(dict.fromkeys(op.sends, number))
            self.recvs.update(dict.fromkeys(op.recvs, number))
        for message, sender in self.sends.items():
            receiver = self.recvs.get(message)
            if receiver is None or self.num_bytes(message, sender) != self.num_bytes(message, receiver):
                raise OrderError(f"message {message}: {self.text(sender)}: not received with its size")
            self._order(2 * sender, 2 * receiver + 1)
        for message in self.recvs.keys() - self.sends.keys():
            raise OrderError(f"message {message}: {self.text(self.recvs[message])}: not sent")
        for (_, members, label), numbers in collectives.items():
            if len(numbers) != len(members):
                raise OrderError(f"collective {label} of ranks {members}: {len(numbers)} ranks start it")
            for one in numbers:
                for other in numbers:
                    self._order(2 * one, 2 * other + 1)
        self.flags: list[tuple[int, int]] = []
        for word in sets.keys() | reaches.keys():
            if len(sets[word]) != len(reaches[word]):
                raise OrderError(f"flag {word}: {len(sets[word])} steps set it, {len(reaches[word])} wait")
            for setting, reaching in zip(sets[word], reaches[word], strict=True):
                self._order(2 * setting + 1, 2 * reaching)
            self.flags += zip(reaches[word], sets[word][1:], strict=False)

    def _order(self, node: int, later: int) -> None:
        self.after[node].append(later)

    def num_bytes(self, message: MessageKey, number: int) -> int:
        return self.ops[number][1].tensors[message].nbytes

    def text(self, number: int) -> str:
        rank, op = self.ops[number]
        return f"rank {rank} {op.stream}: {op.kind} {op.label or ''} (operation {number})"

    def sort(self, *, one_queue: bool) -> list[int]:
        """All nodes in an order in which devices can run them."""
        after = [list(nodes) for nodes in self.after]
        for message, sender in self.sends.items():
            # A send may wait for its receive.
            after[2 * self.recvs[message]].append(2 * sender + 1)
        if one_queue:
            last = dict[int, int]()
            for number, (rank, op) in enumerate(self.ops):
                if op.kind == "undefine":
                    continue
                if rank in last:
                    after[2 * last[rank]].append(2 * number)
                if op.kind != "record":
                    last[rank] = number
        missing = Counter(node for nodes in after for node in nodes)
        order = [node for node in range(len(after)) if not missing[node]]
        for node in order:  # the loop appends to this list
            for later in after[node]:
                missing[later] -= 1
                if not missing[later]:
                    order.append(later)
        if len(order) < len(after):
            reached = set(order)
            firsts = dict[tuple[int, str], int]()
            for number, (rank, op) in enumerate(self.ops):
                if 2 * number + 1 not in reached:
                    firsts.setdefault((rank, op.stream), number)
            texts = "\n".join(map(self.text, firsts.values()))
            raise OrderError(f"deadlock with {'one queue' if one_queue else 'many queues'}:\n{texts}")
        return order


def check(ranks: Sequence[Recorder]) -> int:
    """Checks recorded operations; returns their number.

    Raises:
        OrderError: see there.
    """
    orders = _Orders(ranks)
    orders.sort(one_queue=False)
    nodes = orders.sort(one_queue=True)
    follows = _follows(orders, nodes)

    def ordered(first: int, second: int) -> bool:
        return bool(follows[second, orders.stream_of[first]] > orders.position[first])

    for cleared, setting in orders.flags:
        # The step after a wait for a flag clears it, in the same stream.
        if not follows[setting, orders.stream_of[cleared]] > orders.position[cleared] + 1:
            raise OrderError(f"{orders.text(setting)}: may set a flag before {orders.text(cleared)} has cleared it")
    used = _accesses(orders)
    for memory, accesses in used.items():
        for one, other in _conflicts(accesses, np.array(orders.stream_of)):
            first, second = (orders.ops[each][1] for each in (one, other))
            protected = _END in (first.label, second.label) and {first.kind, second.kind} & {"messages", "collective"}
            if not (protected or ordered(one, other) or ordered(other, one)):
                raise OrderError(f"race in memory {memory}: {orders.text(one)} and {orders.text(other)}")
    _check_defined(orders, nodes)
    return len(orders.ops)


def _follows(orders: _Orders, nodes: Sequence[int]) -> np.ndarray:
    """For each operation and stream: the number of operations of the stream that have ended when it starts."""
    ended = np.zeros((2 * len(orders.ops), len(orders.streams)), dtype=np.int32)
    for node in nodes:
        number = node // 2
        if node % 2:
            ended[node, orders.stream_of[number]] = orders.position[number] + 1
        for later in orders.after[node]:
            np.maximum(ended[later], ended[node], out=ended[later])
    return ended[::2]


Access = tuple[int, int, int, bool]
"""Operation, first byte, byte after the last, and whether it writes."""


def _uses(op: Op) -> Iterator[tuple[Span, bool]]:
    for span in op.reads:
        yield span, False
    for span in op.writes:
        yield span, True


def _accesses(orders: _Orders) -> dict[object, list[Access]]:
    used = defaultdict[object, list[Access]](list)
    for number, (_, op) in enumerate(orders.ops):
        for (memory, start, stop), writes in _uses(op):
            if start < stop:
                used[memory].append((number, start, stop, writes))
    return used


def _conflicts(accesses: Sequence[Access], stream_of: np.ndarray) -> Iterator[tuple[int, int]]:
    """Pairs of operations in different streams that use the same bytes, of which one writes them."""
    number, start, stop, writes = (np.array(each) for each in zip(*accesses, strict=True))
    stream = stream_of[number]
    if (stream == stream[0]).all():
        return
    for index in range(len(number)):
        meets = (start[index] < stop[:index]) & (start[:index] < stop[index]) & (stream[:index] != stream[index])
        for other in np.flatnonzero(meets & (writes[:index] | writes[index])):
            yield int(number[other]), int(number[index])


def _check_defined(orders: _Orders, nodes: Sequence[int]) -> None:
    """Checks that no operation reads undefined bytes; without races all orders read the same."""
    sizes = Counter[object]()
    for _, op in orders.ops:
        for (memory, _, stop), _ in _uses(op):
            sizes[memory] = max(sizes[memory], stop)
    defined = {memory: np.ones(size, dtype=bool) for memory, size in sizes.items()}
    for node in nodes:
        op = orders.ops[node // 2][1]
        for memory, start, stop in () if node % 2 else op.reads:
            if not defined[memory][start:stop].all():
                raise OrderError(f"{orders.text(node // 2)}: reads undefined bytes of memory {memory}")
        for memory, start, stop in op.writes if node % 2 and op.label != _END else ():
            defined[memory][start:stop] = op.kind != "undefine"
