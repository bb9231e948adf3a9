"""Fused ops are equal to the same references as p2p: real autograd, real processes, kernels in the interpreter."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from megatron_overlap.ops.fused_plan import FusedPlan
from tests.helpers.interpreting import interpreting_world
from tests.helpers.world import World, assert_same
from tests.ops import all_reduce_cases, cases

SEQUENCE = ["all_gather_linear", "linear_reduce_scatter"]
PLAIN = ["linear_all_reduce", "copy_linear"]
PLANS = {
    "push, remote stores": FusedPlan(chunk_rows=7),
    "pull, staged stores": FusedPlan(mover="pull", stores="staged", chunk_rows=7),
    "ring, one tile a shard, one SM": FusedPlan(mover="ring", chunk_rows=64, spare_sms=1),
}


@pytest.fixture(scope="module")
def ranks() -> Iterator[World]:
    """Four interpreting workers."""
    workers = interpreting_world(4)
    yield workers
    workers.close()


@pytest.mark.parametrize("plan", PLANS.values(), ids=list(PLANS))
@pytest.mark.parametrize("op", SEQUENCE)
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_equals_reference(ranks: World, num_ranks: int, op: str, plan: FusedPlan) -> None:
    """61 rows: shards and chunks differ in length."""
    ranks.run(num_ranks, cases.against_reference, op, 61, 48, 33, torch.float32, plan, late=False)


@pytest.mark.parametrize("plan", PLANS.values(), ids=list(PLANS))
@pytest.mark.parametrize("op", PLAIN)
def test_all_reduce_equals_reference(ranks: World, op: str, plan: FusedPlan) -> None:
    bits = ranks.run(4, all_reduce_cases.against_reference, op, 61, 48, 33, torch.float32, plan, late=False)
    assert_same(bits)
