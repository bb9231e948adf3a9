"""Layers on halves of a micro-batch: equal to the whole, and every sum travels while the other half is computed."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.world import World, assert_same
from tests.ops.tensor_parallel import batch_overlap_workers as cases


@pytest.mark.parametrize("main_grad", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_equals_reference(world: World, num_ranks: int, dtype: torch.dtype, main_grad: bool) -> None:
    assert_same(world.run(num_ranks, cases.against_reference, dtype, main_grad=main_grad))


def test_every_sum_has_the_other_halfs_computation_to_travel(world: World) -> None:
    """Forward goes a, b; backward b, a. What is begun is waited for after the next piece, and not before."""
    for forward, backward in world.run(2, cases.order):
        assert forward == [
            *("start a1", "start b1", "wait a1", "wait b1"),
            *("start a2", "start b2", "wait a2", "wait b2"),
        ]
        assert backward == [
            *("start b2", "start a2", "wait b2", "start b1"),
            *("wait a2", "start a1", "wait b1", "wait a1"),
        ]


def test_a_weight_gets_one_gradient_for_both_halves(world: World) -> None:
    """Megatron's data parallel hooks count on it."""
    assert world.run(2, cases.hands_over_once) == [[1, 1]] * 2


@pytest.mark.parametrize("which", range(4), ids=["x", "w1", "w2", "bias"])
def test_frozen(world: World, which: int) -> None:
    assert world.run(2, cases.frozen, which) == [[number != which for number in range(4)]] * 2


def test_evaluation(world: World) -> None:
    assert world.run(2, cases.without_gradients) == [True, True]
