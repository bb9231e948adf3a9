"""Buckets are summed and gathered right: uneven sizes, many at once, as late as the contract allows."""

from __future__ import annotations

import pytest

from tests.helpers.world import World, assert_same
from tests.ops import data_parallel_workers as cases


@pytest.mark.parametrize("late", [False, True], ids=["gloo", "late"])
@pytest.mark.parametrize("wide", [False, True], ids=["narrow", "wide"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_own_shard_is_the_sum(world: World, num_ranks: int, dtype: str, wide: bool, late: bool) -> None:
    """Also a bucket with fewer elements a shard than pieces, and an empty one."""
    numels = [num_ranks * shard for shard in (61, 2, 0, 33)]
    for mean in (False, True):
        world.run(num_ranks, cases.sums, numels, dtype, late=late, wide=wide, mean=mean)


@pytest.mark.parametrize("late", [False, True], ids=["gloo", "late"])
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_all_reduce_is_the_sum_on_all_ranks(world: World, num_ranks: int, dtype: str, late: bool) -> None:
    """Sizes that ranks do not divide, and fewer elements than ranks."""
    bits = world.run(num_ranks, cases.sums, [101, 3, 40], dtype, late=late, whole=True)
    assert_same(bits)


def test_waited_for_in_another_order(world: World) -> None:
    for whole in (False, True):
        world.run(4, cases.sums, [44, 88, 20], "fp32", late=True, whole=whole, backwards=True)


def test_wide_sums_of_large_buckets_go_block_by_block(world: World) -> None:
    world.run(2, cases.sums, [2 * (600_001), 10], "bf16", late=False, wide=True, pieces=1)
    world.run(4, cases.sums, [4 * 300_001], "bf16", late=False, wide=True, pieces=None)


@pytest.mark.parametrize("late", [False, True], ids=["gloo", "late"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_parameters_are_gathered(world: World, num_ranks: int, dtype: str, late: bool) -> None:
    world.run(num_ranks, cases.gathers, [num_ranks * shard for shard in (57, 1, 0, 8)], dtype, late)


def test_landing_buffers_are_used_again(world: World) -> None:
    for first, last in world.run(4, cases.landing_memory, 5):
        assert first == last == 3 * 300 * 4


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_what_has_landed_is_added_on_the_way(world: World, num_ranks: int) -> None:
    assert all(world.run(num_ranks, cases.sums_on_the_way))


def test_what_does_not_fit_is_refused(world: World) -> None:
    texts = world.run(2, cases.refused)
    assert_same(texts)
    assert texts[0] == [
        "bucket: shape (4, 4): must be one contiguous dimension",
        "bucket: shape (4,): must be one contiguous dimension",
        "bucket: 9 elements: not divisible by 2 ranks; pad it",
    ]
