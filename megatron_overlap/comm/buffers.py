"""Buffers that live as long as their transport, so that a step allocates none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from math import prod

import torch


class BufferPool:
    """Named buffers of one transport. A name is handed out again only after the op that took it has finished.

    A buffer grows to the largest size that was asked for and is never returned, as Megatron's global memory buffer.

    Args:
        poison: fill every buffer with NaN (integers: their largest value) each time it is handed out. For tests.
        within: makes the context in which memory is allocated, to have it from elsewhere than usual.
    """

    def __init__(
        self, *, poison: bool = False, within: Callable[[], AbstractContextManager[object]] = nullcontext
    ) -> None:
        self._poison = poison
        self._within = within
        self._storage: dict[tuple[str, torch.dtype, torch.device], torch.Tensor] = {}
        self._content: dict[tuple[str, torch.dtype, torch.device], tuple[torch.Tensor, object]] = {}

    def take(self, name: str, shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
        """A contiguous tensor of `shape` with the dtype and device of `like`; its content is undefined."""
        key = (name, like.dtype, like.device)
        self._content.pop(key, None)
        size = prod(shape)
        storage = self._storage.get(key)
        if storage is None or storage.numel() < size:
            # Free the old one first: both at once would be the peak.
            self._storage.pop(key, None)
            with self._within():
                storage = torch.empty(size, dtype=like.dtype, device=like.device)
            self._storage[key] = storage
        buffer = storage[:size].view(*shape)
        if self._poison:
            buffer.fill_(float("nan") if like.dtype.is_floating_point else torch.iinfo(like.dtype).max)
        return buffer

    def remember(self, name: str, buffer: torch.Tensor, content: object) -> None:
        """Notes what `buffer`, which was taken as `name`, holds now; forgotten when `name` is taken again."""
        self._content[name, buffer.dtype, buffer.device] = (buffer, content)

    def recall(self, name: str, like: torch.Tensor) -> tuple[torch.Tensor, object] | None:
        """The buffer last taken as `name` and the note of what it still holds; None where there is no note."""
        return self._content.get((name, like.dtype, like.device))

    @property
    def num_bytes(self) -> int:
        """Bytes that all buffers hold now."""
        return sum(self.sizes().values())

    def sizes(self) -> dict[str, int]:
        """Bytes that each buffer holds now, by its name."""
        sizes: dict[str, int] = {}
        for (name, _, _), storage in self._storage.items():
            sizes[name] = sizes.get(name, 0) + storage.nbytes
        return sizes

    def clear(self) -> None:
        """Lets all buffers go."""
        self._storage.clear()
        self._content.clear()
