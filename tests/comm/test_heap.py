"""Symmetric buffers lie at the same offset on all ranks, or nowhere in the heap."""

from __future__ import annotations

import pytest
import torch

from megatron_overlap.comm.symmetric.heap import HeapPool
from megatron_overlap.comm.transport import TransportError


def pool(num_bytes: int = 4096) -> HeapPool:
    return HeapPool(torch.zeros(num_bytes, dtype=torch.uint8), lambda text: [text, text])


def test_a_name_keeps_its_place_until_it_grows() -> None:
    buffers, like = pool(), torch.zeros(1)
    first = buffers.take("gather", (100,), like, symmetric=True)
    other = buffers.take("received", (10,), like, symmetric=True)
    assert buffers.take("gather", (10, 5), like, symmetric=True).data_ptr() == first.data_ptr()
    grown = buffers.take("gather", (200,), like, symmetric=True)
    assert [tensor.storage_offset() for tensor in (first, other, grown)] == [0, 128, 192]
    assert all(map(buffers.holds, (first, other, grown)))


def test_a_buffer_that_does_not_fit_or_is_not_symmetric_is_ordinary_memory() -> None:
    buffers, like = pool(), torch.zeros(1)
    assert not buffers.holds(buffers.take("gather", (100,), like))
    assert not buffers.holds(buffers.take("gather", (1025,), like, symmetric=True))
    buffers.take("gather", (600,), like, symmetric=True)
    assert not buffers.holds(buffers.take("received", (600,), like, symmetric=True))


def test_a_new_buffer_forgets_the_content_of_its_name() -> None:
    buffers, like = pool(), torch.zeros(1)
    buffers.remember("gather", buffers.take("gather", (3,), like, symmetric=True), "rows")
    assert buffers.recall("gather", like) is not None
    buffers.take("gather", (3,), like, symmetric=True)
    assert buffers.recall("gather", like) is None


def test_ranks_that_take_different_buffers() -> None:
    buffers = HeapPool(torch.zeros(4096, dtype=torch.uint8), lambda text: [text, "gather: 4 bytes at 0"])
    with pytest.raises(TransportError, match="gather: 12 bytes at 0; gather: 4 bytes at 0"):
        buffers.take("gather", (3,), torch.zeros(1), symmetric=True)
