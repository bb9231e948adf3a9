"""Overlapped linear layers are equal to their references: forward, dgrad, wgrad, bias gradient."""

from __future__ import annotations

import pytest
import torch

from megatron_overlap.ops import LinearPlan
from tests.helpers.world import World, assert_same
from tests.ops.tensor_parallel import linear_all_reduce_workers, linear_workers
from tests.ops.tensor_parallel.equal_cases import equal_cases
from tests.ops.tensor_parallel.linear_workers import LinearCase

OPS = ["all_gather_linear", "linear_reduce_scatter"]


@pytest.mark.parametrize(("num_ranks", "dtype", "pattern", "late"), equal_cases(["direct", "ring", "serial"]))
@pytest.mark.parametrize("op", OPS)
def test_equals_reference(world: World, num_ranks: int, op: str, dtype: torch.dtype, pattern: str, late: bool) -> None:
    # 61 rows: not divisible by ranks, nor a rank's rows by chunks.
    plan = LinearPlan(pattern=pattern, chunks_per_rank=3)  # type: ignore[arg-type]
    world.run(num_ranks, linear_workers.against_reference, op, 61, 48, 33, dtype, plan, late=late)


@pytest.mark.parametrize("depth", [0, 48], ids=["one kernel", "two"])
@pytest.mark.parametrize("rows", [61, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_received_terms_that_kernels_add(world: World, dtype: torch.dtype, rows: int, depth: int) -> None:
    plan = LinearPlan(pattern="direct", split="edge", chunks_per_rank=3)  # as on CUDA
    world.run(4, linear_workers.added_on_a_device, depth, rows, 48, 33, dtype, plan)


@pytest.mark.parametrize("pattern", ["direct", "ring"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("num_ranks", [pytest.param(2, marks=pytest.mark.long), 4])
def test_copies_through_shared_memory_give_the_bits_of_messages(
    world: World, num_ranks: int, dtype: torch.dtype, pattern: str
) -> None:
    for count, different in world.run(num_ranks, linear_workers.copies_equal_messages, dtype, pattern):
        assert count == (10 if pattern == "direct" else 5)
        assert different == []


@pytest.mark.parametrize("split", ["edge", "all"])
@pytest.mark.parametrize("op", OPS)
def test_where_only_the_exposed_slice_is_cut(world: World, op: str, split: str) -> None:
    for pattern in ("ring", "direct"):
        plan = LinearPlan(pattern=pattern, chunks_per_rank=4, split=split)  # type: ignore[arg-type]
        world.run(4, linear_workers.against_reference, op, 50, 16, 24, torch.float32, plan, late=True)


@pytest.mark.parametrize(("rows", "main_grad"), [(61, False), (61, True), (3, True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("op", OPS)
def test_slices_that_share_a_gemm(world: World, op: str, dtype: torch.dtype, rows: int, main_grad: bool) -> None:
    plan = LinearPlan(pattern="direct", split="edge", chunks_per_rank=1)  # as on CUDA
    options = {"late": False, "copies": True, "main_grad": main_grad}
    world.run(4, linear_workers.against_reference, op, rows, 48, 33, dtype, plan, **options)


@pytest.mark.parametrize("rows", [0, 1, 3])
@pytest.mark.parametrize("op", OPS)
def test_fewer_rows_than_ranks_or_chunks(world: World, op: str, rows: int) -> None:
    plan = LinearPlan(chunks_per_rank=4)
    world.run(4, linear_workers.against_reference, op, rows, 8, 8, torch.float32, plan, late=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("op", OPS)
def test_weight_gradient_goes_into_main_grad(world: World, op: str, dtype: torch.dtype) -> None:
    plan = LinearPlan(chunks_per_rank=3)
    world.run(2, linear_workers.against_reference, op, 40, 32, 24, dtype, plan, late=True, main_grad=True)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.long), 4])
def test_random_calls(world: World, num_ranks: int, seed: int) -> None:
    world.run(num_ranks, linear_workers.random_calls, seed * 4 + num_ranks, 12)


@pytest.mark.parametrize("pattern", ["direct", "ring", "serial"])
def test_bytes_that_only_move_are_equal(world: World, pattern: str) -> None:
    world.run(4, linear_workers.gathered_bytes_are_equal, pattern)


def test_megatron_layout(world: World) -> None:
    world.run(2, linear_workers.three_dimensions)


@pytest.mark.parametrize("op", OPS)
def test_frozen_weight_and_constant_input(world: World, op: str) -> None:
    assert world.run(2, linear_workers.frozen, op, "w") == [[True, False]] * 2
    assert world.run(2, linear_workers.frozen, op, "x") == [[False, True]] * 2


@pytest.mark.parametrize("op", ["linear_reduce_scatter", "linear_all_reduce"])
def test_a_skipped_output_is_nan_and_sends_nothing(world: World, op: str) -> None:
    own = [7, 6]
    for rank, (is_nan, equal, passes) in enumerate(world.run(2, linear_all_reduce_workers.skipped_output, op)):
        assert is_nan
        assert equal
        sent = own[rank] * 6 * 4 if op == "linear_reduce_scatter" else 0
        assert passes == [("skipped forward", 0), ("dgrad", sent), ("wgrad", 0)]


def test_activation_recomputation(world: World) -> None:
    plain = world.run(2, linear_workers.two_layers_recomputed, checkpoint=False)
    recomputed = world.run(2, linear_workers.two_layers_recomputed, checkpoint=True)
    for left, right in zip(plain, recomputed, strict=True):
        assert left == pytest.approx(right, rel=1e-6)


def test_the_gathered_input_is_not_saved(world: World) -> None:
    assert world.run(4, linear_workers.saved_bytes) == [64 * 32 * 4] * 4


def test_no_buffer_grows_in_steady_state(world: World) -> None:
    for first, last in world.run(2, linear_workers.steady_memory):
        assert 0 < first == last


def test_what_does_not_fit_is_refused(world: World) -> None:
    messages = world.run(2, linear_workers.refused)
    assert_same([[text.split(":")[0] for text in texts] for texts in messages])
    assert [text.split(":")[0] for text in messages[0]] == ["x_shard", "x_shard", "bias", "x_shard", "main_grad", "x"]


def test_transport_can_be_closed(world: World) -> None:
    assert world.run(2, linear_workers.closed_and_opened_again) == [True, True]


def test_rows_are_used_as_they_arrive(world: World) -> None:
    owners = world.run(3, linear_workers.rows_in_order_of_arrival)
    assert list(dict.fromkeys(owners[2])) == [2, 0, 1]
    assert [sorted(set(each)) for each in owners] == [[0, 1, 2]] * 3


def test_a_ring_computes_on_while_it_waits(world: World) -> None:
    for rank, did in enumerate(world.run(4, linear_workers.a_ring_computes_on_while_it_waits)):
        others = [f"rows of {(rank - distance) % 4}" for distance in (1, 2, 3)]
        assert did == [*others, *["other work"] * 3, f"rows of {rank}"]


def test_sums_do_not_depend_on_what_arrives_first(world: World) -> None:
    assert world.run(4, linear_workers.sums_do_not_depend_on_arrival) == [True] * 4


@pytest.mark.parametrize("pattern", ["direct", "ring", "serial"])
@pytest.mark.parametrize("op", OPS)
def test_rows_travel_in_another_number_format(world: World, op: str, pattern: str) -> None:
    """int8 data and one fp32 scale per row: two tensors instead of one, in forward and in backward."""
    case = LinearCase(rows=24, in_features=16, out_features=20)
    gathered = case.in_features if op == "all_gather_linear" else case.out_features
    row_bytes = gathered + 4
    for sent in world.run(4, linear_workers.another_number_format, op, case, pattern):
        if op == "all_gather_linear":
            assert sent == [("forward", 18 * row_bytes), ("dgrad", 18 * gathered * 4), ("wgrad", 18 * row_bytes)]
        else:
            assert sent == [("forward", 18 * gathered * 4), ("dgrad", 18 * row_bytes), ("wgrad", 0)]
