"""Layers under sequence parallelism on parts of a batch: equal to the whole, with the messages under the other part."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.world import World
from tests.ops.tensor_parallel import part_messages_workers as cases


@pytest.mark.parametrize("main_grad", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_equals_reference(world: World, num_ranks: int, dtype: torch.dtype, main_grad: bool) -> None:
    world.run(num_ranks, cases.against_reference, dtype, main_grad=main_grad)


@pytest.mark.parametrize("messages", ["late", "device"])
def test_late_messages(world: World, messages: cases.Messages) -> None:
    """No row is read before its message was waited for."""
    world.run(4, cases.against_reference, torch.float32, messages=messages)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_collectives(world: World, num_ranks: int, dtype: torch.dtype) -> None:
    """As over NCCL. No row is read before its collective was waited for."""
    world.run(num_ranks, cases.against_reference, dtype, messages="collectives")


@pytest.mark.parametrize("blocks", [1, 6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_gathers_by_copies(world: World, num_ranks: int, dtype: torch.dtype, blocks: int) -> None:
    """They have the bits of collectives, also when all buffers were used before."""
    assert world.run(num_ranks, cases.gathers_by_copies, dtype, blocks) == [[]] * num_ranks


def test_a_postponed_weight_gradient_reads_its_rows_before_their_buffer_is_used_again(world: World) -> None:
    world.run(2, cases.postpones_a_weight_gradient)


def test_a_deterministic_run_uses_messages(world: World) -> None:
    assert world.run(2, cases.collectives_of_ordered) == [(False, True)] * 2


@pytest.mark.parametrize("messages", ["gloo", "late", "device", "collectives"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_sums_of_parts(world: World, num_ranks: int, dtype: torch.dtype, messages: cases.Messages) -> None:
    world.run(num_ranks, cases.sums_parts, dtype, messages=messages)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_abandoned_messages_are_completed(world: World, num_ranks: int) -> None:
    world.run(num_ranks, cases.abandons)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_own_rows_are_first_in_a_gather_and_last_in_a_scatter(world: World, num_ranks: int) -> None:
    for rank, (gather, scatter) in enumerate(world.run(num_ranks, cases.row_order, arrived=False)):
        own, others = f"rows {rank} to {rank + 1}", [(0, rank), (rank + 1, num_ranks)]
        received = [f"rows {start} to {stop}" for start, stop in others if start < stop]
        assert gather == ["start a input", own, "wait a input", *received]
        peers = [(rank + distance) % num_ranks for distance in range(1, num_ranks)]
        assert scatter == ["start a output", *(f"rows {peer} to {peer + 1}" for peer in peers), own]


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_rows_that_have_arrived_are_one_gemm(world: World, num_ranks: int) -> None:
    for gather, _ in world.run(num_ranks, cases.row_order, arrived=True):
        assert gather == ["start a input", "wait a input", f"rows 0 to {num_ranks}"]


@pytest.mark.parametrize(("num_rows", "num_first"), [(6, 3), (7, 3), (7, 6), (2, 1)])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_rows_move_to_parts_and_back(world: World, num_ranks: int, num_rows: int, num_first: int) -> None:
    world.run(num_ranks, cases.moves_rows, num_rows, num_first)
