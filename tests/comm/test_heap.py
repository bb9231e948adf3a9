"""Symmetric buffers have the same place on all ranks, in arenas that grow."""

from __future__ import annotations

import pytest
import torch

from megatron_overlap.comm.symmetric.heap import HeapPool
from megatron_overlap.comm.transport import TransportError
from tests.comm.copy_protocol import RecordedBackend


def pool() -> HeapPool:
    return HeapPool(RecordedBackend(0, 2, {}))


def test_a_name_keeps_its_memory_until_it_grows() -> None:
    buffers, like = pool(), torch.zeros(1)
    first = buffers.take("gather", (100,), like, symmetric=True)
    other = buffers.take("received", (10,), like, symmetric=True)
    assert buffers.take("gather", (10, 5), like, symmetric=True).data_ptr() == first.data_ptr() != other.data_ptr()
    grown = buffers.take("gather", (200,), like, symmetric=True)
    assert grown.data_ptr() != first.data_ptr()
    assert buffers.sizes() == {"gather": 800, "received": 40}


def test_the_place_at_a_peer() -> None:
    buffers, like = pool(), torch.zeros(1)
    buffer = buffers.take("gather", (10, 4), like, symmetric=True)
    own, far = buffers.at(0, buffer[2:4]), buffers.at(1, buffer[2:4])
    assert own is not None
    assert far is not None
    assert own.data_ptr() == buffer[2].data_ptr()
    assert own.numel() == far.numel() == 32
    assert own.untyped_storage().data_ptr() != far.untyped_storage().data_ptr()
    assert far.storage_offset() == 32
    assert buffers.at(1, buffers.take("other", (10,), like)) is None


def test_a_new_buffer_forgets_the_content_of_its_name() -> None:
    buffers, like = pool(), torch.zeros(1)
    buffers.remember("gather", buffers.take("gather", (3,), like, symmetric=True), "rows")
    assert buffers.recall("gather", like) is not None
    buffers.take("gather", (3,), like, symmetric=True)
    assert buffers.recall("gather", like) is None


def test_ranks_that_take_different_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = RecordedBackend(0, 2, {})
    monkeypatch.setattr(backend, "all_gather_text", lambda text: [text, "gather: 4 bytes"])
    with pytest.raises(TransportError, match="gather: 12 bytes; gather: 4 bytes"):
        HeapPool(backend).take("gather", (3,), torch.zeros(1), symmetric=True)
