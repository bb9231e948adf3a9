"""Symmetric buffers have the same place on all ranks, in arenas that grow."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from megatron_overlap.comm.symmetric.heap import MAX_FLAGS, HeapPool
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
    # By a quarter at least: sizes that vary would replace the buffer at every new largest one.
    buffers.take("received", (11,), like, symmetric=True)
    assert buffers.sizes() == {"gather": 800, "received": 48}


def test_a_buffer_of_a_graph_outlives_a_larger_one() -> None:
    """A replay writes to the addresses of its capture. An arena replaces the one of the same name."""
    arenas: dict[tuple[str, int], list[torch.Tensor]] = {}
    backend, like = RecordedBackend(0, 2, arenas), torch.zeros(1)
    buffers = HeapPool(backend)
    for name, symmetric in (("gather", True), ("partial", False)):
        buffers.take(name, (100,), like, symmetric=symmetric)
    buffers.take("gather", (200,), like, symmetric=True)
    backend.begin_capture()
    captured = [buffers.take(name, (90,), like, symmetric=name == "gather") for name in ("gather", "partial")]
    buffers.captured, backend.captures = True, False
    storages = [weakref.ref(each.untyped_storage()) for each in captured]
    del captured
    for count in (300, 400):
        buffers.take("gather", (count,), like, symmetric=True)
        buffers.take("partial", (count,), like)
    names = [name for name, _ in arenas]
    assert names[0] == names[1]
    assert len(set(names)) == 3
    arenas.clear()
    gc.collect()
    assert all(storage() is not None for storage in storages)


def test_a_larger_buffer_is_mapped_when_the_smaller_one_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    arenas: dict[tuple[str, int], list[torch.Tensor]] = {}
    backend, like = RecordedBackend(0, 2, arenas), torch.zeros(1)
    buffers, map_ = HeapPool(backend), backend.map
    storage = weakref.ref(buffers.take("gather", (100,), like, symmetric=True).untyped_storage())
    arenas.clear()

    def map_alone(num_bytes: int, name: str) -> list[torch.Tensor]:
        gc.collect()
        assert storage() is None
        return map_(num_bytes, name)

    monkeypatch.setattr(backend, "map", map_alone)
    buffers.take("gather", (101,), like, symmetric=True)


def test_the_memory_of_a_buffer_and_its_flags() -> None:
    buffers, like = pool(), torch.zeros(1)
    taken = buffers.take("gather", (10, 4), like, symmetric=True)
    buffer = buffers.buffer_of(taken[2:4])
    assert buffer is not None
    assert [data.numel() for data in buffer.data] == [160, 160]
    assert buffer.data[0].data_ptr() == taken.data_ptr() != buffer.data[1].data_ptr()
    flags = {buffer.flag(source, number) for source in (0, 1) for number in range(MAX_FLAGS)}
    flags |= {buffer.free(receiver) for receiver in (0, 1)}
    assert sorted(flags) == list(range(buffer.words[0].numel()))
    assert not any(words.any() for words in buffer.words)
    assert buffer.words[0].data_ptr() >= taken.data_ptr() + taken.nbytes
    assert buffers.buffer_of(buffers.take("other", (10,), like)) is None


def test_what_is_derived_from_buffers_lives_as_long_as_they() -> None:
    buffers, like = pool(), torch.zeros(1)
    for symmetric in (True, False):
        taken = buffers.take("gather", (10, 4), like, symmetric=symmetric)
        buffers.derived["key"] = "value"
        assert buffers.take("gather", (10, 4), like, symmetric=symmetric) is taken
        assert buffers.take("gather", (20, 2), like, symmetric=symmetric).data_ptr() == taken.data_ptr()
        assert buffers.derived
        buffers.take("gather", (11, 4), like, symmetric=symmetric)
        assert not buffers.derived


def test_ranks_that_take_different_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = RecordedBackend(0, 2, {})
    monkeypatch.setattr(backend, "all_gather_text", lambda text: [text, "gather: 4 bytes"])
    with pytest.raises(TransportError, match="gather: 12 bytes; gather: 4 bytes"):
        HeapPool(backend).take("gather", (3,), torch.zeros(1), symmetric=True)
