"""Symmetric buffers of a transport: each lies at the same offset of the heap on all ranks of the group."""

from collections.abc import Callable, Sequence
from math import prod

import torch

from megatron_overlap.comm.buffers import BufferPool
from megatron_overlap.comm.transport import TransportError

_ALIGNMENT = 256


class HeapPool(BufferPool):
    """See `BufferPool`. A symmetric buffer that does not fit into the heap is ordinary memory, on all ranks alike.

    A buffer that grows takes new bytes of the heap. The ranks compare each new buffer on the host, once.

    Args:
        heap: the heap of this rank, uint8.
        all_gather_text: returns the text of every rank.
    """

    def __init__(self, heap: torch.Tensor, all_gather_text: Callable[[str], list[str]]) -> None:
        super().__init__()
        self._heap, self._all_gather_text, self._num_used = heap, all_gather_text, 0
        self._symmetric: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    def take(self, name: str, shape: Sequence[int], like: torch.Tensor, *, symmetric: bool = False) -> torch.Tensor:
        """See `BufferPool.take`.

        Raises:
            TransportError: the ranks took different symmetric buffers.
        """
        key, num_bytes = (name, like.dtype), prod(shape) * like.itemsize
        if not symmetric or num_bytes > self._heap.numel():
            return super().take(name, shape, like)
        storage = self._symmetric.get(key)
        if storage is None or storage.numel() < num_bytes:
            start, stop = self._num_used, self._num_used + -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
            if stop > self._heap.numel():
                return super().take(name, shape, like)
            texts = self._all_gather_text(f"{name}: {num_bytes} bytes at {start}")
            if len(set(texts)) > 1:
                raise TransportError(f"symmetric buffer: the ranks differ: {'; '.join(texts)}; use ordinary buffers")
            storage, self._num_used = self._heap[start:stop], stop
            self._symmetric[key] = storage
        self._content.pop((name, like.dtype, like.device), None)
        return storage[:num_bytes].view(like.dtype).view(*shape)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` lies in the heap."""
        return tensor.untyped_storage()._cdata == self._heap.untyped_storage()._cdata

    def sizes(self) -> dict[str, int]:
        return {**super().sizes(), "symmetric heap": self._heap.numel()}

    def clear(self) -> None:
        super().clear()
        self._symmetric.clear()
        self._heap = self._heap[:0]
