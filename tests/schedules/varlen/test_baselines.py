"""The baselines satisfy the plan invariants, and the hybrid schedule equals that of Megatron."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_overlap.schedules.varlen import CapacityError, Topology, balance, partition
from megatron_overlap.schedules.varlen.partition import ring_over_all
from scripts.bench.document_lengths import DISTRIBUTIONS, sample
from scripts.bench.placements import METHODS, hybrid, hybrid_stages, packing
from tests.schedules.varlen.checks import check_plan


@settings(max_examples=60)
@given(
    lengths=st.lists(st.integers(0, 400), max_size=40),
    nodes=st.sampled_from([1, 2, 4]),
    devices=st.sampled_from([1, 2, 4]),
    method=st.sampled_from(sorted(METHODS)),
)
def test_every_token_once(lengths: list[int], nodes: int, devices: int, method: str) -> None:
    # Hybrid makes as many passes as it needs.
    tokens = max(lengths, default=0) if method == "hybrid" else sum(lengths)
    capacity = 400 if method == "packing" else max(30, -(-tokens // (nodes * devices)))
    plan = METHODS[method](lengths, Topology(nodes, devices), capacity=capacity, cost=None)
    assert plan.method == method
    check_plan(plan, capacity=method != "hybrid")


def test_ring_cuts_every_document_evenly() -> None:
    plan = ring_over_all([1000, 3, 1, 17], Topology(2, 2), capacity=300)
    assert [len(ring.ranks) for ring in plan.passes[0].rings] == [4, 3, 4]
    assert max(plan.tokens(0)) - min(plan.tokens(0)) <= 1
    assert plan.exchange == "ring"
    gathered = METHODS["all_gather"]([1000, 3, 1, 17], Topology(2, 2), capacity=300)
    assert gathered.exchange == "all_gather"
    assert gathered.passes == plan.passes
    ring, gather = balance(plan), balance(gathered)
    assert ring.attention_us == gather.attention_us
    assert ring.step_us == max(ring.attention_us, ring.message_us)
    assert gather.step_us > ring.step_us


def test_packing_keeps_documents_whole() -> None:
    plan = packing([50, 40, 30, 20, 10], Topology(1, 2), capacity=60)
    check_plan(plan)
    assert not any(part.rings for part in plan.passes)
    assert len(plan.passes) == 2
    with pytest.raises(CapacityError, match="packing cannot"):
        packing([61], Topology(1, 2), capacity=60)


def test_hybrid_with_a_document_shorter_than_its_group() -> None:
    plan = hybrid([1, 3], Topology(1, 8), capacity=10)
    check_plan(plan)
    assert [len(ring.ranks) for part in plan.passes for ring in part.rings] == [3]


def test_hybrid_refuses_batches_that_megatron_cannot_run() -> None:
    with pytest.raises(ValueError, match="power of two"):
        hybrid([5], Topology(1, 3), capacity=10)
    with pytest.raises(CapacityError, match="document 0 has 50 tokens"):
        hybrid([50], Topology(1, 4), capacity=10)


class GroupOfSize:
    """The part of a process group that Megatron's scheduler calls."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks

    def size(self) -> int:
        return self.ranks


def megatron_stages(lengths: list[int], ranks: int, capacity: int) -> list[list[list[int]]]:
    module = pytest.importorskip("megatron.core.pipeline_parallel.hybrid_cp_schedule")
    scheduler = module.BalancedCPScheduler(capacity, GroupOfSize(ranks))
    _, stages = scheduler.get_groups_and_subsamples(list(enumerate(lengths)), None)
    return [[list(documents) for documents in stage] for stage in stages]


def plugin_stages(lengths: list[int], ranks: int, capacity: int) -> list[list[list[int]]]:
    return [
        [group.documents for group in groups for _ in group.ranks] for groups in hybrid_stages(lengths, ranks, capacity)
    ]


def test_hybrid_stages_equal_those_of_megatron() -> None:
    for distribution in DISTRIBUTIONS:
        lengths = sample(distribution, 64 * 8192, 1)
        assert plugin_stages(lengths, 64, 8192) == megatron_stages(lengths, 64, 8192)
    for seed in (*range(60), 362, 1919):  # the last two depend on the bounds of the buckets
        rng = random.Random(seed)
        ranks, capacity = rng.choice([2, 4, 8, 16]), rng.choice([10, 50])
        longest = min([ranks * capacity, capacity * 2, capacity * 4][seed % 3], ranks * capacity)
        lengths = [rng.randrange(1, longest + 1) for _ in range(rng.randrange(1, 40))]
        assert plugin_stages(lengths, ranks, capacity) == megatron_stages(lengths, ranks, capacity)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_balanced_has_better_balance_than_hybrid(distribution: str) -> None:
    lengths, topology = sample(distribution, 4 << 20, 0), Topology(8, 8, 8)
    in_passes = hybrid(lengths, topology, capacity=8192)
    balanced, megatron = balance(partition(lengths, topology, capacity=72 << 10)), balance(in_passes)
    assert len(in_passes.passes) > 1
    assert balanced.attention > megatron.attention
    assert balanced.compute > megatron.compute
    assert balanced.attention_us < megatron.attention_us
