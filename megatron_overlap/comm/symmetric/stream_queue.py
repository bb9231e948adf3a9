"""A queue on a CUDA stream: copies, batches of copies, and steps on flags, by calls of the CUDA driver."""

import ctypes
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import batched, groupby
from typing import Any, NamedTuple

import torch

from megatron_overlap.comm.symmetric.backend import Copy, FlagStep, copies_of
from megatron_overlap.comm.transport import TransportError


@lru_cache
def _driver_functions() -> tuple[Callable[..., int], ...]:
    """The calls of the driver that copy, write a word, wait for a word, and do several of these on a stream."""
    driver = ctypes.CDLL("libcuda.so.1")
    copy, write, wait = driver.cuMemcpyAsync, driver.cuStreamWriteValue32_v2, driver.cuStreamWaitValue32_v2
    batch = driver.cuStreamBatchMemOp_v2
    copy.argtypes = ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p
    write.argtypes = wait.argtypes = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint
    batch.argtypes = ctypes.c_void_p, ctypes.c_uint, ctypes.c_void_p, ctypes.c_uint
    return copy, write, wait, batch


class _CopyAttributes(ctypes.Structure):
    """`CUmemcpyAttributes` of the CUDA driver. Hints of locations are for managed memory."""

    _fields_ = (("order", ctypes.c_int), ("hints", ctypes.c_int * 4), ("flags", ctypes.c_uint))


_STREAM_ORDER, _BESIDE_COMPUTATION = 1, 1  # CUmemcpySrcAccessOrder, CUmemcpyFlags


@lru_cache
def _batch_function() -> Callable[..., int] | None:
    """The call of the driver that enqueues several copies on a stream; None if it is missing or a trial fails.

    CUDA has it since 12.8. Since 13.0 it has no argument for the number of the copy that failed.
    """
    driver = ctypes.CDLL("libcuda.so.1")
    attributes, first = _CopyAttributes(order=_STREAM_ORDER, flags=_BESIDE_COMPUTATION), ctypes.c_size_t(0)
    of_all: tuple[object, ...] = (ctypes.byref(attributes), ctypes.byref(first), ctypes.c_size_t(1))
    function = getattr(driver, "cuMemcpyBatchAsync_v2", None)
    if function is None:
        function, failed = getattr(driver, "cuMemcpyBatchAsync", None), ctypes.c_size_t()
        of_all += (ctypes.byref(failed),)
    if function is None:
        return None

    def batch(to: Any, source: Any, num_bytes: Any, stream: int) -> int:
        count = ctypes.c_size_t(len(to))
        return int(function(to, source, num_bytes, count, *of_all, ctypes.c_void_p(stream)))

    words = _source_words()
    stream, first_word = torch.cuda.Stream(), words.data_ptr()
    source, to = _addresses([first_word, first_word + 4]), _addresses([first_word + 8, first_word + 12])
    status = batch(to, source, _sizes([4, 4]), stream.cuda_stream)
    stream.synchronize()
    return batch if not status and words[2].item() == 1 else None


def _addresses(values: Sequence[int]) -> Any:
    return (ctypes.c_uint64 * len(values))(*values)


def _sizes(values: Sequence[int]) -> Any:
    return (ctypes.c_size_t * len(values))(*values)


class _Batch(NamedTuple):
    """Copies for one call of the driver.

    Attributes:
        to, source, num_bytes: arrays.
        gaps: where each call puts the address of a tensor: an array and an index.
        tensors: live as long as this.
    """

    to: Any
    source: Any
    num_bytes: Any
    gaps: Sequence[tuple[Any, int]] = ()
    tensors: object = None


@lru_cache
def _writes_reach_peers() -> bool:
    """Whether `cuStreamWriteValue32` can write to the memory of another GPU. Since CUDA 13.1 it cannot.

    Source: github.com/NVIDIA/nccl/issues/2052. A write takes the host and the device less time than a copy.
    """
    version = ctypes.c_int()
    check_status("cuDriverGetVersion", ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)))
    return version.value < 13010


