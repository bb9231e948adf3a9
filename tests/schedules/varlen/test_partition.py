"""The partition places every token once, respects the capacity, is the same on all ranks, and is nearly optimal."""

from __future__ import annotations

import pickle
import random
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_overlap.schedules.varlen import (
    CapacityError,
    CostModel,
    Plan,
    Topology,
    balance,
    bin_packing,
    describe,
    partition,
)
from megatron_overlap.schedules.varlen.plan import loads
from scripts.bench.document_lengths import DISTRIBUTIONS, sample
from tests.config.test_wrong_input import environment
from tests.schedules.varlen.checks import check_plan

BIG = Topology(8, 8, 8)
MILLION = 1 << 20

documents = st.lists(st.one_of(st.integers(0, 4), st.integers(0, 300), st.integers(200, 3000)), min_size=0, max_size=60)
topologies = st.builds(Topology, st.integers(1, 4), st.integers(1, 5), st.integers(1, 3))


@settings(max_examples=150)
@given(lengths=documents, topology=topologies, slack=st.integers(0, 200))
def test_every_token_is_placed_once_within_the_capacity(lengths: list[int], topology: Topology, slack: int) -> None:
    """From a batch that fills all ranks completely to one that leaves them half empty."""
    capacity = -(-max(sum(lengths), 1) // topology.ranks) + slack
    plan = partition(lengths, topology, capacity=capacity)
    assert len(plan.passes) == 1
    check_plan(plan)


@settings(max_examples=60)
@given(lengths=documents, topology=topologies, data=st.data())
def test_load_does_not_depend_on_the_order_of_the_batch(
    lengths: list[int], topology: Topology, data: st.DataObject
) -> None:
    shuffled = data.draw(st.permutations(lengths))
    capacity = max(1, sum(lengths))
    one, other = (partition(batch, topology, capacity=capacity) for batch in (lengths, shuffled))
    assert [loads(one, 0)] == [loads(other, 0)]


def test_every_process_computes_the_same_plan() -> None:
    """Processes with different hash seeds, lists and tuples."""
    program = (
        "import hashlib, pickle, sys\n"
        "from megatron_overlap.schedules.varlen import Topology, partition\n"
        "from scripts.bench.document_lengths import sample\n"
        "plan = partition(tuple(sample('wlb', 400_000, 3)), Topology(4, 4), capacity=26_000)\n"
        "print(hashlib.sha256(repr((plan.lengths, plan.passes)).encode()).hexdigest())\n"
        "loaded = {'torch', 'megatron', 'numpy', 'matplotlib'} & set(sys.modules)\n"
        "assert not loaded, loaded"
    )
    digests = set()
    for seed in ("0", "1", "77"):
        done = subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            env={**environment(), "PYTHONHASHSEED": seed},
        )
        assert done.returncode == 0, done.stderr
        digests.add(done.stdout)
    assert len(digests) == 1
    lengths = sample("wlb", 400_000, 3)
    of_list, of_tuple = (partition(batch, Topology(4, 4), capacity=26_000) for batch in (lengths, tuple(lengths)))
    assert vars(of_list) == vars(of_tuple)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@settings(max_examples=4)
@given(seed=st.integers(0, 1 << 30))
def test_near_the_lower_bound_on_published_distributions(distribution: str, seed: int) -> None:
    """64 ranks, 4M tokens, one pass."""
    assert_near_the_lower_bound(sample(distribution, 4 * MILLION, seed), capacity=72 << 10)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_near_the_lower_bound_with_few_tokens(distribution: str) -> None:
    """8,192 tokens on each rank, 6 % spare capacity. Not every batch passes."""
    for seed in range(3):
        assert_near_the_lower_bound(sample(distribution, 64 * 8192, seed), capacity=8704)


def assert_near_the_lower_bound(lengths: list[int], *, capacity: int) -> None:
    """By the cost model, and by query-key pairs alone, which is stricter."""
    plan = partition(lengths, BIG, capacity=capacity)
    result = balance(plan)
    assert result.attention >= 0.95
    assert result.compute >= 0.93
    assert result.attention_us <= 1.15 * result.lower_bound_us
    assert pair_balance(plan) >= 0.94


