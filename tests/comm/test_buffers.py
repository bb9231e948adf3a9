"""Buffers are reused and grow."""

from __future__ import annotations

import torch

from megatron_overlap.comm import BufferPool
from tests.helpers.late import PoisonedPool


def test_a_buffer_is_reused() -> None:
    buffer_pool = BufferPool()
    like = torch.zeros(1, dtype=torch.bfloat16)
    first = buffer_pool.take("gather", (4, 8), like)
    again = buffer_pool.take("gather", (2, 8), like)
    assert first.data_ptr() == again.data_ptr()
    assert again.shape == (2, 8)
    assert again.dtype is torch.bfloat16
    assert sum(buffer_pool.sizes().values()) == 4 * 8 * 2


def test_a_buffer_grows_and_the_old_one_is_freed() -> None:
    buffer_pool = BufferPool()
    buffer_pool.take("gather", (4,), torch.zeros(1))
    buffer_pool.take("gather", (10,), torch.zeros(1))
    assert sum(buffer_pool.sizes().values()) == 40
    grown = buffer_pool.take("gather", (11,), torch.zeros(1))
    assert sum(buffer_pool.sizes().values()) == 48, "a quarter more"
    assert grown.shape == (11,)
    assert buffer_pool.take("gather", (12,), torch.zeros(1)).data_ptr() == grown.data_ptr()
    buffer_pool.clear()
    assert sum(buffer_pool.sizes().values()) == 0


def test_each_name_and_dtype_has_a_buffer() -> None:
    buffer_pool = BufferPool()
    one = buffer_pool.take("partial", (4,), torch.zeros(1))
    for other in (
        buffer_pool.take("received", (4,), torch.zeros(1)),
        buffer_pool.take("partial", (4,), torch.zeros(1, dtype=torch.float64)),
    ):
        assert one.data_ptr() != other.data_ptr()


def test_bytes_of_each_name() -> None:
    buffer_pool = BufferPool()
    buffer_pool.take("received", (4,), torch.zeros(1))
    buffer_pool.take("received", (4,), torch.zeros(1, dtype=torch.float64))
    buffer_pool.take("partial", (3,), torch.zeros(1))
    assert buffer_pool.sizes() == {"received": 16 + 32, "partial": 12}
    assert sum(buffer_pool.sizes().values()) == 60


def test_poison() -> None:
    buffer_pool = PoisonedPool()
    assert buffer_pool.take("a", (3,), torch.zeros(1)).isnan().all()
    assert (buffer_pool.take("a", (3,), torch.zeros(1, dtype=torch.int32)) == torch.iinfo(torch.int32).max).all()


def test_training_writes_to_a_buffer_that_generation_allocated() -> None:
    pool = BufferPool()
    with torch.inference_mode():
        pool.take("a", (2, 2), torch.zeros(1)).fill_(1)
    buffer = pool.take("a", (2, 2), torch.zeros(1))
    buffer.add_(1)
    assert not buffer.is_inference()