class MemOp(ctypes.Structure):
    """`CUstreamBatchMemOpParams` of the CUDA driver: a wait for a word or a write to it."""

    _fields_ = (
        ("operation", ctypes.c_uint),
        ("address", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("flags", ctypes.c_uint),
        ("alias", ctypes.c_uint64),
        ("pad", ctypes.c_uint64),
    )


_MAX_OPS = 255  # of one call of cuStreamBatchMemOp
WAIT_VALUE_32, WRITE_VALUE_32 = 1, 2  # CUstreamBatchMemOpType


class StreamQueue:
    """A queue on a stream. `None` selects the current stream at each call.

    Where a stream cannot write to the memory of another GPU, copies write the words of peers.

    The caller orders the computing stream after all copies from a tensor before it frees the tensor. A new thread, such
    as one of autograd, calls `mark` or `after` first: calls of the driver fail (201) in a thread without a context.
    """

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        self._handle = None if stream is None else stream.cuda_stream
        self._device = torch.cuda.current_device()
        # The streams of earlier calls, by handle.
        self._used = {} if stream is None else {stream.cuda_stream: stream}
        self._copy, self._write, self._wait, self._batch = _driver_functions()
        # The driver refuses batches on the default stream.
        self._copy_batch = None if stream is None else _batch_function()
        self._copies_words = not _writes_reach_peers()
        self._sources = _source_words()
        self._one, self._value = self._sources.data_ptr(), self._sources.data_ptr() + 4

    @property
    def stream(self) -> torch.cuda.Stream:
        return self._used[self._raw_stream()]

    def _raw_stream(self) -> int:
        if self._handle is not None:
            return self._handle
        # `torch.cuda.current_stream()` takes microseconds.
        handle = torch._C._cuda_getCurrentRawStream(self._device)
        if handle not in self._used:
            self._used[handle] = torch.cuda.current_stream()
        return handle

    def synchronize(self) -> None:
        """Block until the work of the present stream and of those of earlier calls is complete."""
        self._raw_stream()  # adds the present one
        for stream in self._used.values():
            stream.synchronize()

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        check_status("cuMemcpyAsync", self._copy(to.data_ptr(), source.data_ptr(), source.nbytes, self._raw_stream()))

    def prepare_copies(self, copies: Sequence[Copy], *, captured: bool = False) -> object:
        # A CUDA graph has no batches.
        if len(copies) == 1 or captured or self._copy_batch is None:
            return copies
        arrays = to, source = [
            _addresses([0 if tensor is None else tensor.data_ptr() for tensor in tensors])
            for tensors in zip(*copies, strict=True)
        ]
        num_bytes = [next(tensor.nbytes for tensor in copy if tensor is not None) for copy in copies]
        gaps = [(arrays[side], index) for index, copy in enumerate(copies) for side in (0, 1) if copy[side] is None]
        return _Batch(to, source, _sizes(num_bytes), gaps, copies)

    def copy_all(self, prepared: Any, tensors: Sequence[torch.Tensor]) -> None:
        if not isinstance(prepared, _Batch):
            for to, source in copies_of(prepared, tensors):
                self.copy(to, source)
            return
        for (column, index), tensor in zip(prepared.gaps, tensors, strict=True):
            column[index] = tensor.data_ptr()
        self._enqueue(prepared)

    def _enqueue(self, batch: _Batch) -> None:
        assert self._copy_batch is not None
        status = self._copy_batch(batch.to, batch.source, batch.num_bytes, self._raw_stream())
        check_status("cuMemcpyBatchAsync", status)

    def write(self, words: torch.Tensor, index: int, value: int) -> None:
        stream, address = self._raw_stream(), words.data_ptr() + 4 * index
        # Flags 0: the write follows all earlier work of the stream, also for readers on other devices.
        written = self._write(stream, self._value if self._copies_words else address, value, 0)
        check_status("cuStreamWriteValue32", written)
        if self._copies_words:
            check_status("cuMemcpyAsync", self._copy(address, self._value, 4, stream))

    def wait(self, words: torch.Tensor, index: int, value: int) -> None:
        # Flags 0: until the word is at least the value.
        status = self._wait(self._raw_stream(), words.data_ptr() + 4 * index, value, 0)
        check_status("cuStreamWaitValue32", status)

    def prepare(self, steps: Sequence[FlagStep], *, captured: bool = False) -> object:
        calls: list[object] = []
        for copies, group in groupby(steps, key=lambda step: step.sets and self._copies_words):
            if copies:
                to = [step.words.data_ptr() + 4 * step.position for step in group]
                if len(to) == 1 or captured or self._copy_batch is None:
                    calls += to
                else:
                    calls.append(_Batch(_addresses(to), _addresses([self._one] * len(to)), _sizes([4] * len(to))))
            else:
                ops = (op for step in group for op in _ops(step))
                calls += [(MemOp * len(some))(*some) for some in batched(ops, _MAX_OPS)]
        return calls

    def run(self, prepared: object) -> None:
        assert isinstance(prepared, list)
        stream = self._raw_stream()
        for call in prepared:
            if isinstance(call, int):
                check_status("cuMemcpyAsync", self._copy(call, self._one, 4, stream))
            elif isinstance(call, _Batch):
                self._enqueue(call)
            else:
                check_status("cuStreamBatchMemOp", self._batch(stream, len(call), call, 0))

    def mark(self) -> object:
        return self.stream.record_event()

    def after(self, mark: object) -> None:
        assert isinstance(mark, torch.cuda.Event)
        self.stream.wait_event(mark)


def _source_words() -> torch.Tensor:
    """Four words of device memory: a queue copies the first, 1, or the second to peers; a trial writes the others."""
    words = torch.tensor([1, 0, 0, 0], dtype=torch.int32, device="cuda")
    torch.cuda.current_stream().synchronize()  # other streams read them
    return words


def _ops(step: FlagStep) -> list[MemOp]:
    """Set a flag, or wait for one of this rank and clear it. Flags 0, as in `StreamQueue.write` and `wait`."""
    address = step.words.data_ptr() + 4 * step.position
    if step.sets:
        return [MemOp(WRITE_VALUE_32, address, 1)]
    wait = [MemOp(WAIT_VALUE_32, address, 1), MemOp(WRITE_VALUE_32, address, 0)]
    if step.note is None:
        return wait
    # A device writes pinned memory at its address on the host.
    word = step.note.words.data_ptr() + 4 * step.note.position
    return [MemOp(WRITE_VALUE_32, word, step.note.number), *wait, MemOp(WRITE_VALUE_32, word, 0)]


def check_status(function: str, status: int) -> None:
    """Raise a `TransportError` unless a function of the CUDA driver succeeded."""
    if status:
        text = ctypes.c_char_p()
        ctypes.CDLL("libcuda.so.1").cuGetErrorString(status, ctypes.byref(text))
        raise TransportError(f"{function}: CUDA driver error {status}: {(text.value or b'unknown').decode()}")