def pair_balance(plan: Plan) -> float:
    pairs, peaks = 0, 0
    for part in plan.passes:
        held = [sum(plan.lengths[d] * (plan.lengths[d] + 1) // 2 for d in whole) for whole in part.local]
        for ring in part.rings:
            for position, rank in enumerate(ring.ranks):
                held[rank] += ring.pairs(position)
        pairs += sum(held)
        peaks += max(held)
    return pairs / (plan.topology.ranks * peaks)


def test_messages_are_hidden_on_published_distributions() -> None:
    for distribution in DISTRIBUTIONS:
        result = balance(partition(sample(distribution, 4 * MILLION, 0), BIG, capacity=72 << 10))
        assert result.step_us == result.attention_us
        assert result.message_us < 0.25 * result.attention_us


def test_large_batch() -> None:
    """100K documents on 1,024 ranks. `docs/design/varlen_planner.md` has the time."""
    lengths = sample("prolong", 310 * MILLION, 0)[:100_000]
    topology = Topology(128, 8, 8)
    capacity = -(-sum(lengths) // topology.ranks) * 17 // 16
    plan = partition(lengths, topology, capacity=capacity)
    assert len(plan.passes) == 1
    assert max(plan.tokens(0)) <= capacity
    assert sum(plan.tokens(0)) == sum(lengths)
    result = balance(plan)
    assert result.attention >= 0.93
    assert result.compute >= 0.95


def test_zones() -> None:
    """Short documents stay whole, long ones become rings inside a node, the longest one a ring over nodes."""
    lengths = [60_500, 61_000, 200_000, *[1000] * 150]
    plan = partition(lengths, Topology(2, 4), capacity=60_000)
    check_plan(plan)
    (part,) = plan.passes
    # Messages are posted in this order: inter-node rings first, then long documents.
    assert [(ring.document, ring.zone) for ring in part.rings] == [(2, "inter"), (1, "intra"), (0, "intra")]
    short = partition([1000] * 160, Topology(2, 4), capacity=60_000)
    assert not short.passes[0].rings


def test_slow_links_keep_a_document_in_its_node() -> None:
    """A document above the mean load of a node: on slow links an uneven placement in one node is faster."""
    lengths = [30_000, *[2_000] * 12]
    slow = {"inter_gbps": 0.02, "routing": False}
    fast, limited = (partition(lengths, Topology(2, 2, **links), capacity=16_000) for links in ({}, slow))  # type: ignore[arg-type]
    check_plan(limited)
    assert [ring.zone for ring in fast.passes[0].rings if ring.document == 0] == ["inter"]
    assert [ring.zone for ring in limited.passes[0].rings if ring.document == 0] == ["intra"]
    forced = (
        balance(fast).attention_us,
        max(load.message_fs for load in loads(replace(fast, topology=limited.topology), 0)) / 1e9,
    )
    assert balance(limited).step_us < 0.5 * max(forced)


def test_a_cut_document_makes_room_before_another_is_cut() -> None:
    """No node has room for the last document: on slow links one inter-node ring is faster than two."""
    slow = Topology(2, 2, 2, intra_gbps=0.14, inter_gbps=0.019, intra_latency_us=250, inter_latency_us=400)
    cost = CostModel(pair_fs=36_000_000, token_fs=2_400_000_000, kv_bytes=1024)
    plan = partition([1312, 295, 283, 158], slow, capacity=544, cost=cost)
    check_plan(plan)
    assert [ring.document for ring in plan.passes[0].rings] == [0]
    # On fast links the plan with the best balance is the fastest.
    fast = partition([1312, 295, 283, 158], Topology(2, 2, 2), capacity=544, cost=cost)
    assert balance(fast).attention > balance(plan).attention


def test_rings_of_any_size() -> None:
    rng = random.Random(0)
    sizes = set()
    for _ in range(40):
        lengths = [rng.randrange(1000, 60_000) for _ in range(20)]
        plan = partition(lengths, Topology(2, 7), capacity=sum(lengths))
        sizes |= {len(ring.ranks) for ring in plan.passes[0].rings}
    assert {2, 3, 5, 6} <= sizes


def test_equal_documents_on_equal_ranks_are_not_cut() -> None:
    plan = partition([4096] * 64, Topology(2, 4), capacity=40_000)
    assert not plan.passes[0].rings
    assert balance(plan).attention == 1.0
    assert plan.tokens(0) == [8 * 4096] * 8


@pytest.mark.parametrize(
    ("lengths", "topology", "capacity"),
    [
        pytest.param([1_000_000], BIG, 15_625, id="one document is the batch"),
        pytest.param([1_000_001], Topology(1, 1), 1_000_001, id="one rank"),
        pytest.param([1] * 5000, BIG, 79, id="all of length one"),
        pytest.param([0, 0, 5, 0, 7, 0], Topology(1, 2), 6, id="empty documents"),
        pytest.param([0, 0], Topology(2, 2), 1, id="only empty documents"),
        pytest.param([], Topology(2, 2), 1, id="no document"),
        pytest.param([3], BIG, 1, id="more ranks than tokens"),
        pytest.param([1, 1, 1], BIG, 10, id="more ranks than documents"),
        pytest.param([64 * 999, 64], BIG, 1000, id="full, two documents"),
        pytest.param([7919] * 64, BIG, 7919, id="full, whole documents fit"),
        pytest.param([7919] * 63 + [7918, 1], BIG, 7919, id="full, and one document of one token"),
        pytest.param([1000] * 30 + [100_000] * 2, Topology(2, 4), 28_750, id="full, two sizes"),
        pytest.param([513] * 31, Topology(4, 4), 1000, id="half a rank and one token more"),
    ],
)
def test_adversarial(lengths: list[int], topology: Topology, capacity: int) -> None:
    plan = partition(lengths, topology, capacity=capacity)
    check_plan(plan)
    assert balance(plan).attention > 0
    assert describe(plan)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"lengths": [10, 31], "capacity": 10}, CapacityError, "41 tokens: 4 ranks hold 40"),
        ({"lengths": [5, -1], "capacity": 10}, ValueError, "lengths: -1"),
        ({"lengths": [5], "capacity": 0}, ValueError, "capacity: 0"),
    ],
)
def test_invalid_arguments(arguments: dict[str, object], error: type[ValueError], text: str) -> None:
    with pytest.raises(error, match=text):
        partition(topology=Topology(2, 2), **arguments)  # type: ignore[arg-type]


