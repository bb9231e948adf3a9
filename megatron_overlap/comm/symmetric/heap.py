"""Symmetric buffers of a transport: every rank of the group knows the address of a buffer on all ranks."""

from collections.abc import Sequence
from math import prod

import torch

from megatron_overlap.comm.buffers import BufferPool
from megatron_overlap.comm.symmetric.backend import SymmetricBackend
from megatron_overlap.comm.transport import TransportError


class HeapPool(BufferPool):
    """See `BufferPool`. A symmetric buffer is an arena of its own.

    A new or larger buffer is collective: it waits for all work of the ranks, and compares their requests. This occurs
    in the first steps.

    Args:
        backend: maps the arenas.
    """

    def __init__(self, backend: SymmetricBackend) -> None:
        super().__init__()
        self._backend = backend
        self._arenas: dict[tuple[str, torch.dtype], list[torch.Tensor]] = {}

    def take(self, name: str, shape: Sequence[int], like: torch.Tensor, *, symmetric: bool = False) -> torch.Tensor:
        """See `BufferPool.take`.

        Raises:
            TransportError: the ranks took different symmetric buffers.
        """
        num_bytes = prod(shape) * like.itemsize
        if not symmetric or num_bytes == 0:
            return super().take(name, shape, like)
        key, backend = (name, like.dtype), self._backend
        arenas = self._arenas.get(key)
        if arenas is None or arenas[backend.rank].numel() < num_bytes:
            backend.barrier()
            texts = backend.all_gather_text(f"{name}: {num_bytes} bytes")
            if len(set(texts)) > 1:
                raise TransportError(f"symmetric buffer: the ranks differ: {'; '.join(texts)}; use ordinary buffers")
            arenas = self._arenas[key] = backend.map(num_bytes, f"{name} {like.dtype}")
        self._content.pop((name, like.dtype, like.device), None)
        return arenas[backend.rank][:num_bytes].view(like.dtype).view(*shape)

    def at(self, peer: int, tensor: torch.Tensor) -> torch.Tensor | None:
        """The bytes of `peer` at the place of `tensor`; None if `tensor` is no part of a symmetric buffer."""
        storage = tensor.untyped_storage()._cdata
        for arenas in self._arenas.values():
            if arenas[self._backend.rank].untyped_storage()._cdata == storage:
                start = tensor.storage_offset() * tensor.itemsize
                return arenas[peer][start : start + tensor.nbytes]
        return None

    def sizes(self) -> dict[str, int]:
        symmetric = {name: arenas[self._backend.rank].numel() for (name, _), arenas in self._arenas.items()}
        return {**super().sizes(), **symmetric}

    def clear(self) -> None:
        super().clear()
        self._arenas.clear()
