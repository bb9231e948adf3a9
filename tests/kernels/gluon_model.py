"""Python model of a Hopper SM that runs the unchanged source of the Gluon kernels with the latest permitted timing.

Triton's interpreter does not run Gluon. Here `jit` returns the Python function, and each partition is a Python thread.
One thread runs at a time. Each operation that other threads can observe selects the next thread at random. A TMA load
completes at a random time, and its slot contains NaN until then. A multiplication runs when the kernel waits for it. A
store becomes visible at the next barrier of its partition. TMA sees writes of other ranks after a fence.

Not modelled: threads inside a partition, layouts, 16-byte stores, registers. `test_compiled.py` checks these.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from tests.kernels.turns import Machine

_machine: Machine | None = None
_block = threading.local()


@contextmanager
def on(machine: Machine) -> Iterator[Machine]:
    """While open, launches run on `machine`."""
    global _machine
    _machine = machine
    try:
        yield machine
    finally:
        _machine = None


def _m() -> Machine:
    assert _machine is not None
    return _machine


class Int(int):
    """An integer of the device."""

    def to(self, kind: Any) -> Any:
        return Pointer(int(self), kind.dtype) if isinstance(kind, _PointerType) else self


class _PointerType:
    def __init__(self, dtype: Any) -> None:
        self.dtype = dtype


class Pointer:
    """An address, or a tensor of addresses."""

    def __init__(self, address: Any, dtype: torch.dtype) -> None:
        self.address, self._dtype = address, dtype
        self.dtype = SimpleNamespace(element_ty=dtype)

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.address + offset * self._dtype.itemsize, self._dtype)

    def load(self) -> Int:
        tensor, index = _m().find(self.address, self._dtype)
        return Int(tensor[index])

    def places(self, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The flat tensor that all masked addresses lie in, and the indices."""
        addresses = self.address.broadcast_to(mask.shape)[mask]
        if not len(addresses):
            return torch.empty(0, dtype=self._dtype), addresses
        tensor, first = _m().find(int(addresses.min()), self._dtype)
        indices = first + (addresses - addresses.min()) // self._dtype.itemsize
        if int(indices.max()) >= tensor.numel():
            raise IndexError(f"stores or loads {int(indices.max()) - tensor.numel() + 1} elements past the end")
        return tensor, indices


class Tile(torch.Tensor):
    """A tensor of the device, with the one type attribute that the kernels use."""

    type = SimpleNamespace(layout=None)  # type: ignore[assignment]


class Barrier:
    """An mbarrier."""

    def __init__(self) -> None:
        self.count = self.left = self.bytes = self.phase = 0

    def arrive(self, count: int, num_bytes: int = 0) -> None:
        self.left -= count
        self.bytes += num_bytes
        assert self.left >= 0, "more arrivals than a phase has"
        if not self.left and not self.bytes:
            self.left, self.phase = self.count, self.phase ^ 1


class Slot:
    """Shared memory for one operand of one step."""

    def __init__(self, shape: list[int], dtype: torch.dtype) -> None:
        self.data = torch.full(shape, torch.nan, dtype=dtype)

    def permute(self, order: tuple[int, int]) -> Any:
        assert order == (1, 0)
        return SimpleNamespace(read=lambda: self.data.t())

    def read(self) -> torch.Tensor:
        return self.data


class Slots(list[Any]):
    """Slots or barriers of a ring."""

    def index(self, number: int) -> Any:  # type: ignore[override]
        return self[number]


class TensorDescriptor:
    """TMA descriptor of a matrix. TMA reads the matrix as of the last fence of the block."""

    def __init__(self, matrix: torch.Tensor, block: list[int], layout: Any) -> None:
        assert matrix.stride(1) == 1
        assert matrix.stride(0) * matrix.itemsize % 16 == 0
        self.matrix, self.dtype, self.layout = matrix, matrix.dtype, layout
        self.block_type = SimpleNamespace(shape=block, nbytes=block[0] * block[1] * matrix.itemsize)

    @classmethod
    def from_tensor(cls, matrix: torch.Tensor, block: list[int], layout: Any) -> TensorDescriptor:
        return cls(matrix, block, layout)

    def tile(self, row: int, column: int) -> torch.Tensor:
        """Return a tile, with zeros past the end of the matrix."""
        seen = _block.seen[self]
        rows, columns = self.block_type.shape
        found = torch.zeros(rows, columns, dtype=self.dtype)
        part = seen[row : row + rows, column : column + columns]
        found[: part.shape[0], : part.shape[1]] = part
        return found


def _see(descriptors: Iterable[TensorDescriptor]) -> None:
    """Make the current matrices visible to TMA."""
    _block.seen = {desc: desc.matrix.clone() for desc in descriptors}


def _descriptors(value: Any) -> list[TensorDescriptor]:
    if isinstance(value, tuple):
        return [desc for each in value for desc in _descriptors(each)]
    return [value] if isinstance(value, TensorDescriptor) else []


def load_tile(desc: TensorDescriptor, where: list[int], barrier: Barrier, slot: Slot) -> None:
    tile = desc.tile(*where)
    # From now on TMA may overwrite any byte of the slot.
    slot.data.fill_(torch.nan)

    def complete() -> None:
        slot.data.copy_(tile)
        barrier.arrive(0, -desc.block_type.nbytes)

    _m().pending_copies.append(complete)
    _m().pause()


def _init(barrier: Barrier, count: int) -> None:
    barrier.count = barrier.left = count


def _wait(barrier: Barrier, phase: int) -> None:
    _m().pause(lambda: barrier.phase != phase)


def _expect(barrier: Barrier, num_bytes: int) -> None:
    barrier.arrive(1, num_bytes)
    _m().pause()


