"""Query-split attention is equal to attention, projection and reduce-scatter: forward and every gradient."""

from __future__ import annotations

import pytest
import torch

from megatron_overlap.ops import LinearPlan
from tests.helpers.world import World, assert_same
from tests.ops.tensor_parallel import attention_projection_workers as cases
from tests.ops.tensor_parallel.attention_projection_workers import Shape


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("late", [False, True], ids=["gloo", "late"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.long), 4])
def test_equals_float64(world: World, num_ranks: int, dtype: torch.dtype, late: bool, causal: bool) -> None:
    # 61 positions: not divisible by ranks, nor a rank's positions by chunks. Three query heads a key head.
    shape = Shape(61, heads=6, kv_heads=2)
    world.run(num_ranks, cases.against_exact, shape, dtype, LinearPlan(chunks_per_rank=3), late=late, causal=causal)


@pytest.mark.parametrize("pattern", ["direct", "ring", "serial"])
@pytest.mark.parametrize("split", ["edge", "all"])
def test_every_schedule(world: World, pattern: str, split: str) -> None:
    plan = LinearPlan(pattern=pattern, chunks_per_rank=4, split=split)  # type: ignore[arg-type]
    world.run(4, cases.against_exact, Shape(50), torch.float32, plan, late=True)


def test_more_than_one_block_of_the_kernel(world: World) -> None:
    """Slices that the kernel itself cuts, and a number of chunks that is chosen."""
    shape = Shape(620, batch=1, heads=2, kv_heads=1, size=32)
    world.run(2, cases.against_exact, shape, torch.float32, LinearPlan(), late=True, repeats=1)


@pytest.mark.parametrize("positions", [0, 1, 3])
def test_fewer_positions_than_ranks_or_chunks(world: World, positions: int) -> None:
    world.run(4, cases.against_exact, Shape(positions), torch.float32, LinearPlan(chunks_per_rank=4), late=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_weight_gradient_goes_into_main_grad(world: World, dtype: torch.dtype) -> None:
    plan = LinearPlan(chunks_per_rank=3)
    world.run(2, cases.against_exact, Shape(40), dtype, plan, late=True, main_grad=True, scale=0.4)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.long), 4])
def test_random_calls(world: World, num_ranks: int, seed: int) -> None:
    world.run(num_ranks, cases.random_calls, seed * 4 + num_ranks, 12)


def test_the_reference_is_the_formulas(world: World) -> None:
    for causal in (True, False):
        world.run(2, cases.reference_is_the_formulas, causal=causal)


def test_frozen_weight_and_constant_input(world: World) -> None:
    assert world.run(2, cases.frozen, "w") == [[True, True, True, False]] * 2
    assert world.run(2, cases.frozen, "x") == [[False, False, False, True]] * 2


def test_bytes_are_those_of_the_collectives(world: World) -> None:
    """Shape(12) on two ranks: six positions, two sequences, 24 features each way; both gradients share a gather."""
    once = 6 * 2 * 24 * 4
    assert world.run(2, cases.counted) == [{"forward": once, "dgrad": once, "wgrad": 0}] * 2


def test_scores_are_not_kept(world: World) -> None:
    """The context in bf16 and one fp32 number a query and head; unfused attention keeps S numbers there."""
    shape = Shape(64, batch=2, heads=2, size=16)
    assert world.run(2, cases.saved_bytes, shape) == [64 * 2 * 2 * (16 * 2 + 4)] * 2


def test_activation_recomputation(world: World) -> None:
    plain = world.run(2, cases.recomputed, checkpoint=False)
    again = world.run(2, cases.recomputed, checkpoint=True)
    for left, right in zip(plain, again, strict=True):
        assert left == pytest.approx(right, rel=1e-6)


def test_what_does_not_fit_is_refused(world: World) -> None:
    messages = world.run(2, cases.refused)
    assert_same(messages)
    names = ["q", "k", "k", "k", "w_shard", "v", "q", "main_grad"]
    assert [text.split(":")[0] for text in messages[0]] == names
