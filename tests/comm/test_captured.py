"""Operations over copies give the bits of messages over gloo, and so does every replay of a captured sequence."""

from __future__ import annotations

import pytest
import torch

from megatron_overlap.ops import LinearPlan
from tests.comm import captured, operations_workers
from tests.helpers.world import World

STEPS = 100


@pytest.mark.parametrize(
    ("num_ranks", "pattern", "chunks", "dtype"),
    [
        (2, "direct", 1, torch.bfloat16),
        (4, "direct", 2, torch.float32),
        (4, "ring", 1, torch.float32),
        pytest.param(4, "direct", 1, torch.bfloat16, marks=pytest.mark.long),
        pytest.param(2, "direct", 2, torch.float32, marks=pytest.mark.long),
        pytest.param(2, "ring", 1, torch.float32, marks=pytest.mark.long),
    ],
)
def test_a_hundred_replays_in_processes(
    world: World, num_ranks: int, pattern: str, chunks: int, dtype: torch.dtype
) -> None:
    plan = LinearPlan(pattern=pattern, chunks_per_rank=chunks)  # type: ignore[arg-type]
    for different, num_changed in world.run(num_ranks, captured.replay_layers, STEPS, plan, dtype):
        assert different == []
        assert num_changed == STEPS


@pytest.mark.parametrize("num_ranks", [pytest.param(2, marks=pytest.mark.long), 4])
@pytest.mark.parametrize("name", operations_workers.OPERATIONS)
def test_other_operations_in_processes(world: World, num_ranks: int, name: str) -> None:
    """A sequence of them cannot be replayed: messages through rings have numbers that grow."""
    for different, num_pieces in world.run(num_ranks, operations_workers.compare, name, 10):
        assert different == []
        assert num_pieces > 0
