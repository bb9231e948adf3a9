"""Overlapped linear layers without sequence parallelism are equal to their references, and alike on all ranks."""

from __future__ import annotations

import pytest
import torch

from megatron_overlap.ops import LinearPlan
from tests.helpers.world import World, assert_same
from tests.ops.tensor_parallel import linear_all_reduce_workers as cases
from tests.ops.tensor_parallel.equal_cases import equal_cases

OPS = list(cases.OPS)


@pytest.mark.parametrize(("num_ranks", "dtype", "pattern", "late"), equal_cases(["direct", "serial"]))
@pytest.mark.parametrize("op", OPS)
def test_equals_reference(world: World, num_ranks: int, op: str, dtype: torch.dtype, pattern: str, late: bool) -> None:
    # 61 rows: not divisible by parts, nor a part's rows by ranks. 300 features: wgrad is made in three pieces.
    plan = LinearPlan(pattern=pattern, chunks_per_rank=3)  # type: ignore[arg-type]
    f = 300 if op == "copy_linear" else 33
    assert_same(world.run(num_ranks, cases.against_reference, op, 61, 48, f, dtype, plan, late=late))


@pytest.mark.parametrize("split", ["edge", "all"])
@pytest.mark.parametrize("op", OPS)
def test_however_parts_are_cut(world: World, op: str, split: str) -> None:
    plan = LinearPlan(chunks_per_rank=4, split=split)  # type: ignore[arg-type]
    assert_same(world.run(4, cases.against_reference, op, 50, 16, 24, torch.float32, plan, late=True))


@pytest.mark.parametrize("late", [False, True], ids=["gloo", "late"])
@pytest.mark.parametrize("op", OPS)
def test_additions_at_the_places_of_the_plan(world: World, op: str, late: bool) -> None:
    """As on CUDA: nobody asks what has landed."""
    plan = LinearPlan(chunks_per_rank=5, add_in_place=True)
    f = 700 if op == "copy_linear" else 24
    assert_same(world.run(4, cases.against_reference, op, 50, 16, f, torch.float32, plan, late=late))


@pytest.mark.parametrize(
    ("num_ranks", "rows", "chunks", "dtype"),
    [
        (2, 64, 1, torch.float32),
        (3, 61, 2, torch.bfloat16),
        (4, 96, 3, torch.bfloat16),
        (4, 61, 3, torch.float32),
        (4, 3, 2, torch.float32),
        # Slices share a GEMM.
        (4, 61, None, torch.float32),
        (4, 3, None, torch.bfloat16),
        (4, 256, None, torch.bfloat16),
    ],
)
@pytest.mark.parametrize("op", OPS)
def test_over_copy_engines(
    world: World, op: str, num_ranks: int, rows: int, chunks: int | None, dtype: torch.dtype
) -> None:
    """In the order of a device, between symmetric buffers that hold NaN; also chunks of different lengths."""
    f = 300 if op == "copy_linear" else 33
    args = op, rows, 48, f, dtype, LinearPlan(pattern="direct", chunks_per_rank=chunks)
    assert_same(world.run(num_ranks, cases.against_reference, *args, late=False, copies=True))


@pytest.mark.parametrize("rows", [0, 1, 3])
@pytest.mark.parametrize("op", OPS)
def test_fewer_rows_than_ranks_or_parts(world: World, op: str, rows: int) -> None:
    plan = LinearPlan(chunks_per_rank=4)
    assert_same(world.run(4, cases.against_reference, op, rows, 8, 8, torch.float32, plan, late=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("op", OPS)
def test_weight_gradient_goes_into_main_grad(world: World, op: str, dtype: torch.dtype) -> None:
    plan = LinearPlan(chunks_per_rank=3)
    world.run(2, cases.against_reference, op, 40, 32, 300, dtype, plan, late=True, main_grad=True)


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_random_calls(world: World, num_ranks: int) -> None:
    for seed in range(2):
        assert_same(world.run(num_ranks, cases.random_calls, seed * 10 + num_ranks, 10))


def test_the_sum_is_made_in_fp32_and_rounded_once(world: World) -> None:
    assert world.run(4, cases.sum_is_rounded_once) == [True] * 4


def test_three_dimensions(world: World) -> None:
    world.run(2, cases.three_dimensions)


@pytest.mark.parametrize("op", OPS)
def test_frozen_weight_and_constant_input(world: World, op: str) -> None:
    assert world.run(2, cases.frozen, op, "w") == [[True, False]] * 2
    assert world.run(2, cases.frozen, op, "x") == [[False, True]] * 2


@pytest.mark.parametrize("op", OPS)
def test_only_the_input_is_kept_and_only_for_a_weight_gradient(world: World, op: str) -> None:
    assert world.run(2, cases.kept_bytes, op, weight=True) == [16 * 8 * 4] * 2
    assert world.run(2, cases.kept_bytes, op, weight=False) == [0] * 2


def test_activation_recomputation(world: World) -> None:
    plain = world.run(2, cases.two_layers_recomputed, checkpoint=False)
    recomputed = world.run(2, cases.two_layers_recomputed, checkpoint=True)
    for left, right in zip(plain, recomputed, strict=True):
        assert left == pytest.approx(right, rel=1e-6)


@pytest.mark.parametrize("late", [False, True], ids=["gloo", "late"])
@pytest.mark.parametrize("main_grad", [False, True])
def test_a_weight_gradient_waits_for_a_message_to_hide(world: World, main_grad: bool, late: bool) -> None:
    """It has the same bits, and reaches its parameter in the backward of the column-parallel layer before."""
    for did in world.run(2, cases.with_a_deferred_wgrad, checkpoint=False, main_grad=main_grad, late=late):
        assert did == [
            *("dgrad 3", "weight 3", "dgrad 2", "weight 2"),
            *("dgrad 1", "weight 1", "dgrad 0", "weight 0"),
        ]


def test_a_weight_gradient_waits_inside_what_is_recomputed(world: World) -> None:
    whole = world.run(2, cases.with_a_deferred_wgrad, checkpoint=False, main_grad=False, late=False)
    assert world.run(2, cases.with_a_deferred_wgrad, checkpoint=True, main_grad=False, late=False) == whole


def test_a_weight_gradient_that_nobody_takes_is_there_after_the_pass(world: World) -> None:
    assert world.run(2, cases.a_row_without_a_column) == [[[6.0], [12.0]]] * 2


def test_bytes_are_those_of_a_direct_all_reduce(world: World) -> None:
    """Of 12 rows each of 4 ranks sends the 9 of others to them, and the sum of its own 3 to three others."""
    forward = [("forward", (9 + 3 * 3) * 6 * 4), ("dgrad", 0), ("wgrad", 0)]
    assert world.run(4, cases.passes, "linear_all_reduce") == [forward] * 4
    backward = [("forward", 0), ("dgrad", (9 + 3 * 3) * 8 * 4), ("wgrad", 0)]
    assert world.run(4, cases.passes, "copy_linear") == [backward] * 4


def test_what_does_not_fit_is_refused(world: World) -> None:
    messages = world.run(2, cases.refused)
    assert_same(messages)
    assert [text.split(":")[0] for text in messages[0]] == ["x", "x", "main_grad", "pattern", "bias"]
