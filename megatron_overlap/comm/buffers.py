"""Reusable communication buffers that live as long as their transport, so that a step allocates none."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from math import prod
from typing import Any

import torch

_MAX_TENSORS = 256


class BufferPool:
    """Named buffers of one transport: `take` returns the same memory for the same name.

    An operation must finish with a name before the next operation takes it.

    A buffer grows to the largest requested size and is never freed, like Megatron's global memory buffer. It grows by
    at least a quarter: otherwise sizes that vary would replace it, and fragment memory, at every new largest one.

    Args:
        within: returns the context of allocations, such as another memory pool.

    Attributes:
        derived: what callers derive from buffers, by keys of theirs; emptied when a buffer is replaced.
        in_use: names of buffers that unfinished operations hold, for callers that need one buffer for each.
    """

    def __init__(self, *, within: Callable[[], AbstractContextManager[object]] = nullcontext) -> None:
        self._within = within
        self._storage: dict[tuple[str, torch.dtype, torch.device, bool], torch.Tensor] = {}
        self._taken: dict[tuple[object, ...], torch.Tensor] = {}
        self.derived: dict[Any, Any] = {}
        self.in_use: set[str] = set()

    def take(
        self,
        name: str,
        shape: Sequence[int],
        like: torch.Tensor,
        *,
        dtype: torch.dtype | None = None,
        symmetric: bool = False,
    ) -> torch.Tensor:
        """Return a contiguous tensor of `shape` with the device of `like` and undefined content.

        Args:
            dtype: of the tensor; None: that of `like`.
            symmetric: all ranks take this name with the same size at the same operation. A pool of symmetric memory
                returns the same address on all ranks.
        """
        key = (name, dtype or like.dtype, like.device, symmetric)
        taken = self._taken.get((key, *shape))
        if taken is not None:
            return taken
        size = prod(shape)
        storage = self._storage.get(key)
        # Training writes to buffers that generation allocated, which torch refuses for tensors of inference mode.
        with torch.inference_mode(False):
            if storage is None or storage.numel() < size:
                capacity = size if storage is None else max(size, storage.numel() * 5 // 4)
                # Free the old buffer first to lower the peak.
                self._replace(storage)
                del storage
                self._storage.pop(key, None)
                self.forget()
                storage = self._storage[key] = self._allocate(name, capacity, *key[1:3], symmetric=symmetric)
            taken = storage[:size].view(*shape)
        # Shapes that never repeat must not add up.
        if len(self._taken) >= _MAX_TENSORS:
            self.forget()
        self._taken[key, *shape] = taken
        return taken

    def _allocate(
        self, name: str, capacity: int, dtype: torch.dtype, device: torch.device, *, symmetric: bool
    ) -> torch.Tensor:
        """Return a new buffer of `capacity` elements."""
        with self._within():
            return torch.empty(capacity, dtype=dtype, device=device)

    def _replace(self, buffer: torch.Tensor | None) -> None:
        """Called with a buffer before a larger one takes its place; None for a new name."""

    def free_replaced(self) -> None:
        """Free symmetric buffers that larger ones have replaced. Called between training steps."""

    def forget(self) -> None:
        """Drop all tensors of earlier calls, and what is derived from them."""
        self._taken.clear()
        self.derived.clear()

    def sizes(self) -> dict[str, int]:
        """Return the bytes of each name."""
        sizes: dict[str, int] = {}
        for (name, *_), storage in self._storage.items():
            sizes[name] = sizes.get(name, 0) + storage.nbytes
        return sizes

    def clear(self) -> None:
        """Free all buffers."""
        self.forget()
        self._storage.clear()
