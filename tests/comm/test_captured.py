"""Operations over copies give the bits of messages over gloo, and so does every replay of a captured sequence."""

from __future__ import annotations

import pytest
import torch

from megatron_overlap.ops import LinearPlan
from megatron_overlap.schedules.plan import Pattern
from tests.comm import captured, operations_workers
from tests.helpers.world import World

STEPS = 100


@pytest.mark.parametrize(
    ("name", "num_ranks", "pattern", "chunks", "dtype"),
    [
        ("rows", 2, "direct", 1, torch.bfloat16),
        ("rows", 2, "direct", 2, torch.float32),
        ("rows", 4, "ring", 1, torch.float32),
        ("all-reduce", 4, "direct", 2, torch.bfloat16),
        ("Ulysses", 2, "direct", 1, torch.bfloat16),
        pytest.param("rows", 4, "direct", 1, torch.bfloat16, marks=pytest.mark.long),
        pytest.param("rows", 4, "direct", 2, torch.float32, marks=pytest.mark.long),
        pytest.param("rows", 2, "ring", 1, torch.float32, marks=pytest.mark.long),
        pytest.param("all-reduce", 2, "direct", 1, torch.float32, marks=pytest.mark.long),
        pytest.param("Ulysses", 4, "direct", 2, torch.float32, marks=pytest.mark.long),
    ],
)
def test_a_hundred_replays_in_processes(
    world: World, name: str, num_ranks: int, pattern: Pattern, chunks: int, dtype: torch.dtype
) -> None:
    plan = LinearPlan(pattern=pattern, chunks_per_rank=chunks)
    for different, num_changed in world.run(num_ranks, captured.replay, name, STEPS, plan, dtype):
        assert different == []
        assert num_changed == STEPS


@pytest.mark.parametrize("num_ranks", [pytest.param(2, marks=pytest.mark.long), 4])
@pytest.mark.parametrize("name", operations_workers.OPERATIONS)
def test_other_operations_in_processes(world: World, num_ranks: int, name: str) -> None:
    assert world.run(num_ranks, operations_workers.compare, name, 10) == [[]] * num_ranks


@pytest.mark.parametrize("name", operations_workers.OPERATIONS)
def test_no_tensor_waits_for_the_garbage_collector(world: World, name: str) -> None:
    """Megatron's `--manual-gc` runs it once in many steps."""
    assert world.run(2, operations_workers.num_uncollected, name) == [[0, 0]] * 2