def _arrive(barrier: Barrier, count: int = 1, pred: bool = True) -> None:
    if pred:
        barrier.arrive(count)
    _m().pause()


mbarrier = SimpleNamespace(init=_init, wait=_wait, expect=_expect, arrive=_arrive, MBarrierLayout=lambda: None)


def fence_async_shared() -> None:
    pass


def warpgroup_mma(a: Any, b: Any, total: Tile, is_async: bool) -> Tile:
    assert is_async
    _block.products.append((a, b))
    return total


def warpgroup_mma_wait(outstanding: int, deps: tuple[Tile, ...]) -> Tile:
    (total,) = deps
    _m().pause()
    while len(_block.products) > outstanding:
        a, b = _block.products.pop(0)
        total += a.read().float() @ b.read().float()
    return total


def _inline_asm(text: str, *_: Any, **__: Any) -> None:
    assert "fence.proxy.async.global" in text
    _see(_block.seen)


def _load(pointer: Pointer, mask: Any = None, other: float = 0.0) -> Any:
    if mask is None:
        return pointer.load()
    tensor, indices = pointer.places(mask)
    found = torch.full(mask.shape, other, dtype=tensor.dtype)
    found[mask] = tensor[indices]
    return found


def _store(pointer: Pointer, value: torch.Tensor, mask: torch.Tensor) -> None:
    tensor, indices = pointer.places(mask)
    _block.stores.append((tensor, indices, value.broadcast_to(mask.shape)[mask]))
    _m().pause()


def _meet() -> None:
    for tensor, indices, values in _block.stores:
        tensor[indices] = values.as_subclass(torch.Tensor)
    _block.stores.clear()


def _atomic_add(pointer: Pointer, value: int, sem: str, scope: str) -> Int:
    _m().pause()
    if value == 0 and _m().looked is not None:
        _m().looked(pointer.address)
    before = pointer.load()
    tensor, index = _m().find(pointer.address, torch.int32)
    tensor[index] += value
    return before


def _atomic_xchg(pointer: Pointer, value: int, sem: str, scope: str) -> None:
    tensor, index = _m().find(pointer.address, torch.int32)
    tensor[index] = value
    if sem == "release" and _m().raised is not None:
        _m().raised(pointer.address)
    _m().pause()


def _warp_specialize(partitions: list[Any], num_warps: list[int], num_registers: list[int]) -> None:
    _block.partitions += partitions


def _allocate(dtype: torch.dtype, shape: list[int], layout: Any) -> Slots:
    if dtype == torch.int64:
        return Slots(Barrier() for _ in range(shape[0]))
    return Slots(Slot(shape[1:], dtype) for _ in range(shape[0]))


class Launch:
    """A kernel with a grid."""

    def __init__(self, kernel: Callable[..., None], grid: tuple[int]) -> None:
        self._kernel, self._grid = kernel, grid

    def __call__(self, *arguments: Any, num_warps: int, **constants: Any) -> None:
        machine, works = _m(), []
        given = [self._argument(argument) for argument in arguments]
        for program in range(self._grid[0]):
            _block.partitions = []
            self._kernel(*given, **constants)
            for function, values in _block.partitions:
                works.append(lambda f=function, v=values, p=program: self._partition(f, v, p))
        machine.run(works)

    def _argument(self, argument: Any) -> Any:
        if isinstance(argument, torch.Tensor):
            return Pointer(_m().know(argument), argument.dtype)
        return Int(argument) if isinstance(argument, int) else argument

    def _partition(self, function: Callable[..., None], values: Any, program: int) -> None:
        _block.program, _block.programs = program, self._grid[0]
        _block.stores, _block.products = [], []
        _see(_descriptors(values))
        function(*values)
        assert not _block.products, "a multiplication without a wait"
        _meet()


class Kernel:
    """Kernel function that `jit` returns."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *arguments: Any, **constants: Any) -> Any:
        return self._function(*arguments, **constants)

    def __getitem__(self, grid: tuple[int]) -> Launch:
        return Launch(self._function, grid)


def jit(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    return Kernel if function is None else Kernel(function)


gl = SimpleNamespace(
    constexpr=lambda value: value,
    int32=torch.int32,
    int64=torch.int64,
    float32=torch.float32,
    bfloat16=torch.bfloat16,
    float16=torch.float16,
    pointer_type=_PointerType,
    cdiv=lambda a, b: -(-a // b),
    static_range=range,
    program_id=lambda axis: _block.program,
    num_programs=lambda axis: _block.programs,
    num_warps=lambda: 8,
    load=_load,
    store=_store,
    arange=lambda first, last, layout: torch.arange(first, last),
    zeros=lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype).as_subclass(Tile),
    reshape=lambda value, shape: value.reshape(shape),
    permute=lambda value, order: value.permute(order),
    split=lambda value: (value[..., 0], value[..., 1]),
    convert_layout=lambda value, layout: value,
    multiple_of=lambda value, number: value,
    allocate_shared_memory=_allocate,
    inline_asm_elementwise=_inline_asm,
    warp_specialize=_warp_specialize,
    NVMMADistributedLayout=lambda *_: None,
    NVMMASharedLayout=SimpleNamespace(get_default_for=lambda block, dtype: None),
    BlockedLayout=lambda *_: None,
    SliceLayout=lambda *_: None,
)
tl = SimpleNamespace(
    constexpr=lambda value: value,
    float32=torch.float32,
    bfloat16=torch.bfloat16,
    float16=torch.float16,
    atomic_add=_atomic_add,
    atomic_xchg=_atomic_xchg,
    debug_barrier=_meet,
    minimum=min,
    where=lambda condition, chosen, other: chosen if condition else other,
)
triton = SimpleNamespace(jit=jit, cdiv=gl.cdiv)
