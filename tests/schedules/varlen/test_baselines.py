"""The baselines hold the same rules, and the hybrid schedule is Megatron's own."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_overlap.schedules.varlen import CapacityError, Topology, balance, partition
from megatron_overlap.schedules.varlen.baselines import METHODS, all_gather, hybrid, packing, ring_over_all
from megatron_overlap.schedules.varlen.hybrid import schedule
from megatron_overlap.tools.plan.lengths import DISTRIBUTIONS, sample
from tests.schedules.varlen.checks import check_plan


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 400), max_size=40),
    nodes=st.sampled_from([1, 2, 4]),
    devices=st.sampled_from([1, 2, 4]),
    method=st.sampled_from(sorted(METHODS)),
)
def test_every_token_once(lengths: list[int], nodes: int, devices: int, method: str) -> None:
    capacity = 400 if method == "packing" else max(30, -(-max(lengths, default=0) // (nodes * devices)))
    plan = METHODS[method](lengths, Topology(nodes, devices), capacity=capacity, cost=None)
    assert plan.method == method
    check_plan(plan, capacity=method != "hybrid")


def test_ring_cuts_everything_evenly() -> None:
    plan = ring_over_all([1000, 3, 1, 17], Topology(2, 2), capacity=300)
    assert [len(ring.ranks) for ring in plan.passes[0].rings] == [4, 3, 4]
    assert max(plan.tokens(0)) - min(plan.tokens(0)) <= 1
    assert plan.exchange == "ring"
    gathered = all_gather([1000, 3, 1, 17], Topology(2, 2), capacity=300)
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


def test_hybrid_refuses_what_megatron_cannot_run() -> None:
    with pytest.raises(ValueError, match="power of two"):
        hybrid([5], Topology(1, 3), capacity=10)
    with pytest.raises(CapacityError, match="document 0 has 50 tokens"):
        hybrid([50], Topology(1, 4), capacity=10)


class Group:
    """What Megatron's scheduler asks of a process group."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks

    def size(self) -> int:
        return self.ranks


def stages_of_megatron(lengths: list[int], ranks: int, capacity: int) -> list[list[list[int]]]:
    module = pytest.importorskip("megatron.core.pipeline_parallel.hybrid_cp_schedule")
    scheduler = module.BalancedCPScheduler(capacity, Group(ranks))
    _, stages = scheduler.get_groups_and_subsamples(list(enumerate(lengths)), None)
    return [[list(documents) for documents in stage] for stage in stages]


def stages_of_ours(lengths: list[int], ranks: int, capacity: int) -> list[list[list[int]]]:
    return [[group.documents for group in groups for _ in group.ranks] for groups in schedule(lengths, ranks, capacity)]


def test_hybrid_schedules_as_megatron_does() -> None:
    for distribution in DISTRIBUTIONS:
        lengths = sample(distribution, 64 * 8192, 1)
        assert stages_of_ours(lengths, 64, 8192) == stages_of_megatron(lengths, 64, 8192)
    for seed in (*range(60), 362, 1919):  # in the last two it matters where a run of equal work ends
        rng = random.Random(seed)
        ranks, capacity = rng.choice([2, 4, 8, 16]), rng.choice([10, 50])
        longest = min([ranks * capacity, capacity * 2, capacity * 4][seed % 3], ranks * capacity)
        lengths = [rng.randrange(1, longest + 1) for _ in range(rng.randrange(1, 40))]
        assert stages_of_ours(lengths, ranks, capacity) == stages_of_megatron(lengths, ranks, capacity)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_balanced_is_more_even_than_hybrid(distribution: str) -> None:
    lengths, topology = sample(distribution, 4 << 20, 0), Topology(8, 8, 8)
    ours = balance(partition(lengths, topology, capacity=72 << 10))
    theirs = balance(hybrid(lengths, topology, capacity=8192))
    assert ours.attention > theirs.attention
    assert ours.compute > theirs.compute
    assert ours.passes < theirs.passes
    assert ours.attention_us < theirs.attention_us