def test_the_capacity_in_the_error_message_suffices() -> None:
    with pytest.raises(CapacityError, match="raise capacity to 26 ") as caught:
        partition([103], Topology(2, 2), capacity=25)
    assert caught.type is CapacityError
    check_plan(partition([103], Topology(2, 2), capacity=26))


def test_loads_count_every_pair_once() -> None:
    """Without per-token cost and floor, the attention time of a plan is that of all causal pairs."""
    cost = CostModel(pair_fs=3, token_fs=0, floor_fs=0)
    lengths = [5000, 311, 97, 2, 1]
    plan = partition(lengths, Topology(2, 3), capacity=1200, cost=cost)
    total = sum(load.attention_fs for index in range(len(plan.passes)) for load in loads(plan, index))
    assert total == sum(3 * n * (n + 1) // 2 for n in lengths)
    assert balance(plan).lower_bound_us == pytest.approx(total / 6 / 1e9)


def test_short_documents_cost_at_least_the_floor() -> None:
    cost = CostModel(pair_fs=1, token_fs=0, floor_fs=1000)
    assert cost.share_fs(3, 3) == 1000
    assert cost.share_fs(0, 3) == 0
    assert cost.attention_fs(6, 3) == 1000
    assert cost.attention_fs(4950, 99) == cost.share_fs(99, 99) == 4950


@pytest.mark.parametrize("field", ["nodes", "devices_per_node", "nics_per_node", "intra_gbps", "inter_latency_us"])
def test_wrong_topology(field: str) -> None:
    with pytest.raises(ValueError, match=field):
        Topology(**{"nodes": 1, "devices_per_node": 1, field: 0})


@pytest.mark.parametrize("field", ["pair_fs", "token_fs", "kv_bytes"])
def test_wrong_cost(field: str) -> None:
    with pytest.raises(ValueError, match=field):
        CostModel(**{field: -1})


def test_plans_can_be_pickled() -> None:
    plan = partition([900, 20, 3], Topology(1, 2), capacity=500)
    assert vars(pickle.loads(pickle.dumps(plan))) == vars(plan)


def test_a_cheap_document_longer_than_a_bin_is_cut_evenly() -> None:
    """An expensive document is cut at every threshold. The cheap one is cut only because of its length."""
    cost = CostModel(pair_fs=1, token_fs=0, floor_fs=0)
    shares = [(150, 10_000), (150, 150), (50, 50), (50, 50)]
    items = [bin_packing.Item(*share, document, cost.share_fs(*share)) for document, share in enumerate(shares)]
    bins = bin_packing.Level(bins=4, capacity=120, cost=cost, message_fs=lambda item, here: 10**9, attempts=1)
    placed = bin_packing.place(bins, items)
    assert placed is not None
    assert [item.tokens for each in placed.items for item in each if item.document == 1] == [75, 75]
