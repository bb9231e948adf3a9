"""Symmetric buffers of a transport: every rank of the group knows the address of a buffer on all ranks."""

from dataclasses import dataclass

import torch

from megatron_overlap.comm.buffers import BufferPool
from megatron_overlap.comm.symmetric.backend import SymmetricBackend, aligned
from megatron_overlap.comm.transport import TransportError

MAX_FLAGS = 1024
"""Flags of a symmetric buffer for each source: the most messages of one operation from one rank to one buffer."""


@dataclass(frozen=True, slots=True)
class SymmetricBuffer:
    """One name and dtype of the pool.

    Attributes:
        data: the bytes of each rank.
        words: the flags of each rank: `[R, MAX_FLAGS]` of received messages by source, then `[R]` of free buffers, by
            the rank that owns the buffer.
    """

    data: list[torch.Tensor]
    words: list[torch.Tensor]

    def flag(self, source: int, number: int) -> int:
        """Index of the flag of message `number` from `source`, at the receiver."""
        return source * MAX_FLAGS + number

    def free(self, receiver: int) -> int:
        """Index of the flag that the buffer of `receiver` is free, at the sender."""
        return len(self.data) * MAX_FLAGS + receiver


class HeapPool(BufferPool):
    """See `BufferPool`. A symmetric buffer is an arena of its own, with the flags of the messages that land in it.

    A new or larger buffer is collective: it waits for the work of the transport on all ranks, and compares their
    requests. This occurs in the first steps.

    A replay of a CUDA graph writes to the buffers. Therefore, after a capture, the pool keeps the buffers that larger
    ones replace.

    Attributes:
        captured: whether a CUDA graph uses the buffers.
    """

    def __init__(self, backend: SymmetricBackend) -> None:
        super().__init__()
        self._backend = backend
        self._buffers: dict[tuple[str, torch.dtype], SymmetricBuffer] = {}
        self.captured = False
        self._of_graphs: list[object] = []

    def _replace(self, buffer: torch.Tensor | None) -> None:
        if self.captured and buffer is not None:
            self._of_graphs.append((buffer, self.buffer_of(buffer)))

    def _allocate(
        self, name: str, capacity: int, dtype: torch.dtype, device: torch.device, *, symmetric: bool
    ) -> torch.Tensor:
        """See `BufferPool`.

        Raises TransportError if the ranks took different symmetric buffers, or during a capture.
        """
        if not (symmetric and capacity):
            return super()._allocate(name, capacity, dtype, device, symmetric=symmetric)
        self._buffers.pop((name, dtype), None)  # on a host the memory is freed with it
        backend, num_bytes = self._backend, capacity * dtype.itemsize
        if backend.is_capturing():
            raise TransportError(
                f"symmetric buffer {name}: {num_bytes} bytes: a CUDA graph is being captured; run forward and backward "
                "with the same shapes before the capture"
            )
        backend.barrier()
        texts = backend.all_gather_text(f"{name}: {num_bytes} bytes")
        if len(set(texts)) > 1:
            raise TransportError(f"symmetric buffer: the ranks differ: {'; '.join(texts)}; use ordinary buffers")
        begin = aligned(num_bytes)
        # An arena replaces the one of the same name.
        arena_name = f"{name} {dtype} {len(self._of_graphs)}"
        arenas = backend.map(begin + 4 * backend.size * (MAX_FLAGS + 1), arena_name)
        data, words = [arena[:num_bytes] for arena in arenas], [arena[begin:].view(torch.int32) for arena in arenas]
        self._buffers[name, dtype] = SymmetricBuffer(data, words)
        return data[backend.rank].view(dtype)

    def free_replaced(self) -> None:
        self._backend.free_replaced()

    def buffer_of(self, tensor: torch.Tensor) -> SymmetricBuffer | None:
        """The symmetric buffer of which `tensor` is a part; None if there is none."""
        storage = tensor.untyped_storage()._cdata
        for buffer in self._buffers.values():
            if buffer.data[self._backend.rank].untyped_storage()._cdata == storage:
                return buffer
        return None

    def clear(self) -> None:
        super().clear()
        self._buffers.clear()
        self._of_graphs.clear()
